"""A small cost model: one device, replicas, stages, or replicas of stages?

It knows a network by five numbers and a link by two, and counts what a step waits for. It
leaves out what overlaps (DDP's buckets under the backward pass, sends under the next
micro-batch), so it is a little hard on both.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mgpu_tutorial.lab import Table

PER_PARAMETER = 16  # bytes with Adam: weight, gradient and two moments, float32 each


@dataclass(frozen=True)
class Net:
    """A network: what one sample costs, and each micro-batch however small it is.

    `seconds` a sample for forward and backward on one device, and `overhead` seconds a
    micro-batch; a sample `kept` as so many bytes until its backward, `sends` over a cut.
    """

    seconds: float
    overhead: float
    parameters: float = 0
    kept: float = 0
    sends: float = 0


class Link(NamedTuple):
    """A message of n bytes takes `latency` + n / `bandwidth` seconds."""

    latency: float
    bandwidth: float


FREE = Link(0.0, float("inf"))


class Plan(NamedTuple):
    """`replicas` copies of a pipeline of `stages`, each fed with `micro` micro-batches."""

    replicas: int = 1
    stages: int = 1
    micro: int = 1

    def __str__(self) -> str:
        data = f"{self.replicas} replicas" if self.replicas > 1 else ""
        model = f"{self.stages} stages, m = {self.micro}" if self.stages > 1 else ""
        return " of ".join(filter(None, [data, model])) or "one device"


def step_seconds(net: Net, link: Link, batch: int, plan: Plan) -> float:
    """m + p - 1 slots of the slowest device, and the all_reduce of a stage's gradients."""
    rows = batch / (plan.replicas * plan.micro)
    slot = (net.overhead + net.seconds * rows) / plan.stages
    if plan.stages > 1:  # activations forward, gradients back
        slot += 2 * (link.latency + net.sends * rows / link.bandwidth)
    others = plan.replicas - 1
    gradients = 4 * net.parameters / plan.stages
    messages = 2 * others * link.latency
    reduce = messages + 2 * others / plan.replicas * gradients / link.bandwidth
    return (plan.micro + plan.stages - 1) * slot + reduce


def fit(times: Mapping[int, Sequence[float]], batch: int, stages: int) -> Net:
    """A net with the overhead and the seconds a sample that the two ends of `times` tell.

    `times` are seconds of a step, repeated, by the number of micro-batches: the least of
    the repetitions count, and of the numbers in between nothing is used.
    """
    ends = min(times), max(times)
    slots = [(micro + stages - 1) / stages for micro in ends]
    first, last = (min(times[micro]) / n for micro, n in zip(ends, slots, strict=True))
    rows, fewer = batch / ends[0], batch / ends[1]
    seconds = (first - last) / (rows - fewer)
    return Net(seconds=seconds, overhead=last - seconds * fewer)


def calibrate(
    times: Mapping[str, float], samples: int, parameters: int, sends: float
) -> tuple[Net, Link]:
    """Net and link from four times of `model_parallel.race` on two ranks."""
    one, all_of_them = times["one sample"], times["one rank"]
    seconds = max(0.0, all_of_them - one) / (samples - 1)
    net = Net(seconds, max(0.0, one - seconds), parameters, sends=sends)
    bandwidth = 4e6 / max(times["4 MB"] - times["4 B"], 1e-9)
    return net, Link(times["4 B"] / 2, bandwidth)


def memory(net: Net, batch: int, plan: Plan) -> float:
    """Bytes of the fullest device under 1F1B, which holds min(m, p) micro-batches."""
    rows = batch / (plan.replicas * plan.micro)
    in_flight = min(plan.micro, plan.stages)
    return (PER_PARAMETER * net.parameters + net.kept * rows * in_flight) / plan.stages


def best_plan(
    net: Net, link: Link, batch: int, devices: int, limit: float
) -> tuple[Plan, float] | None:
    """The fastest plan on up to `devices` devices of `limit` bytes; None where none fits."""
    powers = [2**k for k in range(batch.bit_length())]
    found = [
        (step_seconds(net, link, batch, plan), plan)
        for plan in itertools.starmap(Plan, itertools.product(powers, repeat=3))
        if plan.replicas * plan.stages <= devices
        and plan.replicas * plan.micro <= batch
        and memory(net, batch, plan) <= limit
    ]
    return min(found)[::-1] if found else None


def transformer(layers: int, width: int, speed: float, tokens: int = 2048) -> Net:
    """A transformer by its shape, on devices of `speed` operations a second.

    Parameters, operations and the 34 bytes that a layer keeps for each of its numbers in
    16 bits are counted as in https://arxiv.org/abs/2205.05198; 0.1 ms a layer of overhead.
    """
    parameters = 12 * layers * width**2
    seconds = 6 * parameters * tokens / speed
    kept = 34 * tokens * width * layers
    return Net(seconds, 1e-4 * layers, parameters, kept, 2 * tokens * width)


def plan_table(
    nets: dict[str, Net], links: dict[str, Link], batch: int, devices: int, limit: float
) -> Table:
    """The fastest plan that fits: a row a network, a column a link."""
    rows = []
    for name, net in nets.items():
        found = [best_plan(net, link, batch, devices, limit) for link in links.values()]
        rows.append(
            [name, *("does not fit" if best is None else str(best[0]) for best in found)]
        )
    return Table(["", *links], rows)
