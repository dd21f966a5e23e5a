"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.long_sequences.builds import build
from tests.builds import edited

BY_LARGEST = """largest = torch.maximum(lse, block_lse)
    a, b = (lse - largest).exp(), (block_lse - largest).exp()
    return (a * out + b * block_out) / (a + b), largest + (a + b).log()"""
BY_SIGMOID = """out = out - torch.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse - torch.nn.functional.logsigmoid(lse - block_lse)"""
BY_LSE = "return (lse * out + block_lse * block_out) / (lse + block_lse), both"
FOUR = "blocks of 4 and 4 keys: the "
MERGE = [
    ("both =…", BY_LARGEST),
    ("both =…", BY_SIGMOID),
    ("return…", "return (out + block_out) / 2, lse", f"{FOUR}log-sum-exp"),
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
MERGED_LAST = """blocks.append(attend(q, *kv, theirs > mine[:, None]))
    for more in blocks:
        out, lse = merge(out, lse, *more)
    return out, lse"""
KV, HOP = "kv = torch.stack([k, v])", "kv = Shift.apply(kv)"
DEAL, BLOCK = (
    "deal(length, (rank - step) % world_size, world_size)",
    "attend(q, *kv, theirs > ",
)
NEIGHBOURS = "torch.arange(len(mine)) + (rank - step) % world_size * len(mine)"
RING = [
    ("kv =…", KEYS_AND_VALUES),
    (KV, f"{KV}\n    blocks = []", "out, lse = merge…", MERGED_LAST),
    (HOP, "pass", "contiguous, on rank 1 of 2: the output"),
    (DEAL, "mine", "contiguous, on rank 0 of 2: the output"),
    (f"merge(out, lse, *{BLOCK}mine[:, None]))", f"{BLOCK}mine[:, None])", "on rank"),
    ("rank - step", "rank + step", "on rank 1 of 3: the output"),
    (HOP, "kv = Shift.apply(kv.detach())", "the gradient of k"),
    (DEAL, NEIGHBOURS, "striped, on rank"),
    ("return out, lse", "Shift.apply(kv); return out, lse", "sends to"),
    (HOP, "kv = Shift.apply(kv, -1)", "rank - step", "rank + step", "rank 0 sends to"),
]
FROM_THE_END = """size = length // (2 * world_size)
    front = torch.arange(rank * size, (rank + 1) * size)
    return torch.cat([front, length - 1 - front.flip(0)])"""
ROWS = "return torch.arange(length).view(2 * world_size, -1)[[rank, -1 - rank]].flatten()"
BOTH = "chunks[rank], chunks[-1 - rank]"
ZIGZAG = [
    ("chunks =…", FROM_THE_END),
    ("chunks =…", ROWS),
    ("-1 - rank", "-rank", "rank 0 of 4 gets"),
    ("return…", "return torch.cat(chunks[2 * rank : 2 * rank + 2])", "rank 0 of 4 gets"),
    ("chunks =…", "return torch.arange(rank, length, world_size)", "rank 0 of 4 gets"),
    (BOTH, "chunks[-1 - rank], chunks[rank]", "rank 0 of 4 gets"),
    (f"torch.cat([{BOTH}])", f"list(torch.cat([{BOTH}]))", "of the type"),
    ("chunk(2 * world_size)", "chunk(8)", "rank 0 of 1 gets"),
    ("require_chunks(length, 2 * world_size)", "require_chunks(length, world_size)")
    + ("no ValueError",),
]
test_right, test_wrong = edited(
    build, {"merge": MERGE, "ring_attention": RING, "zigzag": ZIGZAG}
)
