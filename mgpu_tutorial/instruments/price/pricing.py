"""`price`: one call about as short as `launch`, and its result, which draws itself."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any

from mgpu_tutorial.instruments.price import pretended
from mgpu_tutorial.instruments.price.machine import Machine, bytes_sent, machine_of
from mgpu_tutorial.instruments.price.picture import draw
from mgpu_tutorial.instruments.price.products import Unpriced
from mgpu_tutorial.instruments.price.replay import Played, replay
from mgpu_tutorial.instruments.price.tape import ELSEWHERE, Call, Tape
from mgpu_tutorial.lab import RanksHung, launch
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.record.trace import POINT_TO_POINT
from mgpu_tutorial.lab.table import Table, formatted
from mgpu_tutorial.shared.guards import whole

MOST = 64  # ranks of a chain of messages that are taped, one after the other
NO_NUMBER = ("DataDependentOutputException", "DynamicOutputShapeException")
NO_MEMORY = ("data is not allocated", "data pointer", "numpy")
# Files of PyTorch through which every call goes, so that their names say nothing
MACHINERY = ("_subclasses", "_ops.py", "utils/_", "_prims", "_refs", "_decomp", "_library")
MACHINERY += ("_meta_registrations", "overrides.py", "_tensor.py", "_compile.py", "_dynamo")
NO_GPU = (ELSEWHERE, "CUDA", "NVIDIA")


def price(
    worker: Callable,
    ranks: int,
    *args: Any,
    machine: str | Machine | None = None,
    timeout: float = 120.0,
    **kwargs: Any,
) -> "Priced":
    """What `worker(rank, ranks, *args, **kwargs)` would take on so many GPUs.

    What it computes outside of PyTorch, as in NumPy, costs nothing here.

    The worker runs once, as rank 0 of a group that only pretends, on tensors that have shapes
    and no numbers; and once more for every rank with which that one exchanges messages. The
    last span whose name begins with "step" is priced, or all of the worker.

    machine  such as "8 x H100", which is also what None stands for, with a GPU for each
             rank; the names are those of `cost_model`.
    timeout  seconds until the worker must have returned; a model of full size takes minutes.

    A worker with a whole number `tokens`, those of a rank and step, has a rate of them too.

    Raises ValueError for a machine that is unknown or has another number of GPUs, and for a
    worker that asks for numbers; RuntimeError for one that fails, or does not return.
    """
    if not callable(worker):
        raise TypeError(f"worker must be a function worker(rank, ranks, …), got {worker!r}")
    whole("ranks", ranks)
    ranks = int(ranks)  # 2.0 is 2
    chosen = machine_of(machine or f"{ranks} x H100")
    if chosen.gpus != ranks:
        raise ValueError(
            f"{ranks} ranks need a machine of {ranks} GPUs, and {chosen.name!r} has "
            f"{chosen.gpus}: give one a GPU for each rank"
        )
    (tapes,) = tape_all(worker, [(ranks, args, kwargs)], timeout)
    tokens = tokens_of(worker, args, kwargs)
    return Priced(worker, ranks, args, kwargs, tapes, chosen, timeout, tokens)


def given_to(worker: Callable, args: tuple, kwargs: Mapping) -> inspect.BoundArguments:
    """All arguments of the worker, its defaults among them."""
    given = inspect.signature(worker).bind(0, 0, *args, **kwargs)
    given.apply_defaults()
    return given


def tokens_of(worker: Callable, args: tuple, kwargs: Mapping) -> int | None:
    """How many tokens a rank has, where the worker's argument `tokens` is a whole number."""
    tokens = given_to(worker, args, kwargs).arguments.get("tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def fit(priced: "Priced", seconds: float) -> Machine:
    """The machine of a price, with the share of the peak at which its step takes `seconds`.

    Measure one step of your own program, and give the machine to its other prices. Raises
    ValueError for seconds in which what is no product would not be over, and for a share
    above the peak.
    """
    if not (isinstance(seconds, Real) and 0 < seconds < math.inf):
        raise ValueError(f"seconds must be those of a measured step, got {seconds!r}")
    machine = priced.machine
    least = priced.on(machine._replace(flops=1e30)).seconds
    if seconds <= least:
        raise ValueError(
            f"{1e3 * least:.3g} ms pass beside the products, so no share of the peak gives "
            f"{1e3 * seconds:.3g} ms: is it the same step, on links and memory like these?"
        )
    low, high = machine.flops / 1e3, machine.flops * 1e3
    for _ in range(40):
        middle = math.sqrt(low * high)
        is_slow = priced.on(machine._replace(flops=middle)).seconds > seconds
        low, high = (middle, high) if is_slow else (low, middle)
    if machine.peak and high > machine.peak:
        share = f"{high / machine.peak:.0%} of the peak of {machine.name}"
        raise ValueError(f"{1e3 * seconds:.3g} ms need {share}: is it the same step?")
    return machine._replace(flops=high, seen=f"fitted to {1e3 * seconds:.3g} ms")


def tape_all(
    worker: Callable, jobs: list[tuple[int, tuple, Mapping]], timeout: float
) -> list[dict[int, Tape]]:
    """The step of each job's taped ranks; a job has its number of ranks and arguments.

    Two processes share the jobs: a laptop has two cores at least.
    """
    call = {"backend": "none", "device": "cpu", "timeout": timeout}
    processes = min(len(jobs), 2)
    try:
        parts = launch(_tape_here, processes, worker, jobs, **call).results
    except RanksHung as error:
        raise RuntimeError(
            f"the worker did not return within {timeout:g} s, so there is no price: give "
            f"price(…, timeout={5 * timeout:g}) for a large model ({error})"
        ) from None
    found: list[dict[int, Tape]] = [{} for _ in jobs]
    for first, part in enumerate(parts):
        if isinstance(part, str):
            raise (ValueError if part.startswith("what") else RuntimeError)(part)
        found[first::processes] = part
    return found


def _tape_here(rank: int, world_size: int, worker: Callable, jobs: list) -> list | str:
    """In its own process: rank 0 and those it messages, for each of its jobs; or why not."""
    pretended.pretend()
    jobs = jobs[rank::world_size]
    found: list[dict[int, Tape]] = [{} for _ in jobs]
    for tapes, job in zip(found, jobs, strict=True):
        to_do = [0]
        while to_do:
            now = to_do.pop(0)
            try:
                tapes[now] = pretended.tape_worker(now, worker, *job).step()
            except Exception as error:
                return _reason(error, now)
            calls = [event for event in tapes[now].events if isinstance(event, Call)]
            peers = {call.peer for call in calls if call.name in POINT_TO_POINT}
            to_do += sorted(peers - {None} - tapes.keys() - set(to_do))
            if len(tapes) + len(to_do) > MOST:
                return (
                    f"what more than {MOST} ranks send each other takes too long to tape: "
                    f"price {MOST} ranks or fewer"
                )
    return found


def _reason(error: Exception, rank: int) -> str:
    """One sentence: what was asked of a pretended rank, where, and what to do."""
    frames, trace, asked = [], error.__traceback__, ""
    while trace:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(source_lines.TORCH):
            inside = code.co_filename.removeprefix(source_lines.TORCH)
            asked = asked if inside.startswith(MACHINERY) else code.co_qualname
        if not code.co_filename.startswith(__file__.rpartition("pricing")[0]):
            line = source_lines.SourceLine(code.co_filename, trace.tb_lineno, code.co_name)
            frames.append(line)
        trace = trace.tb_next
    place = source_lines.innermost(frames)
    within = f", in PyTorch's {asked}" if asked else ""
    at = f" (`{place.text}`, {place}{within})" if place else ""
    said = next(iter(str(error).splitlines()), "")
    if isinstance(error, Unpriced):
        return said + at
    if type(error).__name__ in NO_NUMBER or any(words in said for words in NO_MEMORY):
        return (
            f"what this line asks for depends on numbers{at}, and a priced tensor has a "
            "shape and none: hand the numbers to the worker as an argument, such as equal "
            "counts for experts, or leave the line out"
        )
    if any(words in said for words in NO_GPU):
        return (
            f"what this line asks for is a GPU{at}, and a priced rank computes on the CPU, "
            "whatever its machine: leave the device out"
        )
    return f"the worker failed as pretended rank {rank}: {type(error).__name__}: {said}{at}"


@dataclass
class Priced:
    """A step of taped ranks on a machine; shows itself as a timeline, memory and a table.

    Seconds and bytes of a rank are in `played` and `memory`; `on` is another machine.
    """

    worker: Callable
    ranks: int
    args: tuple
    kwargs: Mapping[str, Any]
    tapes: Mapping[int, Tape] = field(repr=False)
    machine: Machine
    timeout: float = 120.0
    tokens: float | None = None  # of a rank

    def on(self, machine: str | Machine) -> "Priced":
        """The same on another machine; the worker runs again only for more or fewer GPUs."""
        chosen = machine_of(machine)
        if chosen.gpus == self.ranks:
            return replace(self, machine=chosen)
        more = {"machine": chosen, "timeout": self.timeout} | self.kwargs
        return price(self.worker, chosen.gpus, *self.args, **more)

    @cached_property
    def played(self) -> dict[int, Played]:
        """The taped ranks on the machine, by rank."""
        events = {rank: taped.events for rank, taped in self.tapes.items()}
        return replay(events, self.machine)

    @property
    def seconds(self) -> float:
        """Of the step, until the last rank is done."""
        return max(player.seconds for player in self.played.values())

    @property
    def exposed(self) -> float:
        """Seconds in which that last rank computes nothing, for messages or other ranks."""
        return max(self.played.values(), key=lambda player: player.seconds).exposed

    def memory(self, rank: int = 0) -> list[tuple[float, Counter]]:
        """The bytes of each kind from a moment on, in seconds of the step."""
        player, curve = self.played[rank], [(0.0, Counter())]
        for position, live in self._held(rank):
            is_over = position >= len(player.begins)
            moment = player.seconds if is_over else player.begins[position]
            moment = max(moment, curve[-1][0])  # an early kernel of another stream
            if curve[-1][0] < moment or live.total() > curve[-1][1].total():
                curve.append((moment, live))  # of a moment the most
        return [*curve, (player.seconds, live)] if self.tapes[rank].changes else curve

    def fullest(self, rank: int = 0) -> Counter:
        """The bytes of each kind at the moment at which the rank holds the most."""
        return max(
            (kinds for _, kinds in self._held(rank)), key=Counter.total, default=Counter()
        )

    def _held(self, rank: int) -> Iterator[tuple[int, Counter]]:
        """The bytes of each kind after each change, with the change's position."""
        live: Counter = Counter()
        for change in sorted(self.tapes[rank].changes, key=lambda change: change.position):
            live[change.kind] += change.nbytes
            yield change.position, Counter(live)

    def sent(self, rank: int = 0) -> float:
        """The bytes that the rank puts on its links."""
        events = self.tapes[rank].events
        return sum(bytes_sent(event) for event in events if isinstance(event, Call))

    def row(self, rank: int) -> list[float]:
        """Milliseconds, those of exposed messages, GB at the fullest, GB sent."""
        player, full = self.played[rank], self.fullest(rank).total()
        return [1e3 * player.seconds, 1e3 * player.exposed, full / 1e9, self.sent(rank) / 1e9]

    def table(self) -> Table:
        """A row for each rank that was taped."""
        columns = {
            "": "",
            "ms": ".0f",
            "exposed (ms)": ".0f",
            "GB at most": ".1f",
            "GB sent": ".2f",
        }
        rows = [[f"rank {rank}", *self.row(rank)] for rank in self.tapes]
        if self.tokens:
            columns["tokens/s"] = ",.0f"
            rows = [[*row, self.tokens / self.seconds] for row in rows]
        return formatted(columns, rows)

    def says(self) -> str:
        """Where this is, and whether it fits."""
        full = max(self.fullest(rank).total() for rank in self.tapes)
        fits = (
            ""
            if full <= self.machine.memory
            else (f"; {full / 1e9:.0f} GB do not fit into {self.machine.memory / 1e9:.0f}")
        )
        return f"priced on {self.machine.name}, not measured: {self.machine.says()}{fits}"

    def __repr__(self) -> str:
        return f"{self.says()}\n{self.table()!r}"

    def drawing(self, first: float = 0) -> Drawing:
        """The timeline of the first taped rank, and its memory under it.

        first: the seconds of another setting, which the axis has to cover too
        """
        rank = next(iter(self.tapes))
        about = self.played[rank], self.memory(rank), self.machine, repr(self)
        return draw(*about, first=first)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        drawing = self.drawing()
        page = f"{drawing.html()}<p>{self.says()}</p>{self.table()._repr_html_()}"
        return {"text/plain": repr(self), "text/html": page, "image/svg+xml": drawing.svg()}
