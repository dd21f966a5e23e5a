"""When a unit is whole, in a picture: beside the gathers that the recorder saw."""

import pytest
from torch.distributed.fsdp import fully_shard

from mgpu_tutorial.fully_shard import figures, units


def block_0_forgotten(model):
    for module in [*model.blocks[1:], model]:
        fully_shard(module)


@pytest.mark.parametrize(
    "plan, rows",
    [
        (
            units.shard_blocks,
            [
                "block 0 is gathered for block 0, then for block 0",
                "block 1 is gathered for block 1, then for block 1",
                "block 2 is gathered for block 2 and head",
                "root is gathered for block 0, block 1, block 2 and head",
            ],
        ),
        (
            block_0_forgotten,
            [
                "block 1 is gathered for block 1, then for block 1",
                "block 2 is gathered for block 2, then for block 2",
                "root is gathered for block 0, block 1, block 2 and head",
            ],
        ),
    ],
)
def test_a_unit_s_bar_is_high_from_each_of_its_gathers(ranks, plan, rows):
    report = ranks(2, figures.watch_step, plan, trace=True)
    picture = figures.units_picture(report.results[0])
    assert picture.text.splitlines() == rows
    gathers = [e for e in report.events if e.rank == 0 and e.op == "all_gather_single"]
    assert len(gathers) == picture.text.count(" for ")
