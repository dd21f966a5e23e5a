"""When a unit is whole, in a picture: beside the gathers that the recorder saw."""

import pytest
from torch.distributed.fsdp import fully_shard

from mgpu_tutorial.fully_shard import figures, units


def block_0_forgotten(model):
    for module in [*model.blocks[1:], model]:
        fully_shard(module)


TWICE = "block {0} is whole in block {0} forward, then in block {0} backward"
ROOT = "root is whole in block 0 forward to block 0 backward"
KEPT = "block 2 is whole in block 2 forward to block 2 backward"


@pytest.mark.parametrize(
    "plan, rows",
    [
        (units.shard_blocks, [TWICE.format(0), TWICE.format(1), KEPT, ROOT]),
        (block_0_forgotten, [TWICE.format(1), TWICE.format(2), ROOT]),
    ],
)
def test_a_unit_s_bar_is_high_from_each_of_its_gathers(ranks, plan, rows):
    report = ranks(2, figures.watch_step, plan, trace=True)
    picture = figures.units_picture(report.results[0])
    assert picture.text.splitlines() == rows
    gathers = [e for e in report.events if e.rank == 0 and e.op == "all_gather_single"]
    assert len(gathers) == picture.text.count(" in ")
