"""The build takes right answers in any dress, and no wrong one."""

from mgpu_tutorial.language_model.builds import build
from tests.builds import right_and_wrong


def cut(*lines):
    body = "\n    ".join(lines)
    return f"from torch import nn\n\ndef cut_model(model, mesh, share):\n    {body}\n"


STAGE = 'stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()'
EACH = "each = (len(model) - 2) // stages"
BLOCKS = "blocks = list(model)[1 + stage * each : 1 + (stage + 1) * each]"
SHARE = 'for block in blocks: share(block, mesh["tp"].get_group())'
ENDS = (
    "first = [model[0]] if stage == 0 else []",
    "last = [model[-1]] if stage == stages - 1 else []",
)
RETURN = "return nn.Sequential(*first, *blocks, *last)"
RIGHT = [
    cut(STAGE, EACH, BLOCKS, SHARE, *ENDS, RETURN),
    cut(
        "coordinates = mesh.get_coordinate()",
        "stages = mesh.mesh.shape[0]",
        "parts = [list(model)[1:-1][i :: 1] for i in range(1)]",
        "each = len(parts[0]) // stages",
        "mine = parts[0][coordinates[0] * each :][:each]",
        'for block in mine: share(block, mesh["tp"].get_group())',
        "if coordinates[0] == 0: mine = [model[0], *mine]",
        "if coordinates[0] == stages - 1: mine = [*mine, model[-1]]",
        "return nn.Sequential(*mine)",
    ),
    cut(
        STAGE,
        "each = (len(model) - 2) // stages",
        "begin = 0 if stage == 0 else 1 + stage * each",
        "end = len(model) if stage == stages - 1 else 1 + (stage + 1) * each",
        "for i in range(1 + stage * each, 1 + (stage + 1) * each):",
        '    share(model[i], mesh["tp"].get_group())',
        "return model[begin:end]",
    ),
]
WRONG = [
    (cut(STAGE, "blocks = list(model)[1:-1]", SHARE, *ENDS, RETURN), "pp=2, rank 0"),
    (cut(STAGE, EACH, BLOCKS, *ENDS, RETURN), "shared blocks"),
    (
        cut(STAGE, EACH, BLOCKS, SHARE.replace('"tp"', '"dp"'), *ENDS, RETURN),
        "tp=2, rank 0: its shared blocks",
    ),
    (cut(STAGE, EACH, BLOCKS, SHARE, "return nn.Sequential(*blocks)"), "dp=2, rank 0"),
    (
        cut(STAGE, EACH, BLOCKS, SHARE, "return nn.Sequential(model[0], *blocks, model[-1])"),
        "pp=2, rank 0",
    ),
    (
        cut(
            STAGE,
            EACH,
            BLOCKS,
            "for block in list(model)[1:-1]: share(block, mesh['tp'].get_group())",
            *ENDS,
            RETURN,
        ),
        "tp=2,pp=2, rank 0: its shared blocks",
    ),
    (cut(STAGE, EACH, BLOCKS, SHARE, *ENDS), "nothing was returned"),
    (
        cut(
            STAGE,
            EACH,
            BLOCKS,
            'blocks = [share(block, mesh["tp"].get_group()) for block in blocks]',
            *ENDS,
            RETURN,
        ),
        "`share` cuts a block in place, and returns nothing",
    ),
    (cut("..."), "a `...` is left to fill in"),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
