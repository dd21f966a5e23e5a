"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.long_sequences.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
import torch
import torch.distributed as dist
from mgpu_tutorial.long_sequences.blocks import attend
from mgpu_tutorial.long_sequences.dealing import require_chunks
from mgpu_tutorial.long_sequences.ring import Shift
"""


def merge(*lines):
    body = "\n    ".join(lines)
    return f"{IMPORTS}\ndef merge(out, lse, block_out, block_lse):\n    {body}\n"


BOTH = "both = torch.logaddexp(lse, block_lse)"
WEIGHED = "out = (lse - both).exp() * out + (block_lse - both).exp() * block_out"


def ring(loop, last="return out, lse", before="pass"):
    body = "\n        ".join(loop)
    return f"""{IMPORTS}
def ring_attention(q, k, v, deal):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length = q.shape[2] * world_size
    mine = deal(length, rank, world_size)
    out, lse = attend(q, k, v, mine > mine[:, None])
    kv = torch.stack([k, v])
    {before}
    for step in range(1, world_size):
        {body}
    {last}
"""


HOP = "kv = Shift.apply(kv)"
THEIRS = "theirs = deal(length, (rank - step) % world_size, world_size)"
MORE = "more = attend(q, kv[0], kv[1], theirs > mine[:, None])"
MERGE = "out, lse = merge(out, lse, *more)"


def zigzag(*lines, check="require_chunks(length, 2 * world_size)"):
    body = "\n    ".join((check, *lines))
    return f"{IMPORTS}\ndef zigzag(length, rank, world_size):\n    {body}\n"


CHUNKS = "chunks = torch.arange(length).chunk(2 * world_size)"
RIGHT = [
    merge(BOTH, WEIGHED, "return out, both"),
    merge(
        "largest = torch.maximum(lse, block_lse)",
        "a, b = (lse - largest).exp(), (block_lse - largest).exp()",
        "return (a * out + b * block_out) / (a + b), largest + (a + b).log()",
    ),
    merge(
        "out = out - torch.sigmoid(block_lse - lse) * (out - block_out)",
        "return out, lse - torch.nn.functional.logsigmoid(lse - block_lse)",
    ),
    ring([HOP, THEIRS, MORE, MERGE]),
    ring(
        [
            "ks, vs = Shift.apply(torch.stack([ks, vs]))",
            "owner = rank - step if rank >= step else rank - step + world_size",
            "later = deal(length, owner, world_size)[None, :] > mine[:, None]",
            "out, lse = merge(out, lse, *attend(q, ks, vs, later))",
        ],
        before="ks, vs = k, v",
    ),
    ring(
        [HOP, THEIRS, MORE, "blocks.append(more)"],
        before="blocks = []",
        last="""for more in blocks:
        out, lse = merge(out, lse, *more)
    return out, lse""",
    ),
    zigzag(CHUNKS, "return torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]])"),
    zigzag(
        "size = length // (2 * world_size)",
        "front = torch.arange(rank * size, (rank + 1) * size)",
        "return torch.cat([front, length - 1 - front.flip(0)])",
    ),
    zigzag(
        "rows = torch.arange(length).view(2 * world_size, -1)",
        "return rows[[rank, -1 - rank]].flatten()",
    ),
]
WRONG = [
    (merge("return (out + block_out) / 2, lse"), "blocks of 4 and 4 keys: the log-sum-exp"),
    (merge(BOTH, WEIGHED, "return out, lse"), "blocks of 4 and 4 keys: the log-sum-exp"),
    (merge(BOTH, WEIGHED, "return out"), "type of what is returned"),
    (
        merge(
            "both = (lse.exp() + block_lse.exp()).log()",
            "out = (lse.exp() * out + block_lse.exp() * block_out) / both.exp()",
            "return out, both",
        ),
        "the log-sum-exp",
    ),
    (
        merge(BOTH, "return (lse * out + block_lse * block_out) / (lse + block_lse), both"),
        "blocks of 4 and 4 keys: the output",
    ),
    (ring([THEIRS, MORE, MERGE]), "on rank 1 of 2: the output"),
    (ring([HOP, "theirs = mine", MORE, MERGE]), "on rank 0 of 2: the output"),
    (ring([HOP, THEIRS, MORE, "out, lse = more"]), "on rank"),
    (
        ring([HOP, THEIRS.replace("rank - step", "rank + step"), MORE, MERGE]),
        "on rank 1 of 3: the output",
    ),
    (ring([HOP.replace("kv)", "kv.detach())"), THEIRS, MORE, MERGE]), "the gradient of k"),
    (
        ring(
            [
                HOP,
                "first = (rank - step) % world_size * len(mine)",
                "theirs = torch.arange(first, first + len(mine))",
                MORE,
                MERGE,
            ]
        ),
        "on rank",
    ),
    (ring([HOP, THEIRS, MORE, MERGE], last="Shift.apply(kv); return out, lse"), "sends to"),
    (zigzag(CHUNKS, "return torch.cat([chunks[rank], chunks[-rank]])"), "24 tokens"),
    (zigzag(CHUNKS, "return torch.cat(chunks[2 * rank : 2 * rank + 2])"), "rank 1 gets"),
    (zigzag("return torch.arange(rank, length, world_size)"), "rank 1 gets"),
    (zigzag(CHUNKS, "return torch.cat([chunks[-1 - rank], chunks[rank]])"), "rank 1 gets"),
    (
        zigzag(
            CHUNKS,
            "return torch.cat([chunks[rank], chunks[-1 - rank]])",
            check="require_chunks(length, world_size)",
        ),
        "no ValueError",
    ),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
