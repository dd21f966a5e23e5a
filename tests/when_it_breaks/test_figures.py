"""The apparatus: what is cut from an error's text, what it compares, and what py-spy sees."""

import shutil

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.when_it_breaks import figures, jobs

GLOO = "[/build/third_party/gloo/gloo/transport/tcp/"


def test_the_first_lines_name_no_place_no_port_and_no_direction(capsys):
    said = [
        f"{GLOO}unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to end",
        f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:4711. This is typically …",
        f"{GLOO}pair.cc:537] Read error [127.0.0.1]:51592: Connection reset by peer. This …",
        "Rank 1 successfully reached monitoredBarrier, but received errors while waiting",
        "has ended\nand more",
        "",
    ]
    figures.print_first_lines(Report(6, stdout=said))
    assert capsys.readouterr().out.splitlines() == [
        "rank 0: Timed out waiting 5000ms",
        "rank 1: Connection closed by peer",
        "rank 2: Connection closed by peer",
        "rank 3: Rank 1 successfully reached monitoredBarrier",
        "rank 4: has ended",
        "rank 5: (silent)",
    ]


def test_of_a_death_the_fatal_error_its_line_and_the_root_cause_are_kept():
    errors = f"""Fatal Python error: Bus error

Current thread 0x00007f0bfb7c4b80 (most recent call first):
  File "{jobs.__file__}", line 69 in average_file
  File "/elsewhere/rank.py", line 439 in under_torchrun
[rank0]: Traceback (most recent call last):
[rank0]:   File "{jobs.__file__}", line 70, in average_file
[rank0]: RuntimeError: Connection closed by peer
Failures:
  rank      : 0 (local_rank: 0)
Root Cause (first observed failure):
[0]:
  time      : now
  rank      : 1 (local_rank: 1)
  exitcode  : -7 (pid: 22160) (SIGBUS)
"""
    assert figures.essence(errors).splitlines() == [
        "Fatal Python error: Bus error",
        "  at jobs.py:69",
        "Root Cause (first observed failure):",
        "rank      : 1 (local_rank: 1)",
        "exitcode  : -7 (SIGBUS)",
    ]
    assert figures.own_places(errors) == ["jobs.py:69", "jobs.py:70"]


def test_one_other_bit_is_found(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    changed = {
        "one": torch.zeros(1),
        "momentum": state["optimizer"]["state"][1]["momentum_buffer"],
        "weight": state["model"]["weight"],
    }
    for name, tensor in changed.items():
        tensor += 1e-6
        (tmp_path / name).mkdir()
        torch.save(state, tmp_path / name / "run.pt")
    one, momentum, weight = (str(tmp_path / name) for name in changed)
    assert figures.same_bits([one, one]) == [True] * 4
    assert figures.same_bits([one, momentum]) == [True, True, True, False]
    assert figures.same_bits([momentum, weight]) == [False, True, True, True]


def sum_with_own(rank, world_size, mine):
    """A tool that says what this rank was told, and the sum of what all were told."""
    total = torch.tensor(mine)
    dist.all_reduce(total)
    return [mine, total.item()]


def test_a_tool_is_told_its_own_number_of_each_list(ranks):
    results = ranks(2, figures.ask_each, sum_with_own, [[3, 4], [9, 1]]).results
    assert results == [[[3, 7], [9, 10]], [[4, 7], [1, 10]]]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not shutil.which("py-spy"), reason="py-spy is not installed")
def test_py_spy_sees_where_each_rank_hangs(monkeypatch):
    monkeypatch.setenv("CLICOLOR_FORCE", "1")  # as Jupyter does
    rank, line = figures.fault_of(jobs.agree_on_settings)
    seen = figures.spy_on(jobs.agree_on_settings, 3).splitlines()
    where = [f"rank {r}: jobs.py:{line + 3 * (r != rank)}" for r in range(3)]
    assert [text.split(",")[0] for text in seen] == where


def test_without_py_spy_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(figures.shutil, "which", lambda *_, **__: None)
    assert "pip install py-spy" in figures.spy_on(jobs.agree_on_settings, 3)
