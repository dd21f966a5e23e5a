"""python -m mgpu_tutorial.language_model.course trains on the prose of this course.

It is `own_text.train_on` for 30 minutes on the plan dp=2, with the text of all notebooks in
`notebooks/`, and keeps the lines that the model wrote on the way. The prose and the number of
steps that a machine takes in this time change, so a second run writes other lines.
"""

import json
import re
import tempfile
from pathlib import Path

from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.run import progress
from mgpu_tutorial.language_model import own_text

LINES = Path(__file__).with_name("course_lines.txt")  # what it wrote in our run
PROMPT, MINUTES, PLAN = "A rank ", 30.0, "dp=2"
NOT_PROSE = r"```.*?```|^\|.*?$|</?\w+>|\*\*|`"  # code, tables, marks


def prose(folder: str) -> str:
    """The paragraphs of all notebooks in a folder, without links, tables, code and marks."""
    paragraphs = []
    for file in sorted(Path(folder).glob("[0-9]*.ipynb")):
        for cell in json.loads(file.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                paragraphs.append("".join(cell["source"]))
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", "\n\n".join(paragraphs))
    words = re.sub(NOT_PROSE, "", words, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", words)


if __name__ == "__main__":
    progress.to_terminal()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "course.txt")
        text.write_text(prose("notebooks"), "utf-8")
        given = {"minutes": MINUTES, "prompt": PROMPT, "timeout": 60 * MINUTES + 600}
        report = launch(own_text.train_on, 2, str(text), PLAN, **given)
        print(report)
        LINES.write_text(own_text.lines_beside(str(text)).read_text("ascii"), "ascii")
