"""What each build must do, asked of the package's own text: only where that is mistaken.

Otherwise the notebook asks it of the same text.
"""

import pytest

from tests.test_builds import BUILDS

OURS = [(chapter, name) for chapter, build in BUILDS.items() for name in build.ours]


@pytest.mark.parametrize("chapter, name", OURS, ids=".".join)
def test_ours_does_what_the_reader_s_must(chapter, name):
    BUILDS[chapter].require(BUILDS[chapter].ours[name])
