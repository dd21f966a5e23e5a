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


def playground(
    function: Callable, first: Mapping[str, Any] | None = None, **controls: Any
) -> "Playground":
    """Show what `function(**setting)` returns, with a control for each keyword.

    The function makes a real run and returns something that can be shown (a drawing, a
    plot, a table, a report), or a list of several. A control is a sequence of choices:
    numbers become a slider, anything else a menu; a dict names its choices. The first
    setting, which runs at once, is the first choice of each, or what `first` names.

    What the first run raises is raised; a later run that fails shows its error in one line.
    """
    choices = {name: _named(given) for name, given in controls.items()}
    return Playground(function, choices, first or {})


class Playground:
    """A function, the widgets of its parameters, and the result of the present setting."""

    def __init__(self, function: Callable, choices: dict, first: Mapping[str, Any]) -> None:
        import ipywidgets as widgets

        self.function, self.choices = function, choices
        self.controls = {
            name: _control(name, named, first.get(name)) for name, named in choices.items()
        }
        self.page, self.first = widgets.HTML(), self.setting()
        self.result = function(**self._values())
        self.page.value = self._drawn()
        for control in self.controls.values():
            control.observe(self._moved, names="value")

    def setting(self) -> str:
        """The present setting in words, such as "ranks = 2, cap = 1"."""
        return ", ".join(f"{name} = {c.value}" for name, c in self.controls.items())

    def _values(self) -> dict[str, Any]:
        return {name: self.choices[name][c.value] for name, c in self.controls.items()}

    def _drawn(self) -> str:
        return "".join(map(_html, _parts(self.result)))

    def _moved(self, _: object) -> None:
        """Make the run again; the old result stays, greyed out, until a new one comes."""
        from IPython.utils.capture import capture_output

        setting, old = html.escape(self.setting()), self._drawn()
        pale = f'<div style="opacity:0.35">{old}</div>'
        self.page.value = f"<i>computing with {setting} …</i>{pale}"
        try:
            with capture_output():  # a progress bar, which has no cell to stand in
                self.result = self.function(**self._values())
            self.page.value = self._drawn()
        except (Exception, KeyboardInterrupt) as error:  # the learner's code, or a stop
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            said = html.escape(said.removesuffix(": "))
            self.page.value = f"{plate(setting, WRONG)} {said}{pale}"

    def widget(self):
        """The interactive form: the controls above the result."""
        import ipywidgets as widgets

        row = widgets.Layout(flex_flow="row wrap")
        return widgets.VBox(
            [widgets.HBox(list(self.controls.values()), layout=row), self.page]
        )

    def bundles(self) -> list[dict]:
        """What a cell shows: the caption, then each part of the result, still and alive.

        The caption's live form is the whole playground; that of a part is nothing, as the
        playground shows it already.
        """
        import ipywidgets as widgets

        still = f"with {self.first} (run this cell to get the controls)"
        caption = {"text/plain": still, "text/html": f"<p><i>{html.escape(still)}</i></p>"}
        nothing = view_of(widgets.Box(layout=widgets.Layout(display="none")))
        parts = [nothing | _bundle(part) for part in _parts(self.result)]
        return [view_of(self.widget()) | caption, *parts]

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for bundle in self.bundles():
            display(bundle, raw=True)


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


def _control(name: str, choices: Mapping[Any, Any], first: Any):
    import ipywidgets as widgets

    value = next(iter(choices)) if first is None else first
    look = {"description": name, "options": list(choices), "value": value}
    look["style"] = {"description_width": "initial"}
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
    text = html.escape(bundle.get("text/plain", ""), quote=True)
    if "text/html" in bundle:
        return bundle["text/html"]
    if "image/png" in bundle:
        source = f"data:image/png;base64,{bundle['image/png']}"
        return f'<img alt="{text}" style="width:760px;max-width:100%" src="{source}"/>'
    return f"<pre>{text}</pre>"
