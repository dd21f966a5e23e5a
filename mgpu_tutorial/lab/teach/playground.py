"""A real run behind sliders: move a control, and the run is made again and drawn again.

Nothing is kept in advance: every picture is that of a run with the setting shown. Without
widgets (a web page, print, a notebook that was not run yet) the result of the first
setting stands there, each of its parts as it shows itself.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgpu_tutorial.lab.teach.verdict import WRONG, plate
from mgpu_tutorial.lab.widget import view_of


class Playground:
    """A function, its controls and the result of the present setting.

    `controls` maps each parameter to its widget, `result` is what the function returned
    last, and `error` the line that stands above it after a run that failed.
    """

    def __init__(self, function: Callable, choices: Mapping[str, Mapping[str, Any]]) -> None:
        import ipywidgets as widgets

        self.function, self.choices, self.error = function, choices, ""
        self.controls = {name: _control(name, named) for name, named in choices.items()}
        self.status, self.page = widgets.HTML(), widgets.HTML()
        self.first = self.setting()
        self.result = function(**self._values())
        self.page.value = self.drawn = "".join(map(_html, _parts(self.result)))
        for control in self.controls.values():
            control.observe(self._moved, names="value")

    def setting(self) -> str:
        """The present setting in words, such as "ranks = 2, cap = 1"."""
        return ", ".join(f"{name} = {c.value}" for name, c in self.controls.items())

    def _values(self) -> dict[str, Any]:
        return {name: self.choices[name][c.value] for name, c in self.controls.items()}

    def _moved(self, _: object) -> None:
        """Make the run again; the old result stays, greyed out, until a new one comes."""
        from IPython.utils.capture import capture_output

        setting = html.escape(self.setting())
        self.status.value = f"<i>computing with {setting} …</i>"
        self.page.value = f'<div style="opacity:0.35">{self.drawn}</div>'
        try:
            with capture_output():  # a progress bar, which has no cell to stand in
                self.result = self.function(**self._values())
            self.drawn = "".join(map(_html, _parts(self.result)))
        except (Exception, KeyboardInterrupt) as error:  # the learner's code, or a stop
            first = str(error).splitlines()[0] if str(error) else ""
            self.error = f"{type(error).__name__}: {first}".rstrip(": ")
            self.status.value = f"{plate(setting, WRONG)} {html.escape(self.error)}"
        else:
            self.error = self.status.value = ""
            self.page.value = self.drawn

    def widget(self):
        """The interactive form: the controls above the result."""
        import ipywidgets as widgets

        row = widgets.Layout(flex_flow="row wrap")
        controls = widgets.HBox(list(self.controls.values()), layout=row)
        return widgets.VBox([controls, self.status, self.page])

    def bundles(self) -> list[dict]:
        """What a cell shows: the caption, then each part of the result, still and alive.

        The caption's live form is the whole playground; that of a part is nothing, as the
        playground shows it already.
        """
        import ipywidgets as widgets

        still = f"with {self.first} (run this cell to get the controls)"
        caption = {"text/plain": still, "text/html": f"<p><i>{html.escape(still)}</i></p>"}
        nothing = widgets.Box(layout=widgets.Layout(display="none"))
        parts = [_bundle(part) for part in _parts(self.result)]
        return [view_of(self.widget()) | caption] + [
            view_of(nothing) | part for part in parts
        ]

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for bundle in self.bundles():
            display(bundle, raw=True)

    def __repr__(self) -> str:
        return "\n".join([self.setting(), *map(repr, _parts(self.result))])


def playground(function: Callable, **controls: Any) -> Playground:
    """Show what `function(**setting)` returns, with a control for each keyword.

    The function makes a real run and returns something that can be shown (a drawing, a
    plot, a table, a report), or a list of several. A control is a sequence of choices:
    numbers become a slider, anything else a menu; a dict names its choices. The first
    choice of each is the first setting, which runs at once.

    What the first run raises is raised; a later run that fails shows its error in one line.
    """
    return Playground(function, {name: _named(given) for name, given in controls.items()})


def _named(given: Mapping | Sequence) -> dict[Any, Any]:
    """The choices of a control by what stands on it: numbers stand for themselves."""
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    return {
        v if _is_number(v) else getattr(v, "__name__", str(v)).replace("_", " "): v
        for v in given
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _control(name: str, choices: Mapping[Any, Any]):
    import ipywidgets as widgets

    look = {"description": name, "options": list(choices)}
    look |= {"value": next(iter(choices)), "style": {"description_width": "initial"}}
    if all(map(_is_number, choices)):
        return widgets.SelectionSlider(**look, continuous_update=False)
    return widgets.Dropdown(**look)


def _parts(result: Any) -> list:
    return list(result) if isinstance(result, list | tuple) else [result]


def _bundle(part: Any) -> dict[str, str]:
    """All forms in which one part can show itself, by mime type."""
    from IPython.core.formatters import DisplayFormatter

    return DisplayFormatter().format(part)[0]


def _html(part: Any) -> str:
    """The form that a widget can hold: HTML, else the picture, else the text."""
    bundle = _bundle(part)
    text = bundle.get("text/plain", "")
    if "text/html" in bundle:
        return bundle["text/html"]
    if "image/png" in bundle:
        source = f"data:image/png;base64,{bundle['image/png']}"
        alt = html.escape(text, quote=True)
        return f'<img alt="{alt}" style="width:760px;max-width:100%" src="{source}"/>'
    return f"<pre>{html.escape(text)}</pre>"
