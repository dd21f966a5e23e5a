"""A replay beside a clock: the steps of DDP's chapter on an imitated link, priced and run.

    python benchmarks/price_clock.py

Backward and what is left of the messages after it, in milliseconds, on two ranks: six layers
that sleep 20 ms each. The clock's is the shortest step of several launches. Besides its
sleeps the run has the work of backward on this machine, which the price leaves out.
PyTorch's DDP makes its calls from C++ and cannot be taped.
"""

import time

import torch
from common import options

from mgpu_tutorial.ddp_buckets.experiments import Tower, finish_gradient_synchronization
from mgpu_tutorial.ddp_buckets.figures import run_steps
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.lab import Table, span
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.shared.cost_model.links import Link

LINK = Link(latency=2.5e-3, bandwidth=20e6)
WRAPPERS = {
    "naive": (NaiveDDP, {}),
    "cap 0": (BucketedDDP, {"bucket_cap_mb": 0}),
    "cap 25": (BucketedDDP, {"bucket_cap_mb": 25}),
    "cap 0.25": (BucketedDDP, {"bucket_cap_mb": 0.25}),
}


def backward(rank, world_size, wrapper, **options):
    """The step of `figures.record_steps` from its backward on."""
    module = Tower(256, 6)
    for layer in module.body:
        layer.register_full_backward_pre_hook(lambda layer, gradient: time.sleep(0.02))
    model = wrapper(module, **options)
    loss = model(torch.randn(8, 256)).square().mean()
    with span("step"):
        loss.backward()
        finish_gradient_synchronization(model)


def on_the_clock(wrapper, **options) -> float:
    """Milliseconds of the same in a run, in its shortest step."""
    report = run_steps(wrapper, LINK, **options)
    spans = {e.note: e for e in events_of(report, "shortest") if e.rank == 0}
    return 1e3 * (spans["finish"].end - spans["backward"].begin)


if __name__ == "__main__":
    repeats = options(__doc__, repeats=5).repeats
    machine, rows = machine_of("2 x H100")._replace(inside=LINK, kernel=0), []
    for name, (wrapper, given) in WRAPPERS.items():
        priced = (
            1e3 * price(backward, 2, wrapper, machine=machine, timeout=900, **given).seconds
        )
        clock = min(on_the_clock(wrapper, **given) for _ in range(repeats))
        rows.append([name, f"{priced:.0f}", f"{clock:.0f}", f"{clock / priced:.2f}"])
    print(Table(["DDP on its link", "priced ms", "clock ms", "clock / priced"], rows))
