"""What each build must do, asked of the package's own text: only where that is mistaken.

Otherwise the notebook asks it of the same text.
"""

import pytest

from tests.test_builds import BUILDS

OURS = {
    f"{chapter}.{name}": build for chapter, build in BUILDS.items() for name in build.ours
}


@pytest.mark.parametrize("name", OURS)
def test_ours_does_what_the_reader_s_must(name):
    OURS[name].require(OURS[name].ours[name.partition(".")[2]])
