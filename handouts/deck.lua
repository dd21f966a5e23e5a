-- A block of markdown becomes its blocks: as read.lua, which also keeps the lines.
-- Without an end of line the last row of a table would be none.

local MARKDOWN = "commonmark+pipe_tables+tex_math_dollars+strikeout+autolink_bare_uris"
  .. "+footnotes+task_lists+raw_html+attributes"

function RawBlock(raw)
  if raw.format == "markdown" then
    return pandoc.read(raw.text .. "\n", MARKDOWN).blocks
  end
end
