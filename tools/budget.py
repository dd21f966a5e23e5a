"""How long each chapter's checks took, beside its budget: a pytest plugin, `-p tools.budget`.

Prints and never fails: a second is a fact about a machine, and about what runs beside it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

TESTS, NOTEBOOK = 15.0, 15.0  # seconds per chapter, on two quiet cores
OWN = {"lab": 180.0}  # no chapter: it starts interpreters and waits for deliberate hangs
PLACE = re.compile(r"(?:tests/(?:test_)?|notebooks/\d\d_)(\w+)")


def chapter_of(nodeid: str) -> str:
    """What a test or a cell belongs to, by its folder or its file."""
    found = PLACE.match(nodeid)
    return found[1] if found else "the rest"


def lines(seconds: Mapping[str, float], budget: float) -> list[str]:
    """A line for each chapter, the longest first; what is over its budget says so."""
    longest_first = sorted(seconds.items(), key=lambda entry: -entry[1])
    return [
        f"{taken:6.1f} s  {name}"
        + (f"   over its {given:.0f} s" if taken > (given := OWN.get(name, budget)) else "")
        for name, taken in longest_first
    ]


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Add up set-up, call and teardown of every test that ran."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[chapter_of(report.nodeid)] += report.duration
    notebooks = config.getoption("nbval", False)
    terminalreporter.section("notebooks by time" if notebooks else "tests by time")
    for line in lines(seconds, NOTEBOOK if notebooks else TESTS):
        terminalreporter.write_line(line)
