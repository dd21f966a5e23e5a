"""Batches that run out, and the trace of a step."""

import json
from collections import UserDict
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_in_practice import figures, practice


def learn_while_joined(rank, world_size):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(5 - 2 * rank):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
    return model.module.weight.grad.item()


def test_join_can_divide_by_the_ranks_that_are_left(ranks):
    assert ranks(2, learn_while_joined).results == [1.0, 1.0]


def test_the_rank_that_is_late_has_the_short_call(ranks, tmp_path):
    ranks(2, practice.profile_step, str(tmp_path), practice.accumulate, late=0.3)
    calls = [min(practice.read_trace(tmp_path, r, "gloo:all_reduce")) for r in (0, 1)]
    on_time, late = (end - begin for begin, end in calls)
    assert late < on_time < 10_000  # milliseconds


def test_backward_is_drawn_from_its_first_operation_to_its_last(tmp_path, monkeypatch):
    spans = {"autograd::engine": [(3, 4), (2, 9), (5, 6)], "gloo:all_reduce": [(3, 5)]}
    events = [(name, *span) for name, each in spans.items() for span in each]
    text = [{"ph": "X", "name": n, "ts": 1e6 * b, "dur": 1e6 * (e - b)} for n, b, e in events]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": text}))
    monkeypatch.setattr(figures, "timeline", lambda report: report.events)
    drawn = [(e.op, e.begin, e.end) for e in figures.draw_trace(tmp_path, ranks=1)]
    assert drawn == [("span", 2, 9), ("all_reduce", 3, 5)]


def test_each_part_of_a_step_has_its_own_backward(tmp_path, monkeypatch):
    forwards = [("DistributedDataParallel.forward", begin, begin + 1) for begin in (0, 10)]
    backwards = [("autograd::engine", *span) for span in [(2, 4), (3, 6), (12, 13), (13, 15)]]
    text = [
        {"ph": "X", "name": name, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        for name, begin, end in [*forwards, *backwards]
    ]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": text}))
    monkeypatch.setattr(figures, "timeline", lambda report: report.events)
    drawn = figures.draw_trace(tmp_path, ranks=1)
    spans = {(e.note, e.begin, e.end) for e in drawn}
    assert spans == {
        ("forward", 0, 1),
        ("forward", 10, 11),
        ("backward", 2, 6),
        ("backward", 12, 15),
    }


INTERVALS = st.lists(st.tuples(st.integers(-10, 20), st.integers(0, 9)), max_size=8)


@given(INTERVALS)
def test_the_union_counts_each_moment_once(starts_and_lengths):
    intervals = [(begin, begin + length) for begin, length in starts_and_lengths]
    covered = {moment for begin, end in intervals for moment in range(begin, end)}
    assert practice.union_length(intervals) == len(covered)


class Alone(nn.Linear):
    """A model of one process, which has nothing to send."""

    no_sync = nullcontext


def test_parts_can_come_from_a_generator():
    model, x = Alone(3, 2), torch.randn(5, 3)
    practice.accumulate(model, (part for part in x.split(2)), practice.mean_square)
    (expected,) = torch.autograd.grad(practice.mean_square(model, x), model.weight)
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.parametrize(
    "part",
    [
        torch.ones(3, 2),
        (torch.ones(3, 2), torch.ones(3)),
        {"position_ids": torch.ones(1, 2), "input_ids": torch.ones(3, 2)},
        {"use_cache": False, "scale": torch.tensor(2.0), "input_ids": torch.ones(3, 2)},
        UserDict(input_ids=torch.ones(3, 2)),  # as a tokenizer gives it
    ],
    ids=["tensor", "pair", "positions for all rows", "settings", "of a tokenizer"],
)
def test_a_part_has_as_many_rows_as_its_longest_tensor(part):
    assert practice.rows_in(part) == 3
