-- Read each text of a notebook once: a raw block of markdown or HTML goes in, a div comes out
-- with its blocks. A block of markdown is in a div of its own that names its lines.

local MARKDOWN = "commonmark+sourcepos+pipe_tables+tex_math_dollars+strikeout+"
  .. "autolink_bare_uris+footnotes+task_lists+raw_html+attributes"

local function bare(element)
  if element.attributes then
    element.attributes["data-pos"] = nil
    return element.attributes.wrapper and element.content or element
  end
end

function RawBlock(raw)
  if raw.format == "html" then
    return pandoc.Div(pandoc.read(raw.text, "html+raw_html").blocks)
  end
  local blocks = pandoc.Blocks {}
  for _, block in ipairs(pandoc.read(raw.text, MARKDOWN).blocks) do
    local attr = pandoc.Attr("", {}, { lines = block.attributes["data-pos"] })
    blocks:insert(pandoc.Div(pandoc.Blocks { block }:walk { Inline = bare, Block = bare }, attr))
  end
  return pandoc.Div(blocks)
end
