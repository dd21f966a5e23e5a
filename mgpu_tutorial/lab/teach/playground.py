"""A real run behind sliders: move one, and the run is made again and drawn again.

Without widgets (a web page, print, a notebook that was not run yet) the result of the first
setting stands there.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgpu_tutorial.lab.teach.verdict import WRONG, plate


def playground(function: Callable, first: Mapping[str, Any], **choices: Sequence) -> None:
    """Show what `function(**setting)` returns, with a slider over each keyword's choices.

    The setting `first` runs at once, with the first choice of what it does not name. What
    that run raises is raised; a later one that fails shows its error in one line.
    """
    import ipywidgets as widgets
    from IPython.display import display
    from IPython.utils.capture import capture_output

    sliders = {
        name: widgets.SelectionSlider(
            description=name,
            options=values,
            value=first.get(name, values[0]),
            style={"description_width": "initial"},
            continuous_update=False,
        )
        for name, values in choices.items()
    }
    status = widgets.HTML()

    def setting() -> str:
        return ", ".join(f"{name} = {slider.value}" for name, slider in sliders.items())

    def run() -> Any:
        return function(**{name: slider.value for name, slider in sliders.items()})

    def move(_: object) -> None:
        status.value = f"<i>computing with {setting()} …</i>"
        try:
            with capture_output():  # a progress bar, which has no cell to stand in
                result = run()
        except (Exception, KeyboardInterrupt) as error:  # the learner's code, or a stop
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            status.value = f"{plate(setting(), WRONG)} {html.escape(said)}"
        else:
            status.value = ""
            place.update(result)

    result = run()
    still = f"with {setting()} (run this cell to get the controls)"
    caption = {"text/plain": still, "text/html": f"<p><i>{still}</i></p>"}
    row = widgets.HBox([*sliders.values()], layout=widgets.Layout(flex_flow="row wrap"))
    display(widgets.VBox([row, status])._repr_mimebundle_() | caption, raw=True)
    place = display(result, display_id=True)
    for slider in sliders.values():
        slider.observe(move, names="value")
