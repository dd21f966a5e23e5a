"""What the chapter's functions cannot do they say, before anything is sent."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.survival import elastic


def indices(rank, world_size, *given):
    return elastic.samples_of(*given)


REFUSED = [
    (1, "no step 0 of rank 2 of 2", indices, (0, 2, 2, 12, 50)),
    (1, "no step 0 of rank -1 of 2", indices, (0, -1, 2, 12, 50)),
    (1, "no step -1 of rank 0 of 2", indices, (-1, 0, 2, 12, 50)),
    (1, "51", indices, (0, 0, 2, 51, 50)),
    (1, "a batch of 0", indices, (0, 0, 2, 0, 50)),
    (2, "torchrun", elastic.train_with_accident, ("/",)),
]


@pytest.mark.parametrize("world_size, words, worker, given", REFUSED)
def test_refused(refused, world_size, words, worker, given):
    refused(world_size, ValueError(words), worker, *given)


@pytest.mark.parametrize(
    "world_size, steps, words",
    [(2, 3, "more than 3"), (1, 9, "2 ranks, and 1"), (3, 9, "2 ranks, and 3")],
)
def test_what_is_not_the_same_run_is_refused(
    ranks, refused, tmp_path, world_size, steps, words
):
    folder = str(tmp_path)
    ranks(2, elastic.train, folder, elastic.resume_or_start, 6)
    call = elastic.train, folder, elastic.resume_or_start, steps
    refused(world_size, ValueError(words), *call, sent=True)  # rank 0 sends the file


def resume_without_a_step(rank, world_size, path, also):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic.checkpoint.save(path, model, optimizer, **also)
    elastic.resume_or_start(path, model, optimizer, None, 8)


def test_a_file_without_its_step_is_not_started_anew(refused, tmp_path):
    path = str(tmp_path / "run.pt")
    refused(2, KeyError("step"), resume_without_a_step, path, {"epoch": 5}, sent=True)


def test_one_rank_has_no_accident(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ValueError, match="on 2 ranks or more"):
        elastic.train_with_accident(0, 1, str(tmp_path))


@given(
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(),
)
def test_ranks_share_the_batch_of_one_process(step, world_size, batch, more, seed):
    torch.manual_seed(seed % 2**31)
    samples, per_epoch = batch + more, (batch + more) // batch
    generator = torch.Generator().manual_seed(step // per_epoch)
    begin = step % per_epoch * batch
    whole = torch.randperm(samples, generator=generator).tolist()[begin : begin + batch]
    every = range(world_size)
    shares = [elastic.samples_of(step, r, world_size, batch, samples) for r in every]
    assert torch.cat(shares).tolist() == whole  # ranks to spare have none


def save_each(rank, world_size, folder):
    """Weights of a kind that a checkpoint must hold, saved by a function of one's own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2))
    model[0].bfloat16()
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def write(path, state):
        calls.append(sorted(state))
        elastic.save_whole(path, state)

    path = f"{folder}/own.pt"
    elastic.checkpoint.save(path, model, optimizer, write=write, step=3)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for value in model.state_dict().values():
        value.zero_()
    found = elastic.checkpoint.load(path, model, optimizer)
    same = all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    return found, same, calls


def test_a_checkpoint_is_written_by_the_function_that_is_given(ranks, tmp_path):
    results = ranks(2, save_each, str(tmp_path)).results
    calls = [["model", "optimizer", "step"]]
    assert results == [({"step": 3}, True, calls), ({"step": 3}, True, [])]
    assert os.listdir(tmp_path) == ["own.pt"]


def save_and_change(rank, world_size, folder):
    net = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.ones_(net.weight)
    state = {"plain": torch.ones(2**16), "net": net.state_dict()}
    future = dcp.async_save(state, checkpoint_id=folder)
    with torch.no_grad():
        net.weight.add_(1)
    state["plain"].add_(1)
    future.result()
    again = {"plain": torch.zeros(2**16), "net": {"weight": torch.zeros(64, 64)}}
    dcp.load(again, checkpoint_id=folder)
    return again["plain"].max().item(), again["net"]["weight"].max().item()


@pytest.mark.slow
def test_a_save_in_the_background_has_the_values_of_its_call(ranks, tmp_path):
    """Of plain tensors and of a model, as the page shows it of a tensor dealt to ranks."""
    assert ranks(2, save_and_change, str(tmp_path), timeout=60).results == [(1.0, 1.0)] * 2
