"""Our own pipelines compute what one process does, in the order that their name says."""

import pytest
import torch

from mgpu_tutorial.lab import film
from mgpu_tutorial.model_parallel.micro_batches import Task
from mgpu_tutorial.pipelines import figures, stages
from tests.pipelines.linear_stages import LinearStages, expected_of

OWN = [(stages.run_gpipe,), (stages.run_in_order, stages.order_of_1f1b, stages.isend)]
SIZES = [(1, 2), (3, 2), (4, 6)]  # micro-batches: fewer, more


def on_linear_stages(rank, world_size, micro, run, *given):
    work = LinearStages(world_size)
    torch.set_default_dtype(torch.float64)  # of what is received; in this rank only
    return run(rank, world_size, work, micro, *given)


@pytest.mark.parametrize("world_size, micro", SIZES)
def test_1f1b_has_the_gradients_of_one_process(ranks, world_size, micro):
    loss, gradients = expected_of(world_size, micro)
    results = ranks(world_size, on_linear_stages, micro, *OWN[1], trace=True).results
    torch.testing.assert_close([own for _, own in results], gradients, rtol=0, atol=1e-12)
    assert sum(results[-1][0]) == pytest.approx(loss)


def test_an_output_is_sent_without_blocking_and_waited_for(ranks):
    report = ranks(3, on_linear_stages, 6, *OWN[1], trace=True)
    for rank, sent in enumerate((6, 6, 0)):
        ops = [e.op for e in report.events if e.rank == rank]
        assert ops.count("isend") == ops.count("wait") == sent


@pytest.mark.parametrize("run, most", [(OWN[0], [5, 5, 5, 5]), (OWN[1], [4, 3, 2, 1])])
def test_the_film_shows_what_is_held(run, most):
    texts = [frame.text.splitlines() for frame in film(figures.in_slots(*run)).frames]
    assert len(texts) == 2 * (5 + 4 - 1)
    assert (texts[1][-1], texts[-1][-1]) == (
        "  now: rank 0 → rank 1",
        "  now: rank 1 → rank 0",
    )
    held = [[text[1 + rank].count("holds") for rank in range(4)] for text in texts]
    assert [max(of_rank) for of_rank in zip(*held, strict=True)] == most
    idle = sum(text[1 + rank].count("now") == 0 for text in texts for rank in range(4))
    assert idle == 4 * 2 * (4 - 1)


@pytest.mark.parametrize("faster", ["first", "second"])
def test_of_two_runs_the_one_that_was_disturbed_less_is_shown(monkeypatch, faster):
    runs = {
        name: [Task(2, 5 - (name == faster), 0, 0, "F", 0)] for name in ("first", "second")
    }
    monkeypatch.setattr(figures, "launch", lambda *given, **more: None)
    monkeypatch.setattr(figures, "tasks_of", lambda report, during: runs[during])
    assert figures.timed(stages.run_gpipe) == runs[faster]
