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
PARTS, VIEW = "flat[: sum(sizes)].split(sizes)", "part.view(shape)"
VIEWS = [
    Right("views_of", replace={PARTS: "flat.narrow(0, 0, sum(sizes)).split(sizes)"}),
    Wrong("views_of", replace={PARTS: "flat.split(sizes)"}, says="split_with_sizes"),
    Wrong("views_of", replace={VIEW: "part.clone().view(shape)"}, says="are copies"),
    Wrong(
        "views_of", replace={VIEW: "part"}, says="of the numbers 0 to 11 `weight`: the shape"
    ),
    Wrong("views_of", replace={VIEW: "part.detach().view(shape)"}, says="require grad"),
    Wrong(
        "views_of",
        replace={PARTS: "flat[-sum(sizes) :].split(sizes)"},
        says="of the numbers 0 to 11 `weight`: [3, 4, 5, 6, 7, 8], expected [0, 1, 2, 3",
    ),
    Wrong("views_of", replace={"    return {": "    {"}, says="it returns None, no dict"),
]
WHOLE, COMPUTE = (
    "Gather.apply(shard, group)",
    "functional_call(module, views_of(whole, shapes), (x,))",
)
CALL = [
    Right("sharded_call", replace={COMPUTE: COMPUTE.replace("(x,)", "x")}),
    Wrong("sharded_call", replace={COMPUTE: "module(x)"}, says="the shard gets no gradient"),
    Wrong("sharded_call", replace={WHOLE: f"{WHOLE}.detach()"}, says="require grad"),
    Wrong(
        "sharded_call",
        replace={WHOLE: "Gather.apply(shard)"},
        says="rank 0 of 4 in a group of ranks 0 and 2: the output",
    ),
    Wrong(
        "sharded_call",
        replace={COMPUTE: COMPUTE.replace("whole,", f"{WHOLE},")},
        says="the calls of forward: all_gather_single, all_gather_single",
    ),
]

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
    build, [*STEP, *OWNERS, *GATHERS, *VIEWS, *CALL, *BLOCK, *ANY, *AT_WORK]
)
