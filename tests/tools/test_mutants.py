"""make mutants: each mistake can be made today, and is told from what is no mistake."""

from dataclasses import replace

import pytest

from mgpu_tutorial import CHAPTERS
from tools import mutants


@pytest.mark.parametrize("chapter", [*CHAPTERS, "shared", "lab"])
def test_every_chapter_has_mistakes_that_can_be_made_today(chapter):
    found = list(mutants.chosen([chapter]))
    assert found
    for mistake in found:
        changed = mistake.made_in((mutants.ROOT / mistake.file).read_text("utf-8"))
        compile(changed, mistake.file, "exec")
        assert mistake.wrong and mistake.closest_tests(), mistake


@pytest.mark.parametrize("old, new", [("no such text", ""), ("dist", "d"), ("left", "left")])
def test_a_mistake_that_cannot_be_made_is_named(old, new):
    with pytest.raises(ValueError, match="nonblocking:1, .* must stand"):
        replace(mutants.load("nonblocking")[0], old=old, new=new).made_in("left dist dist")


def test_names_choose_chapters_or_single_mistakes(capsys):
    assert {m.chapter for m in mutants.chosen([])} == {*CHAPTERS, "shared", "lab"}
    assert [m.number for m in mutants.chosen(["lab:3"])] == [3]
    assert mutants.main(["nowhere"]) == 2
    assert "NAMES='nowhere': no such chapter" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_listing_alone_shows_is_text_only():
    swapped = mutants.load("nonblocking")[4]
    verdict, by = mutants.try_out(swapped)
    assert verdict == "caught" and mutants.failing_without({by}) == set()
    remark = replace(swapped, old="# 1 MB", new="# a million bytes")
    assert mutants.try_out(remark)[0] == "text only"
