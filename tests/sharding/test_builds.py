"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.sharding.builds import build
from tests.builds import edited

REDUCE = "dist.reduce(parameter.grad, group_dst=owner[i], group=group)"
DIVIDE = "parameter.grad /= dist.get_world_size(group)"
OWNS = "owner[i] == dist.get_rank(group)"
SEND = "dist.broadcast(parameter.data, group_src=owner[i], group=group)"
GLOBAL = "(group or dist.group.WORLD, owner[i])"
STEP = [
    (REDUCE, "pass", DIVIDE, f"{DIVIDE}; {REDUCE}")
    + (SEND, "dist.broadcast(parameter.detach(), group_src=owner[i], group=group)"),
    (REDUCE, f"dist.reduce(parameter.grad, dist.get_global_rank{GLOBAL}, group=group)"),
    (DIVIDE, "parameter.grad /= dist.get_world_size()", "SGD: rank"),
    (DIVIDE, "pass", "and one process by"),
    (SEND, "pass", "of 2 has moved"),
    (REDUCE, "dist.all_reduce(parameter.grad, group=group)", "calls of a step"),
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
GATHER, RETURN = "dist.all_gather_single(whole, shard, group=group)", "return whole"
SCATTER = "dist.reduce_scatter_single(shard, gradient, group=ctx.group)"
MEAN = "return shard / ranks, None"
ALL = """gradient = gradient / ranks
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ranks)[dist.get_rank(ctx.group)], None"""
LIST = "list(whole.chunk(dist.get_world_size(group)))"
GATHERS = [
    (SCATTER, SCATTER.replace("gradient,", "gradient / ranks,"), MEAN, "return shard, None")
    + (GATHER, f"dist.all_gather({LIST}, shard, group=group)"),
    (MEAN, "return shard, None", "rank 0 of 3: the gradient: [6, 12], expected [2, 4]"),
    (SCATTER, SCATTER.replace("ctx.group", "None"), "rank"),
    (SCATTER, f"{SCATTER}\n        dist.all_reduce(gradient)", "single, all_reduce"),
    (MEAN, ALL, SCATTER, "pass", "the calls of backward: all_reduce"),
    (GATHER, "whole.copy_(shard.repeat(dist.get_world_size(group)))", "rank 0 of 3"),
    (GATHER, GATHER.replace("whole, shard", "shard, whole"), "result is the first argument"),
    (RETURN, "", "returns no tensor"),
]
WEIGHT = "Gather.apply(shard, group)[: shape.numel()].view(shape)"
FIRST = "for shard in [Gather.apply(shard) for shard in shards]"
CHAIN = [
    (WEIGHT, "Gather.apply(shard).narrow(0, 0, shape.numel()).reshape(shape)"),
    (WEIGHT, "Gather.apply(shard).view(shape)", "shape '[3, 3]'"),
    ("    return x", "        return x", "gets no gradient"),
    (WEIGHT, "Gather.apply(shard)[-shape.numel() :].view(shape)", "rank 0 of 2: the output"),
    (WEIGHT, f"{WEIGHT}.detach().requires_grad_()", "shard number 0 gets no gradient"),
    (WEIGHT, f"{WEIGHT}.T", "rank 0 of 1: the output: [1, 0, 0], expected [1, 101, 10]"),
    (
        "for shard in shards",
        FIRST,
        WEIGHT,
        WEIGHT.replace("Gather.apply(shard, group)", "shard"),
    )
    + ("3 weights are gathered before the first layer computes",),
]

COMPUTE = "return functional_call(self.module, views, inputs, keywords)"
ELSEWHERE = "if tensor.untyped_storage() is not memory:"
PLACE = "place = tensor.shape, tensor.stride(), tensor.storage_offset()"
FRESH, HERE = "if self.whole is None:", "self.whole = self.unshard().detach()"
PLACED, UNMOVED = "self.whole.as_strided(*place)", "require_unmoved(self.shard, version)"
BLOCK = [
    (ELSEWHERE, "if tensor.untyped_storage().data_ptr() != memory.data_ptr():"),
    (HERE, "with torch.no_grad(): self.whole = self.unshard()"),
    (PLACE, "place = tensor.size(), tensor.stride(), tensor.storage_offset()"),
    (ELSEWHERE, "if True:", "gathered bytes are there after forward"),
    (
        ELSEWHERE,
        "if tensor.data_ptr() != memory.data_ptr():",
        "bytes are there after forward",
    ),
    ("finally:\n            self.reshard()", "finally:\n            pass", "bytes are there"),
    (FRESH, "if True:", "all-gathers and reduce-scatters of backward"),
    (HERE, "self.whole = self.unshard().detach() * 2", "1 ranks: the gradient of"),
    (UNMOVED, "pass", "nothing is said, and backward goes on with the new weights"),
    (
        "tensor.stride(), tensor",
        "torch.empty(tensor.shape).stride(), tensor",
        "the gradient of",
    ),
    (COMPUTE, COMPUTE.replace("return", ""), "forward returns None, no tensor"),
]
PATHS, FOUND = "model.set_submodule(path, sharded)", "remove_duplicate=False"
REST = "return kind(model, group) if places_of(model) else model"
ANY = [
    (FOUND, ""),
    (REST, "return kind(model, group)"),
    (REST, "return model", "4 parameters stay whole on each rank: `token.weight`"),
    (PATHS, "pass", "no attribute 'weight'"),
    ("sharded = kind(block, group)", "sharded = kind(block)", "rank"),
    (REST, "kind(model, group)", "it returns None, no module"),
]

test_right, test_wrong = edited(
    build,
    {
        "sharded_step": STEP,
        "owners": OWNERS,
        "Gather": GATHERS,
        "chain": CHAIN,
        "ShardedBlock": BLOCK,
        "fully_sharded": ANY,
    },
)
