"""What `prove` says of the faults in docs/zoo: many scripts in three launches."""

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mgpu_tutorial.instruments.prove import watch_worker
from mgpu_tutorial.instruments.prove.proof import Notes, Proof, compare
from mgpu_tutorial.lab.run.launch import launch

FOLDER = Path(__file__).parents[2] / "docs" / "zoo"
# Their scripts put parts together themselves, so `prove` can't: their own tensor is compared.
OWN_PARTS = "experts", "tied_stages", "weight_decay"


class Compared(NamedTuple):
    """The proof of a script, and its whole tensor, on the ranks and in one process."""

    proof: Proof
    found: Tensor
    right: Tensor


def prove_all(
    names: Sequence[str], ranks: int = 2, timeout: float = 100
) -> dict[str, Compared]:
    """Compare the wrong way of each script of the zoo with one process, by its name."""
    one, moved = (
        launch(watch_all, 1, names, "right", off, timeout=timeout).results[0]
        for off in (False, True)
    )
    every = launch(watch_all, ranks, names, "wrong", False, timeout=timeout).results
    compared = {}
    for name in names:
        notes, right = one[name]
        proof = compare(notes, moved[name][0], [own[name][0] for own in every])
        compared[name] = Compared(proof, every[0][name][1], right)
    return compared


def watch_all(
    rank: int, world_size: int, names: Sequence[str], how: str, moved: bool
) -> dict[str, tuple[Notes, Tensor]]:
    """As one rank: run the job of each script, watched; what was noted, and its tensor."""
    seen = {}
    for name in names:
        job, found = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="zoo")["job"], []

        def worker(rank: int, world_size: int, job=job, found=found) -> None:
            found.append(job(how, rank, world_size)[1])

        notes = watch_worker(rank, world_size, worker, (), {}, None, moved)
        seen[name] = notes, found[0]
    return seen
