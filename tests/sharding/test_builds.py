"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.sharding.builds import build
from tests.builds import Right, Wrong, edited

REDUCE = "dist.reduce(p.grad, group_dst=rank, group=group)"
DIVIDE = "p.grad /= dist.get_world_size(group)"
OWNS = "rank == dist.get_rank(group)"
SEND = "dist.broadcast(p.data, group_src=rank, group=group)"
GLOBAL = "(group or dist.group.WORLD, rank)"
STEP = [
    Right(
        "sharded_step",
        replace={
            REDUCE: "pass",
            DIVIDE: f"{DIVIDE}; {REDUCE}",
            SEND: "dist.broadcast(p.detach(), group_src=rank, group=group)",
        },
    ),
    Right(
        "sharded_step",
        replace={REDUCE: f"dist.reduce(p.grad, dist.get_global_rank{GLOBAL}, group=group)"},
    ),
    Wrong(
        "sharded_step", replace={DIVIDE: "p.grad /= dist.get_world_size()"}, says="SGD: rank"
    ),
    Wrong("sharded_step", replace={DIVIDE: "pass"}, says="and one process by"),
    Wrong("sharded_step", replace={SEND: "pass"}, says="of 2 has moved"),
    Wrong(
        "sharded_step",
        replace={REDUCE: "dist.all_reduce(p.grad, group=group)"},
        says="calls of a step",
    ),
    Wrong(
        "sharded_step",
        replace={SEND: "pass", REDUCE: f"{SEND}\n        {REDUCE}"},
        says="of 2 has moved",
    ),
    Wrong(
        "sharded_step",
        replace={REDUCE: f"{OWNS} and {REDUCE}"},
        says="or meant for a different call",
    ),
]
LEAST = "owner[i] = owned.index(min(owned))"
IS_LARGE = "parameters[i].numel() > max(p.numel() for p in parameters) / 100"
IN_A_ROW = "[i // -(-len(parameters) // world_size) for i in range(len(parameters))]"
OWNERS = [
    Right(
        "owners",
        replace={LEAST: "owner[i] = min(range(world_size), key=lambda rank: owned[rank])"},
    ),
    Right(
        "owners",  # the fullest rank has 33,280: 0.6% above the best
        replace={LEAST: f"{LEAST} if {IS_LARGE} else world_size - 1"},
    ),
    Wrong(
        "owners",
        replace={LEAST: "owner[i] = i % world_size"},
        says="the fullest has 65536, expected at most 33418",
    ),
    Wrong(
        "owners",
        replace={".numel()):": ".numel() - __import__('os').urandom(1)[0] / 999):"},
        says="beside those on rank 0",
    ),
    Wrong(
        "owners",
        replace={"return owner": "return list(range(len(parameters)))"},
        says="is no rank of 4",
    ),
    Wrong(
        "owners",
        replace={"parameters[i].numel()\n    ret…": "1\n    return owner"},
        says="the fullest has 11, expected at most 9",
    ),
    Wrong(
        "owners",
        replace={"return owner": f"return {IN_A_ROW}"},
        says="the fullest has 17, expected at most 16",
    ),
    Wrong("owners", replace={"return owner": ""}, says="Is a `return` missing?"),
]
GATHER, RETURN = "dist.all_gather_single(whole, shard, group=group)", "return whole"
SCATTER = "dist.reduce_scatter_single(shard, gradient, group=ctx.group)"
MEAN = "return shard / ranks, None"
ALL = """gradient = gradient / ranks
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ranks)[dist.get_rank(ctx.group)], None"""
LIST = "list(whole.chunk(dist.get_world_size(group)))"
GATHERS = [
    Right(
        "Gather",
        replace={
            SCATTER: SCATTER.replace("gradient,", "gradient / ranks,"),
            MEAN: "return shard, None",
            GATHER: f"dist.all_gather({LIST}, shard, group=group)",
        },
    ),
    Wrong(
        "Gather",
        replace={MEAN: "return shard, None"},
        says="rank 0 of 3: the gradient: [6, 12], expected [2, 4]",
    ),
    Wrong("Gather", replace={SCATTER: SCATTER.replace("ctx.group", "None")}, says="rank"),
    Wrong(
        "Gather",
        replace={SCATTER: f"{SCATTER}\n        dist.all_reduce(gradient)"},
        says="single, all_reduce",
    ),
    Wrong(
        "Gather",
        replace={MEAN: ALL, SCATTER: "pass"},
        says="the calls of backward: all_reduce",
    ),
    Wrong(
        "Gather",
        replace={GATHER: "whole.copy_(shard.repeat(dist.get_world_size(group)))"},
        says="rank 0 of 3",
    ),
    Wrong(
        "Gather",
        replace={GATHER: GATHER.replace("whole, shard", "shard, whole")},
        says="result is the first argument",
    ),
    Wrong("Gather", replace={RETURN: ""}, says="returns no tensor"),
]
WEIGHT = "Gather.apply(shard, group)[: shape.numel()].view(shape)"
FIRST = "for shard in [Gather.apply(shard) for shard in shards]"
CHAIN = [
    Right(
        "chain",
        replace={WEIGHT: "Gather.apply(shard).narrow(0, 0, shape.numel()).reshape(shape)"},
    ),
    Wrong(
        "chain", replace={WEIGHT: "Gather.apply(shard).view(shape)"}, says="shape '[3, 3]'"
    ),
    Wrong("chain", replace={"    return x": "        return x"}, says="gets no gradient"),
    Wrong(
        "chain",
        replace={WEIGHT: "Gather.apply(shard)[-shape.numel() :].view(shape)"},
        says="rank 0 of 2: the output",
    ),
    Wrong(
        "chain",
        replace={WEIGHT: f"{WEIGHT}.detach().requires_grad_()"},
        says="shard number 0 gets no gradient",
    ),
    Wrong(
        "chain",
        replace={WEIGHT: f"{WEIGHT}.T"},
        says="rank 0 of 1: the output: [1, 0, 0], expected [1, 101, 10]",
    ),
    Wrong(
        "chain",
        replace={
            "for shard in shards": FIRST,
            WEIGHT: WEIGHT.replace("Gather.apply(shard, group)", "shard"),
        },
        says="3 weights are gathered before the first layer computes",
    ),
]

COMPUTE = "output = self.module(*inputs, **keywords)"
MEMORY = "self.whole.untyped_storage()"
ELSEWHERE = f"if tensor.untyped_storage() is not {MEMORY}:"
PLACE = "place = tensor.shape, tensor.stride(), tensor.storage_offset()"
FRESH, HERE = "if self.whole is None:", "            self.gathered()\n        return"
UNMOVED = "if version != self.shard._version:"
BLOCK = [
    Right(
        "ShardedBlock",
        replace={
            ELSEWHERE: f"if tensor.untyped_storage().data_ptr() != {MEMORY}.data_ptr():"
        },
    ),
    Right(
        "ShardedBlock",
        replace={HERE: "            self.whole = self.unshard().detach()\n        return"},
    ),
    Right(
        "ShardedBlock",
        replace={PLACE: "place = tensor.size(), tensor.stride(), tensor.storage_offset()"},
    ),
    Wrong(
        "ShardedBlock",
        replace={ELSEWHERE: "if True:"},
        says="gathered bytes are there after forward",
    ),
    Wrong(
        "ShardedBlock",
        replace={ELSEWHERE: f"if tensor.data_ptr() != {MEMORY}.data_ptr():"},
        says="bytes are there after forward",
    ),
    Wrong("ShardedBlock", replace={"        self.reshard()\n": ""}, says="bytes are there"),
    Wrong(
        "ShardedBlock",
        replace={FRESH: "if True:"},
        says="all-gathers and reduce-scatters of backward",
    ),
    Wrong(
        "ShardedBlock",
        replace={
            HERE: "            self.whole = self.unshard().detach() * 2\n        return"
        },
        says="1 ranks: the gradient of",
    ),
    Wrong(
        "ShardedBlock",
        replace={UNMOVED: "if False:"},
        says="nothing is said, and backward goes on with the new weights",
    ),
    Wrong(
        "ShardedBlock",
        replace={"tensor.stride(), tensor": "torch.empty(tensor.shape).stride(), tensor"},
        says="the gradient of",
    ),
    Wrong(
        "ShardedBlock",
        replace={COMPUTE: COMPUTE.replace(", **keywords", "")},
        says="the output of block(x, scale=2.0)",
    ),
    Wrong(
        "ShardedBlock",
        replace={COMPUTE: COMPUTE.replace("output =", "output = None;")},
        says="forward returns None, no tensor",
    ),
    Wrong(
        "ShardedBlock",
        replace={"self.hooks()": "saved_tensors_hooks(self.pack, self.unpack)"},
        says="around the block, on rank 0: activations that are kept: 1, expected 0",
    ),
]
PATHS, FOUND = "model.set_submodule(path, sharded)", "remove_duplicate=False"
SHARDED = "sharded = kind(block, group)"
LISTED = "paths = [path for path, part in every if part is block]"
LOOP = f"for path in paths:\n            {PATHS}"
WHILE = f"""for path, part in every:
            if part is block:
                {PATHS.replace("sharded", "kind(block, group)")}"""
REST = "return kind(model, group) if places_of(model) else model"
ANY = [
    Right("fully_sharded", replace={REST: "return kind(model, group)"}),
    Wrong(
        "fully_sharded",
        replace={REST: "return model"},
        says="`inner`, which is in no block, stays whole",
    ),
    Wrong("fully_sharded", replace={PATHS: "pass"}, says="no sharded block is at `first`"),
    Wrong("fully_sharded", replace={FOUND: ""}, says="no sharded block is at `last`"),
    Wrong(
        "fully_sharded",
        replace={PATHS: PATHS.replace("sharded", "kind(block, group)"), SHARDED: ""},
        says="no parameters",
    ),
    Wrong(
        "fully_sharded", replace={SHARDED: "", LISTED: "", LOOP: WHILE}, says="no parameters"
    ),
    Wrong(
        "fully_sharded",
        replace={"sharded = kind(block, group)": "sharded = kind(block)"},
        says="rank",
    ),
    Wrong(
        "fully_sharded",
        replace={REST: "kind(model, group)"},
        says="it returns None, no module",
    ),
]

OVER, FACTOR = 'if group != "whole":', "(max_norm / (norm + 1e-6)).clamp(max=1.0)"
AT_WORK = [
    Right("clip_grad_norm", replace={FACTOR: "min(1.0, max_norm / (norm.item() + 1e-6))"}),
    Wrong("clip_grad_norm", replace={OVER: "if False:"}, says="rank 0 of 2: the norm"),
    Wrong("clip_grad_norm", replace={OVER: "if True:"}, says="whole"),
    Wrong(
        "clip_grad_norm",
        replace={FACTOR: FACTOR.replace(".clamp(max=1.0)", "")},
        says="max_norm 100, rank 0 of 1: the gradients",
    ),
    Wrong(
        "clip_grad_norm",
        replace={"dist.all_reduce(part, group=group)": "dist.all_reduce(part)"},
        says="rank 0 of 4: the norm",
    ),
    Wrong(
        "clip_grad_norm",
        replace={"dist.all_reduce(total, group=group)": "pass"},
        says="owners, rank 0 of 3: the norm",
    ),
]

test_right, test_wrong = edited(
    build, [*STEP, *OWNERS, *GATHERS, *CHAIN, *BLOCK, *ANY, *AT_WORK]
)
