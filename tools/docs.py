"""Write what programs write under docs/: `python -m tools.docs`.

published_runs.md has the rows of `step_time`. cell.svg and ring.svg are for the README:
a build of `point_to_point` that hangs and is mended, and the film of `collectives`, in which
four ranks sum their numbers around a ring. Both show what comes last. The pages of the site
have a button that plays them: it takes out that nothing moves. In a dark theme both are dark.
"""

from pathlib import Path

from mgpu_tutorial.collectives.figures import ring_film
from mgpu_tutorial.lab import film, launch
from mgpu_tutorial.lab.draw.drawing import Drawing, animated
from mgpu_tutorial.step_time import published
from tools import cell_picture

PAGE = Path(__file__).parent.parent / "docs" / "published_runs.md"


def page() -> str:
    """Every row, our prediction and the null guess."""
    lines = [
        "# Published steps, and what the cost model says",
        "",
        "The rows of [23 Step time](../notebooks/23_step_time.ipynb), in the authors'",
        "units, per GPU. All errors are of the seconds of a step: below 0 the prediction is",
        "too fast, in whatever unit the run was published. The *null guess* keeps the rate",
        "per GPU of the fitted run. *Held out* are runs that we added when the formula was",
        "finished; nothing in it was changed for them.",
        "Plans and shapes are in `mgpu_tutorial/step_time/published.json`.",
    ]
    for family, table in published.TABLES.items():
        date = f"{table['date']}{', held out' if family in published.HELD_OUT else ''}"
        lines += ["", f"## {family}", ""]
        lines += [f"{table['note']} [Source]({table['source']}), {date}.", ""]
        lines += ["| run | plan | published | predicted | unit | error | null guess |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row, written in zip(published.predict(family), table["rows"], strict=True):
            run, factor = row.run, 1 + row.error
            ours = run.published * factor if run.unit == "s" else run.published / factor
            places = 2 if run.unit == "s" else int(run.published < 1000)
            numbers = f"{run.published:,.{places}f} | {ours:,.{places}f}"
            errors = f"{row.error:+.1%} | {row.null_error:+.1%}"
            errors = "fitted | " if run.fitted else errors
            name = f"[{run.name}]({written['source']})" if "source" in written else run.name
            lines += [f"| {name} | {run.plan} | {numbers} | {run.unit} | {errors} |"]
    return "\n".join([*lines, ""])


DARK = (  # the filter of the pages; they have it already, and leave this out
    '<style media="(prefers-color-scheme: dark)">'
    "svg{filter:invert(0.9) hue-rotate(180deg)}</style>"
)


def write(name: str, drawing: Drawing) -> None:
    """Write a picture that looks after a dark theme by itself, as GitHub's, and is still."""
    picture = drawing.svg().replace("<style>@media", "<style media='not all'>@media", 1)
    picture = picture.replace("</title>", f"</title>{DARK}", 1)
    PAGE.with_name(name).write_text(picture + "\n", "utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    report = launch(ring_film, 4, trace=True, device="cpu")
    write("ring.svg", animated(film(report).frames, rounds=1))
    write("cell.svg", cell_picture.draw())
