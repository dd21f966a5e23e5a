"""make mutants: each mistake can be made today."""

import pytest

from mgpu_tutorial import CHAPTERS
from tools import mutants


@pytest.mark.parametrize("chapter", [*CHAPTERS, "shared", "instruments", "lab"])
def test_every_chapter_has_mistakes_that_can_be_made_today(chapter):
    found = list(mutants.chosen([chapter]))
    assert found
    for mistake in found:
        changed = mistake.made_in((mutants.ROOT / mistake.file).read_text("utf-8"))
        compile(changed, mistake.file, "exec")
        assert mistake.wrong and mistake.closest_tests(), mistake
