"""Write docs/published_runs.md, the rows of 22 Step time: python -m tools.published_runs."""

from pathlib import Path

from mgpu_tutorial.step_time import published

PAGE = Path(__file__).parent.parent / "docs" / "published_runs.md"


def page() -> str:
    """Every row, our prediction and the null guess."""
    lines = [
        "# Published steps, and what the cost model says",
        "",
        "The rows of [22 Step time](../notebooks/22_step_time.ipynb), in the authors'",
        "units, per GPU. All errors are of the rate: above 0 we predict too fast a step. The",
        "*null guess* keeps the rate per GPU of the fitted row.",
        "Plans and shapes are in `mgpu_tutorial/step_time/published.json`.",
    ]
    for family, table in published.TABLES.items():
        lines += ["", f"## {family}", "", f"{table['note']} [Source]({table['source']})", ""]
        lines += ["| run | plan | published | predicted | unit | error | null guess |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in published.predict(family):
            run, ours = row.run, row.step.seconds
            if run.unit != "s":
                ours = run.published * (1 + row.error)
            errors = f"{row.error:+.1%} | {row.null_error:+.1%}"
            places = 2 if run.unit == "s" else int(run.published < 1000)
            numbers = f"{run.published:,.{places}f} | {ours:,.{places}f}"
            errors = "fitted | " if run.fitted else errors
            lines += [f"| {run.name} | {run.plan} | {numbers} | {run.unit} | {errors} |"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
