"""The report on a machine with GPUs, rehearsed in small on a CPU."""

import gzip
import json
import re

import pytest

from benchmarks import gpu_report

SMALL = gpu_report.Machine(rehearse=True)


def test_what_is_busy_is_counted_once():
    assert gpu_report.busy([(0, 2), (1, 3), (5, 6), (5.2, 5.5)]) == 4
    assert gpu_report.busy([]) == 0


def test_the_roof_has_a_row_for_each_product_and_copy():
    rows = re.findall(
        r"^\| (float32|\d+) \|.* ([\d.e-]+) \|$", gpu_report.roofline(SMALL), re.M
    )
    assert [name for name, _ in rows] == ["float32", "float32", "1", "16"]
    assert all(float(rate) > 0 for _, rate in rows)


@pytest.mark.slow
def test_a_step_leaves_a_trace_that_says_which_thread_was_busy(tmp_path):
    path = tmp_path / "x.trace.json.gz"
    said = gpu_report.step_trace(SMALL, path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "x.trace.json.gz" in said and "| cpu_op |" in said
    assert any("addmm" in event["name"] or "mm" in event["name"] for event in events)


@pytest.mark.slow
def test_links_are_measured_by_real_ranks():
    said = gpu_report.links(SMALL)
    assert re.match(r"2 ranks\.", said) and re.search(
        r"^\| 2\^12 \| \d+ \| [\d.]+ \|$", said, re.M
    )


def test_a_command_that_fails_or_takes_too_long_is_told():
    assert gpu_report.shell("no-such-command-x") == "no-such-command-x: not found"
    assert gpu_report.shell("sleep", "5", seconds=0.2) == "not done after 0 s"
    assert "boom" in gpu_report.shell("sh", "-c", "echo boom; exit 3")
