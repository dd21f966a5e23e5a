"""What the reader's stages of ZeRO must do, on real ranks."""

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from mgpu_tutorial.distributed_sgd.sgd import average_gradients
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.lab.words import in_a_row
from mgpu_tutorial.sharding.blocks import (
    ShardedBlock,
    blocks_in,
    fully_sharded,
    sharded_call,
    views_of,
)
from mgpu_tutorial.sharding.stages import loss_of, new_tower
from mgpu_tutorial.sharding.whole import clip_grad_norm
from mgpu_tutorial.sharding.zero import Gather, flatten, owners, shard_of, sharded_step
from mgpu_tutorial.shared.models import SmallTransformer


def _calls(report: Report, during: str) -> list[str]:
    """The collectives that rank 0 calls inside a span."""
    return [e.op for e in events_of(report, during) if e.rank == 0 and e.op]


def _pair(rank: int) -> dist.ProcessGroup:
    """One of two groups: ranks 0 and 2, or ranks 1 and 3."""
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]


def _train(
    rank: int,
    world_size: int,
    step: Callable | None,
    kind: type[Optimizer],
    in_pairs: bool = False,
    pair: int = 0,
) -> dict[str, torch.Tensor]:
    """How three steps have moved the tower; without `step` one process takes them."""
    tower, start = new_tower(torch.float64), new_tower(torch.float64).state_dict()
    group = [_pair(rank)] if in_pairs else []
    pair = rank % 2 if in_pairs else pair
    rank, world_size = (rank // 2, 2) if in_pairs else (rank, world_size)
    parameters = list(tower.parameters())
    owner = [i % world_size for i in range(len(parameters))]
    optimizer = kind(parameters[rank::world_size], lr=0.01)
    for number in range(3):
        tower.zero_grad()
        loss_of(tower, number + 3 * pair, rank, world_size).backward()
        with span(f"step {number}"):
            step(parameters, owner, optimizer, *group) if step else optimizer.step()
    return {name: value - start[name] for name, value in tower.state_dict().items()}


def _as_one(step: Callable, n: int, kind: type[Optimizer], in_pairs: bool = False) -> None:
    """Raise AssertionError unless each rank has moved the tower as one process does."""
    results = launch(_train, n, step, kind, in_pairs).results
    pairs = (0, 1) if in_pairs else (0,)  # of which each has samples of its own
    alone = [_train(0, 1, None, kind, pair=pair) for pair in pairs] * n
    far, rank, name = max(
        (largest_difference(moved, alone[rank][name]), rank, name)
        for rank, found in enumerate(results)
        for name, moved in found.items()
    )
    assert far < 1e-9, (
        f"{kind.__name__}: rank {rank} of {n} has moved `{name}` by a distance of "
        f"{results[rank][name].norm():.2g}, and one process by {alone[rank][name].norm():.2g}"
    )


def steps_like_one(step: Callable) -> None:
    """equal one process on one and on two ranks with SGD, and on three with Adam"""
    for n, kind in ((1, SGD), (2, SGD), (3, Adam)):
        _as_one(step, n, kind)


def steps_in_a_group(step: Callable) -> None:
    """do so in a group: ranks 0 and 2 train one model, ranks 1 and 3 another one"""
    _as_one(step, 4, SGD, in_pairs=True)


def sends_the_model_twice(step: Callable) -> None:
    """send each gradient to one rank, and each new value to all"""
    ops = _calls(launch(_train, 2, step, SGD, trace=True), "step 1")
    wanted = {"reduce": 16, "broadcast": 16}
    expect({op: ops.count(op) for op in ops}, wanted, "the calls of a step")


with torch.random.fork_rng():  # an import seeds nothing
    TOWER = [p.numel() for p in new_tower().parameters()]
ALMOST = 1.01
# sizes, ranks, and what the fullest rank owns where the largest goes first
CASES = (
    (TOWER, 4, 33_088),
    ([1, 1, 1, 1, 1, 1, 9], 3, 9),
    ([8, 1, 8, 1, 8, 1, 8], 3, 16),
    ([5], 2, 5),
)


def _owners(rank: int, world_size: int, rule: Callable) -> list[list[int]]:
    return [rule([torch.empty(n) for n in sizes], ranks) for sizes, ranks, _ in CASES]


def agrees_on_every_rank(rule: Callable) -> None:
    """make the same list of owners on every rank"""
    first, second = launch(_owners, 2, rule).results
    assert first[0] is not None, "nothing was returned. Is a `return` missing?"
    expect(second[0], first[0], "the tower's owners on rank 1, beside those on rank 0")


def begins_with_the_largest(rule: Callable) -> None:
    """share the tower evenly, to 1%, and other sizes so that the fullest rank has least"""
    (lists,) = launch(_owners, 1, rule).results
    for (sizes, ranks, most), found in zip(CASES, lists, strict=True):
        expect(len(found), len(sizes), f"{len(sizes)} parameters: the length of the list")
        owned = [0] * ranks
        for owner, size in zip(found, sizes, strict=True):
            assert owner in range(ranks), f"{owner} is no rank of {ranks}"
            owned[owner] += size
        what = f"of {sizes} the {ranks} ranks own {owned}: the fullest has"
        limit = int(ALMOST * most)
        assert max(owned) <= limit, f"{what} {max(owned)}, expected at most {limit}"


def _gather(
    rank: int, world_size: int, gather: type, in_pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole of shards of two numbers, and a shard's gradient of a loss of its own."""
    group = [_pair(rank)] if in_pairs else []
    shard = torch.tensor([10.0 * rank, 10.0 * rank + 1], requires_grad=True)
    with span("forward"):
        whole = gather.apply(shard, *group)
    assert isinstance(whole, torch.Tensor), "forward returns no tensor"
    weights = (rank + 1) * torch.arange(1.0, 1 + len(whole))
    with span("backward"):
        (whole * weights).sum().backward()
    assert shard.grad is not None, "backward returns no gradient of the shard"
    return whole.detach(), shard.grad


def gathers_and_scatters(gather: type) -> None:
    """return all shards in order, and give back this rank's shard of the mean gradient"""
    for n in (1, 3):
        _gathered(launch(_gather, n, gather).results, [range(n)] * n)


def _gathered(results: list, members: list[Sequence[int]]) -> None:
    """Raise AssertionError unless each rank has the whole and its part of the mean."""
    for rank, ((whole, gradient), ranks) in enumerate(zip(results, members, strict=True)):
        shards = torch.tensor([10.0 * other + i for other in ranks for i in (0, 1)])
        factor = sum(other + 1 for other in ranks) / len(ranks)
        mean = factor * torch.arange(1.0, 1 + len(shards))
        where = f"rank {rank} of {len(results)}"
        if len(ranks) < len(results):
            where += f" in a group of ranks {in_a_row([str(r) for r in ranks])}"
        expect(whole, shards, f"{where}: the whole tensor (the result is the first argument)")
        expect(gradient, mean[2 * ranks.index(rank) :][:2], f"{where}: the gradient", 1e-5)


def gathers_in_a_group(gather: type) -> None:
    """do both in a group only: ranks 0 and 2 have one tensor, ranks 1 and 3 another one"""
    pairs = [[0, 2], [1, 3]] * 2
    _gathered(launch(_gather, 4, gather, True).results, pairs)


def makes_two_calls(gather: type) -> None:
    """make one all-gather in forward, and one reduce-scatter in backward"""
    report = launch(_gather, 2, gather, trace=True)
    for phase, wanted in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        ops = _calls(report, phase)
        assert len(ops) == 1 and wanted in ops[0], f"the calls of {phase}: {', '.join(ops)}"


class _Tied(nn.Module):
    """Three layers of whole numbers, of which the last has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(i, i + parameter.numel()).view_as(parameter))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self.last(self.first(x).relu() * self.inner(x))


def _row(rank: int) -> torch.Tensor:
    return torch.tensor([[1.0 + rank, 2.0]])


def cuts_in_order(views: Callable) -> None:
    """cut a flat tensor into tensors of these shapes, in their order, without the padding"""
    shapes = {"weight": torch.Size([2, 3]), "bias": torch.Size([2]), "scale": torch.Size([])}
    flat = torch.arange(12.0)
    wanted = {"weight": flat[:6].view(2, 3), "bias": flat[6:8], "scale": flat[8]}
    found = views(flat, shapes)
    assert isinstance(found, dict), f"it returns {found!r:.40}, no dict"
    expect(list(found), list(wanted), "the names")
    for name, tensor in wanted.items():
        what = f"of the numbers 0 to 11 `{name}`"
        assert isinstance(found[name], torch.Tensor), f"{what} is no tensor"
        expect(list(found[name].shape), list(tensor.shape), f"{what}: the shape")
        expect(found[name], tensor, what)


def cuts_views(views: Callable) -> None:
    """return views, which copy nothing: their gradients come together in the flat tensor"""
    flat = torch.zeros(7, requires_grad=True)
    found = views(flat, {"weight": torch.Size([2, 2]), "bias": torch.Size([2])})
    sum((1 + i) * view.sum() for i, view in enumerate(found.values())).backward()
    expect(flat.grad, torch.tensor([1.0] * 4 + [2.0] * 2 + [0]), "the flat tensor's gradient")
    memory = {view.untyped_storage().data_ptr() for view in found.values()}
    assert memory == {flat.untyped_storage().data_ptr()}, "what it returns are copies"


def _call(
    rank: int, world_size: int, call: Callable, in_pairs: bool = False
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """0; the output for this rank's row; the gradient of its shard."""
    torch.manual_seed(0)
    module, group = _Tied(), _pair(rank) if in_pairs else None
    shapes = {name: p.shape for name, p in module.named_parameters()}
    shard = shard_of(flatten(module.parameters(), group), group).clone().requires_grad_()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1e6)  # what the module has itself counts for nothing
    with span("forward"):
        output = call(module, shard, shapes, _row(rank), *([group] if in_pairs else []))
    assert isinstance(output, torch.Tensor), f"it returns {output!r:.40}, no tensor"
    with span("backward"):
        output.sum().backward()
    assert shard.grad is not None, "the shard gets no gradient"
    return 0, output.detach(), shard.grad


def calls_compute_like_one(call: Callable) -> None:
    """give the output and the gradients of one process, on 1, 2 and 3 ranks"""
    for n in (1, 2, 3):
        _like_one(launch(_call, n, call).results, [range(n)], 1.0)


def calls_gather_once(call: Callable) -> None:
    """gather all parameters in one call, and scatter their gradients in one"""
    report = launch(_call, 2, call, trace=True)
    for phase, wanted in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        ops = _calls(report, phase)
        assert len(ops) == 1 and wanted in ops[0], f"the calls of {phase}: {', '.join(ops)}"


def calls_in_a_group(call: Callable) -> None:
    """do so in a group: ranks 0 and 2 share one module, ranks 1 and 3 another one"""
    _like_one(launch(_call, 4, call, True).results, [[0, 2], [1, 3]], 1.0)


def _block(
    rank: int, world_size: int, block: type, in_pairs: bool = False
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The bytes of gathered memory that forward leaves behind; the output; the gradient."""
    torch.manual_seed(0)
    made = block(_Tied(), _pair(rank)) if in_pairs else block(_Tied())
    gathered, gather = [], dist.all_gather_single

    def watch(whole: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        gathered.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        return gather(whole, *rest, **keywords)

    dist.all_gather_single = watch
    with span("forward"):
        output = made(_row(rank).requires_grad_(), scale=2.0)
    assert isinstance(output, torch.Tensor), f"forward returns {output!r:.40}, no tensor"
    for _ in range(40):  # a thread of the process group may let go a little later
        alive = sum(nbytes for memory, nbytes in gathered if not memory.expired())
        if not alive:
            break
        time.sleep(0.01)
    with span("backward"):
        output.sum().backward()
    assert made.shard.grad is not None, "the shard gets no gradient"
    return alive, output.detach(), made.shard.grad


@cache
def _blocks(block: type, n: int, in_pairs: bool = False) -> Report:
    return launch(_block, n, block, in_pairs, trace=True)


def _like_one(results: list, groups: Sequence[Sequence[int]], scale: float) -> None:
    """Raise AssertionError unless each group has the outputs and gradients of one process."""
    for ranks in groups:
        torch.manual_seed(0)
        alone, n = _Tied(), len(results)
        outputs = alone(torch.cat([_row(rank) for rank in ranks]), scale)
        (outputs.sum() / len(ranks)).backward()
        where = "" if len(ranks) == n else f" in a group of ranks {ranks[0]} and {ranks[1]}"
        for rank, output in zip(ranks, outputs, strict=True):
            found = results[rank][1][0]
            what = f"rank {rank} of {n}{where}: the output"
            expect(found, output.detach(), what)
        flat = torch.cat([results[rank][2] for rank in ranks])
        for name, parameter in alone.named_parameters():
            part, flat = flat[: parameter.numel()], flat[parameter.numel() :]
            what = f"{n} ranks{where}: the gradient of `{name}`"
            expect(part, parameter.grad.flatten(), what, 1e-3)


def blocks_compute_like_one(block: type) -> None:
    """give the output and the gradients of one process, on 1, 2 and 3 ranks"""
    for n in (1, 2, 3):
        _like_one(_blocks(block, n).results, [range(n)], 2.0)


def blocks_let_go(block: type) -> None:
    """keep no gathered memory between forward and backward"""
    for rank, (alive, _, _) in enumerate(_blocks(block, 2).results):
        assert not alive, f"on rank {rank} {alive} gathered bytes are there after forward"


def blocks_gather_twice(block: type) -> None:
    """gather once in forward and once in backward, and scatter once"""
    for phase, wanted in (("forward", [1, 0]), ("backward", [1, 1])):
        ops = _calls(_blocks(block, 2), phase)
        words = "all_gather", "reduce_scatter"
        found = [sum(word in op for op in ops) for word in words]
        expect(found, wanted, f"all-gathers and reduce-scatters of {phase}")


def blocks_in_a_group(block: type) -> None:
    """work in a group: ranks 0 and 2 share one block, ranks 1 and 3 another one"""
    _like_one(_blocks(block, 4, True).results, [[0, 2], [1, 3]], 2.0)


def _step_between(rank: int, world_size: int, block: type) -> str:
    made = block(_Tied())
    loss = made(_row(rank)).sum()
    with torch.no_grad():
        made.shard += 1
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def blocks_refuse_a_step(block: type) -> None:
    """say so when a step comes between forward and backward"""
    said = launch(_step_between, 2, block).results
    assert all(said), "nothing is said, and backward goes on with the new weights"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return SmallTransformer(5, width=4, heads=1, depth=2).double()


def _model_step(
    rank: int, world_size: int, shard: Callable | None, in_pairs: bool = False, pair: int = 0
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What stays whole on a rank, and how two steps have moved each parameter."""
    model, start = _model(), dict(_model().named_parameters())
    group, pair = ([_pair(rank)], rank % 2) if in_pairs else ([], pair)
    rank, world_size = (rank // 2, 2) if in_pairs else (rank, world_size)
    if shard:
        model = shard(model, list(model.blocks), *group)
        assert isinstance(model, nn.Module), f"it returns {model!r:.40}, no module"
    shards = {block.shard for block in blocks_in(model)}
    left = [name for name, p in model.named_parameters() if p not in shards]
    optimizer = SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(24).view(6, 4) % 5
    for number in range(2):
        optimizer.zero_grad()
        mine = ((tokens + number + 2 * pair) * tokens % 5).chunk(world_size)[rank]
        with span(f"step {number}"):
            logits = model(mine)
            cross_entropy(logits.flatten(0, 1), (mine + 1).flatten() % 5).backward()
        optimizer.step()
    now = full_of(model) if shard else dict(model.named_parameters())
    return left, {name: value.detach() - start[name] for name, value in now.items()}


@torch.no_grad()
def full_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters of all sharded blocks in a model, by the names they had in it."""
    full, paths = {}, {part: path for path, part in model.named_modules()}
    for block in blocks_in(model):
        whole = Gather.apply(block.shard, block.group)
        for name, view in views_of(whole, block.shapes).items():
            path = f"{paths[block]}.{name}".replace("module.", "").strip(".")
            full[path] = view
    return full


@cache
def _sharded(shard: Callable, n: int, in_pairs: bool = False) -> Report:
    return launch(_model_step, n, shard, in_pairs, trace=True)


def leaves_nothing_whole(shard: Callable) -> None:
    """leave no parameter whole: what is in no block is the root's"""
    for left, _ in _sharded(shard, 2).results:
        names = ", ".join(f"`{name}`" for name in left[:3])
        assert not left, f"{len(left)} parameters stay whole on each rank: {names}"


def _trains_like_one(shard: Callable, n: int, in_pairs: bool = False) -> None:
    one = [_model_step(0, 1, None, pair=pair)[1] for pair in ((0, 1) if in_pairs else (0,))]
    for rank, (_, found) in enumerate(_sharded(shard, n, in_pairs).results):
        alone = one[rank % len(one)]
        expect(sorted(found), sorted(alone), f"rank {rank} of {n}: the names of parameters")
        for name, moved in alone.items():
            how = f"by {found[name].norm():.2g}, and one process by {moved.norm():.2g}"
            assert largest_difference(found[name], moved) < 1e-9, (
                f"rank {rank} of {n}: two steps have moved `{name}` {how}"
            )


def trains_like_one(shard: Callable) -> None:
    """train a transformer with a tied head as one process does, on 1, 2 and 3 ranks"""
    for n in (1, 2, 3):
        _trains_like_one(shard, n)


def gathers_each_block(shard: Callable) -> None:
    """gather each of two blocks and the root twice a step"""
    ops = _calls(_sharded(shard, 2), "step 1")
    expect(sum("all_gather" in op for op in ops), 6, "all-gathers of a step")


def trains_in_a_group(shard: Callable) -> None:
    """do so in a group: ranks 0 and 2 share one model, ranks 1 and 3 another one"""
    _trains_like_one(shard, 4, in_pairs=True)


class _Twice(nn.Module):
    """A block of whole numbers at two places, `first` and `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last = self.first
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(i, i + parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)).relu())


def _twice(rank: int, world_size: int, shard: Callable) -> tuple:
    """The output, and the whole gradients, of a model with a block at two places."""
    model = _Twice()
    root = shard(model, [model.first])
    assert isinstance(root, nn.Module), f"it returns {root!r:.40}, no module"
    for path in "first", "last":
        assert hasattr(model.get_submodule(path), "shard"), f"no sharded block is at `{path}`"
    assert model.first is model.last, "two sharded blocks are at `first` and `last`"
    assert hasattr(root, "shard"), "`inner`, which is in no block, stays whole"
    output = root(_row(rank))
    output.sum().backward()
    whole = (views_of(Gather.apply(b.shard.grad), b.shapes) for b in (model.first, root))
    return output.detach(), [view for views in whole for view in views.values()]


def puts_a_block_at_both_places(shard: Callable) -> None:
    """put one sharded block at both places where a block stands"""
    alone = _Twice()
    outputs = alone(torch.cat([_row(0), _row(1)]))
    (outputs.sum() / 2).backward()
    wanted = [parameter.grad for parameter in alone.parameters()]
    for rank, (output, gradients) in enumerate(launch(_twice, 2, shard).results):
        expect(output[0], outputs[rank].detach(), f"rank {rank} of 2: the output")
        expect(gradients, wanted, f"rank {rank} of 2: the gradients", 1e-3)


def _half_sharded(rank: int, world_size: int, group: list) -> tuple[nn.Module, nn.Module]:
    """A block in shards and one that each rank has whole, with averaged gradients."""
    first, second, *_ = new_tower(torch.float64)
    model = nn.Sequential(ShardedBlock(first, *group), second)
    pair = rank % 2 if group else 0
    rank, world_size = (rank // 2, 2) if group else (rank, world_size)
    loss_of(model, pair, rank, world_size).backward()
    average_gradients(second, *group)
    return model[0], second


def _clip(
    rank: int, world_size: int, clip: Callable, max_norm: float, in_pairs: bool = False
) -> tuple[Any, list[torch.Tensor]]:
    """The norm and all gradients, whole."""
    group = [_pair(rank)] if in_pairs else []
    block, second = _half_sharded(rank, world_size, group)
    norm = clip([*block.parameters(), *second.parameters()], max_norm)
    whole = views_of(Gather.apply(block.shard.grad, *group), block.shapes).values()
    return norm, [*whole, *(p.grad for p in second.parameters())]


def _clip_owned(
    rank: int, world_size: int, clip: Callable, max_norm: float
) -> tuple[Any, list[torch.Tensor]]:
    """The same where each rank owns other parameters, and the last one none."""
    tower = new_tower(torch.float64)[:2]
    loss_of(tower, 0, 0, 1).backward()
    every = list(tower.parameters())
    mine = every[4 * rank :][:4]
    norm = clip(mine, max_norm, groups=[None])
    return norm, [p.grad for p in every]


def _clipped(pair: int, max_norm: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tower = new_tower(torch.float64)[:2]
    loss_of(tower, pair, 0, 1).backward()
    norm = nn.utils.clip_grad_norm_(tower.parameters(), max_norm)
    return norm, [p.grad for p in tower.parameters()]


NORMS = 0.01, 100.0  # gradients are longer than the one and shorter than the other


def _clips(results: list, norm: float, pairs: Sequence[int] = (0,)) -> None:
    """Raise AssertionError unless each rank has the norm and gradients of one process."""
    for rank, (found, gradients) in enumerate(results):
        expected, every = _clipped(pairs[rank % len(pairs)], norm)
        what = f"max_norm {norm:g}, rank {rank} of {len(results)}: "
        expect(found, expected, what + "the norm that is returned", 1e-7)
        expect(gradients, every, what + "the gradients", 1e-7)


def clips_shards(clip: Callable) -> None:
    """find one process's norm where a block is in shards and another one whole, and clip"""
    for n, norm in product((1, 2, 3), NORMS):
        _clips(launch(_clip, n, clip, norm).results, norm)


def clips_in_a_group(clip: Callable) -> None:
    """do so in groups: ranks 0 and 2 share one model, ranks 1 and 3 another one"""
    _clips(launch(_clip, 4, clip, NORMS[0], True).results, NORMS[0], (0, 1))


def clips_what_others_own(clip: Callable) -> None:
    """add up over `groups` where each rank has other parameters, or none"""
    for rank, (found, gradients) in enumerate(launch(_clip_owned, 3, clip, 0.01).results):
        expected, every = _clipped(0, 0.01)
        what = f"max_norm 0.01, owners, rank {rank} of 3: "
        expect(found, expected, what + "the norm that is returned", 1e-7)
        mine = slice(4 * rank, 4 * rank + 4)
        expect(gradients[mine], every[mine], what + "the gradients", 1e-7)


build = Builder(
    "sharding",
    {
        sharded_step: [steps_like_one, steps_in_a_group, sends_the_model_twice],
        owners: [agrees_on_every_rank, begins_with_the_largest],
        Gather: [gathers_and_scatters, gathers_in_a_group, makes_two_calls],
        views_of: [cuts_in_order, cuts_views],
        sharded_call: [calls_compute_like_one, calls_gather_once, calls_in_a_group],
        ShardedBlock: [
            blocks_compute_like_one,
            blocks_let_go,
            blocks_gather_twice,
            blocks_in_a_group,
            blocks_refuse_a_step,
        ],
        fully_sharded: [
            puts_a_block_at_both_places,
            leaves_nothing_whole,
            gathers_each_block,
            trains_like_one,
            trains_in_a_group,
        ],
        clip_grad_norm: [clips_shards, clips_in_a_group, clips_what_others_own],
    },
)
