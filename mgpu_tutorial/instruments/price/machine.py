"""A machine for the replay, "8 x H100", and what a kernel and a call take on it."""

import re
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

from mgpu_tutorial.instruments.price.tape import EXACT, TENSOR_FLOAT, Call, Operation
from mgpu_tutorial.shared.cost_model.links import (
    Link,
    all_gather_seconds,
    all_to_all_seconds,
    require_message,
)
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, TAPED
from mgpu_tutorial.shared.guards import whole

KERNEL = 4e-6  # seconds that the shortest kernel takes; set, not fitted


class Machine(NamedTuple):
    """GPUs in nodes; all rates are reached ones, in operations or bytes per second.

    `inside` joins the GPUs of a node, `between` is each GPU's network card. `flops` are in
    16 bits, `memory` is in bytes. `_replace(flops=…)` tries another number.

    tensor_float, exact   how many times as long a product of 32 bits takes, with TF32 or not
    shared                so many GPUs of a node share one `inside` link
    peak                  operations per second of the data sheet; 0 where nobody asks
    seen                  the lowest and the highest share of it that published programs reach
    """

    name: str
    gpus: int
    per_node: int
    flops: float
    memory_rate: float
    memory: float
    inside: Link
    between: Link
    kernel: float = KERNEL
    tensor_float: float = 2.0
    exact: float = 16.0
    shared: int = 1
    peak: float = 0.0
    seen: tuple[float, float] | str = ""

    def says(self) -> str:
        """The pace of its products: a price is no better than this number."""
        if not self.peak:
            return f"products at {self.flops / 1e12:.0f} TFLOP/s"
        share = f"products at {self.flops / self.peak:.0%} of the peak"
        if isinstance(self.seen, str):
            return f"{share}{', ' * bool(self.seen)}{self.seen}"
        return f"{share}, published programs {100 * self.seen[0]:.0f} to {self.seen[1]:.0%}"

    def part(self) -> Link:
        """A GPU's part of the link inside its node, while all that share it send."""
        sharing = min(self.shared, self.gpus, self.per_node)
        return self.inside._replace(bandwidth=self.inside.bandwidth / sharing)

    def of(self, gpus: int) -> "Machine":
        """The same with more or fewer GPUs; ValueError where they are no whole nodes."""
        _require_nodes(gpus, self.per_node)
        name = re.sub(r"^\d+", str(int(gpus)), self.name)
        return self._replace(gpus=int(gpus), name=name)

    def nodes(self, ranks: tuple[int, ...]) -> int:
        """Over how many nodes these ranks are spread, which stand side by side in order."""
        return _nodes(ranks, self.per_node)

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link between these ranks."""
        return self.between if self.nodes(ranks) > 1 else self.part()


@lru_cache
def _nodes(ranks: tuple[int, ...], per_node: int) -> int:
    return len({rank // per_node for rank in ranks})


def _require_nodes(gpus: int, per_node: int) -> None:
    whole("the number of GPUs", gpus)
    if gpus > per_node and gpus % per_node:
        raise ValueError(
            f"{gpus} GPUs are no whole nodes of {per_node}: give up to {per_node}, or a "
            "multiple of it"
        )


def _require_machine(machine: Machine) -> None:
    """ValueError, with the name of its field, where seconds would be below 0 or none."""
    for name in ("flops", "memory_rate", "memory"):
        if not (isinstance(value := getattr(machine, name), Real) and value > 0):
            raise ValueError(f"{machine.name}: {name} must be above 0, got {value}")
    for name, least in (("kernel", 0), ("tensor_float", 1), ("exact", 1), ("peak", 0)):
        if not (value := getattr(machine, name)) >= least:
            raise ValueError(f"{machine.name}: {name} must be {least} or more, got {value}")
    whole(f"{machine.name}: shared", machine.shared)
    _require_nodes(machine.gpus, machine.per_node)
    require_message(0, 1, machine.inside, machine.between)


def machine_of(text: "str | Machine") -> Machine:
    """What "8 x H100" stands for; a Machine is taken as it is.

    Raises ValueError for a text that names no GPU of `cost_model`, or no whole nodes, and for
    a Machine that cannot be.
    """
    if isinstance(text, Machine):
        _require_machine(text)
        return text
    found = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(\S+)\s*", str(text))
    if not found or found[2] not in CLUSTERS:
        known = ", ".join(CLUSTERS)
        raise ValueError(f'machine must be like "8 x H100", of one of {known}, got {text!r}')
    gpus, cluster, taped = int(found[1]), CLUSTERS[found[2]], TAPED[found[2]]
    _require_nodes(gpus, cluster.gpus_per_node)
    return Machine(
        name=f"{gpus} x {found[2]}",
        gpus=gpus,
        per_node=cluster.gpus_per_node,
        flops=cluster.gpu.peak * taped.share,
        memory_rate=cluster.memory_rate(),
        memory=cluster.gpu.memory,
        inside=cluster.reached()[0],
        between=cluster.reached()[1],
        tensor_float=cluster.gpu.peak / taped.tensor_float,
        exact=cluster.gpu.peak / taped.exact,
        peak=cluster.gpu.peak,
        seen=taped.seen,
    )


def operation_seconds(operation: Operation, machine: Machine) -> float:
    """The longer of its two roads, products or memory; never less than a kernel takes."""
    if operation.seconds:
        return operation.seconds
    products = operation.flops * slowdown(operation, machine) / machine.flops
    return max(products, operation.nbytes / machine.memory_rate, machine.kernel)


def slowdown(operation: Operation, machine: Machine) -> float:
    """How many times as long its products take as those of 16 bits."""
    slower = {TENSOR_FLOAT: machine.tensor_float, EXACT: machine.exact}
    return slower.get(operation.numbers, 1)


def call_seconds(call: Call, rank: int, machine: Machine) -> float:
    """From the moment at which all are ready and the link is free, as `links.py` has it."""
    if call.peer is not None and call.name in ("send", "isend", "recv", "irecv"):
        link = machine.link((rank, call.peer))
        return link.latency + call.nbytes / link.bandwidth
    ranks, nodes, link = len(call.group), machine.nodes(call.group), machine.link(call.group)
    if ranks < 2:
        return 0.0
    size = ranks, -(-ranks // nodes), machine.part(), machine.between
    if call.name.startswith("all_reduce"):
        return 2 * all_gather_seconds(call.nbytes, *size)
    if call.name.startswith("all_to_all"):
        return all_to_all_seconds(call.nbytes, *size)
    if call.name.startswith(("all_gather", "reduce_scatter")):
        return all_gather_seconds(call.nbytes, *size)
    levels = (ranks - 1).bit_length()  # of a tree
    if "barrier" in call.name:
        return 2 * levels * link.latency
    copies = ranks - 1 if call.name.startswith(("gather", "scatter")) else 1
    return levels * link.latency + copies * call.nbytes / link.bandwidth


def bytes_sent(call: Call) -> float:
    """What one rank puts on the link, as rings do."""
    others = max(0, len(call.group) - 1) / max(1, len(call.group))
    if call.name in ("recv", "irecv") or "barrier" in call.name:
        return 0
    if call.name in ("send", "isend", "broadcast", "reduce"):
        return call.nbytes
    if call.name.startswith(("gather", "scatter")):
        return call.nbytes
    return call.nbytes * others * (2 if call.name.startswith("all_reduce") else 1)
