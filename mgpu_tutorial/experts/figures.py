"""Apparatus, not the lesson: the tokens' journey, bytes, the way to one process, a bias."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from mgpu_tutorial.experts.layer import Experts, choose, drawn, move_bias, tokens_per_expert
from mgpu_tutorial.experts.parallel import ExpertModel, combine, dispatch, run, step
from mgpu_tutorial.lab import RankFailed, Table, curves, frame, launch
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference

FAR = 1e-12


def travel(rank: int, world_size: int) -> None:
    """Twelve tokens go to their experts and back, with k = 1 and a film.

    A row carries its token, its expert and the place that it leaves from.
    """

    def say(says: str, rows: torch.Tensor, came_from: Sequence[int] = ()) -> None:
        numbered = list(enumerate(rows.tolist()))
        tokens = {str(i): (f"{row[0]}→e{row[1]}", row[0] // 3) for i, row in numbered}
        came = {str(i): (came_from[i], str(row[2])) for i, row in numbered if came_from}
        frame(says, tokens, came)

    mine = torch.arange(12).tensor_split(world_size)[rank]
    chosen = choose(drawn(5, 12, 16) @ drawn(1, 16, world_size), k=1)[mine]
    order = chosen.flatten().argsort(stable=True)
    rows = torch.stack([mine, chosen.flatten(), order.argsort()], 1)
    says = "Each rank has three tokens of its own. The router has chosen an expert for each."
    say(says, rows)
    say("Each rank sorts its tokens by expert.", rows[order])
    arrived, _, way = dispatch(rows, chosen.flatten(), world_size)
    says = "Each token goes to the rank of its expert, and is answered there."
    say(says, arrived, (arrived[:, 0] // 3).tolist())
    arrived[:, 2] = torch.arange(len(arrived))
    back = combine(arrived, way, torch.ones_like(chosen))
    says = "The answers come home, and go to the places that the tokens had before the sort."
    say(says, back, chosen.flatten().tolist())


def last_words(error: RankFailed) -> str:
    """What gloo says of the lengths where it aborts a rank."""
    return re.search(r"op\.preamble.*?\d+ vs \d+", str(error))[0]


def bytes_table(follow: Callable) -> Table:
    """Bytes that one of four ranks sends in a layer's forward: by formula, and counted.

    Beside it the bytes of the experts' weights, if those were gathered instead.
    """
    rows, k, row, weights = [], 2, 16 * 8, 2 * 16 * 32 * 8  # a float64 has 8 bytes
    for experts in (4, 16, 64):
        results = launch(follow, 4, experts, k, tokens=64).results
        away = sum(sum(sent) - sent[rank] for rank, sent in enumerate(results))
        counts = 2 * 16 * k * row * 3 // 4, 2 * away * row // 4, experts * weights * 3 // 4
        rows.append([experts, *counts])
    head = ["experts", "tokens, by formula", "tokens, counted", "weights, by formula"]
    return Table(head, rows)


@cache
def one_process(k: int) -> dict[str, torch.Tensor]:
    """Output and gradients of the whole model, with all experts in one process."""
    return launch(_whole, 1, k).results[0]


def _whole(rank: int, world_size: int, k: int) -> dict[str, torch.Tensor]:
    model = ExpertModel(Experts(8, k))
    return {"output": run(model)} | {name: p.grad for name, p in model.named_parameters()}


def beside_one(results: Sequence[Mapping], k: int) -> dict[str, tuple]:
    """By name: what the ranks have, without second copies, and what one process has."""
    return {
        name: (torch.cat([found[name] for found in results])[: len(expected)], expected)
        for name, expected in one_process(k).items()
    }


def factors(results: Sequence[Mapping]) -> Table:
    """How many times one process's gradient the ranks have; "wrong" if it is no multiple."""
    rows = []
    for name, (found, expected) in beside_one(results, 2).items():
        times = round((found.norm() / expected.norm()).item())
        is_multiple = largest_difference(found, expected * times) < FAR
        rows.append([name, f"{times} ×" if is_multiple else "wrong"])
    return Table(["", "times one process"], rows)


def equality() -> Table:
    """How far the output and each gradient are from one process, with one copy."""
    rows = []
    for ranks in (1, 2, 4):
        for k in (1, 2):
            pairs = beside_one(launch(step, ranks, 1, k).results, k)
            far = [largest_difference(*pair) for pair in pairs.values()]
            rows.append(
                [f"top-{k}", ranks, *("< 1e-12" if f < FAR else f"{f:.0e}" for f in far)]
            )
    return Table(["", "ranks", *pairs], rows)


def skewed(batch: int) -> torch.Tensor:
    """Scores of 1,024 tokens in whole 1/1024, exact everywhere; later experts get more."""
    generator = torch.Generator("cpu").manual_seed(batch)
    parts = torch.randint(0, 257, (4, 1024, 16), generator=generator, device="cpu").sum(dim=0)
    scores = (parts + 24 * torch.arange(16, device="cpu")).double() / 1024
    return scores.to(torch.get_default_device())


def excess(rate: float) -> list[float]:
    """At each step, by how much the busiest expert exceeds the mean load, over the mean."""
    bias, found = torch.zeros(16, dtype=torch.float64), []
    for batch in range(400):
        counts = tokens_per_expert(choose(skewed(batch) + bias, k=2), 16)
        found.append(counts.max().item() / (counts.sum().item() / 16) - 1)
        bias = move_bias(bias, counts, rate)
    return found


def bias_at_work() -> Plot:
    """The busiest expert's excess, with and without a bias."""
    steps = range(0, 400, 8)
    shown = {f"rate {rate:g}": (steps, excess(rate)[::8]) for rate in (0, 0.001, 0.01)}
    return curves(shown, {}, "step", "excess of the busiest", "linear")
