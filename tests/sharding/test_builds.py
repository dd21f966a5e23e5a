"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.sharding.builds import build
from tests.builds import right_and_wrong

HEAD = "import torch\nimport torch.distributed as dist\nSUM = dist.ReduceOp.SUM\n"


def step(before="", after="dist.broadcast(p.data, owner[i])", inner="optimizer.step()"):
    return f"""{HEAD}
def sharded_step(parameters, owner, optimizer):
    for i, p in enumerate(parameters):
        {before or "dist.reduce(p.grad, owner[i]); p.grad /= dist.get_world_size()"}
    {inner}
    for i, p in enumerate(parameters):
        {after}
"""


def rule(*lines):
    body = "\n    ".join(lines)
    return f"def owners(parameters, world_size):\n    {body}\n"


ORDER = "for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):"
START = "sizes = [p.numel() for p in parameters]; owner = [0] * len(sizes)"


def gather(
    backward="shard = gradient.new_empty(len(gradient) // dist.get_world_size()); "
    "dist.reduce_scatter_single(shard, gradient); return shard / dist.get_world_size()",
    forward="dist.all_gather_single(whole, shard); return whole",
):
    return f"""{HEAD}
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        whole = shard.new_empty(dist.get_world_size() * len(shard))
        {forward}

    @staticmethod
    def backward(ctx, gradient):
        {backward}
"""


def layers(weight="Gather.apply(shard)[: shape.numel()].view(shape)", x="torch.tanh(x @ w)"):
    return f"""{HEAD}from mgpu_tutorial.sharding.zero3 import Gather
def chain(shards, shape, x):
    for shard in shards:
        w = {weight}
        x = {x}
    return x
"""


EVERYBODY_S = """g = gradient.clone(); dist.all_reduce(g)
        n, r = dist.get_world_size(), dist.get_rank()
        return g.chunk(n)[r] / n"""
RIGHT = [
    step("p.grad /= dist.get_world_size(); dist.reduce(p.grad, dst=owner[i])"),
    step(after="dist.broadcast(p.detach(), src=owner[i])"),
    step("dist.reduce(p.grad, owner[i], op=SUM); p.grad.div_(dist.get_world_size())"),
    rule(
        START,
        "owned = [0] * world_size",
        ORDER,
        "    owner[i] = min(range(world_size), key=lambda rank: owned[rank])",
        "    owned[owner[i]] += sizes[i]",
        "return owner",
    ),
    rule(
        START,
        "import heapq",
        "heap = [(0, rank) for rank in range(world_size)]",
        ORDER,
        "    had, owner[i] = heapq.heappop(heap)",
        "    heapq.heappush(heap, (had + sizes[i], owner[i]))",
        "return owner",
    ),
    gather(
        "n = dist.get_world_size(); shard = gradient[: len(gradient) // n].clone(); "
        "dist.reduce_scatter_single(shard, gradient / n); return shard"
    ),
    gather(
        forward="dist.all_gather(list(whole.chunk(dist.get_world_size())), shard); "
        "return whole"
    ),
    layers("Gather.apply(shard).narrow(0, 0, shape.numel()).reshape(shape)"),
    layers(x="(x @ w).tanh()"),
]
WRONG = [
    (step("dist.reduce(p.grad, owner[i])"), "in one process"),
    (step("p.grad /= dist.get_world_size()"), "rank 0 of 2 with SGD"),
    (step(after="pass"), "with SGD"),
    (step("dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"), "calls of a step"),
    (step("dist.reduce(p.grad, 0); p.grad /= dist.get_world_size()"), "rank 0 of 2 with SGD"),
    (step(after="dist.broadcast(p.data, 0)"), "rank 0 of 2 with SGD"),
    (
        rule("return [i % world_size for i in range(len(parameters))]"),
        "entry 0 of 4: 65536, expected 33088",
    ),
    (rule("return [0] * len(parameters)"), "that a rank owns"),
    (rule("sizes = [p.numel() for p in parameters]"), "TypeError"),
    (
        rule(
            START,
            "owned = [0] * world_size",
            "for i in range(len(sizes)):",
            "    owner[i] = owned.index(min(owned))",
            "    owned[owner[i]] += sizes[i]",
            "return owner",
        ),
        "that a rank owns",
    ),
    (rule(START, ORDER, "    owner[i] = i", "return owner"), "is no rank of 4"),
    (
        gather(
            "shard = gradient.new_empty(len(gradient) // dist.get_world_size()); "
            "dist.reduce_scatter_single(shard, gradient); return shard"
        ),
        "rank 0 of 2",
    ),
    (gather(EVERYBODY_S), "the calls of backward: all_reduce"),
    (
        gather("n, r = dist.get_world_size(), dist.get_rank(); return gradient.chunk(n)[r]"),
        "rank 0 of 2: the gradient",
    ),
    (
        gather(forward="return whole.copy_(shard.repeat(dist.get_world_size()))"),
        "rank 0 of 2",
    ),
    (gather(forward="dist.all_gather_single(whole, shard)"), "forward"),
    (layers("Gather.apply(shard).view(shape)"), "shape '[3, 3]'"),
    (layers("shard.view(shape)"), "shape '[3, 3]'"),
    (layers("Gather.apply(shard.detach())[: shape.numel()].view(shape)"), "grad"),
    (layers("Gather.apply(shard)[-shape.numel() :].view(shape)"), "2 ranks: the output"),
]

test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
