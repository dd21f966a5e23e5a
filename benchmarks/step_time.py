"""Where does a training step spend its time, by number of ranks and by method?

    python benchmarks/step_time.py [--repeats 5]

The network and the batch of the notebook on distributed SGD. Both ways to average run in
turns inside the same ranks; prints medians over the repeats, and how many times longer all
communication takes with one all_reduce a parameter than with one flat buffer.
"""

from functools import partial

from common import median_ms, options, ratio, repeat
from torch.nn.functional import nll_loss

from mgpu_tutorial import distributed_sgd as sgd
from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.shared.data import digits

METHODS = [sgd.average_gradients, sgd.average_flat]


def time_steps(rank: int, world_size: int) -> dict[str, float]:
    """The least seconds of ten: of forward and backward, and of each way to average."""
    data = digits()
    model, _ = sgd.new_model()
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
