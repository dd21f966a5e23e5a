"""`explore`: sliders over a priced step, on a screen, on a web page and as stills on paper.

Only the replay runs while a slider moves. For tokens and ranks the worker is taped once more
with twice as many of each: what a kernel computes and moves, and what is held, is a constant
plus a part that grows with the tokens, and one that shrinks as 1 / ranks, so two tapes tell
all others. A web page has the tape in its `data-tape`, and `explore.js` replays it there.
"""

import json
from dataclasses import replace
from typing import Any, NamedTuple

from mgpu_tutorial.instruments.price.machine import Machine, slowdown
from mgpu_tutorial.instruments.price.pricing import Priced, given_to, tape_all
from mgpu_tutorial.instruments.price.tape import Call, Event, Mark, Operation, Tape, Wait
from mgpu_tutorial.lab.draw import sliders
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.shared.cost_model.links import require_message
from mgpu_tutorial.shared.guards import whole

FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of a link's bandwidth
LATENCIES = (0.25, 1, 4, 16, 64)
TIMES = (1, 2, 4, 8, 16)  # of the tokens
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Slider(NamedTuple):
    """What moves, in which unit, and where it is as priced."""

    name: str
    says: str
    values: list[float]
    at: int

    def moving(self) -> sliders.Slider:
        labels = [f"{value:,g}" if value >= 1000 else f"{value:.3g}" for value in self.values]
        return sliders.Slider(self.says, labels, self.values, self.at)


def explore(priced: Priced) -> "Explored":
    """Sliders for a step of `price`: bandwidths, latency, tokens a GPU, ranks.

    Tokens need a worker with a whole number `tokens`. Ranks need collectives of all ranks,
    and both need that the worker does the same with twice as many; else the slider is left
    out. Raises ValueError for a step whose ranks send messages to each other one by one.
    """
    if len(priced.tapes) > 1:
        raise ValueError(
            f"sliders move the step of one rank, and this one has {len(priced.tapes)} that "
            'wait for each other: give it other machines one by one, by .on("8 x A100")'
        )
    return Explored(priced)


class Explored:
    """A priced step with sliders; `at(ranks=64)` is the step where they stand so."""

    def __init__(self, priced: Priced) -> None:
        self.priced, machine = priced, priced.machine
        self.base = priced.tapes[0]
        tokens, twice = _with_twice(priced)
        self.twice = {
            name: tape for name, tape in twice.items() if _signs(tape) == _signs(self.base)
        }
        everybody = tuple(range(priced.ranks))
        groups = {event.group for event in self.base.events if isinstance(event, Call)}
        if not groups or groups != {everybody}:
            self.twice.pop("ranks", None)
        ranks = sorted({*RANKS, priced.ranks}) if "ranks" in self.twice else [priced.ranks]
        whole = machine.per_node
        ranks = [n for n in ranks if n <= whole or n % whole == 0]
        rows = [
            Slider("ranks", "ranks", ranks, ranks.index(priced.ranks)),
            Slider("tokens", "tokens a GPU", [n * (tokens or 0) for n in TIMES], 0),
        ]
        for name in ("inside", "between"):
            rate = getattr(machine, name).bandwidth / 1e9
            says = f"GB/s {name} {'a node' if name == 'inside' else 'nodes'}"
            rows.append(Slider(name, says, [f * rate for f in FACTORS], FACTORS.index(1)))
        rows.append(Slider("latency", "times the latency", list(LATENCIES), 1))
        unused = {name for name in ("ranks", "tokens") if name not in self.twice}
        if not groups:
            unused |= {"inside", "between", "latency"}
        if max(ranks) <= whole:
            unused.add("between")
        self.sliders = {row.name: row for row in rows if row.name not in unused}

    def at(self, **values: float) -> Priced:
        """The step with some sliders elsewhere, in their units.

        Raises ValueError for a slider that is not there, and for a value that cannot be.
        """
        for name in values.keys() - self.sliders.keys():
            known = ", ".join(self.sliders) or "no slider"
            raise ValueError(f"there is no slider {name!r}, but {known}")
        priced, machine = self.priced, self.priced.machine
        ranks, weights = values.get("ranks", priced.ranks), {}
        if "tokens" in values:
            whole("tokens", values["tokens"])
            weights["tokens"] = values["tokens"] / self.sliders["tokens"].values[0] - 1
        if ranks != priced.ranks:
            machine = machine.of(ranks)
            weights["ranks"] = 2 * (1 - priced.ranks / ranks)
        for name in ("inside", "between"):
            link = getattr(machine, name)
            rate = 1e9 * values[name] if name in values else link.bandwidth
            link = link._replace(
                bandwidth=rate, latency=link.latency * values.get("latency", 1)
            )
            require_message(0, ranks, link)
            machine = machine._replace(**{name: link})
        tape = _mixed(self.base, [(self.twice[n], w) for n, w in weights.items()], ranks)
        tokens = values.get("tokens", priced.tokens)
        return replace(priced, ranks=ranks, machine=machine, tapes={0: tape}, tokens=tokens)

    def data(self) -> dict[str, Any]:
        """What a web page needs: sliders, machine, and the tape, whose kinds stand once."""
        machine, kinds = self.priced.machine, {}
        events = zip(
            self.base.events,
            *(self.twice.get(n, self.base).events for n in ("tokens", "ranks")),
            strict=True,
        )
        tape = [
            kinds.setdefault(_packed(i, *three, machine, self.priced.ranks), len(kinds))
            for i, three in enumerate(events)
        ]
        spread = [
            self.sliders[n].values if n in self.sliders else [None]
            for n in ("tokens", "ranks")
        ]
        full = [
            [self._gigabytes(tokens, ranks) for ranks in spread[1]] for tokens in spread[0]
        ]
        return {
            "sliders": [slider._asdict() for slider in self.sliders.values()],
            "machine": [machine.flops, machine.memory_rate, machine.kernel, machine.per_node],
            "shared": machine.shared,
            "links": [[*machine.inside], [*machine.between]],
            "memory": machine.memory / 1e9,
            "ranks": self.priced.ranks,
            "full": full,
            "kinds": [json.loads(kind) for kind in kinds],
            "tape": tape,
        }

    def _gigabytes(self, tokens: float | None, ranks: float | None) -> float:
        given = {"tokens": tokens, "ranks": ranks}
        found = self.at(**{name: value for name, value in given.items() if value})
        return round(found.fullest().total() / 1e9, 1)

    def stills(self) -> list[tuple[str, Drawing]]:
        """Three settings with their pictures, for paper."""
        moved, found = self.sliders, [("as priced", {})]
        if link := moved.get(
            "between"
            if self.priced.machine.nodes(tuple(range(self.priced.ranks))) > 1
            else "inside"
        ):
            found.append(("with an eighth of the bandwidth", {link.name: link.values[1]}))
        for name in ("tokens", "ranks"):
            if name in moved and len(found) < 3:
                values = moved[name].values
                value = values[min(moved[name].at + 3, len(values) - 1)]
                found.append((f"with {value:,.0f} {moved[name].says}", {name: value}))
        first = self.priced.seconds
        return [(says, self.at(**given).drawing(first)) for says, given in found]

    def widget(self):
        """Sliders above the picture; each move replays the tape and draws it again."""

        def show(*values: float) -> str:
            found = self.at(**dict(zip(self.sliders, values, strict=True)))
            return f"{found.drawing(self.priced.seconds).html()}<p>{words(found)}</p>"

        return sliders.moving([slider.moving() for slider in self.sliders.values()], show)

    def still(self) -> str:
        """The stills side by side, with the tape for the script of a web page."""
        return sliders.page(self.stills(), tape=self.data())

    def __repr__(self) -> str:
        return "\n".join(f"{says}: {drawing.text}" for says, drawing in self.stills())

    def _repr_mimebundle_(self, **_: object) -> dict:
        own = {"text/plain": repr(self), "text/html": self.still()}
        return self.widget()._repr_mimebundle_() | own


def words(found: Priced) -> str:
    """A step in a sentence, as the page's script says it."""
    full, most = found.fullest().total() / 1e9, found.machine.memory / 1e9
    share = found.exposed / found.seconds if found.seconds else 0
    return (
        f"{1e3 * found.seconds:.0f} ms, of which {1e3 * found.exposed:.0f} ms are exposed "
        f"messages ({100 * share:.0f}%). At most {full:.1f} GB of {most:g} GB"
        f"{': it does not fit' if full > most else ''}."
    )


def _with_twice(priced: Priced) -> tuple[int | None, dict[str, Tape]]:
    """How many tokens a rank has, and tapes with twice as many, and with twice the ranks."""
    tokens, jobs = priced.tokens, {}
    if priced.ranks > 1:
        jobs["ranks"] = 2 * priced.ranks, priced.args, priced.kwargs
    if tokens:
        given = given_to(priced.worker, priced.args, priced.kwargs)
        given.arguments["tokens"] = 2 * tokens
        jobs["tokens"] = priced.ranks, given.args[2:], given.kwargs
    found = tape_all(priced.worker, list(jobs.values()), priced.timeout)
    return tokens, {name: tapes[0] for name, tapes in zip(jobs, found, strict=True)}


def _signs(tape: Tape) -> list:
    """What must be alike in two tapes for one to be stretched into the other."""
    events = [
        event._replace(flops=0, nbytes=0, seconds=0)
        if isinstance(event, Operation)
        else event._replace(nbytes=0, group=())
        if isinstance(event, Call)
        else event
        for event in tape.events
    ]
    return [*events, *(change._replace(nbytes=0) for change in tape.changes)]


def _mixed(base: Tape, others: list[tuple[Tape, float]], ranks: int) -> Tape:
    """The tape between and beyond others, each with its weight."""
    if not others:
        return base
    everybody, events, changes = tuple(range(ranks)), list(base.events), list(base.changes)

    def between(own: Any, name: str, alike: list) -> float:
        value = getattr(own, name)
        moved = sum(
            w * (getattr(o, name) - value) for o, (_, w) in zip(alike, others, strict=True)
        )
        return max(0.0, value + moved)

    for i, (event, *alike) in enumerate(
        zip(events, *(o.events for o, _ in others), strict=True)
    ):
        if isinstance(event, Operation):
            sizes = {name: between(event, name, alike) for name in ("flops", "nbytes")}
            events[i] = event._replace(**sizes)
        elif isinstance(event, Call):
            events[i] = event._replace(
                nbytes=between(event, "nbytes", alike), group=everybody
            )
    for i, change in enumerate(changes):
        moved = sum(w * (o.changes[i].nbytes - change.nbytes) for o, w in others)
        changes[i] = change._replace(nbytes=change.nbytes + moved)
    return Tape(events, changes)


def _packed(
    i: int, event: Event, tokens: Event, ranks: Event, machine: Machine, n: int
) -> str:
    """An event for `explore.js`, its numbers to four digits; the same ones are kept once."""

    def three(name: str) -> list[float]:
        value = getattr(event, name)
        more = [getattr(other, name) - value for other in (tokens, ranks)]
        return [float(f"{number:.4g}") for number in (value, *more)]

    if isinstance(event, Operation):
        sizes = [three("flops"), three("nbytes")]
        times = slowdown(event, machine)
        return json.dumps(["kernel", event.stream, times, event.seconds, *sizes])
    if isinstance(event, Call):
        size = len(event.group)
        group = [0, 0] if size == n else [size, machine.nodes(event.group)]
        return json.dumps(["call", event.stream, event.name, three("nbytes"), *group])
    if isinstance(event, Wait):
        return json.dumps(["wait", event.stream, i - event.of if event.of >= 0 else 0])
    assert isinstance(event, Mark)
    return json.dumps(["mark", event.stream, event.name, event.begins])
