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

ADAM_BYTES = 16  # a parameter in training: weight, gradient and two moments, float32 each
LARGE = 10**6  # numbers in the larger of the two all_reduces that tell the link


@dataclass(frozen=True)
class NetworkCost:
    """What one sample costs on one device, and what each micro-batch costs however small.

    `seconds`: forward and backward of one sample; `overhead`: seconds more per micro-batch.
    `parameters`: their number. `activation_bytes`: what one sample keeps until its backward.
    `cut_bytes`: what one sample sends over a cut, in each direction.
    """

    seconds: float
    overhead: float
    parameters: float = 0
    activation_bytes: float = 0
    cut_bytes: float = 0


class Link(NamedTuple):
    """A message of n bytes takes `latency` + n / `bandwidth` seconds.

    `latency` is in seconds, `bandwidth` in bytes per second.
    """

    latency: float
    bandwidth: float


FREE = Link(latency=0.0, bandwidth=float("inf"))


class Plan(NamedTuple):
    """`replicas` copies of a pipeline of `stages`, each fed with `micro` micro-batches."""

    replicas: int = 1
    stages: int = 1
    micro: int = 1

    def __str__(self) -> str:
        data = f"{self.replicas} replicas" if self.replicas > 1 else ""
        model = f"{self.stages} stages, m = {self.micro}" if self.stages > 1 else ""
        return " of ".join(filter(None, [data, model])) or "one device"


class Times(NamedTuple):
    """Seconds that two ranks measured: of two all_reduces, and of a step by each plan.

    `small_all_reduce` is of one float32, `large_all_reduce` of a million; `one_sample` and
    `one_rank` are steps of rank 0 alone with one sample and with the whole batch.
    """

    small_all_reduce: float
    large_all_reduce: float
    one_sample: float
    one_rank: float
    replicas: float
    stages: float


def step_seconds(net: NetworkCost, link: Link, batch: int, plan: Plan) -> float:
    """m + p - 1 slots of the slowest device, and the all_reduce of a stage's gradients."""
    samples = batch / (plan.replicas * plan.micro)
    slot = (net.overhead + net.seconds * samples) / plan.stages
    if plan.stages > 1:  # activations forward, gradients back
        slot += 2 * (link.latency + net.cut_bytes * samples / link.bandwidth)
    others = plan.replicas - 1
    gradient_bytes = 4 * net.parameters / plan.stages
    latencies = 2 * others * link.latency
    reduce = latencies + 2 * others / plan.replicas * gradient_bytes / link.bandwidth
    return (plan.micro + plan.stages - 1) * slot + reduce


def fit(times: Mapping[int, Sequence[float]], batch: int, stages: int) -> NetworkCost:
    """A network with the overhead and the seconds a sample that the ends of `times` tell.

    `times` are seconds of a step, repeated, by the number of micro-batches: the least of
    the repetitions count, and of the numbers in between nothing is used.
    """
    fewest, most = min(times), max(times)
    first = min(times[fewest]) * stages / (fewest + stages - 1)
    last = min(times[most]) * stages / (most + stages - 1)
    seconds = (first - last) / (batch / fewest - batch / most)
    return NetworkCost(seconds=seconds, overhead=last - seconds * batch / most)


def calibrate(
    times: Times, samples: int, parameters: int, cut_bytes: float
) -> tuple[NetworkCost, Link]:
    """Network and link from the first four of `times`, for a batch of `samples`.

    `parameters` are counted, `cut_bytes` are those of one sample over the cut.
    """
    seconds = max(0.0, times.one_rank - times.one_sample) / (samples - 1)
    overhead = max(0.0, times.one_sample - seconds)
    net = NetworkCost(seconds, overhead, parameters, cut_bytes=cut_bytes)
    longer = max(times.large_all_reduce - times.small_all_reduce, 1e-9)
    return net, Link(latency=times.small_all_reduce / 2, bandwidth=4 * LARGE / longer)


def memory(net: NetworkCost, batch: int, plan: Plan) -> float:
    """Bytes of the fullest device under 1F1B, which keeps min(m, p) micro-batches."""
    samples = batch / (plan.replicas * plan.micro)
    in_flight = min(plan.micro, plan.stages)
    activations = net.activation_bytes * samples * in_flight
    return (ADAM_BYTES * net.parameters + activations) / plan.stages


def best_plan(
    net: NetworkCost, link: Link, batch: int, devices: int, limit: float
) -> tuple[Plan, float] | None:
    """The fastest plan on up to `devices` devices of `limit` bytes, and its seconds.

    None where no plan fits.
    """
    powers = [2**k for k in range(batch.bit_length())]
    found = [
        (step_seconds(net, link, batch, plan), plan)
        for plan in itertools.starmap(Plan, itertools.product(powers, repeat=3))
        if plan.replicas * plan.stages <= devices
        and plan.replicas * plan.micro <= batch
        and memory(net, batch, plan) <= limit
    ]
    return min(found)[::-1] if found else None


def transformer(layers: int, width: int, speed: float, tokens: int = 2048) -> NetworkCost:
    """A transformer by its shape, on devices of `speed` operations per second.

    Parameters, operations and the 34 bytes that a layer keeps for each of its numbers in
    16 bits are counted as in https://arxiv.org/abs/2205.05198; 0.1 ms a layer of overhead.
    """
    parameters = 12 * layers * width**2
    return NetworkCost(
        seconds=6 * parameters * tokens / speed,
        overhead=1e-4 * layers,
        parameters=parameters,
        activation_bytes=34 * tokens * width * layers,
        cut_bytes=2 * tokens * width,
    )


def plan_table(
    networks: Mapping[str, NetworkCost],
    links: Mapping[str, Link],
    batch: int,
    devices: int,
    limit: float,
) -> Table:
    """The fastest plan that fits `limit` bytes a device: a row a network, a column a link."""
    rows = []
    for name, net in networks.items():
        found = [best_plan(net, link, batch, devices, limit) for link in links.values()]
        rows.append(
            [name, *("does not fit" if best is None else str(best[0]) for best in found)]
        )
    return Table(["", *links], rows)
