"""The equipment of the notebooks: launch ranks, trace them, draw them, check answers."""

from mgpu_tutorial.lab import server

if kernel := server.notebook_kernel():  # first: the fork server imports torch while we do
    server.start()
    server.end_with(kernel)

from mgpu_tutorial.lab.bucket_map import bucket_map
from mgpu_tutorial.lab.cells import before_after
from mgpu_tutorial.lab.chart import sequence_chart
from mgpu_tutorial.lab.checks import check
from mgpu_tutorial.lab.devices import device_of, devices, place
from mgpu_tutorial.lab.errors import RankFailed, RanksHung
from mgpu_tutorial.lab.lanes import (
    idle_share,
    in_flight,
    in_order,
    pipeline_chart,
    quickest,
    steps,
)
from mgpu_tutorial.lab.launch import launch
from mgpu_tutorial.lab.link import slow_link
from mgpu_tutorial.lab.memory import Ledger, memory_bars
from mgpu_tutorial.lab.minimum import minimum_plot
from mgpu_tutorial.lab.ownership import ownership
from mgpu_tutorial.lab.placement import placement, where
from mgpu_tutorial.lab.playground import playground
from mgpu_tutorial.lab.plot import curves, image_rows
from mgpu_tutorial.lab.rank import progress, status
from mgpu_tutorial.lab.source import show_changes, show_source
from mgpu_tutorial.lab.stepper import stepper
from mgpu_tutorial.lab.tables import Table, traffic
from mgpu_tutorial.lab.threads import record_threads
from mgpu_tutorial.lab.timeline import timeline
from mgpu_tutorial.lab.trace import note, span
from mgpu_tutorial.lab.transfer import CannotTravel

__all__ = [
    "CannotTravel",
    "Ledger",
    "RankFailed",
    "RanksHung",
    "Table",
    "before_after",
    "bucket_map",
    "check",
    "curves",
    "device_of",
    "devices",
    "idle_share",
    "image_rows",
    "in_flight",
    "in_order",
    "launch",
    "memory_bars",
    "minimum_plot",
    "note",
    "ownership",
    "pipeline_chart",
    "place",
    "placement",
    "playground",
    "progress",
    "quickest",
    "record_threads",
    "sequence_chart",
    "show_changes",
    "show_source",
    "slow_link",
    "span",
    "status",
    "stepper",
    "steps",
    "timeline",
    "traffic",
    "where",
]
