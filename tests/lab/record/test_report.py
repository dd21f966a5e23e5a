"""What a report shows of a rank: lines as a terminal shows them, and not too many."""

import pytest

from mgpu_tutorial.lab.record.report import Report


@pytest.mark.parametrize(
    "count, more", [(60, []), (61, ["… 1 more lines in report.stdout[0]"])]
)
def test_sixty_lines_are_shown_and_then_how_many_more_there_are(count, more):
    lines = list(map(str, range(count)))
    shown = Report(1, stdout=["\n".join(lines)], stderr=[""]).lines(0)
    assert shown == lines[:60] + more


def test_output_errors_and_result_follow_each_other_and_a_silent_rank_says_so():
    report = Report(2, ["4", None], ["10 %\r20 %\ndone\r\n", ""], ["a warning\n", ""])
    assert report.lines(0) == ["20 %", "done", "a warning", "returned '4'"]
    assert str(report).splitlines()[-1] == "rank 1 │ (silent)"


def test_a_long_line_and_a_long_result_are_shown_by_their_first_500_characters():
    report = Report(1, stdout=["a" * 500 + "\n" + "b" * 501], stderr=["c" * 501])
    assert report.lines(0) == ["a" * 500, "b" * 500 + " …", "c" * 500 + " …"]
    report.results = [["a"] * 300]
    (line,) = report.lines(0)[3:]
    assert line == f"returned {str(['a'] * 300)[:500]} … (1,500 characters)"
    report.results = ["a" * 498]  # and two quotes
    assert report.lines(0)[3:] == [f"returned {'a' * 498!r}"]
