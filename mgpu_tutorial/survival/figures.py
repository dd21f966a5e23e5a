"""Apparatus: a run that is killed many times, and one on two nodes."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.survival import elastic
from mgpu_tutorial.when_it_breaks.figures import shell


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
    lot, deaths = random.Random(0), 0
    for _ in range(times):
        try:
            victim, call = lot.randrange(2), lot.randrange(1, 8000)
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
