"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.long_sequences.builds import build
from tests.builds import edited

BY_LARGEST = """largest = torch.maximum(lse, block_lse)
    a, b = (lse - largest).exp(), (block_lse - largest).exp()
    return (a * out + b * block_out) / (a + b), largest + (a + b).log()"""
BY_LSE = "return (lse * out + block_lse * block_out) / (lse + block_lse), both"
MERGE = [
    ("both =…", BY_LARGEST),
    ("block_out, both", "block_out, lse", "the exp of the log-sum-exp: 1, expected 4"),
    ("block_out, both", "block_out", "type of what is returned"),
    ("torch.logaddexp(lse, block_lse)", "(lse.exp() + block_lse.exp()).log()")
    + ("blocks of 4 and 4 keys: the log-sum-exp",),
    ("return…", BY_LSE, "three that answer 4, all with the score 0: the output"),
]
KEYS_AND_VALUES = """for step in range(1, world_size):
        k, v = Shift.apply(torch.stack([k, v]), 1, group)
        owner = rank - step if rank >= step else rank - step + world_size
        later = deal(length, owner, world_size)[None, :] > mine[:, None]
        out, lse = merge(out, lse, *attend(q, k, v, later))
    return out, lse"""
HOP = "kv = Shift.apply(kv, 1, group)"
DEAL = "deal(length, (rank - step) % world_size, world_size)"
NEIGHBOURS = "torch.arange(len(mine)) + (rank - step) % world_size * len(mine)"
RING = [
    ("kv =…", KEYS_AND_VALUES),
    (HOP, "pass", "rank 1: query 2 attends to keys [2, 3], expected 0 to 2"),
    ("rank - step", "rank + step", "3 rank(s), striped, rank 1: query 1 attends to keys"),
    ("theirs > mine", "mine > theirs", "query 0 attends to keys [0, 2, 3], expected 0 to 0"),
    (HOP, "kv = Shift.apply(kv.detach(), 1, group)")
    + ("rank 0 of 2: the gradient of k with contiguous",),
    (DEAL, NEIGHBOURS, "3 rank(s), striped, rank"),
    ("return out, lse", "Shift.apply(kv); return out, lse", "sends to"),
    (HOP, "kv = Shift.apply(kv, -1, group)", "rank - step", "rank + step", "rank 0 sends to"),
    (HOP, "kv = Shift.apply(kv)", "groups of ranks 0 and 2, 1 and 3, rank"),
    ("group: Group = None", "group: Group = None, *, other=None", "(group)", "(other)")
    + ("rank",),
]
ROWS = "return torch.arange(length).view(2 * world_size, -1)[[rank, -1 - rank]].flatten()"
BOTH = "chunks[rank], chunks[-1 - rank]"
ZIGZAG = [
    ("chunks =…", ROWS),
    ("return…", "return torch.cat(chunks[2 * rank : 2 * rank + 2])", "rank 0 of 4 gets"),
    (BOTH, "chunks[-1 - rank], chunks[rank]", "rank 0 of 4 gets"),
    (f"torch.cat([{BOTH}])", f"list(torch.cat([{BOTH}]))", "of the type"),
    ("chunk(2 * world_size)", "chunk(8)", "rank 0 of 1 gets"),
    ("require_chunks(length, 2 * world_size)", "require_chunks(length, world_size)")
    + ("no ValueError",),
]
test_right, test_wrong = edited(
    build, {"merge": MERGE, "ring_attention": RING, "zigzag": ZIGZAG}
)
