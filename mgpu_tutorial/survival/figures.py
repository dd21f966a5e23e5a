"""Apparatus: two nodes under torchrun, a run that is killed many times, and a table."""

import random
import re
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from mgpu_tutorial.lab import RankFailed, Table, launch
from mgpu_tutorial.processes_and_ranks.meeting import free_port
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.survival import elastic, order
from mgpu_tutorial.when_it_breaks.figures import shell

BETWEEN = 54 * 24 * 60 / 419  # minutes between two interruptions of Llama 3's training


def run_two_nodes(folder: str) -> list[str]:
    """Run the elastic script on two "nodes", each a torchrun of its own with one rank.

    Returns how workers died that torchrun saw dying of SIGKILL, and what the ranks printed.
    """
    script = f"-m mgpu_tutorial.survival.elastic --accident --folder {shlex.quote(folder)}"
    meet = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()}"

    def node(number: int) -> subprocess.CompletedProcess:
        return shell(
            "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 "
            f"{meet} --rdzv-conf is_host={1 - number} {script}",
            TMPDIR=folder,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    with ThreadPoolExecutor() as nodes:
        ends = list(nodes.map(node, (0, 1)))
    deaths = re.findall(r"failed \(exitcode: -9\)", "".join(end.stderr for end in ends))
    return deaths + sorted("".join(end.stdout for end in ends).splitlines())


def same_bits(folders: list[str]) -> list[bool]:
    """Whether each tensor of model and optimizer has the same bits in the run.pt of both."""
    first, second = (torch.load(f"{folder}/run.pt", weights_only=True) for folder in folders)
    pairs = [(first["model"][name], second["model"][name]) for name in first["model"]]
    momenta = [state["optimizer"]["state"] for state in (first, second)]
    pairs += [(momenta[0][i][k], momenta[1][i][k]) for i in momenta[0] for k in momenta[0][i]]
    return [torch.equal(a, b) for a, b in pairs]


def train_and_die(
    rank: int, world_size: int, folder: str, resume: Callable, victim: int, call: int
) -> None:
    """A life of a training of 60 steps, in which one rank dies at one of its calls."""
    elastic.resume_or_start = resume  # in this process only
    if rank == victim:
        elastic.die_at_call(call)
    elastic.train(rank, world_size, folder, steps=60)


def kill(folder: str, times: int, resume: Callable = elastic.resume_or_start) -> int:
    """Kill a training at random calls, and let it live to its end; returns the deaths.

    A life after one that leaves a file that can't be read raises.
    """
    lot, deaths = random.Random(0), 0
    for _ in range(times):
        victim, call = lot.randrange(2), lot.randrange(2000, 7000)
        try:
            launch(train_and_die, 2, folder, resume, victim, call, timeout=20)
        except RankFailed:
            deaths += 1
    launch(train_and_die, 2, folder, resume, -1, 0, timeout=20)
    return deaths


def on_other_ranks(*pairs: tuple[int, int]) -> Table:
    """Ten steps on some ranks, ten more on others: how far from twenty on one process?"""
    start = torch.zeros(4, dtype=torch.float64)
    one = launch(order.train_on, 1, start, range(20)).results[0]
    rows = []
    for before, after in pairs:
        half = launch(order.train_on, before, start, range(10)).results[0]
        ends = launch(order.train_on, after, half, range(10, 20)).results
        far = max((end - one).abs().max().item() for end in ends)
        limit = "below 1e-12" if far < 1e-12 else f"{far:.0e}"
        rows.append([f"{before}, then {after}", limit])
    return Table(["ranks", "distance from one process"], rows)


def best_minutes(save: float, gpus: int) -> float:
    """How often to save on so many of the GPUs on which Llama 3 was trained."""
    return best_interval(save, BETWEEN * 16384 / gpus)
