"""A small table, right-aligned where there are numbers; text and HTML alike."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __repr__(self) -> str:
        lines = [list(map(str, self.header)), *(map(_text, row) for row in self.rows)]
        columns = []
        for cells, is_numeric in zip(zip(*lines, strict=True), self._numeric(), strict=True):
            width = max(map(len, cells))
            columns.append([c.rjust(width) if is_numeric else c.ljust(width) for c in cells])
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    def _repr_html_(self) -> str:
        """A table in a box of its own, which scrolls where the page is narrow."""
        sides = ["right" if is_numeric else "left" for is_numeric in self._numeric()]
        looks = [f"text-align:{side};padding:2px 8px" for side in sides]
        looks[:1] = [look + ";white-space:nowrap" for look in looks[:1]]

        def line(tag: str, texts: Iterable[str]) -> str:
            pairs = zip(looks, texts, strict=True)
            cells = [f'<{tag} style="{look}">{html.escape(t)}</{tag}>' for look, t in pairs]
            return f"<tr>{''.join(cells)}</tr>"

        head = line("th", map(str, self.header))
        body = "".join(line("td", map(_text, row)) for row in self.rows)
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x:auto">{table}</div>'

    def _numeric(self) -> list[bool]:
        places = range(len(self.header))
        return [all(isinstance(row[i], int | float) for row in self.rows) for i in places]


def formatted(columns: Mapping[str, str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose columns are written as their formats say, such as {"ms": ".1f"}.

    An empty format leaves a value as it is.
    """
    texts = []
    for row in rows:
        pairs = zip(row, columns.values(), strict=True)
        texts.append([format(value, how) if how else value for value, how in pairs])
    return Table(list(columns), texts)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
