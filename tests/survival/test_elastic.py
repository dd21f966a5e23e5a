"""The run that is killed elsewhere is, where it lives, the training of one process."""

import torch

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.survival import elastic, figures


def test_the_run_of_two_ranks_is_that_of_one_process_written_out(ranks, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = set()
    for step in range(12):
        pairs = [elastic.batch_of(step, rank) for rank in (0, 1)]
        inputs, targets = (torch.cat(part) for part in zip(*pairs, strict=True))
        seen.update(map(tuple, inputs.tolist()))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    assert len(seen) == 12 * 2 * 16  # no sample comes twice
    given = str(tmp_path), elastic.resume_or_start
    assert ranks(2, elastic.train, *given).results == [0, 0]
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert saved["step"] == 12
    assert largest_difference(saved["model"], dict(model.state_dict())) < 1e-4


def test_one_tensor_of_two_files_that_differs_is_found(tmp_path):
    """Two weights and their two momenta; then one number of each is another."""
    for changed in [None, 0, 1, 2, 3]:
        numbers = [float(i == changed) for i in range(4)]
        tensors = [torch.full((2,), number) for number in numbers]
        momenta = {i: {"momentum_buffer": tensors[2 + i]} for i in (0, 1)}
        model = {"weight": tensors[0], "bias": tensors[1]}
        state = {"model": model, "optimizer": {"state": momenta}}
        folder = tmp_path / str(changed)
        folder.mkdir()
        torch.save(state, folder / "run.pt")
        same = figures.same_bits([str(tmp_path / "None"), str(folder)])
        assert same == [i != changed for i in range(4)]
