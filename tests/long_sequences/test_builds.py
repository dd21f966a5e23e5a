"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.long_sequences.builds import build
from tests.builds import edited

BY_LARGEST = """largest = torch.maximum(lse, block_lse)
    a, b = (lse - largest).exp(), (block_lse - largest).exp()
    return (a * out + b * block_out) / (a + b), largest + (a + b).log()"""
BY_LSE = "return (lse * out + block_lse * block_out) / (lse + block_lse), both"
FOUR = "blocks of 4 and 4 keys: the "
MERGE = [
    ("both =…", BY_LARGEST),
    ("block_out, both", "block_out, lse", f"{FOUR}log-sum-exp"),
    ("block_out, both", "block_out", "type of what is returned"),
    ("torch.logaddexp(lse, block_lse)", "(lse.exp() + block_lse.exp()).log()", "log-sum-exp"),
    ("return…", BY_LSE, f"{FOUR}output"),
]
KEYS_AND_VALUES = """for step in range(1, world_size):
        k, v = Shift.apply(torch.stack([k, v]))
        owner = rank - step if rank >= step else rank - step + world_size
        later = deal(length, owner, world_size)[None, :] > mine[:, None]
        out, lse = merge(out, lse, *attend(q, k, v, later))
    return out, lse"""
HOP, DEAL = "kv = Shift.apply(kv)", "deal(length, (rank - step) % world_size, world_size)"
NEIGHBOURS = "torch.arange(len(mine)) + (rank - step) % world_size * len(mine)"
RING = [
    ("kv =…", KEYS_AND_VALUES),
    (HOP, "pass", "rank 1 of 2: the output with contiguous"),
    ("rank - step", "rank + step", "rank 1 of 3: the output with striped"),
    (HOP, "kv = Shift.apply(kv.detach())", "rank 0 of 2: the gradient of k with contiguous"),
    (DEAL, NEIGHBOURS, "of 3: the output with striped"),
    ("return out, lse", "Shift.apply(kv); return out, lse", "sends to"),
    (HOP, "kv = Shift.apply(kv, -1)", "rank - step", "rank + step", "rank 0 sends to"),
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
