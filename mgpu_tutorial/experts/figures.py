"""Apparatus, not the lesson: the tokens' journey, who sent how many to whom, and tables."""

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from mgpu_tutorial.experts.balance import load, move_bias, within_capacity
from mgpu_tutorial.experts.exchange import combine, dispatch
from mgpu_tutorial.experts.layer import Experts, choose, drawn
from mgpu_tutorial.experts.parallel import Model, run
from mgpu_tutorial.lab import RankFailed, Table, curves, frame, launch
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.report import Report

WIDTH = 16
FAR = 1e-12


# The journey


def travel(rank: int, world_size: int) -> None:
    """Twelve tokens go to their experts and back, with k = 1 and a film.

    A row carries its token, its expert and the place that it leaves from.
    """
    home = torch.arange(12).tensor_split(world_size)
    chosen = choose(drawn(5, 12, WIDTH) @ drawn(1, WIDTH, world_size), k=1)[home[rank]]

    def say(says: str, rows: torch.Tensor, came_from: Sequence[int] = ()) -> None:
        bricks, came = {}, {}
        for place, (token, expert, left) in enumerate(rows.tolist()):
            owner = next(r for r, tokens in enumerate(home) if token in tokens)
            bricks[str(place)] = f"{token}→e{expert}", owner
            if came_from:
                came[str(place)] = came_from[place], str(left)
        frame(says, bricks, came)

    rows = torch.stack([home[rank], chosen.flatten(), torch.zeros(3, dtype=torch.int64)], 1)
    say(
        "Each rank has three tokens of its own. The router has chosen an expert for each.",
        rows,
    )
    order = chosen.flatten().argsort(stable=True)
    rows[order, 2] = torch.arange(3)
    say("Each rank sorts its tokens by expert.", rows[order])
    arrived, _, way = dispatch(rows, chosen.flatten(), world_size)
    senders = [r for r, count in enumerate(way.received) for _ in range(count)]
    say("Each token goes to the rank of its expert, and is answered there.", arrived, senders)
    arrived[:, 2] = torch.arange(len(arrived))
    back = combine(arrived, way, torch.ones_like(chosen))
    says = "The answers come home, and go to the places that the tokens had before the sort."
    say(says, back, chosen.flatten().tolist())


def last_words(error: RankFailed) -> str:
    """What gloo says of the lengths where it aborts a rank."""
    return re.search(r"op\.preamble.*?\d+ vs \d+", str(error))[0]


def matrix(report: Report) -> Table:
    """How many rows each rank of a launch of `follow` sent to each."""
    sent = [result[3].sent for result in report.results]
    rows = [[f"from rank {rank}", *row, sum(row)] for rank, row in enumerate(sent)]
    arrived = [sum(column) for column in zip(*sent, strict=True)]
    rows.append(["arrived", *arrived, sum(arrived)])
    return Table(["rows", *(f"to rank {rank}" for rank in range(len(sent))), "sum"], rows)


def bytes_table(follow: Callable, tokens: int = 64, k: int = 2, hidden: int = 32) -> Table:
    """Bytes that one of four ranks sends in a layer's forward: by formula, and counted.

    Beside it the bytes of the experts' weights, if those were gathered instead.
    """
    rows, ranks, number = [], 4, 8  # bytes of a float64
    for experts in (4, 16, 64):
        results = launch(follow, ranks, experts, k, tokens).results
        away = sum(sum(way.sent) - way.sent[r] for r, (_, _, _, way, _) in enumerate(results))
        formula = 2 * (tokens // ranks) * k * WIDTH * number * (ranks - 1) // ranks
        weights = 2 * experts * WIDTH * hidden * number * (ranks - 1) // ranks
        rows.append([experts, formula, 2 * away * WIDTH * number // ranks, weights])
    head = ["experts", "tokens, by formula", "tokens, counted", "weights, by formula"]
    return Table(head, rows)


# Beside one process


def one_process(rank: int, world_size: int, k: int) -> dict[str, torch.Tensor]:
    """Output and gradients of the whole model, with all experts in one process."""
    model = Model(Experts(8, k))
    return {"output": run(model)} | {name: p.grad for name, p in model.named_parameters()}


def beside_one(
    results: Sequence[Mapping], k: int, copies: int = 1
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What the ranks have under each name, put together, and what one process has."""
    pairs = {}
    for name, expected in launch(one_process, 1, k).results[0].items():
        parts = [found[name] for found in results]
        if name in ("experts.up", "experts.down"):
            parts = parts[: len(parts) // copies]  # one copy
        elif name != "output":
            parts = parts[:1]
        pairs[name] = torch.cat(parts), expected
    return pairs


def factors(results: Sequence[Mapping], copies: int = 1) -> Table:
    """How many times one process's gradient the ranks have; "wrong" if it is no multiple."""
    rows = []
    for name, (found, expected) in beside_one(results, 2, copies).items():
        times = (found.norm() / expected.norm()).item()
        is_multiple = largest_difference(found, expected * round(times)) < FAR
        rows.append([name, f"{round(times)} ×" if is_multiple else "wrong"])
    return Table(["", "times one process"], rows)


def equality(step: Callable) -> Table:
    """How far the output and each gradient are from one process, with one copy."""
    rows = []
    for k in (1, 2):
        for ranks in (1, 2, 4):
            pairs = beside_one(launch(step, ranks, 1, k).results, k)
            far = [largest_difference(*pair) for pair in pairs.values()]
            near = ["< 1e-12" if f < FAR else f"{f:.0e}" for f in far]
            rows.append([f"top-{k}", ranks, *near])
    return Table(["", "ranks", *pairs], rows)


# The balance


def skewed(batch: int, slope: int = 24, experts: int = 16) -> torch.Tensor:
    """Scores of 1,024 tokens in whole 1/1024, exact everywhere; later experts get more."""
    generator = torch.Generator("cpu").manual_seed(batch)
    size = (4, 1024, experts)
    parts = torch.randint(0, 257, size, generator=generator, device="cpu").sum(dim=0)
    scores = (parts + slope * torch.arange(experts, device="cpu")).double() / 1024
    return scores.to(torch.get_default_device())


def excess(rate: float, slope: int = 24, steps: int = 400) -> list[float]:
    """At each step, by how much the busiest expert exceeds the mean load, over the mean."""
    bias, found = torch.zeros(16, dtype=torch.float64), []
    for step in range(steps):
        counts = load(choose(skewed(step, slope) + bias, k=2), 16)
        found.append(counts.max().item() / (counts.sum().item() / 16) - 1)
        bias = move_bias(bias, counts, rate)
    return found


def bias_at_work() -> tuple[Table, Plot]:
    """The busiest expert's excess with and without a bias, as a table and as curves."""
    runs = {f"rate {rate:g}": excess(rate) for rate in (0, 0.001, 0.01)}
    rows = []
    for name, found in (runs | {"no preference": excess(0, slope=0)}).items():
        first = next((i for i, value in enumerate(found) if value < 0.25), "never")
        rows.append([name, f"{found[0]:.2f}", f"{sum(found[-100:]) / 100:.2f}", str(first)])
    head = ["", "excess at first", "mean of the last 100 steps", "below 0.25 at step"]
    shown = {name: (list(range(0, 400, 8)), found[::8]) for name, found in runs.items()}
    return Table(head, rows), curves(shown, {}, "step", "excess of the busiest", "linear")


def capacity_table() -> Table:
    """What a capacity drops and leaves empty, by its factor, under a skewed router."""
    counts, rows = load(choose(skewed(0), k=2), 16), []
    for factor in (1.0, 1.25, 1.5, 2.0, 4.0):
        dropped, empty = within_capacity(counts, factor)
        rows.append([f"{factor:g}", f"{dropped:.1%}", f"{empty:.1%}"])
    return Table(["factor", "choices dropped", "places empty"], rows)
