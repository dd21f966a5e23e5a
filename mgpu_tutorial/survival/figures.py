"""Apparatus: two nodes under torchrun, a run that is killed many times, and tables."""

import os
import random
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import torch

from mgpu_tutorial.lab import RankFailed, Table, launch
from mgpu_tutorial.processes_and_ranks.meeting import free_port
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.survival import accidents, elastic, interval, order
from mgpu_tutorial.when_it_breaks.figures import End, end_of, torchrun

BETWEEN = 54 * 24 * 60 / 419  # minutes between two interruptions of Llama 3's training


def run_two_nodes(folder: str, accident: str = "none", limit: float = 100.0) -> list[End]:
    """Run the elastic script on two "nodes", each a torchrun of its own with one rank.

    Where the accident is "node", node 1 is started again as soon as it has gone; its second
    life is the third in the list.
    """
    port = free_port()

    def start(number: int, accident: str, life: int = 0) -> subprocess.Popen:
        return torchrun(
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("--rdzv-id", "run"),
            # A lost node is missed after three seconds.
            *("--rdzv-conf", f"is_host={int(number == 0)},keep_alive_interval=1"),
            *("--local-addr", "127.0.0.1", "--log-dir", f"{folder}/log{number}{life}"),
            *("-m", "mgpu_tutorial.survival.elastic"),
            *("--folder", folder, "--accident", accident),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    nodes = [start(number, accident) for number in (0, 1)]
    with ThreadPoolExecutor() as readers:
        ends = [readers.submit(end_of, node, limit) for node in nodes]
        if accident == "node" and ends[1].result().code:
            ends.append(readers.submit(end_of, start(1, "none", life=1), limit))
        return [end.result() for end in ends]


def restarts(ends: list[End]) -> list[str]:
    """How the workers died that torchrun saw dying of SIGKILL: "exitcode: -9" for each."""
    return re.findall(r"failed \((exitcode: -9)", "\n".join(end.errors for end in ends))


def same_bits(folders: list[str]) -> list[bool]:
    """Whether each tensor of model and optimizer has the same bits in the run.pt of both."""
    first, second = (torch.load(f"{folder}/run.pt", weights_only=True) for folder in folders)
    pairs = [(first["model"][name], second["model"][name]) for name in first["model"]]
    momenta = [state["optimizer"]["state"] for state in (first, second)]
    pairs += [(momenta[0][i][k], momenta[1][i][k]) for i in momenta[0] for k in momenta[0][i]]
    return [torch.equal(a, b) for a, b in pairs]


def train_and_die(rank: int, world_size: int, folder: str, victim: int, call: int) -> None:
    """A life of a long training, in which one rank dies at one of its calls."""
    if rank == victim:
        accidents.die_at_call(call)
    elastic.train(rank, world_size, folder, steps=60)


def kill(folder: str, times: int, seed: int = 0) -> list[int]:
    """Kill a training of 60 steps at random calls; the step in its file after each death.

    A file that can't be read raises. At last the training lives to its end.
    """
    lot = random.Random(seed)
    steps: list[int] = []
    while len(steps) < times:
        victim, call = lot.randrange(2), lot.randrange(2000, 7000)
        try:
            launch(train_and_die, 2, folder, victim, call)
        except RankFailed:
            steps.append(step_in(folder))
    launch(train_and_die, 2, folder, -1, 0)
    return steps


def step_in(folder: str) -> int:
    """The number of the next step, by the file of a run; 0 where there is none yet."""
    path = f"{folder}/run.pt"
    return torch.load(path, weights_only=True)["step"] if os.path.exists(path) else 0


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


def waste(save: float, intervals: tuple[float, ...]) -> Table:
    """What is lost of the time trained, also with the best interval: formula, simulation."""
    rows = []
    for minutes in sorted([*intervals, best_interval(save, BETWEEN)]):
        formula = save / minutes + minutes / (2 * BETWEEN)
        played = interval.simulate_waste(minutes, save, BETWEEN)
        rows.append([round(minutes), f"{formula:.1%}", f"{played:.1%}"])
    return Table(["save every (min)", "lost, by the formula", "simulated"], rows)


def best_minutes(save: float, gpus: int) -> float:
    """How often to save on so many of the GPUs on which Llama 3 was trained."""
    return best_interval(save, BETWEEN * 16384 / gpus)


def from_one_process(folder: str) -> float:
    """How far the model in a folder is from one process that has both ranks' batches."""
    alone = launch(_train_alone, 1).results[0]
    model = torch.load(f"{folder}/run.pt", weights_only=True)["model"]
    return max((model[name] - alone[name]).abs().max().item() for name in alone)


def _train_alone(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Train on batches that hold those of ranks 0 and 1; returns the model's state."""
    pair = [elastic.batch_of]
    elastic.batch_of = lambda step, rank: tuple(
        torch.cat(part) for part in zip(*(pair[0](step, r) for r in (0, 1)), strict=True)
    )
    with TemporaryDirectory() as folder:
        elastic.train(rank, world_size, folder)
        return torch.load(f"{folder}/run.pt", weights_only=True)["model"]
