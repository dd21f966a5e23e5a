-- Turn the pieces of a notebook into what the page needs, for Typst and for HTML.
--
-- The document that comes in holds code blocks only: one a piece, its class says which.
-- Python chose the pieces; this filter knows how each looks in a format. The functions that
-- the Typst text calls are in paper.typ and slides.typ.

local typst = FORMAT == "typst"
local extensions = { -- and the sign that a text has for each
  pipe_tables = "|", tex_math_dollars = "$", strikeout = "~~", autolink_bare_uris = "://",
  footnotes = "[^", task_lists = "- [", raw_html = "<", attributes = "{",
}
local meta, problems, figures, where = {}, {}, 0, ""
local spoken = false -- in a speaker's notes, where everything is ordinary text

local function problem(text)
  table.insert(problems, where .. ": " .. text)
end

local function quoted(text)
  text = text:gsub("\\", "\\\\"):gsub('"', '\\"'):gsub("\n", "\\n"):gsub("\t", "    ")
  return '"' .. text .. '"'
end

-- Reading with an extension takes a millisecond more, so only with those that are needed.
local function markdown(text)
  local needed = {}
  for name, sign in pairs(extensions) do
    if text:find(sign, 1, true) then
      table.insert(needed, name)
    end
  end
  table.sort(needed)
  return pandoc.read(text, { format = "commonmark", extensions = needed }).blocks
end

local function raw(text)
  return pandoc.RawBlock("typst", text)
end

local function written(blocks)
  return (pandoc.write(pandoc.Pandoc(blocks), "typst"):gsub("%s+$", ""))
end

local function wrapped(opening, blocks)
  return raw(opening .. "[\n" .. written(blocks) .. "\n]")
end

-- Links ---------------------------------------------------------------------------------

local function resolved(path)
  local parts = {}
  for part in (meta.folder .. "/" .. path):gmatch("[^/]+") do
    if part == ".." then
      table.remove(parts)
    elseif part ~= "." then
      table.insert(parts, part)
    end
  end
  return table.concat(parts, "/")
end

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
  local file = path == "" and meta.file or resolved(path)
  local id = meta.targets[file]
  if not id then
    if not pandoc.path.exists(meta.root .. "/" .. file) then
      problem("a link leads nowhere: " .. target)
    end
    return pandoc.Span(element.content) -- a file of the repository, not of the book
  end
  if anchor ~= "" and not meta.anchors[id .. "#" .. anchor] then
    problem("no such heading: " .. target)
    return nil
  end
  if typst then
    local call = string.format("#nb(%s, %s)[", quoted(id), quoted(anchor))
    local inlines = pandoc.Inlines { pandoc.RawInline("typst", call) }
    inlines:extend(element.content)
    inlines:insert(pandoc.RawInline("typst", "]"))
    return inlines
  end
  if meta.epub then
    element.target = "#" .. id .. (anchor ~= "" and "--" .. anchor or "")
    return element
  end
  local fragment = anchor ~= "" and "#" .. anchor or ""
  element.target = (id == meta.id and fragment ~= "") and fragment or id .. ".html" .. fragment
  return element
end

-- Pictures ------------------------------------------------------------------------------

local function caption_of(text)
  figures = figures + 1
  if meta.chapter == "" then
    return text
  end
  return string.format("Figure %s.%d. %s", meta.chapter, figures, text)
end

local function figure(file, alt, caption, width)
  if alt == "" then
    problem("a picture without alternative text")
    alt = "picture"
  end
  caption = meta.slides and "" or caption_of(caption)
  if typst then
    return raw(string.format("#picture(%s, %s, %s, width: %s, where: %s)",
      quoted(file), quoted(alt), quoted(caption), width > 0 and width or "none",
      quoted(where)))
  end
  local attributes = width > 0 and { width = string.format("%d", width) } or {}
  local image = pandoc.Image({ pandoc.Str(alt) }, file, "", pandoc.Attr("", {}, attributes))
  image.attributes.alt = alt
  local long = pandoc.Blocks { pandoc.Plain { pandoc.Str(caption) } }
  return pandoc.Figure(pandoc.Plain { image }, { long = long })
end

local function alone(block)
  local image = (block.t == "Para" or block.t == "Plain") and #block.content == 1
    and block.content[1]
  return image and image.t == "Image" and image or nil
end

local function filmstrip(pictures, given)
  local items, alt = {}, ""
  for _, picture in ipairs(pictures) do
    local image
    picture:walk { Image = function(found) image = found end }
    alt = pandoc.utils.stringify(image.caption)
    local name = pandoc.utils.stringify(picture.caption.long)
    table.insert(items, string.format("(%s, %s, %s)",
      quoted(image.src), quoted(alt .. ", " .. name), quoted(name)))
  end
  local caption = (given or "") ~= "" and given
    or string.format("Step by step, in %d drawings.", #pictures)
  caption = meta.slides and "" or caption_of(caption)
  return raw(string.format("#filmstrip((%s,), %s, where: %s)",
    table.concat(items, ", "), quoted(caption), quoted(where)))
end

-- A text that begins with "=" or "-" is no heading and no list item, whatever Typst thinks.
local function literal(block)
  local first = block.content[1]
  if typst and first and first.t == "Str" and first.text:match("^[=+/-]") then
    block.content:insert(1, pandoc.RawInline("typst", "\\"))
    return block
  end
end

local function tabular(block)
  for _, column in ipairs(block.colspecs) do
    if column[1] == "AlignDefault" then
      column[1] = "AlignLeft"
    end
  end
  return wrapped("#tabular(where: " .. quoted(where) .. ")", { block })
end

-- HTML outputs in print -----------------------------------------------------------------

local print_html

local function panels(div)
  local items = {}
  for _, child in ipairs(div.content) do
    if child.t ~= "Div" then
      return nil
    end
    local colour = (child.attributes.style or ""):match("border[%w-]*:[^;]*(#%x+)") or "#666666"
    local blocks = pandoc.Blocks(child.content)
    local name = ""
    if blocks[1] and (blocks[1].t == "Para" or blocks[1].t == "Plain") then
      name = pandoc.utils.stringify(blocks[1])
      blocks:remove(1)
    end
    local text = #blocks == 1 and blocks[1].t == "CodeBlock" and blocks[1].text
    local body = text and quoted(text) or "[" .. written(print_html(blocks)) .. "]"
    table.insert(items, string.format("(%s, %s, %s)", quoted(name), quoted(colour), body))
  end
  if #items == 0 then
    return nil
  end
  return raw(string.format("#panels((%s,), where: %s)", table.concat(items, ", "),
    quoted(where)))
end

local function printed(block)
  -- a picture that stands alone, or a table; any other block as it is
  local image = alone(block)
  if image then
    local alt = pandoc.utils.stringify(image.caption)
    return figure(image.src, alt, alt, 0)
  end
  return block.t == "Table" and tabular(block) or block
end

print_html = function(blocks, caption)
  blocks = blocks:walk { Plain = literal, Para = literal }
  local result = pandoc.Blocks {}
  for _, block in ipairs(blocks) do
    local style = block.t == "Div" and block.attributes.style or ""
    local flex = style:match("display:%s*flex") and panels(block)
    local strip = block.t == "Div" and #block.content > 1
      and block.content:find_if(function(b) return b.t ~= "Figure" end) == nil
    if flex then
      result:insert(flex)
    elseif strip then
      result:insert(filmstrip(block.content, caption))
    elseif block.t == "Div" then
      result:extend(print_html(block.content, caption))
    elseif block.t == "Figure" then
      local found
      block:walk { Image = function(img) found = img end }
      local caption = pandoc.utils.stringify(block.caption.long)
      result:insert(figure(found.src, pandoc.utils.stringify(found.caption), caption, 0))
    elseif block.t == "CodeBlock" then
      result:insert(raw("#shown(" .. quoted(block.text) .. ")"))
    else
      result:insert(printed(block))
    end
  end
  return result
end

-- Prose ---------------------------------------------------------------------------------

local inline = {
  Plain = literal,
  Para = literal,
  Link = link,
  Math = function(element)
    if not typst then
      return nil
    end
    local display = element.mathtype == "DisplayMath"
    local text = written { pandoc.Plain { element } }
    return pandoc.RawInline("typst", string.format("#equation(%s, %s, %s, %s)",
      tostring(display), quoted(element.text), text, quoted(where)))
  end,
  Image = function(element)
    if pandoc.utils.stringify(element.caption) == "" then
      problem("a picture without alternative text: " .. element.src)
    end
  end,
}

local function folded(blocks)
  -- <details> arrives as raw HTML around ordinary blocks; print has no folds
  local result, inside, title = pandoc.Blocks {}, nil, ""
  for _, block in ipairs(blocks) do
    local html = block.t == "RawBlock" and block.format:match("^html") and block.text
    if html and html:match("<details") and not html:match("</details") then
      title = html:match("<summary>(.-)</summary>") or "More"
      inside = pandoc.Blocks {}
    elseif html and inside and html:match("^%s*</details") then
      result:insert(wrapped("#folded(" .. quoted(title) .. ")", inside))
      inside = nil
    elseif html and inside and title == "More" and html:match("<summary") then
      title = html:match("<summary>(.-)</summary>") or title
    elseif html then
      (inside or result):extend(print_html(pandoc.read(html, "html").blocks))
    else
      (inside or result):insert(block)
    end
  end
  return result
end

local function prose(text)
  local blocks = markdown(text .. "\n"):walk(inline)
  if not typst or spoken then
    return blocks
  end
  local result = pandoc.Blocks {}
  for _, block in ipairs(folded(blocks)) do
    if block.t == "CodeBlock" then
      result:insert(raw(string.format("#listing(%s, %s)", quoted(block.text),
        quoted(block.classes[1] or ""))))
    else
      result:insert(printed(block))
    end
  end
  return result
end

-- One function a class of piece ---------------------------------------------------------

local pieces = {}

function pieces.heading(block)
  local level, title = tonumber(block.attributes.level), prose("# " .. block.text)[1].content
  local whole = typst or meta.epub
  local id = whole and meta.id .. (level > 1 and "--" .. slug(block.text) or "")
    or slug(block.text)
  local number = block.attributes.number or ""
  if number ~= "" then
    title = pandoc.Inlines { pandoc.Str(number), pandoc.Space(), table.unpack(title) }
  end
  return pandoc.Header(level, title, pandoc.Attr(meta.slides and "" or id))
end

function pieces.prose(block)
  local more = block.attributes.more
  if not (more and typst and meta.slides) then
    return prose(block.text)
  end
  -- What stands on a slide, and what would if it were nearly empty otherwise.
  return pandoc.Blocks {
    pandoc.Div(prose(block.text), pandoc.Attr("", { "short" })),
    pandoc.Div(prose(more), pandoc.Attr("", { "long" })),
  }
end

function pieces.lead(block)
  local blocks = prose(block.text)
  return typst and wrapped("#lead", blocks) or blocks
end

function pieces.predict(block)
  if typst then
    return wrapped("#predict", prose(block.text))
  end
  return pandoc.Div(prose(block.text), pandoc.Attr("", { "predict" }))
end

-- The code of a question once more, beside its answer, if there is room for it.
function pieces.again(block)
  return raw("#again(" .. quoted(block.text) .. ")")
end

function pieces.code(block)
  if typst then
    local apart = (block.attributes.apart or "") ~= "" and ", apart: true" or ""
    return raw("#source(" .. quoted(block.text) .. apart .. ")")
  end
  return pandoc.CodeBlock(block.text, pandoc.Attr("", { "python" }))
end

function pieces.listing(block)
  local blocks = prose(block.text)
  return typst and blocks or pandoc.Div(blocks, pandoc.Attr("", { "listing" }))
end

function pieces.text(block)
  if typst then
    return raw("#shown(" .. quoted(block.text) .. ")")
  end
  return pandoc.CodeBlock(block.text, pandoc.Attr("", { "output" }))
end

function pieces.error(block)
  if typst then
    return raw("#failure(" .. quoted(block.text) .. ")")
  end
  return pandoc.CodeBlock(block.text, pandoc.Attr("", { "output", "error" }))
end

function pieces.html(block)
  local blocks = print_html(pandoc.read(block.text, "html").blocks, block.attributes.caption)
  if #blocks == 0 then
    problem("an output of text/html has no printable form")
  end
  if typst then
    return blocks
  elseif meta.epub then
    local parsed = pandoc.read(block.text, "html").blocks
    return pandoc.Div(parsed, pandoc.Attr("", { "rich" }))
  end
  local text = block.text
  if text:find("<figcaption>step 0", 1, true) then
    text = "<p>In the notebook a slider moves through these steps.</p>" .. text
  end
  return pandoc.Div(pandoc.RawBlock("html", text), pandoc.Attr("", { "rich" }))
end

function pieces.image(block)
  local a = block.attributes
  return figure(block.text, a.alt, a.caption, tonumber(a.width) or 0)
end

function pieces.note(block)
  return wrapped("#note", prose(block.text))
end

function pieces.hint(block)
  if typst then
    return wrapped("#hint", prose(block.text))
  end
  local inside = pandoc.Blocks { pandoc.RawBlock("html", "<details><summary>Hint</summary>") }
  inside:extend(prose(block.text))
  inside:insert(pandoc.RawBlock("html", "</details>"))
  return inside
end

-- What Python wrote in the language of the format itself.
pieces["raw"] = function(block)
  return pandoc.RawBlock(typst and "typst" or "html", block.text)
end

-- Groups of pieces ----------------------------------------------------------------------

local function converted(blocks)
  local result = pandoc.Blocks {}
  for _, block in ipairs(blocks) do
    where = block.attributes.where or where
    if block.t == "Div" then
      result:extend(pieces[block.classes[1]](block))
    else
      if typst and not meta.slides then
        result:insert(raw("// " .. where)) -- so that an error of Typst has a place
      end
      local made = pieces[block.classes[1]](block)
      if pandoc.utils.type(made) == "Blocks" then
        result:extend(made)
      else
        result:insert(made)
      end
    end
  end
  return result
end

function pieces.solution(div)
  local blocks = converted(div.content)
  if typst then
    return pandoc.Blocks { wrapped("#solution", blocks) }
  elseif meta.epub then
    blocks:insert(1, pandoc.Para { pandoc.Strong "Solution" })
    return pandoc.Blocks { pandoc.Div(blocks, pandoc.Attr("", { "solution" })) }
  end
  blocks:insert(1, pandoc.RawBlock("html", "<details><summary>Solution</summary>"))
  blocks:insert(pandoc.RawBlock("html", "</details>"))
  return blocks
end

-- A prediction on paper: room for it here, its answer at the end of the chapter.
function pieces.room(block)
  local a = block.attributes
  if typst then
    return raw(string.format("#room(%s, %s)", quoted(a.id), a.number))
  end
  return pandoc.Para { pandoc.Link("The answer stands at the end of the chapter.", "#" .. a.id) }
end

function pieces.answers(block)
  local a = block.attributes
  if typst then
    return raw(string.format("#answer(%s, %s)", quoted(a.id), a.number))
  end
  return pandoc.Header(3, "To prediction " .. a.number, pandoc.Attr(a.id, { "unlisted" }))
end

function pieces.answer(div)
  local blocks = converted(div.content)
  blocks:insert(1, pandoc.RawBlock("html",
    '<details class="answer"><summary>Open this after your prediction</summary>'))
  blocks:insert(pandoc.RawBlock("html", "</details>"))
  return blocks
end

local function items(blocks)
  local calls, text, long, differ = {}, pandoc.Blocks {}, pandoc.Blocks {}, false
  local function flush()
    if #text > 0 then
      local more = differ and "(more: [\n" .. written(long) .. "\n])" or ""
      table.insert(calls, "prose" .. more .. "[\n" .. written(text) .. "\n]")
      text, long, differ = pandoc.Blocks {}, pandoc.Blocks {}, false
    end
  end
  for _, block in ipairs(blocks) do
    local class = block.t == "Div" and block.classes[1] or ""
    if block.t == "RawBlock" and block.text:match("^#") then
      flush()
      table.insert(calls, block.text:sub(2))
    elseif class == "short" then
      text:extend(block.content)
    elseif class == "long" then
      long:extend(block.content)
      differ = true
    else
      text:insert(block)
      long:insert(block)
    end
  end
  flush()
  return table.concat(calls, ",\n  ")
end

function pieces.slide(div)
  local a, notes, shown = div.attributes, pandoc.Blocks {}, pandoc.Blocks {}
  for _, block in ipairs(div.content) do
    (block.classes[1] == "notes" and notes or shown):insert(block)
  end
  local header = markdown("# " .. a.title):walk(inline)[1]
  local title = written { pandoc.Plain(header.content) }
  spoken = true
  local said = #notes > 0 and written(converted(notes[1].content)) or ""
  spoken = false
  local form = "#slide(%s, [%s], where: %s, plain: %s, notes: [\n%s\n], (\n  %s,\n))\n"
  local text = form:format(quoted(a.kind), title, quoted(a.where), quoted(a.plain), said,
    items(converted(shown)))
  return pandoc.Blocks { raw(text) }
end

-- The document --------------------------------------------------------------------------

function Pandoc(doc)
  for key, value in pairs(doc.meta) do
    meta[key] = value
  end
  meta.targets, meta.anchors = {}, {}
  for _, pair in ipairs(doc.meta.links) do
    meta.targets[pair.file] = pair.id
    for _, anchor in ipairs(pair.anchors) do
      meta.anchors[pair.id .. "#" .. anchor] = true
    end
  end
  local blocks = converted(doc.blocks)
  if #problems > 0 then
    io.stderr:write("PROBLEM " .. table.concat(problems, "\nPROBLEM ") .. "\n")
    os.exit(1)
  end
  return pandoc.Pandoc(blocks, pandoc.Meta { title = doc.meta.title })
end
