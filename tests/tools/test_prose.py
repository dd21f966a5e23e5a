"""The table of how the notebooks read, on a small one whose figures are counted by hand."""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import prose

LISTING = new_output(
    "display_data", {"text/markdown": "```python\ndef f():\n    pass\n```\n"}
)
CELLS = [
    new_markdown_cell(
        "# Title\n\n[← 00](a.ipynb)\n\nOne two three four five six seven. Short `one`."
    ),
    new_code_cell("from mgpu_tutorial import chapter\nfrom mgpu_tutorial.shared import data"),
    new_code_cell("show_source(chapter.shown)", outputs=[LISTING]),
    new_markdown_cell("**Predict** what comes: This is the second paragraph of it."),
    new_code_cell(
        "launch(chapter.shown, 2)\n\nlaunch(chapter.hidden, data.rows(chapter.SIZE))"
    ),
    new_markdown_cell("**Change** the line. | no table\n\n| a | b |"),
    new_code_cell("check(1)", metadata={"tags": ["exercise"]}),
    new_code_cell("chapter.folded()", metadata={"tags": ["solution"]}),
]


def row_of(tmp_path, cells):
    nbformat.write(new_notebook(cells=cells), tmp_path / "00_chapter.ipynb")
    return list(prose.measures(tmp_path))


def test_sentences_are_counted_in_words_and_links_as_their_text():
    text = prose.prose_of(
        [new_markdown_cell("We [read the page](https://x.y/z). It *is* long.\n\n| a |")]
    )
    assert prose.lengths_of(text) == [4, 3]


def test_a_notebook_is_measured(tmp_path):
    (row,) = row_of(tmp_path, CELLS)
    assert row.sentence == (7 + 2 + 3 + 7 + 5) / 5 and row.short == 3 / 5
    assert row.predictions == 1 and row.changes == 1
    assert row.launched == 2 and row.hidden == ["hidden"]


def test_what_an_earlier_notebook_showed_is_known_in_a_later_one(tmp_path):
    nbformat.write(new_notebook(cells=CELLS[:3]), tmp_path / "00_chapter.ipynb")
    nbformat.write(new_notebook(cells=[*CELLS[1:2], CELLS[4]]), tmp_path / "01_chapter.ipynb")
    assert [row.hidden for row in prose.measures(tmp_path)] == [[], ["hidden"]]


def test_minutes_are_words_lines_predictions_and_exercises(tmp_path):
    words = new_markdown_cell("word " * 300)
    (row,) = row_of(tmp_path, [words])
    assert row.minutes == 2
    (row,) = row_of(tmp_path, [words, *CELLS[6:7]])
    assert row.minutes == 2 + 6 + 1 / 10
    (row,) = row_of(tmp_path, [words, CELLS[2]])  # a line of code, four of listing
    assert abs(row.minutes - (2 + 5 / 10)) < 1e-9


def test_the_table_has_a_row_for_each_notebook(capsys):
    assert prose.main(["--names"]) == 0
    rows = capsys.readouterr().out.splitlines()
    for path in prose.NOTEBOOKS.glob("*.ipynb"):
        assert any(row.startswith(path.stem) for row in rows)
