"""The roofline, the replay of a step, and the threshold of data parallelism."""

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

from mgpu_tutorial.instruments.price.machine import Machine
from mgpu_tutorial.instruments.price.tape import HALF, Call, Event, Operation
from mgpu_tutorial.instruments.price.tape import Wait as Waited


def attainable(flops: float, nbytes: float, peak: float, bandwidth: float) -> float:
    """The operations per second that an operation can reach, at most: the roofline.

    It does `flops` operations and moves `nbytes` bytes on a device that does `peak`
    operations and moves `bandwidth` bytes per second. Raises ValueError unless it moves
    something and all others are numbers that can be. Williams et al., 2009,
    https://doi.org/10.1145/1498765.1498785.
    """
    if not (flops >= 0 and nbytes > 0):
        raise ValueError(
            f"an operation does 0 operations or more and moves more than 0 bytes, got "
            f"{flops} and {nbytes}"
        )
    require_rates(peak=peak, bandwidth=bandwidth)
    return min(peak, flops / nbytes * bandwidth)


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
    longer of its two roads, a message its latencies and its bytes. Raises ValueError for a
    wait that is not for an earlier message, for numbers below 0, and for what is no Machine.
    """
    if not isinstance(machine, Machine):
        raise ValueError(f"machine is {machine!r}: give a Machine, as machine_of makes one")
    compute = link = 0.0
    arrived: dict[int, float] = {}
    for place, event in enumerate(tape):
        known = isinstance(event, Kernel | Message | Wait)
        if not (known and all(isinstance(n, Real) and n >= 0 for n in event)):
            raise ValueError(
                f"event {place} is {event!r}: give a Kernel, a Message or a Wait, with "
                "numbers that are 0 or more"
            )
        if isinstance(event, Kernel):
            roads = event.flops / machine.flops, event.nbytes / machine.memory_rate
            compute += max(roads)
        elif isinstance(event, Message):
            begin = max(compute, link)
            latency, bandwidth = machine.inside
            link = begin + event.steps * latency + event.nbytes / bandwidth
            arrived[place] = link
        elif event.of in arrived:
            compute = max(compute, arrived[event.of])
        else:
            raise ValueError(
                f"event {place} waits for event {event.of}, which is no earlier message: "
                "give the place of one"
            )
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
    and a gradient has `nbytes` bytes. The number of parameters drops out. Raises ValueError
    for rates and sizes that cannot be.
    """
    require_rates(flops=flops, bandwidth=bandwidth, nbytes=nbytes)
    if ranks < 1 or ranks % 1:
        raise ValueError(f"ranks must be a whole number, 1 or more, got {ranks}")
    backward = 4 / flops  # seconds per parameter and token
    ring = 2 * (ranks - 1) / ranks * nbytes / bandwidth  # seconds per parameter
    return ring / backward


def require_rates(**rates: float) -> None:
    """ValueError for a rate that is not above 0."""
    for name, rate in rates.items():
        if not rate > 0:
            raise ValueError(f"{name} must be above 0, got {rate}")
