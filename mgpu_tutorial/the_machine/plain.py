"""The roofline, the replay of a step, and the threshold of data parallelism."""

from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.instruments.price.machine import Machine
from mgpu_tutorial.instruments.price.tape import HALF, Call, Event, Operation
from mgpu_tutorial.instruments.price.tape import Wait as Waited


def attainable(flops: float, nbytes: float, peak: float, bandwidth: float) -> float:
    """The operations per second that an operation can reach, at most: the roofline.

    It does `flops` operations and moves `nbytes` bytes on a device that does `peak`
    operations and moves `bandwidth` bytes per second. Williams et al., 2009,
    https://doi.org/10.1145/1498765.1498785.
    """
    by_memory = flops / nbytes * bandwidth
    return min(peak, by_memory)


class Kernel(NamedTuple):
    """Does `flops` operations, and moves `nbytes` bytes of the GPU's own memory."""

    flops: float
    nbytes: float


class Message(NamedTuple):
    """Begins to send `nbytes` bytes in `steps` steps, and lets the GPU compute on."""

    nbytes: float
    steps: int


class Wait(NamedTuple):
    """Stands still until the message at place `of` of the tape has arrived."""

    of: int


Tape = Sequence[Kernel | Message | Wait]


def replay_step(tape: Tape, machine: Machine) -> float:
    """The seconds until a rank has computed all kernels and sent all messages of a tape.

    Kernels follow each other. Messages do too, on a link of their own. A kernel takes the
    longer of its two roads, a message its latencies and its bytes.
    """
    compute = link = 0.0
    arrived: dict[int, float] = {}
    for place, event in enumerate(tape):
        if isinstance(event, Kernel):
            by_peak = event.flops / machine.flops
            by_memory = event.nbytes / machine.memory_rate
            compute += max(by_peak, by_memory)
        elif isinstance(event, Message):
            begin = max(compute, link)
            latency, bandwidth = machine.inside
            link = begin + event.steps * latency + event.nbytes / bandwidth
            arrived[place] = link
        else:  # a Wait
            compute = max(compute, arrived[event.of])
    return max(compute, link)


def plain_tape(events: Sequence[Event]) -> list[Kernel | Message | Wait]:
    """A tape of the instrument in these three words: 16 bits, all-reduces inside of a node.

    Raises ValueError for any other message, for products of other numbers, and for a second
    stream, which these words don't have.
    """
    tape: list[Kernel | Message | Wait] = []
    places: dict[int, int] = {-1: -1}
    for place, event in enumerate(events):
        if isinstance(event, Operation):
            if event.numbers != HALF:
                raise ValueError(f"a product of {event.numbers}, expected {HALF}")
            tape.append(Kernel(event.flops, event.nbytes))
        elif isinstance(event, Call):
            if not event.name.startswith("all_reduce"):
                raise ValueError(f"the tape has a call of {event.name}, expected all_reduce")
            others = len(event.group) - 1
            places[place] = len(tape)
            sent = 2 * others / len(event.group) * event.nbytes
            tape.append(Message(sent, 2 * others))
        elif isinstance(event, Waited):
            if event.of not in places:
                raise ValueError(
                    f"event {place} waits for a mark of a stream, and a plain tape has one "
                    "stream: give the tape of a worker that makes no other"
                )
            if event.of >= 0:
                tape.append(Wait(places[event.of]))
    return tape


def tokens_to_hide(flops: float, bandwidth: float, ranks: int, nbytes: int = 2) -> float:
    """The tokens per GPU from which backward takes as long as the ring of its gradients.

    A GPU does `flops` operations and sends `bandwidth` bytes per second, both reached ones,
    and a gradient has `nbytes` bytes. The number of parameters drops out.
    """
    backward = 4 / flops  # seconds per parameter and token
    ring = 2 * (ranks - 1) / ranks * nbytes / bandwidth  # per parameter
    return ring / backward
