"""Four trainings whose loss jumps: each shows its own cause and no other."""

import pytest
import torch

from mgpu_tutorial.when_it_breaks import data, jobs

TRAIN = jobs.train_until_it_jumps
LONG = {"A": [2], "B": [0, 1, 2, 3], "C": [1], "D": [1]}


@pytest.mark.slow
@pytest.mark.parametrize("cause", "ABCD")
def test_each_cause_leaves_its_own_marks(ranks, cause):
    results = ranks(4, TRAIN, data.Run(cause), jobs.replay).results
    usual = ranks(4, TRAIN, data.Run("none"), jobs.replay).results
    mean = [sum(rank[step][0] for rank in results) / 4 for step in range(7)]
    assert max(mean[5:]) > 3 * max(mean[:5]) and torch.tensor(mean).isfinite().all()
    norms = [rank[5][1] for rank in results]
    expected = [rank[5][1] for rank in usual]
    assert [r for r in range(4) if norms[r] > 3 * expected[r]] == LONG[cause]
    loudest = results[norms.index(max(norms))][5]
    assert bool(loudest[2] > 0.9 * loudest[1]) is (cause in "BD")
    assert results[0][5][3] == ([1, 2] if cause == "A" else [])
    assert all(step[3] == [] for rank in results for step in rank[:5])


def test_a_usual_training_is_that_of_one_process(ranks):
    weight = torch.zeros(3, dtype=torch.float64)
    norms = []
    for step in range(7):
        batches = [data.Run("none").batch(rank, step) for rank in range(4)]
        gradients = []
        for batch in batches:
            features = batch[:, :3] - batch[0, :3]
            errors = features @ weight - batch[:, 3]
            gradients.append(2 / 8 * features.T @ errors)
        norms.append([gradient.norm().item() for gradient in gradients])
        weight -= 0.2 * sum(gradients) / 4
    results = ranks(4, TRAIN, data.Run("none"), jobs.replay).results
    for rank, seen in enumerate(results):
        assert [step[1] for step in seen] == pytest.approx([n[rank] for n in norms], rel=1e-4)
