"""What is counted, timed and drawn, and what the exercises take."""

import re

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.ddp_reducer import figures
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model.links import Link
from tests.test_exercises import try_answers


def test_the_mean_loss_is_that_of_the_ranks():
    assert figures.mean_losses(Report(3, [[1.0, 4.0], [2.0, 8.0], [6.0, 9.0]])) == [3.0, 7.0]


def test_over_a_slow_link_the_time_follows_the_bytes(ranks):
    link = Link(latency=1e-3, bandwidth=50e6)
    names = ["float32", "bfloat16", "PowerSGD"]
    report = ranks(2, figures.time_each_hook, names, link, steps=1, trace=True)
    nbytes = sum(p.nbytes for p in Tower(512, 6).parameters())
    for times in report.results:
        assert times["float32"] >= 2 + 1e3 * nbytes / 50e6
        assert times["bfloat16"] >= 2 + 1e3 * nbytes / 2 / 50e6
        assert 3 * 2 <= times["PowerSGD"] < times["float32"]
    sent = [e for e in report.events if e.op == "all_reduce" and e.rank == 0]
    # three steps that do not count and one that does; PowerSGD's third and fourth send thrice
    assert len(sent) == 4 + 4 + (2 + 2 * 3)


def test_a_bucket_map_has_a_box_for_each_parameter_and_each_bucket():
    nbytes = {"a.weight": 4096, "a.bias": 16, "b": 16}
    rows = {"first": [["a.weight", "a.bias", "b"]], "then": [["b", "a.bias"], ["a.weight"]]}
    drawing = figures.bucket_map(rows, nbytes)
    assert repr(drawing).splitlines() == [
        "first, bucket 0 (4.03 KiB): a.weight, a.bias, b",
        "then, bucket 0 (32 B): b, a.bias",
        "then, bucket 1 (4 KiB): a.weight",
    ]
    boxes = re.findall(r"<rect [^>]*>", drawing.svg())
    assert len(boxes) == 1 + 3 + 6
    assert sum("#5b5b5b" in box for box in boxes) == 2  # the large one, once a row


VIEW = "'gradient_as_bucket_view': True"


@pytest.mark.slow
def test_the_first_exercise_takes_two_options(capsys):
    right = [
        f"options = {{'bucket_cap_mb': 2, {VIEW}}}",
        f"options = dict(**{{{VIEW}}}, bucket_cap_mb=2)",
    ]
    wrong = {
        "options = ...": "nothing is filled in",
        "options = {}": "'buckets': '1.0 + 5.0'",
        "options = {'bucket_cap_mb': 2}": "6324264",
        f"options = {{'bucket_cap_mb': 1, {VIEW}}}": "1.0 + 1.0",
        f"options = {{{VIEW}}}": "1.0 + 5.0",
    }
    try_answers(capsys, "08_ddp_reducer", "options", right, wrong)


def counting(step, result="state['bytes']"):
    return f"""
def count_bytes(rank, world_size):
    def hook(state, bucket):
        {step}
        return default_hooks.allreduce_hook(None, bucket)

    state = {{"bytes": 0}}
    model = DistributedDataParallel(experiments.Tower())
    model.register_comm_hook(state, hook)
    model(torch.ones(2, 64)).sum().backward()
    return {result}
"""


@pytest.mark.slow
def test_the_second_exercise_takes_a_hook_that_counts(capsys):
    right = [
        counting("state['bytes'] += bucket.buffer().nbytes"),
        counting("state['bytes'] += 4 * bucket.buffer().numel()"),
    ]
    without = "def count_bytes(rank, world_size):\n    return "
    by_hand = "sum(p.nbytes for p in experiments.Tower().parameters())"
    wrong = {
        counting("state['bytes'] += bucket.buffer().numel()"): "rank 0 of 2: the answer",
        counting("pass"): "rank 0 of 2: the answer is 0",
        f"{without}...": "nothing is filled in",
        f"{without}{by_hand}": "without a message",
    }
    hooks = {"default_hooks": default_hooks, "torch": torch}
    try_answers(capsys, "08_ddp_reducer", "count_bytes", right, wrong, **hooks)
