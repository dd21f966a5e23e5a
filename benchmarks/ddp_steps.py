"""07's wrappers and torch's DDP by model size, from latency-bound to bandwidth-bound.

    python benchmarks/ddp_steps.py [--ranks 2] [--steps 15] [--repeats 5]

All take their steps in turns inside the same ranks. Prints the median step of each, and how
many times as long as torch's DDP it takes. Then the same over a network that is set to 1 ms
and 100 MB/s a message, behind a backward of 3 ms a layer; these are waited for.
"""

from functools import partial

from common import all_turns, median_ms, options, ratio, show

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.experiments import Setting
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.shared.cost_model.links import Link

SIZES = {  # a Tower, its batch, and the MiB of a bucket that holds a few of its layers
    "0.1 MiB in 50 parameters": (Setting(32, 24), 0.02),
    "1.5 MiB in 50 parameters": (Setting(128, 24, batch=16), 0.3),
    "6 MiB in 14 parameters": (Setting(512, 6, batch=64), 1.0),
    "24 MiB in 14 parameters": (Setting(1024, 6, batch=64), 4.0),
    "64 MiB in 10 parameters": (Setting(2048, 4, batch=32), 16.0),
    "2 MiB over a slow network": (Setting(256, 8, pause=3e-3, link=Link(1e-3, 100e6)), 0.5),
}


def time_steps(
    rank: int, world_size: int, setting: Setting, bucket_cap_mb: float, steps: int
) -> dict[str, list[float]]:
    """The seconds of each step with each wrapper, in turns, after two that do not count."""
    inputs = setting.inputs()

    def step(model) -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()
        experiments.finish_gradient_synchronization(model)

    actions = {}
    for wrapper, named in experiments.WRAPPERS.items():
        model = wrapper(setting.tower(), **dict.fromkeys(named, bucket_cap_mb))
        if setting.link is not None:
            model = experiments.calling_from_python(model)
        actions[wrapper.__name__] = partial(step, model)
    with setting.network(world_size):
        return in_turns(actions, steps, warm_up=2)


if __name__ == "__main__":
    given = options(__doc__, ranks=2, steps=15, repeats=5)
    rows = []
    for size, (setting, cap) in SIZES.items():
        turns = all_turns(given, time_steps, setting, cap, given.steps)
        for name, seconds in turns.items():
            times = ratio(seconds, turns["DistributedDataParallel"])
            rows.append([size, name, median_ms(seconds), times])
    show(given, ["gradients", "wrapper", "ms a step", "by torch's DDP"], rows)
