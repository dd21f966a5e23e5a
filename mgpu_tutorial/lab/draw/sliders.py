"""Sliders over a picture, where the reader's choice is the lesson.

    def draw(ranks, link):
        ...
        return drawing  # its alt says what is to be seen, with the numbers

    sliders(draw, [(2, "slow"), (8, "slow")], ranks=[2, 4, 8], link={"slow": 1, "fast": 8})

`draw` is called once for every setting, so nothing has to be computed where no kernel is: a
web page has all frames in its `data-frames`, which `sliders.js` shows, and paper has the
stills. The first still is where the sliders begin. Under the picture stands its alternative
text. A few dozen settings are enough; what frames have in common is kept once.
"""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from mgpu_tutorial.lab.draw.controls import in_a_column
from mgpu_tutorial.lab.draw.drawing import Drawing

MOST = 200  # settings
CUTS = re.compile("(?<=>)(?=<)|(?= (?:y|font-size|rx)=)")  # frames share most parts between


class Slider(NamedTuple):
    """What moves, the words and the value of each place, and where it begins."""

    says: str
    labels: list[str]
    values: list[Any]
    at: int


def sliders(
    draw: Callable[..., Drawing],
    stills: Sequence[Sequence],
    **choices: Sequence | Mapping[str, Any],
) -> "Sliders":
    """A picture with a slider for each of `choices`, and some settings of it for paper.

    A choice is a list of values, or a dict that names them. A still has a value, or a name,
    for each choice. Raises ValueError for a still that is no setting.
    """
    settings = prod(map(len, choices.values()))
    if not choices or not 1 < settings <= MOST:
        raise ValueError(
            f"{len(choices)} choices make {settings} settings, and each is drawn beforehand: "
            f"give at least two and at most {MOST}, such as ranks=[2, 4, 8]"
        )
    offered = [list(choice) for choice in choices.values()]
    for still in stills or [()]:
        given = zip(still, offered, strict=False)
        if len(still) != len(offered) or not all(value in choice for value, choice in given):
            raise ValueError(
                f"{still} is no setting for paper: give one of each of {offered}"
            )
    return Sliders(draw, stills, choices)


class Sliders:
    """The frames of all settings, by the places of the sliders."""

    def __init__(self, draw: Callable, stills: Sequence[Sequence], choices: Mapping) -> None:
        offered = [list(choice) for choice in choices.values()]
        self.stills = [
            tuple(each.index(value) for value, each in zip(still, offered, strict=True))
            for still in stills
        ]
        self.rows = [
            Slider(_named(name), list(map(_words, each)), [*values], begin)
            for (name, choice), each, begin in zip(
                choices.items(), offered, self.stills[0], strict=True
            )
            for values in [choice.values() if isinstance(choice, Mapping) else choice]
        ]
        self.frames = {}
        for setting in product(*(range(len(each)) for each in offered)):
            values = self._of(setting, [row.values for row in self.rows])
            self.frames[setting] = draw(**dict(zip(choices, values, strict=True)))

    @staticmethod
    def _of(setting: Sequence[int], rows: list[list]) -> list:
        return [row[place] for place, row in zip(setting, rows, strict=True)]

    def data(self) -> dict[str, Any]:
        """What a web page needs: the sliders, and the frames in parts that stand once."""
        parts: dict[str, int] = {}
        frames = []
        for frame in self.frames.values():
            svg = re.sub("<title>.*?</title>", "", frame.svg(), count=1)
            each = CUTS.split(svg)
            frames.append([frame.alt, [parts.setdefault(part, len(parts)) for part in each]])
        rows = [{"says": row.says, "labels": row.labels, "at": row.at} for row in self.rows]
        return {"sliders": rows, "parts": list(parts), "frames": frames}

    def named(self) -> list[tuple[str, Drawing]]:
        """The stills, each with its setting in words."""
        found = []
        for still in self.stills:
            labels = self._of(still, [row.labels for row in self.rows])
            pairs = zip(self.rows, labels, strict=True)
            words = ", ".join(f"{row.says}: {label}" for row, label in pairs)
            found.append((words, self.frames[still]))
        return found

    def widget(self):
        """Sliders above the picture, which is there already."""

        def show(*setting: int) -> str:
            frame = self.frames[setting]
            return f"{frame.html()}<p>{html.escape(frame.alt)}</p>"

        places = [row._replace(values=range(len(row.values))) for row in self.rows]
        return moving(places, show)

    def _repr_mimebundle_(self, **_: object) -> dict:
        own = {"text/plain": repr(self), "text/html": page(self.named(), frames=self.data())}
        return self.widget()._repr_mimebundle_() | own

    def __repr__(self) -> str:
        return "\n".join(f"{says}\n{frame.text}" for says, frame in self.named())


def _named(choice: str) -> str:
    return choice.replace("_", " ").replace("gpus", "GPUs").replace("micro b", "micro-b")


def _words(value: object) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def moving(rows: Sequence[Slider], show: Callable[..., str]):
    """Sliders in JupyterLab, above the HTML that `show` makes of their values."""
    import ipywidgets as widgets

    moved = [
        widgets.SelectionSlider(
            options=list(zip(row.labels, row.values, strict=True)),
            index=row.at,
            description=row.says,
            style={"description_width": "150px"},
            layout={"width": "420px"},
        )
        for row in rows
    ]
    picture = widgets.HTML()

    def draw(_: object = None) -> None:
        picture.value = show(*(slider.value for slider in moved))

    for slider in moved:
        slider.observe(draw, "value")
    draw()
    return in_a_column(*moved, picture)


def page(stills: Sequence[tuple[str, Drawing]], **data: object) -> str:
    """The stills side by side, with what the script of a web page needs to move them."""
    figures = "".join(
        f'<figure style="display:inline-block;width:47%;min-width:280px;margin:4px">'
        f"<figcaption>{html.escape(says)}</figcaption>{drawing.html()}</figure>"
        for says, drawing in stills
    )
    kept = "".join(
        f' data-{name}="{_quoted(json.dumps(value, separators=(",", ":")))}"'
        for name, value in data.items()
    )
    return f'<div class="explore"{kept}>{figures}</div>'


def _quoted(text: str) -> str:
    """As an attribute in double quotes; the many single ones of an SVG need no escape."""
    return html.escape(text, quote=False).replace('"', "&quot;")
