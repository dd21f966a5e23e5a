"""The equipment of the notebooks: launch ranks, trace them, draw them, check answers."""

from mgpu_tutorial.lab.run import progress, server

if kernel := server.notebook_kernel():  # first: the fork server imports torch while we do
    server.stay_on_this_machine()
    server.start()
    server.end_with(kernel)
_importing = progress.Line()
_importing.draw(
    progress.AFTER, "PyTorch is imported: some seconds, once in each notebook".format
)

from mgpu_tutorial.lab.devices import devices, place
from mgpu_tutorial.lab.draw.film import film, frame
from mgpu_tutorial.lab.draw.memory_bars import memory_bars
from mgpu_tutorial.lab.draw.plot import curves
from mgpu_tutorial.lab.draw.sequence_chart import sequence_chart
from mgpu_tutorial.lab.draw.sliders import sliders
from mgpu_tutorial.lab.draw.timeline import timeline
from mgpu_tutorial.lab.record.intervals import traffic
from mgpu_tutorial.lab.record.memory import Ledger
from mgpu_tutorial.lab.record.trace import note, span
from mgpu_tutorial.lab.run.errors import RankFailed, RanksHung
from mgpu_tutorial.lab.run.launch import launch
from mgpu_tutorial.lab.run.progress import status
from mgpu_tutorial.lab.run.transfer import CannotTravel
from mgpu_tutorial.lab.table import Table
from mgpu_tutorial.lab.teach.checks import check
from mgpu_tutorial.lab.teach.solution import register
from mgpu_tutorial.lab.teach.source import edit, show_source

register()
_importing.__exit__()
