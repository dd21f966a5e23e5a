"""A small chapter with everything that a rule of the handouts speaks of."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

SAID = "Seven, because four and three make seven."
LISTING = "def work(rank, world_size):\n    return rank\n"


def printed(text):
    return [new_output("stream", name="stdout", text=text)]


def shown(**forms):
    data = {mime.replace("__", "/"): content for mime, content in forms.items()}
    return [new_output("display_data", data=data)]


def write(folder, cells, name="00_small"):
    (folder / "notebooks").mkdir(parents=True, exist_ok=True)
    path = folder / "notebooks" / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def tagged(source, tag, outputs=()):
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": [tag]})


@pytest.fixture
def small(tmp_path):
    """One prediction with its answer in two cells, a listing, a finding, an exercise."""
    listing = shown(
        text__markdown=f"```python\n{LISTING}```\n\n[a/b.py](../a/b.py)",
        text__html="<pre>x</pre>",
    )
    unfilled = shown(
        text__html=' \n<div class="verdict">x</div>', text__plain="not yet: filled"
    )
    head = "# Title\n\nA reason. **is it seven?** About 5 minutes."
    said = {"handout": {"slide": "For the hall.", "note": "Ask *twice*."}}
    cells = [
        new_markdown_cell(head),
        new_code_cell("import torch"),
        new_markdown_cell("## 1. One\n\nFirst words.", metadata=said),
        new_markdown_cell("Before.\n\n**Predict** the sum."),
        new_code_cell("print(4 + 3)", outputs=printed("7\n"), execution_count=1),
        new_code_cell("print('so')", outputs=printed("so\n"), execution_count=2),
        new_markdown_cell(f"{SAID} Here is the function:\n\n**Change** the four."),
        new_code_cell("show_source(work)", outputs=listing, execution_count=3),
        new_markdown_cell("Name the rank."),
        tagged("finding = ...\ncheck(finding, 1)", "finding", unfilled),
        new_markdown_cell("It is rank 1.\n\nAnother paragraph."),
        new_markdown_cell("## Exercises\n\n**1.** Add."),
        tagged('x = ...\ncheck(x, 7, hint="count")', "exercise", unfilled),
        tagged("# Solution (click to open)\nx = 3 + 4\ncheck(x, 7)", "solution"),
        new_markdown_cell("## Summary\n\nIt is seven.\n\n## Next\n\nNothing."),
    ]
    return write(tmp_path, cells)
