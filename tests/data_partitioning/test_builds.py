"""The rule of a sampler, right in other words, and wrong as people write it."""

from mgpu_tutorial.data_partitioning.builds import build
from tests.builds import edited

LOOP = """generator = torch.Generator()
    generator.manual_seed(epoch + seed)
    order = [int(i) for i in torch.randperm(samples, generator=generator)]
    each = samples // world_size if drop_last else -(-samples // world_size)
    return [order[(rank + i * world_size) % samples] for i in range(each)]"""
TENSORS = """generator = torch.Generator().manual_seed(seed + epoch)
    each = (samples if drop_last else samples + world_size - 1) // world_size
    places = torch.arange(each * world_size) % samples
    order = torch.randperm(samples, generator=generator)
    return order[places].view(each, world_size)[:, rank]"""
PADDED, WRONG_PARTS = "(order * world_size)[:missing]", "the parts are [["
TWICE = "different ones, expected"
CHECK = "check_rank(rank, world_size)"
DEALT = "order[rank::world_size]"
RANK_INDICES = [
    ("generator =…", LOOP),
    ("generator =…", TENSORS),
    (CHECK, "assert rank in range(world_size)"),
    ("seed + epoch", "seed", "epoch 1 has the order of epoch 0"),
    ("seed + epoch", "seed + epoch + rank", TWICE),
    (", generator=generator", "", TWICE),
    ("return ", "", "nothing was returned"),
    ("rank::world_size", "rank:", WRONG_PARTS),
    (PADDED, "[]", "of 10 samples with drop_last=False"),
    (PADDED, "order[: world_size - samples % world_size]", WRONG_PARTS),
    (PADDED, "order[:missing]", "of 2 samples rank 4 of 5"),
    (PADDED, "[0] * missing", "of 10 samples rank"),
    ("samples - samples % world_size", "-1", WRONG_PARTS),
    ("if drop_last", "if not drop_last", "expected 4 each"),
    ("seed + epoch", "seed * (epoch + 1)", "of 10 samples rank 0 of 3 gets"),
    (
        "generator = torch.Generator().manual_seed(",
        "generator = torch.manual_seed(",
        "use torch.Generator()",
    ),
    (CHECK, "assert rank < world_size", "rank -1 of 2 gets"),
    (CHECK, "pass", "rank 2 of 2 gets"),
    (DEALT, "torch.tensor(order).chunk(world_size)[rank]", "of 10 samples rank 0 of 3 gets"),
]
CUT = "return [whole.tensor_split(world_size)[rank].tolist() for whole in order.split(batch)]"
TAIL = "order.split(batch)"
OTHERS = """order = order.tolist()
    wholes = [order[i : i + batch] for i in range(0, samples, batch)]
    return [whole[rank::world_size] for whole in wholes]"""
BY_SAMPLER = """mine = order[rank::world_size]
    return [part.tolist() for part in mine.split(batch // world_size)]"""
GLOBAL_BATCHES = [
    (CUT, OTHERS),
    (CUT, CUT.replace(".tolist()", "")),
    ("return ", "", "nothing was returned"),
    (CUT, BY_SAMPLER, "3 ranks: rank 0 has 4 batches, expected 3"),
    (
        "tensor_split(world_size)[rank]",
        "split(batch // world_size)[rank]",
        "IndexError: tuple index",
    ),
    (
        TAIL,
        "order.split(batch)[:-1]",
        "one process gets batches of [8, 8], expected [8, 8, 4]",
    ),
    ("seed + epoch", "seed + epoch + rank", "and one process has"),
    ("seed + epoch", "seed", "epoch 1 has the batches of epoch 0"),
    (", generator=generator", "", "and one process has"),
    (
        'torch.randperm(samples, generator=generator, device="cpu")',
        "torch.arange(samples) + 0 * epoch",
        "epoch 1 has the batches of epoch 0",
    ),
    ("torch.Generator().manual_seed(", "torch.manual_seed(", "use torch.Generator()"),
    ("whole.tensor_split(world_size)[rank]", "whole", "3 ranks: batch 0 is [["),
]
test_right, test_wrong = edited(
    build, {"rank_indices": RANK_INDICES, "global_batches": GLOBAL_BATCHES}
)
