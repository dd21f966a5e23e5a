"""The equipment of the notebooks: launch ranks, trace them, draw them, check answers."""

from mgpu_tutorial.lab.errors import RankFailed, RanksHung
from mgpu_tutorial.lab.launch import launch
from mgpu_tutorial.lab.rank import progress
from mgpu_tutorial.lab.trace import note, span
from mgpu_tutorial.lab.transfer import CannotTravel

__all__ = [
    "CannotTravel",
    "RankFailed",
    "RanksHung",
    "launch",
    "note",
    "progress",
    "span",
]
