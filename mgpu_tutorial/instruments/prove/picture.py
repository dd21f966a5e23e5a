"""The tensors of a proof, as a picture: a column for each, a row for each moment."""

from textwrap import wrap

from mgpu_tutorial.instruments.prove.proof import Proof, Row
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, PAPER, Drawing

RIGHT, WRONG = "#d9d9d9", "#e8a0a8"
SIDE, ROW, LEFT, TOP = 22, 26, 190, 34  # lengths
MOST, LETTERS = 34, 110  # tensors in a row, and letters in a line


class Shown(Proof):
    """A proof that shows its picture in a notebook, if something is wrong."""

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        pages = {"text/plain": str(self)}
        return pages if self.right else pages | drawing(self)._repr_mimebundle_()


def drawing(proof: Proof) -> Drawing:
    """Right tensors grey, wrong ones red, and the first wrong one marked by its name.

    A row is a moment of the job, and the tensors stand in the model's order. Where they are
    more than fit, those around the first wrong one are drawn.
    """
    moments: dict[str, dict[str, Row]] = {}
    for row in proof.rows:
        moments.setdefault(row.when, {})[row.name] = row
    moments = {when: rows for when, rows in moments.items() if when != "values returned"}
    names = list(dict.fromkeys(name for rows in moments.values() for name in reversed(rows)))
    first = proof.first
    place = names.index(first.name) if first and first.name in names else 0
    begin = max(0, min(place - MOST // 2, len(names) - MOST))
    names = names[begin : begin + MOST]
    words = [part for line in proof.lines() for part in wrap(line, LETTERS)]
    left = max(LEFT, *(7 * len(when) + 14 for when in moments))
    wide = max(left + SIDE * len(names) + 10, 720)
    below = TOP + ROW * len(moments) + 14
    says = f"{len(proof.wrong)} of {len(proof.rows)} tensors are wrong"
    if first:
        says += f"; the first is {first.name} among the {first.when}: {first.kind}"
    picture = Drawing(wide, below + 19 * len(words), str(proof), f"{says}.")
    for line, text in enumerate(words):
        picture.label(8, below + 8 + 19 * line, text, 13, anchor="start")
    for line, (when, rows) in enumerate(moments.items()):
        y = TOP + ROW * line
        picture.label(left - 10, y + 16, when, 13, anchor="end")
        for column, name in enumerate(names):
            row, x = rows.get(name), left + SIDE * column
            if row is None:
                picture.box(x, y + 2, SIDE - 4, ROW - 6, FAINT, PAPER, 0.8, "2 2", 2)
            elif row is first:
                picture.box(x, y + 2, SIDE - 4, ROW - 6, INK, ALARM, 2, radius=2)
                anchor = "end" if column > len(names) / 2 else "start"
                where = x + (SIDE - 4) * (anchor == "end")
                picture.label(where, TOP - 16, f"{name}: {row.kind}", 13, ALARM, anchor)
                picture.line(x + 9, TOP - 11, x + 9, y, ALARM, 1.2)
            else:
                fill = WRONG if row.kind else RIGHT
                picture.box(x, y + 2, SIDE - 4, ROW - 6, FAINT, fill, 0.8, radius=2)
    return picture
