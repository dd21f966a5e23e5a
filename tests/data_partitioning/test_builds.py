"""The rule of a sampler, right in other words, and wrong as people write it."""

from mgpu_tutorial.data_partitioning.builds import build
from tests.builds import Right, Wrong, edited

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
CHECK = "if not 0 <= rank < world_size:"
DEALT = "order[rank::world_size]"
RANK_INDICES = [
    Right("rank_indices", replace={"generator =…": LOOP}),
    Right("rank_indices", replace={"generator =…": TENSORS}),
    Right("rank_indices", replace={CHECK: "if rank not in range(world_size):"}),
    Wrong(
        "rank_indices",
        replace={"seed + epoch": "seed"},
        says="epoch 1 has the order of epoch 0",
    ),
    Wrong("rank_indices", replace={"seed + epoch": "seed + epoch + rank"}, says=TWICE),
    Wrong("rank_indices", replace={", generator=generator": ""}, says=TWICE),
    Wrong("rank_indices", replace={"return ": ""}, says="nothing was returned"),
    Wrong("rank_indices", replace={"rank::world_size": "rank:"}, says=WRONG_PARTS),
    Wrong("rank_indices", replace={PADDED: "[]"}, says="of 10 samples with drop_last=False"),
    Wrong(
        "rank_indices",
        replace={PADDED: "order[: world_size - samples % world_size]"},
        says=WRONG_PARTS,
    ),
    Wrong(
        "rank_indices", replace={PADDED: "order[:missing]"}, says="of 2 samples rank 4 of 5"
    ),
    Wrong("rank_indices", replace={PADDED: "[0] * missing"}, says="of 10 samples rank"),
    Wrong("rank_indices", replace={"samples - samples % world_size": "-1"}, says=WRONG_PARTS),
    Wrong(
        "rank_indices", replace={"if drop_last": "if not drop_last"}, says="expected 4 each"
    ),
    Wrong(
        "rank_indices",
        replace={"seed + epoch": "seed * (epoch + 1)"},
        says="of 10 samples rank 0 of 3 gets",
    ),
    Wrong(
        "rank_indices",
        replace={
            "generator = torch.Generator().manual_seed(": "generator = torch.manual_seed("
        },
        says="use torch.Generator()",
    ),
    Wrong(
        "rank_indices", replace={CHECK: "if rank >= world_size:"}, says="rank -1 of 2 gets"
    ),
    Wrong("rank_indices", replace={CHECK: "if False:"}, says="rank 2 of 2 gets"),
    Wrong(
        "rank_indices",
        replace={DEALT: "torch.tensor(order).chunk(world_size)[rank]"},
        says="of 10 samples rank 0 of 3 gets",
    ),
]
CUT = "return [whole.tensor_split(world_size)[rank].tolist() for whole in wholes]"
TAIL = "order.split(batch)"
OTHERS = """order = order.tolist()
    wholes = [order[i : i + batch] for i in range(0, samples, batch)]
    return [whole[rank::world_size] for whole in wholes]"""
BY_SAMPLER = """mine = order[rank::world_size]
    return [part.tolist() for part in mine.split(batch // world_size)]"""
ORDER = 'torch.randperm(samples, generator=generator, device="cpu")'
GLOBAL_BATCHES = [
    Right("global_batches", replace={CUT: OTHERS}),
    Right("global_batches", replace={CUT: CUT.replace(".tolist()", "")}),
    Wrong("global_batches", replace={"return ": ""}, says="nothing was returned"),
    Wrong(
        "global_batches",
        replace={CUT: BY_SAMPLER},
        says="3 ranks: rank 0 has 4 batches, expected 3",
    ),
    Wrong(
        "global_batches",
        replace={"tensor_split(world_size)[rank]": "split(batch // world_size)[rank]"},
        says="IndexError: tuple index",
    ),
    Wrong(
        "global_batches",
        replace={TAIL: "order.split(batch)[:-1]"},
        says="one process gets batches of [8, 8], expected [8, 8, 4]",
    ),
    Wrong(
        "global_batches",
        replace={"seed + epoch": "seed + epoch + rank"},
        says="and one process has",
    ),
    Wrong(
        "global_batches",
        replace={"seed + epoch": "seed"},
        says="epoch 1 has the batches of epoch 0",
    ),
    Wrong(
        "global_batches", replace={", generator=generator": ""}, says="and one process has"
    ),
    Wrong(
        "global_batches",
        replace={ORDER: "torch.arange(samples) + 0 * epoch"},
        says="epoch 1 has the batches of epoch 0",
    ),
    Wrong(
        "global_batches",
        replace={"torch.Generator().manual_seed(": "torch.manual_seed("},
        says="use torch.Generator()",
    ),
    Wrong(
        "global_batches",
        replace={"whole.tensor_split(world_size)[rank]": "whole"},
        says="3 ranks: batch 0 is [[",
    ),
]
test_right, test_wrong = edited(build, [*RANK_INDICES, *GLOBAL_BATCHES])
