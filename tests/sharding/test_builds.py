"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.sharding.builds import build
from tests.builds import edited

REDUCE = "dist.reduce(parameter.grad, owner[i])"
DIVIDE, OWNS = "parameter.grad /= dist.get_world_size()", "owner[i] == dist.get_rank()"
SEND = "dist.broadcast(parameter.data, owner[i])"
STEP = [
    (REDUCE, "pass", DIVIDE, f"{DIVIDE}; {REDUCE}")
    + (SEND, "dist.broadcast(parameter.detach(), src=owner[i])"),
    (DIVIDE, "pass", "and one process by"),
    (SEND, "pass", "of 2 has moved"),
    (REDUCE, "dist.all_reduce(parameter.grad)", "calls of a step"),
    (SEND, "pass", REDUCE, f"{SEND}\n        {REDUCE}", "of 2 has moved"),
    (REDUCE, f"{OWNS} and {REDUCE}", "a distributed collective mismatch"),
]
LEAST = "owner[i] = owned.index(min(owned))"
IN_A_ROW = "[i // -(-len(parameters) // world_size) for i in range(len(parameters))]"
OWNERS = [
    (LEAST, "owner[i] = min(range(world_size), key=lambda rank: owned[rank])"),
    (LEAST, "owner[i] = i % world_size", "the fullest has: 65536, expected 33088"),
    (
        ".numel()):",
        ".numel() - __import__('os').urandom(1)[0] / 999):",
        "beside those on rank 0",
    ),
    ("return owner", "return list(range(len(parameters)))", "is no rank of 4"),
    (
        "parameters[i].numel()\n    ret…",
        "1\n    return owner",
        "the fullest has: 11, expected 9",
    ),
    ("return owner", f"return {IN_A_ROW}", "the fullest has: 17, expected 16"),
    ("return owner", "", "Is a `return` missing?"),
]
GATHER, RETURN = "dist.all_gather_single(whole, shard)", "return whole"
SCATTER = "dist.reduce_scatter_single(shard, gradient)"
MEAN = "return shard / dist.get_world_size()"
ALL = """gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]"""
GATHERS = [
    (SCATTER, "dist.reduce_scatter_single(shard, gradient / dist.get_world_size())")
    + (MEAN, "return shard")
    + (GATHER, "dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)"),
    (MEAN, "return shard", "rank 0 of 3: the gradient"),
    (SCATTER, f"{SCATTER}\n        dist.all_reduce(gradient)", "single, all_reduce"),
    (MEAN, ALL, SCATTER, "pass", "the calls of backward: all_reduce"),
    (GATHER, "whole.copy_(shard.repeat(dist.get_world_size()))", "rank 0 of 3"),
    (RETURN, "", "returns no tensor"),
]
WEIGHT = "Gather.apply(shard)[: shape.numel()].view(shape)"
FIRST = "for shard in [Gather.apply(shard) for shard in shards]"
CHAIN = [
    (WEIGHT, "Gather.apply(shard).narrow(0, 0, shape.numel()).reshape(shape)"),
    (WEIGHT, "Gather.apply(shard).view(shape)", "shape '[3, 3]'"),
    ("    return x", "        return x", "a shard gets no gradient"),
    (WEIGHT, "Gather.apply(shard)[-shape.numel() :].view(shape)", "world size 2: the output"),
    ("for shard in shards", FIRST, WEIGHT, WEIGHT.replace("Gather.apply(shard)", "shard"))
    + ("3 weights are gathered before the first layer computes",),
]

test_right, test_wrong = edited(
    build, {"sharded_step": STEP, "owners": OWNERS, "Gather": GATHERS, "chain": CHAIN}
)
