-- Give the blocks of a notebook the form of Typst, of a web page, or of an electronic book.
--
-- Python has chosen the blocks (editions.py) and put each piece into a div whose class says
-- what it is. The functions that the Typst text calls are in paper.typ.

local typst, epub = FORMAT == "typst", FORMAT:match("^epub") ~= nil
local meta, chapter, where, problems = {}, {}, "", {}

local function problem(text)
  table.insert(problems, where .. ": " .. text)
end

local function quoted(text)
  text = text:gsub("\\", "\\\\"):gsub('"', '\\"'):gsub("\n", "\\n"):gsub("\t", "    ")
  return '"' .. text .. '"'
end

local function raw(text, ...)
  return pandoc.RawBlock(typst and "typst" or "html", string.format(text, ...))
end

local function wrapped(opening, blocks, closing)
  local result = pandoc.Blocks { raw("%s", opening) }
  result:extend(blocks)
  result:insert(raw("%s", closing or "]"))
  return result
end

-- Links ---------------------------------------------------------------------------------

local function slug(anchor)
  local words = {}
  for word in pandoc.text.lower(anchor):gmatch("[^%s%p]+") do
    table.insert(words, word)
  end
  return table.concat(words, "-")
end

local function link(element)
  local target = element.target
  if target:match("^%a[%w+.-]*:") then
    return nil
  end
  local path, anchor = target:match("^([^#]*)#?(.*)$")
  anchor = slug(anchor)
  local file = path == "" and chapter.file
    or pandoc.path.normalize(pandoc.path.join { chapter.folder, path })
  while file:find("[^/]+/%.%./") do
    file = file:gsub("[^/]+/%.%./", "", 1)
  end
  local id = meta.targets[file]
  if not id then
    if not pandoc.path.exists(meta.root .. "/" .. file) then
      problem("a link leads nowhere: " .. target)
    end
    return pandoc.Span(element.content) -- a file of the repository, not of the book
  end
  if anchor ~= "" and not meta.anchors[id .. "#" .. anchor] then
    problem("no such heading: " .. target)
  elseif typst then
    local call = string.format("#nb(%s, %s)[", quoted(id), quoted(anchor))
    local inlines = pandoc.Inlines { pandoc.RawInline("typst", call) }
    inlines:extend(element.content)
    inlines:insert(pandoc.RawInline("typst", "]"))
    return inlines
  elseif epub then
    element.target = "#" .. id .. (anchor ~= "" and "--" .. anchor or "")
  elseif id == chapter.id and anchor ~= "" then
    element.target = "#" .. anchor
  else
    element.target = id .. ".html" .. (anchor ~= "" and "#" .. anchor or "")
  end
  return element
end

-- Pictures and what scrolls ---------------------------------------------------------------

local function reached(what) -- by the keyboard, where it is wider than the page
  return pandoc.Attr("", { what }, { tabindex = "0", role = "group", ["aria-label"] = what })
end

local function image(element)
  if pandoc.utils.stringify(element.caption) == "" then
    problem("a picture without alternative text: " .. element.src)
  elseif not typst and not epub then -- a page needs no other file
    local mime, content = pandoc.mediabag.fetch(meta.media .. "/" .. element.src)
    element.src = pandoc.mediabag.make_data_uri(mime, content)
  end
  return element
end

local function parts_of(element) -- its picture, alternative text and caption
  local found = element.content[1].content[1]
  return found, pandoc.utils.stringify(found.caption), pandoc.utils.stringify(element.caption.long)
end

local function figure(element)
  local found, alt, caption = parts_of(element)
  if not typst then
    element.content = { pandoc.Div(pandoc.Plain { image(found) }, reached("picture")) }
    return element, false
  end
  return raw("#picture(%s, %s, %s, width: %s, where: %s)", quoted(found.src), quoted(alt),
    quoted(caption), found.attributes.width or "none", quoted(where)), false
end

local function filmstrip(div)
  local items = {}
  div:walk { Figure = function(each)
    local found, alt, name = parts_of(each)
    table.insert(items, string.format("(%s, %s, %s)", quoted(found.src),
      quoted(alt .. ", " .. name), quoted(name)))
  end }
  return raw("#filmstrip((%s,), %s, where: %s)", table.concat(items, ", "),
    quoted(div.attributes.caption), quoted(where))
end

local function panels(div)
  local items = {}
  for _, panel in ipairs(div.content) do
    local colour = panel.attributes.style:match("border[%w-]*:[^;]*(#%x+)") or "#666666"
    local name, text = table.unpack(panel.content)
    table.insert(items, string.format("(%s, %s, %s)", quoted(pandoc.utils.stringify(name)),
      quoted(colour), quoted(text and text.text or "")))
  end
  return raw("#panels((%s,), where: %s)", table.concat(items, ", "), quoted(where))
end

-- One function a class of piece -------------------------------------------------------------

local kinds = {}

function kinds.rich(div)
  local caption = div.attributes.caption
  div.attributes.caption = nil
  if not typst and caption then
    div.content:insert(pandoc.Para { pandoc.Emph { pandoc.Str(caption) } })
  end
end

local FOLDED = {
  hint = "<summary>Hint</summary>",
  solution = "<summary>Solution</summary>",
  answer = "<summary>Open this after your prediction</summary>",
}

for _, name in ipairs { "lead", "predict", "note", "hint", "solution", "answer" } do
  kinds[name] = function(div)
    local fold = FOLDED[name]
    if typst then
      return wrapped("#" .. name .. "[", div.content)
    elseif epub and name == "solution" then
      div.content:insert(1, pandoc.Para { pandoc.Strong "Solution" })
      return div
    end
    local opening = '<details class="' .. name .. '">'
    return fold and wrapped(opening .. fold, div.content, "</details>")
  end
end

-- A prediction on paper: room for it here, its answer at the end of the chapter.
for name, call in pairs { room = "#room(%s, %s)", answers = "#answer(%s, %s)" } do
  kinds[name] = function(div)
    local a = div.attributes
    if typst then
      return raw(call, quoted(a.label), a.number)
    elseif name == "room" then
      local text = "The answer stands at the end of the chapter."
      return pandoc.Para { pandoc.Link(text, "#" .. a.label) }
    end
    return pandoc.Header(3, "To question " .. a.number, pandoc.Attr(a.label, { "unlisted" }))
  end
end

-- The walk, from the outside to the inside: it knows in which cell it is ------------------

local KEPT = { predict = true, listing = true, rich = true, film = true }
local outside = { traverse = "topdown", Link = link, Image = image, Figure = figure }

function outside.Div(div)
  local class = div.classes[1]
  where = div.attributes.where or where
  chapter = class == "chapter" and div.attributes or chapter
  if typst and (div.attributes.style or ""):match("display:%s*flex") then
    return panels(div), false
  elseif typst and class == "rich" and div.attributes.caption then
    return filmstrip(div), false
  end
  div.content = div.content:walk(outside)
  local made = kinds[class] and kinds[class](div)
  if not made then -- a web page tells some of them apart
    made = not typst and KEPT[class] and div or div.content
  end
  div.attributes.where = nil
  return made, false
end

function outside.CodeBlock(block)
  local class = block.classes[1] or ""
  if not typst then
    block.attributes = { tabindex = "0" }
    return block
  elseif class == "cell" then
    return raw("#source(%s%s)", quoted(block.text), block.attributes.apart and ", apart: true" or "")
  elseif class == "output" then
    return raw(block.classes:includes("error") and "#failure(%s)" or "#shown(%s)",
      quoted(block.text))
  end
  return raw("#listing(%s, %s)", quoted(block.text), quoted(class))
end

function outside.RawBlock(block) -- print has no folds
  if not typst or not block.format:match("^html") then
    return nil
  end
  local title = block.text:match("<summary>(.-)</summary>")
  if block.text:match("^<details") then
    return raw(title and "#folded[#strong(%s)" or "#folded[", title and quoted(title))
  elseif block.text:match("^<summary") then
    return raw("#strong[")
  elseif block.text:match("^</") then
    return raw("]")
  end
end

function outside.Para(block)
  local first = block.content[1]
  if not typst or not first then
    return nil
  elseif first.t == "Image" and #block.content == 1 then -- a picture that stands alone
    local alt = pandoc.utils.stringify(first.caption)
    return figure(pandoc.Figure(pandoc.Plain { first }, { long = { pandoc.Plain { alt } } }))
  elseif first.t == "Str" and first.text:match("^[=+/-]") then -- no heading and no list item
    block.content:insert(1, pandoc.RawInline("typst", "\\"))
    return block
  end
end
outside.Plain = outside.Para

function outside.Table(element)
  element = element:walk(outside)
  for _, column in ipairs(element.colspecs) do
    if column[1] == "AlignDefault" then
      column[1] = "AlignLeft"
    end
  end
  if typst then
    return wrapped("#tabular(where: " .. quoted(where) .. ")[", { element }), false
  end
  return pandoc.Div(element, reached("table")), false
end

function outside.Math(element)
  if typst then
    local call = string.format("#equation(%s, %s)[", quoted(element.text), quoted(where))
    return pandoc.Inlines {
      pandoc.RawInline("typst", call), element, pandoc.RawInline("typst", "]"),
    }, false
  elseif element.mathtype == "DisplayMath" then
    return pandoc.Span(element, reached("formula")), false
  end
end

function Pandoc(doc)
  meta = { root = doc.meta.root, media = doc.meta.media, targets = {}, anchors = {} }
  for _, each in ipairs(doc.meta.links or {}) do
    meta.targets[each.file] = each.id
    for _, anchor in ipairs(each.anchors) do
      meta.anchors[each.id .. "#" .. anchor] = true
    end
  end
  local blocks = doc.blocks:walk(outside)
  if #problems > 0 then
    io.stderr:write("PROBLEM " .. table.concat(problems, "\nPROBLEM ") .. "\n")
    os.exit(1)
  end
  doc.meta.root, doc.meta.media, doc.meta.links = nil, nil, nil
  return pandoc.Pandoc(blocks, doc.meta)
end
