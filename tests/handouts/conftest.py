"""A small chapter with everything that a rule of the handouts speaks of."""

import base64

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

SAID = "Seven, because four and three make seven."
PICTURE = base64.b64encode(
    b"<svg xmlns='http://www.w3.org/2000/svg' width='90' height='9'><title>T</title></svg>"
).decode()
LISTING = "def work(rank, world_size):\n    return rank\n"
HEAD = "# Title\n\nA reason. **is it seven?** About 5 minutes. [More](../README.md#more)."


def printed(text):
    return [new_output("stream", name="stdout", text=text)]


def shown(html, text="x", **forms):
    data = {"text/html": html, "text/plain": text} | forms
    return [new_output("display_data", data={k: v for k, v in data.items() if v})]


def write(folder, cells, name="00_small"):
    (folder / "notebooks").mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("# A small one\n\nIts first words.\n\n## More\n\nText.")
    (folder / "constraints.txt").write_text("torch==2.13.0\ntorchvision==0.28.0\nruff==1\n")
    cited = '- name: Two people\ndate-released: "2026-01-02"\n'
    (folder / "CITATION.cff").write_text(cited)
    path = folder / "notebooks" / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def tagged(source, tag, outputs=()):
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": [tag]})


def small_chapter():
    """One prediction with its answer in two cells, a listing, a finding, an exercise."""
    listing = {"text/markdown": f"```python\n{LISTING}```\n\n[a/b.py](../a/b.py)"}
    asked = "<details><summary>It must</summary><ul><li>be 7</li></ul></details></div>"
    build = shown(f' \n<div class="verdict">x{asked}', "not yet: filled")
    unfilled = shown(' \n<div class="verdict">x</div>', "not yet: filled")
    table = "<table><tr><th>n</th></tr><tr><td>1</td></tr></table>"
    picture = f'<img alt="Ours in a picture." src="data:image/svg+xml;base64,{PICTURE}"/>'
    plate = '<span style="background:#1b6e3c">✓ yes</span>'
    rows = f"<table><tr><td>be 7</td><td>{plate}</td></tr></table>{picture}<pre>x = 7</pre>"
    rows += "<p>Not kept in mine.py: it is ours.</p>"
    fold = f"<details><summary>What the solution shows</summary>{rows}</details></div>"
    solved = shown(f' \n<div class="verdict">{fold}', "correct: as text")
    said = {"handout": {"slide": "For the hall.", "note": "Ask *twice*."}}
    return [
        new_markdown_cell(HEAD),
        new_code_cell("table", outputs=shown(table)),
        new_markdown_cell("## 1. One\n\nFirst words.\n\n$$x = 1$$", metadata=said),
        new_markdown_cell("Before.\n\n**Predict** the sum."),
        new_code_cell("print(4 + 3)", outputs=printed("7\n"), execution_count=1),
        new_code_cell("print('so')", outputs=printed("so\n"), execution_count=2),
        new_markdown_cell(f"{SAID} Here is the function:\n\n**Change** the four."),
        new_code_cell("show_source(work)", outputs=shown("<pre>x</pre>", **listing)),
        new_markdown_cell("Name the rank."),
        tagged("finding = ...\ncheck(finding, 1)", "finding", unfilled),
        new_markdown_cell("It is rank 1.\n\nAnother paragraph.\n\n- a list"),
        new_markdown_cell("## Exercises\n\n**1.** Add."),
        tagged('x = ...\ncheck(x, 7, hint="count")', "exercise", build),
        tagged("# Solution (click to open)\nx = 3 + 4\ncheck(x, 7)", "solution", solved),
        new_markdown_cell("## Summary\n\nIt is seven.\n\n## Next\n\nNothing."),
    ]


@pytest.fixture
def small(tmp_path):
    return write(tmp_path, small_chapter())
