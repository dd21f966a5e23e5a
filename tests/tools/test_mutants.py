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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_listing_alone_shows_is_text_only():
    mistake = mutants.load("nonblocking")[4]
    remark = replace(mistake, old="# 1 MB", new="# a million bytes")
    assert mutants.try_out(remark)[0] == "text only"
