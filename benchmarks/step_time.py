"""Where does a training step spend its time, by number of ranks and by method?

    python benchmarks/step_time.py [--repeats 5]

The network and the batch of the notebook on distributed SGD. Both ways to average run in
turns inside the same ranks; prints medians over the repeats, and how many times longer all
communication takes with one all_reduce a parameter than with one flat buffer.
"""

from functools import partial

import torch
import torch.distributed as dist
from common import median_ms, options, ratio, repeat
from torch import nn
from torch.nn.functional import nll_loss

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import average_gradients, new_model
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.shared.data import digits


def average_flat(model: nn.Module) -> None:
    """The mean over all ranks with one all_reduce for all parameters together."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


METHODS = [average_gradients, average_flat]


def time_steps(rank: int, world_size: int) -> dict[str, float]:
    """The least seconds of ten: of forward and backward, and of each way to average."""
    data = digits()
    model, _ = new_model()
    mine = global_batches(rank, world_size, len(data), 128, seed=1, epoch=0)[0]

    def compute() -> None:
        model.zero_grad()
        nll_loss(model(data.images[mine]), data.labels[mine]).backward()

    averages = {method.__name__: partial(method, model) for method in METHODS}
    seconds = in_turns({"compute": compute} | averages, turns=10)
    return {name: min(taken) for name, taken in seconds.items()}


def main() -> None:
    given = options(__doc__, repeats=5)
    rows = []
    for ranks in (1, 2, 4):
        runs = repeat(given.repeats, ranks, time_steps)
        times = ratio(runs["average_gradients"], runs["average_flat"], digits=1)
        for method in METHODS:
            seconds = median_ms(runs["compute"]), median_ms(runs[method.__name__], digits=2)
            rows.append([ranks, method.__name__, *seconds, times])
    header = ["ranks", "method", "compute ms", "communicate ms", "parameter by flat"]
    print(f"global batch 128, gloo on CPU, {given.repeats} runs of 10 steps")
    print(Table(header, rows))


if __name__ == "__main__":
    main()
