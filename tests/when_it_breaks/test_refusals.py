"""What the jobs and tools of the chapter cannot do, every rank says before it sends."""

import json
import math
from pathlib import Path

import pytest
import torch

from mgpu_tutorial.when_it_breaks import data, figures, jobs

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "11_when_it_breaks.ipynb"


def replay_alone(rank, world_size):
    return jobs.replay(lambda batch: batch, torch.ones(2))


def train(rank, world_size, name):
    return jobs.train_until_it_jumps(rank, world_size, data.Run(name), jobs.replay)


REFUSED = [
    (1, "one rank", replay_alone, ()),
    (5, "5", jobs.average_in_pairs, ()),
    (3, "3 ranks", jobs.train_on_sequences, ()),
    (2, "2", train, ("A",)),
    (3, "'a'", train, ("a",)),
]


@pytest.mark.parametrize("world_size, words, worker, given", REFUSED)
def test_refused(refused, world_size, words, worker, given):
    refused(world_size, ValueError(words), worker, *given)


def replay_of(rank, world_size, batches, bad):
    def gradient_of(batch):
        return batch * 3 + (rank == bad)

    return jobs.replay(gradient_of, batches[rank])


@pytest.mark.parametrize(
    "batches, bad, expected",
    [
        (torch.tensor([[1, 2], [3, 4]]), None, []),  # whole numbers
        (torch.tensor([[1, 2], [3, 4]]), 1, [0, 1]),  # two ranks accuse each other
        (torch.tensor([1.0, 2.0, 3.0]), 0, [0, 2]),  # a gradient of one number
        (torch.ones(3, 2, dtype=torch.bfloat16), 2, [1, 2]),
        (torch.arange(12.0).reshape(2, 2, 3).mT, None, []),  # not contiguous
        (torch.tensor([[math.inf, -math.inf]] * 3), None, []),
        (torch.tensor([[math.nan, 1.0]] * 3), None, []),
        (torch.zeros(3, 0), None, []),
    ],
)
def test_replay_compares_any_numbers(ranks, batches, bad, expected):
    world_size = len(batches)
    results = ranks(world_size, replay_of, batches, bad).results
    assert results == [expected] * world_size


def test_a_replay_gathers_two_objects_and_no_more(ranks):
    report = ranks(2, replay_of, torch.ones(2, 3), None, trace=True)
    ops = [event.op for event in report.events if event.rank == 0]
    assert ops == ["all_gather"] * 4  # of each object its length first


def test_the_page_asks_for_nine_findings_in_eight_jobs_and_four_runs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = ["".join(cell["source"]) for cell in cells]
    findings = [cell for cell in cells if "finding" in cell["metadata"].get("tags", [])]
    faulty = {*figures.FAULTS, jobs.spread_points, jobs.draw_epoch}
    assert (len(findings), len(faulty), len(figures.CAUSES)) == (9, 8, 4)
    assert "nine findings" in text[0] and "Eight jobs follow" in text[2]
    assert "four training runs" in text[2]
    assert all(any(job.__name__ in words for words in text) for job in faulty)
