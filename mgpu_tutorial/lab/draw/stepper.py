"""The frames of a drawing behind a slider, to step through: a chart of messages, or devices.

The frames sit in the page and the slider is tied to them there, so that stepping
needs no answer from the kernel. Without widgets (a web page, print, a notebook that
was not run yet) the same frames are a filmstrip.
"""

from mgpu_tutorial.lab.draw import sequence_chart as chart
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.record.report import Report


class Stepper:
    """The frames of a drawing, one a step."""

    def __init__(self, frames: list[Drawing]) -> None:
        self.frames = frames

    def __repr__(self) -> str:
        texts = [f"step {i}\n{frame.text}" for i, frame in enumerate(self.frames)]
        return "\n".join(texts)

    def widget(self):
        """The interactive form: play, slide, or use the arrow keys."""
        import ipywidgets as widgets

        last = len(self.frames) - 1
        stack = widgets.Stack([widgets.HTML(frame.html()) for frame in self.frames])
        stack.selected_index = 0
        play = widgets.Play(min=0, max=last, interval=900, tooltip="play the steps")
        slider = widgets.IntSlider(0, 0, last, description="step", continuous_update=True)
        widgets.jslink((play, "value"), (slider, "value"))
        widgets.jslink((slider, "value"), (stack, "selected_index"))
        return widgets.VBox([widgets.HBox([play, slider]), stack])

    def filmstrip(self) -> str:
        """The still form: the frames side by side, each under its number."""
        cells = "".join(
            f'<figure style="display:inline-block;width:47%;min-width:280px;margin:4px">'
            f"<figcaption>step {i}</figcaption>{frame.html()}</figure>"
            for i, frame in enumerate(self.frames)
        )
        return f"<div>{cells}</div>"

    def _repr_mimebundle_(self, **_: object) -> dict:
        return self.widget()._repr_mimebundle_() | {
            "text/plain": repr(self),
            "text/html": self.filmstrip(),
        }


def stepper(report: Report) -> Stepper:
    """Make the stepping form of `sequence_chart(report)`; needs `trace=True`."""
    return Stepper(chart.frames(report))
