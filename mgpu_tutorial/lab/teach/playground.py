"""A real run behind sliders: move a control, and the run is made again and drawn again.

Nothing is kept in advance: every picture is that of a run with the setting shown. Without
widgets (a web page, print, a notebook that was not run yet) the result of the first
setting stands there.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgpu_tutorial.lab.teach.verdict import WRONG, plate


class Playground:
    """A function, the widgets of its parameters, and the result of the present setting."""

    def __init__(self, function: Callable, controls: dict[str, Any]) -> None:
        import ipywidgets as widgets

        self.function, self.controls, self.places = function, controls, []
        self.status, self.first = widgets.HTML(), self.setting()
        self.result = self._run()
        for control in controls.values():
            control.observe(self._moved, names="value")

    def setting(self) -> str:
        """The present setting in words, such as "ranks = 2, cap = 1"."""
        return ", ".join(f"{name} = {c.label}" for name, c in self.controls.items())

    def _run(self) -> list:
        result = self.function(**{name: c.value for name, c in self.controls.items()})
        return list(result) if isinstance(result, list | tuple) else [result]

    def _moved(self, _: object) -> None:
        """Make the run again and put each part of its result in the place of the old one."""
        from IPython.utils.capture import capture_output

        setting = html.escape(self.setting())
        self.status.value = f"<i>computing with {setting} …</i>"
        try:
            with capture_output():  # a progress bar, which has no cell to stand in
                self.result = self._run()
        except (Exception, KeyboardInterrupt) as error:  # the learner's code, or a stop
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            said = html.escape(said.removesuffix(": "))
            self.status.value = f"{plate(setting, WRONG)} {said}"
            return
        self.status.value = ""
        for place, part in zip(self.places, self.result, strict=False):
            place.update(part)

    def _ipython_display_(self) -> None:
        """The controls, in print the first setting; below them each part of the result."""
        import ipywidgets as widgets
        from IPython.display import display

        row = widgets.Layout(flex_flow="row wrap")
        controls = widgets.HBox([*self.controls.values()], layout=row)
        still = f"with {self.first} (run this cell to get the controls)"
        caption = {"text/plain": still, "text/html": f"<p><i>{html.escape(still)}</i></p>"}
        view = widgets.VBox([controls, self.status])._repr_mimebundle_()
        display(view | caption, raw=True)
        self.places = [display(part, display_id=True) for part in self.result]


def playground(
    function: Callable, first: Mapping[str, Any] | None = None, **controls: Any
) -> Playground:
    """Show what `function(**setting)` returns, with a control for each keyword.

    The function makes a real run and returns something that can be shown (a drawing, a
    plot, a table, a report), or a list of always as many. A control is a sequence of
    choices: numbers become a slider, anything else a menu; a dict names its choices. The
    first setting, which runs at once, is the first choice of each, or what `first` names.

    What the first run raises is raised; a later run that fails shows its error in one line.
    """
    first = first or {}
    made = {name: _control(name, given, first.get(name)) for name, given in controls.items()}
    return Playground(function, made)


def _control(name: str, given: Mapping | Sequence, first: Any) -> Any:
    """A slider over numbers, a menu of anything else; each choice has its name."""
    import ipywidgets as widgets

    if isinstance(given, Mapping):
        named = {str(key): value for key, value in given.items()}
    else:
        named = {getattr(v, "__name__", str(v)).replace("_", " "): v for v in given}
    label = next(iter(named)) if first is None else str(first)
    look = {"description": name, "options": list(named.items())}
    look |= {"label": label, "value": named[label], "style": {"description_width": "initial"}}
    if not isinstance(given, Mapping) and all(type(v) in (int, float) for v in given):
        return widgets.SelectionSlider(**look, continuous_update=False)
    return widgets.Dropdown(**look)
