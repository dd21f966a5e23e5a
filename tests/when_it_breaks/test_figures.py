"""The apparatus: what it compares, and what it tells a reader's tool."""

import torch
import torch.distributed as dist

from mgpu_tutorial.when_it_breaks import figures


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
