"""A small table: rows under a header, as text and as HTML."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass
class Table:
    """Rows under a header, right-aligned where they are numbers; text and HTML alike."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __repr__(self) -> str:
        lines = [list(map(str, self.header)), *[[_text(v) for v in row] for row in self.rows]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        numeric = self._numeric()
        return "\n".join(
            "  ".join(
                cell.rjust(w) if n else cell.ljust(w)
                for cell, w, n in zip(line, widths, numeric, strict=True)
            ).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        """A table in a box of its own, which scrolls where the page is narrow."""
        looks = [
            f"text-align:{'right' if n else 'left'};padding:2px 8px" for n in self._numeric()
        ]
        looks[:1] = [look + ";white-space:nowrap" for look in looks[:1]]
        head = "".join(
            f'<th style="{look}">{html.escape(str(h))}</th>'
            for h, look in zip(self.header, looks, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="{look}">{html.escape(_text(v))}</td>'
                for v, look in zip(row, looks, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x:auto">{table}</div>'

    def _numeric(self) -> list[bool]:
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.header)
        return [all(isinstance(value, int | float) for value in column) for column in columns]


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
