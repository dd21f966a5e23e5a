"""A death in pictures; a run that is killed many times, and one on two nodes."""

import random
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, PAPER, Drawing
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.survival import elastic
from mgpu_tutorial.when_it_breaks.figures import shell

DEATH = (
    "Ten steps are done. Each rank holds them in memory; the file holds the first nine.",
    "Rank 1 dies. Its memory is gone, and with it its own generator.",
    "Rank 0 waits for rank 1 in the next all-reduce. Torchrun ends it too.",
    "Two new processes read the file. The tenth step is computed again.",
)


def after_a_crash() -> Film:
    """Who holds what before a rank dies, after it, and in the next life."""
    return Film([_held(moment) for moment in range(len(DEATH))])


def _held(moment: int) -> Drawing:
    drawing = Drawing(484, 266, DEATH[moment], DEATH[moment])
    for row, words in enumerate(textwrap.wrap(DEATH[moment], 54)):
        drawing.label(8, 19 + 19 * row, words, 15, anchor="start")
    top, steps = 48, 10 if moment < 3 else 9
    for rank in range(2):
        x = 4 + 162 * rank
        gone = moment == 2 or (moment == 1 and rank == 1)
        edge = ALARM if gone else colour(rank)
        drawing.box(x, top, 150, 150, edge, PAPER, 3, "5 4" if gone else "")
        drawing.label(x + 75, top + 24, f"rank {rank}: memory", 15, weight="bold")
        held = f"model, {steps} steps", "momentum", f"generator of rank {rank}"
        end = "dead" if rank else "ended"
        drawing.text += f"\n  rank {rank}: {end if gone else '; '.join(held)}"
        if gone:
            drawing.label(x + 75, top + 84, end, 16, ALARM)
            continue
        for row, words in enumerate(held):
            drawing.label(x + 75, top + 54 + 26 * row, words, 14)
        says = ("", "waits", "", "reads")[moment]
        drawing.label(x + 75, top + 138, says, 14, weight="bold")
        if moment == 3:
            y = 246 - 16 * rank
            drawing.line(330, y, x + 75, y, INK, 1.5, "5 3")
            drawing.line(x + 75, y, x + 75, top + 154, INK, 1.5, "5 3", arrow=True)
    generators = "generator of rank 0", "generator of rank 1"
    kept = "model, 9 steps", "momentum", *generators, "9 steps are done"
    drawing.box(330, top, 150, 210, FAINT, "#f4f4f4", 3)
    drawing.label(405, top + 24, "disk: run.pt", 15, weight="bold")
    for row, words in enumerate(kept):
        drawing.label(405, top + 54 + 26 * row, words, 14)
    drawing.text += f"\n  the file: {'; '.join(kept)}"
    return drawing


def same_bits(folders: list[str]) -> list[bool]:
    """Whether each tensor of model and optimizer has the same bits in the run.pt of both."""
    tensors = []
    for folder in folders:
        state = torch.load(f"{folder}/run.pt", weights_only=True)
        momenta = [of["momentum_buffer"] for of in state["optimizer"]["state"].values()]
        tensors.append([*state["model"].values(), *momenta])
    return list(map(torch.equal, *tensors))


def live(
    rank: int, world_size: int, folder: str, resume: Callable, victim: int, call: int
) -> None:
    """A life of a training of 200 steps, in which one rank dies at one of its calls."""

    def resume_and_die(*given: Any) -> int:
        if rank == victim:
            elastic.die_at_call(call)
        return resume(*given)

    elastic.train(rank, world_size, folder, resume_and_die, 200)


def kill(folder: str, times: int, resume: Callable = elastic.resume_or_start) -> int:
    """Kill a training at random calls, and let it live to its end; returns the deaths."""
    draws, deaths = random.Random(0), 0
    for _ in range(times):
        try:
            victim, call = draws.randrange(2), draws.randrange(1, 8000)
            launch(live, 2, folder, resume, victim, call, timeout=20)
        except RankFailed:
            deaths += 1
    launch(live, 2, folder, resume, -1, 0, timeout=20)
    return deaths


def run_on_two_nodes(command: str, **environment: str) -> None:
    """Run a torchrun command twice at once, as two nodes do; print deaths and outputs."""
    with ThreadPoolExecutor() as nodes:
        ends = list(nodes.map(lambda _: shell(command, **environment), range(2)))
    errors, said = "".join(e.stderr for e in ends), "".join(e.stdout for e in ends)
    print("ranks killed:", errors.count("failed (exitcode: -9)"))
    print(*sorted(said.splitlines()), sep="\n")
