"""Rows of the logbook: whose they are, what equals one process, and where they are kept."""

from types import SimpleNamespace

import pytest

from mgpu_tutorial.instruments.prove.proof import Proof, Row
from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.shared import logbook
from tools.logbook import printed

SAME = Proof(4, [Row("gradients of step 1", "a", 3e-16, 1e-14)], [])


def priced(ms=300.0):
    rows = {0: [ms, 30.0, 40.0, 9.0], 1: [200.0, 50.0, 20.0, 8.0]}
    return SimpleNamespace(tapes=rows, row=rows.get, seconds=ms / 1e3, ranks=8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The reader's folder, with a `mine.py`."""
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    monkeypatch.setattr(logbook, "NOTED", {})
    (tmp_path / "mine.py").write_text("def wrap(model):\n    return model\n")
    return tmp_path


def test_a_row_says_whose_it_is_and_has_the_most_of_all_ranks():
    yours = mine.run(mine.FILE.read_text()).wrap
    (row,) = logbook.note("08 buckets", yours, SAME, priced(), 2400).rows
    assert row == [
        "08 buckets",
        "yours",
        "1 tensors, 1e-12",
        "300",
        "50",
        "40.0",
        "9.0",
        "1,000",
    ]
    (row,) = logbook.note("08 buckets", priced, SAME, priced(), 2400).rows
    assert row[1] == "ours"


def test_a_proof_is_said_by_its_tensors_or_by_its_first_fault():
    right = [Row("gradients of step 1", name, 3e-16, 1e-14) for name in "ab"]
    wrong = [*right, Row("gradients of step 2", "b", 3.0, 1e-14, "4 times too long")]
    for rows, expected in ((right, "2 tensors, 1e-12"), (wrong, "4 times too long")):
        table = logbook.note("06 after", priced, Proof(4, rows, []), priced(), 2400)
        assert table.rows[0][2] == expected


def test_rows_come_in_the_order_of_chapters_and_the_last_of_a_name_counts():
    for way, ms in (("15 shards", 1.0), ("06 after", 2.0), ("15 shards", 3.0)):
        table = logbook.note(way, priced, SAME, priced(1000 * ms), 8)
    assert [(row[0], row[3]) for row in table.rows] == [
        ("06 after", "2000"),
        ("15 shards", "3000"),
    ]


def test_without_a_library_of_the_readers_nothing_is_kept(folder):
    (folder / "mine.py").unlink()
    for way in ("08 buckets", "06 after"):
        rows = logbook.note(way, priced, SAME, priced(), 2400).rows
    assert [row[0] for row in rows] == ["06 after", "08 buckets"]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("text", ["{", '["06 after"]', "7", "[[1, 2]]"])
def test_what_is_no_logbook_is_not_replaced(folder, text):
    (folder / "logbook.json").write_text(text)
    with pytest.raises(ValueError, match=r"logbook.json is no logbook .*move it away"):
        logbook.note("06 after", priced, SAME, priced(), 2400)
    assert (folder / "logbook.json").read_text() == text


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="tokens must be a whole number, 1 or more, got 0"):
        logbook.note("06 after", priced, SAME, priced(), 0)


def test_the_whole_logbook_has_what_the_notebooks_print():
    said = "run `python -m tools.logbook`, and store the notebook that shows all rows"
    assert logbook.whole() == printed(), said


def test_a_row_of_ones_own_takes_the_place_of_the_printed_one():
    yours = mine.run(mine.FILE.read_text()).wrap
    logbook.note("08 in buckets", yours, SAME, priced(), 2400)
    logbook.note("99 another", yours, SAME, priced(), 2400)
    rows = logbook.whole()
    assert [row[0] for row in rows] == sorted([*(row[0] for row in printed()), "99 another"])
    (own,) = [row for row in rows if row[0] == "08 in buckets"]
    assert own[1:4] == ["yours", "1 tensors, 1e-12", 300.0]
