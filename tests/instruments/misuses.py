"""The job of `uses`, shared in wrong ways: what people do, and what they forget."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.long_sequences.ring import ring_attention, zigzag
from mgpu_tutorial.sharding.blocks import fully_sharded
from mgpu_tutorial.sharding.stages import (
    FlatOptimizer,
    ShardedOptimizer,
    clip_shards,
    prepare,
)
from mgpu_tutorial.sharding.zero import FlatParameters, sharded_step
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.instruments import uses
from tests.instruments.jobs import WIDTH, WORDS, Copy, CutBlock, Sum, net, part_of
from tests.instruments.uses import loss_of, mine, rank_of, size_of, stepping

adam = partial(AdamW, lr=0.01)


# What is averaged, and when


def unfinished(model, wrap):
    """Nobody calls finish_gradient_synchronization."""
    return stepping(nn.Sequential(wrap(model)))


def after(change, wrap=DDP):
    """DDP, and then something with the gradients."""
    return lambda model: stepping(wrap(model), finish=change)


def by_hand(change):
    """No wrapper: the gradients are averaged like this."""
    return lambda model: stepping(model, finish=change)


def thawed_late(model):
    for layer in model.layers:
        layer.norm.requires_grad_(False)
    wrapper = DDP(model)
    for layer in model.layers:
        layer.norm.requires_grad_(True)
    return stepping(wrapper)


def replaced_late(model):
    wrapper = DDP(model, find_unused_parameters=True)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return stepping(wrapper)


def frozen_late(model, wrap):
    wrapper = wrap(model)
    model.head.requires_grad_(False)
    return stepping(wrapper)


def clip_then_average(model):
    uses.clip(model)
    uses.average(model)


def add_up_then_clip(model):
    add_up(model)
    uses.clip(model)


def average_then_clip_by_value(model):
    """A limit for each number, where one process has one for the norm."""
    uses.average(model)
    nn.utils.clip_grad_value_(model.parameters(), 0.001)


def clip_with_scale(model):
    """Clipped while a loss scale is still inside."""
    for p in model.parameters():
        p.grad *= 1024
    uses.clip(model)
    for p in model.parameters():
        p.grad /= 1024


def keep_scale(model):
    for p in model.parameters():
        p.grad *= 1024


def average_twice(model):
    uses.average(model)
    for p in model.parameters():
        p.grad /= size_of()


def add_up(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def average_in_bfloat16(model):
    for p in model.parameters():
        short = p.grad.bfloat16()
        dist.all_reduce(short, dist.ReduceOp.AVG)
        p.grad = short.to(p.grad)


def average_on_first(model):
    """The mean comes to rank 0, and the others keep their own."""
    for p in model.parameters():
        mean = p.grad / size_of()
        dist.reduce(mean, 0)
        p.grad = mean if rank_of() == 0 else p.grad


def average_in_own_order(model):
    """Each rank begins its sum with itself: the same number, other bits."""
    for p in model.parameters():
        every = [torch.empty_like(p.grad) for _ in range(size_of())]
        dist.all_gather(every, p.grad)
        p.grad = sum(every[rank_of() :] + every[: rank_of()]) / size_of()


def average_parameters_in_place_of_gradients(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.data, dist.ReduceOp.AVG)
        )
    return stepping(model)


def average_with_neighbour(model):
    """Pairs of four ranks average, where the batch went to all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrapper = DDP(model, process_group=mesh.get_group("dp"))
    wrapper.mesh = mesh
    return stepping(wrapper)


def average_matrices(model):
    for p in model.parameters():
        if p.dim() > 1:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)


def nan_on_last(model):
    uses.average(model)
    if rank_of() == size_of() - 1:
        list(model.parameters())[-1].grad[0] = torch.nan


def leave_a_remainder(model):
    """Where nothing but rounding should be left."""
    uses.average(model)
    for p in model.parameters():
        if p.grad.norm() < 1e-12:
            p.grad += 1e-3


def zero_head(model):
    uses.average(model)
    model.head.weight.grad.zero_()


def skip_on_last(model):
    """The last rank leaves one parameter out, and takes its own."""
    for name, p in model.named_parameters():
        mean = p.grad.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank_of() < size_of() - 1 or name != "layers.1.up.weight":
            p.grad = mean


def stale(model):
    """From the second step on the average is that of the step before."""
    last = {}

    def finish(model):
        uses.average(model)
        for p in model.parameters():
            now = p.grad.clone()
            p.grad = last.get(p, now)
            last[p] = now

    return stepping(model, finish=finish)


def moving(model):
    """The gradients of earlier steps stay in."""
    return stepping(DDP(model), zero=False)


def compressed(model):
    model = DDP(model)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return stepping(model)


def in_short_numbers(model):
    return stepping(DDP(model.float()))


def with_a_hook_on_ranks(model):
    """A hook that counts each rank once more."""
    model.head.weight.register_hook(lambda gradient: gradient * size_of())
    return stepping(DDP(model))


# The loss, and the batch


def with_loss(loss_of, finish=None):
    return lambda model: stepping(DDP(model), loss_of=loss_of, finish=finish)


def summed(out, targets):
    return cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum")


def summed_by_rows(out, targets):
    return cross_entropy(out.mT, targets, reduction="sum")


def weighted_words(out, targets):
    return cross_entropy(out.mT, targets, weight=torch.linspace(1, 9, WORDS).to(out))


def without_one_word(out, targets):
    return cross_entropy(out.mT, targets, ignore_index=3)


def in_works_by(loss_of):
    """A pipeline and one process, with a mean that does not divide by the tokens."""
    several = partial(uses.in_works, loss=loss_of)
    one = partial(stepping, loss_of=loss_of)
    return {"several": several, "one": one, "model_of": uses.in_layers}


def with_share(share):
    return lambda model: stepping(DDP(model), share=share)


def first_share(tensor):
    return tensor.tensor_split(size_of())[0]


def uneven(tensor):
    return (tensor[:3], tensor[3:])[rank_of()]


def overlapping(tensor):
    return tensor[rank_of() : rank_of() + 4]


def in_parts(cuts, scale):
    """Accumulation: parts of each share, each part's mean times a number."""

    def prepare(model):
        model, optimizer = DDP(model), adam(model.parameters())

        def step(tokens, targets):
            x, y = (mine(t).tensor_split(cuts) for t in (tokens, targets))
            for one, other in zip(x, y, strict=True):
                (loss_of(model(one), other) * scale).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def never_synced(model, wrap=DDP):
    model = wrap(model)
    step = stepping(model)

    def alone(tokens, targets):
        with model.no_sync():
            return step(tokens, targets)

    return alone


def told_by_parts(model):
    """The sum of the losses of three parts is returned in place of their mean."""
    step = stepping(DDP(model), parts=3)
    return lambda tokens, targets: 3 * step(tokens, targets)


def with_biases_of_zero():
    model = net()
    for layer in model.layers:
        nn.init.zeros_(layer.down.bias)
    return model


def one_step_less(model):
    step, done = stepping(DDP(model)), []

    def once(tokens, targets):
        done.append(1)
        return step(tokens, targets) if len(done) < 2 else None

    return once


def gathered_without_gradient(x):
    every = [torch.empty_like(x) for _ in range(size_of())]
    dist.all_gather(every, x.detach())
    every[rank_of()] = x
    return torch.cat(every)


# State: buffers, weights that a forward changes, updates


class Center(nn.Module):
    """Keeps the mean of what it sees, and uses it later."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x


def with_statistics():
    model = net()
    model.layers.insert(0, Center())
    return model


def with_max_norm():
    model = net()
    model.emb.max_norm = 0.5
    return model


def with_other_rate(model):
    return stepping(DDP(model), adam(model.parameters(), lr=0.01 * (1 + rank_of())))


def scheduled_on_first(model):
    optimizer = adam(model.parameters())
    step = stepping(DDP(model), optimizer)

    def both(tokens, targets):
        loss = step(tokens, targets)
        if rank_of() == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    return both


def forgetful(model):
    """A new optimizer for each step: its moments are gone."""
    model = DDP(model)
    return lambda *batch: stepping(model)(*batch)


def decayed_twice(model):
    step = stepping(DDP(model))

    def both(tokens, targets):
        loss = step(tokens, targets)
        with torch.no_grad():
            for p in model.parameters():
                p *= 0.99
        return loss

    return both


def with_owners(model, sends=True, source=None, left_out=(), order=()):
    """ZeRO 1 by hand, without a check."""
    every = list(model.parameters())
    owner = [i % size_of() for i in range(len(every))]
    held = [p for i, p in enumerate(every) if owner[i] == rank_of() and i not in left_out]
    optimizer = adam(held)

    def step(tokens, targets):
        loss = loss_of(model(mine(tokens)), mine(targets))
        loss.backward()
        for what in order or (uses.average,):
            what(model)
        optimizer.step()
        for i, p in enumerate(every if sends else ()):
            dist.broadcast(p.data, owner[i] if source is None else source)
        model.zero_grad()
        return loss.detach()

    return step


def with_sharded_step(model, given=list, zero=True, before=None, held=None):
    """The course's step of stage 1, misused."""
    every = list(model.parameters())
    owner = [i % size_of() for i in range(len(every))]
    own = [p for p, rank in zip(every, owner, strict=True) if rank == rank_of()]
    optimizer = adam(held(own) if held else own)

    def step(tokens, targets):
        loss_of(model(mine(tokens)), mine(targets)).backward()
        if before:
            before(model)
        sharded_step(given(model.parameters()), owner, optimizer)
        if zero:
            model.zero_grad()

    return step


# Shards


def clip_in_own_norm(model):
    """Of the shards that this rank has."""
    own = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in ps_of(model)]
    norm = torch.stack([t.norm() for t in own]).norm()
    for t in own:
        t *= 0.1 / norm


def thawed_for_owners(model):
    for layer in model.layers:
        layer.norm.requires_grad_(False)
    optimizer = ShardedOptimizer(model.parameters(), adam)
    for layer in model.layers:
        layer.norm.requires_grad_(True)
    return stepping(model, optimizer)


def inner_step(model):
    """The optimizer that `prepare` returns beside its step."""
    return stepping(model, prepare(1, model, adam).optimizer)


def clip_copies(model):
    ready = prepare(0, model, adam)
    clip_shards(ready.optimizer, 0.1)
    return stepping(model, ready.optimizer)


def views_of_flat(model):
    optimizer = adam(model.parameters())
    FlatParameters(model)
    return stepping(model, optimizer)


def flat_by_an_old_optimizer(model):
    flat = FlatOptimizer(model.parameters(), adam)
    flat.inner = adam(model.parameters())
    return stepping(model, flat)


def blocks_after_optimizer(model):
    optimizer = adam(model.parameters())
    return stepping(uses.in_blocks(model), optimizer)


def blocks_alone(model):
    """No root: embedding and head are in no block."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_sharded(layer, [])
    return stepping(model)


def ps_of(model):
    return [p for p in model.parameters() if p.grad is not None]


def in_full(model, finish=None):
    return stepping(uses.in_full(model), finish=finish)


def optimizer_first(model):
    optimizer = adam(model.parameters())
    return stepping(uses.in_full(model), optimizer)


def forward_first(model):
    """A look at the loss, and then the optimizer."""
    model = uses.in_full(model)
    with torch.no_grad():
        model(torch.zeros(2, 13, dtype=torch.long))
    return stepping(model)


def blocks_without_root(model):
    for layer in model.layers:
        fully_shard(layer)
    return stepping(model)


def adapted_late(model):
    """The adapters come to layers that are sharded already, and are in no unit."""
    adapters = [layer.up for layer in model.layers]
    for layer, adapter in zip(model.layers, adapters, strict=True):
        layer.up = adapter.layer
    uses.in_full(model)
    for layer, adapter in zip(model.layers, adapters, strict=True):
        layer.up = adapter
    return stepping(model)


def in_full_summed(model):
    model = uses.in_full(model)
    model.set_gradient_divide_factor(1.0)
    for layer in model.layers:
        layer.set_gradient_divide_factor(1.0)
    return stepping(model)


def in_full_never_synced(model):
    model = uses.in_full(model)
    model.set_requires_gradient_sync(False)
    return stepping(model)


# Tensor parallel


def cut(finish=None, share=uses.whole, **faults):
    """Each block is cut by hand, with these faults."""

    def prepare(model):
        for i, layer in enumerate(model.layers):
            model.layers[i] = CutBlock(layer, **faults)
        return stepping(model, share=share, finish=finish)

    return prepare


class SumBothWays(torch.autograd.Function):
    """Its backward sums once more what every rank has already."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class CutAgain(CutBlock):
    """The same block, whose sum, scale or mark of a part can be wrong."""

    def __init__(self, block, sum_of=Sum, mark=True, dim=1, scaled=False):
        super().__init__(block)
        self.sum_of, self.scaled = sum_of, scaled
        if not mark:
            del self.up.weight.cut, self.up.weight.group
        if dim == 0:
            self.down.weight.cut = 0

    def forward(self, x):
        inside = torch.tanh(self.up(Copy.apply(self.norm(x), True)))
        return x + self.sum_of.apply(linear(inside, self.down.weight)) + self.down.bias


def cut_again(**faults):
    def prepare(model):
        for i, layer in enumerate(model.layers):
            model.layers[i] = CutAgain(layer, **faults)
        return stepping(model, share=uses.whole)

    return prepare


class Scaled(nn.Module):
    """A block with one scale for all features inside."""

    def __init__(self, block):
        super().__init__()
        self.inner, self.scale = block, nn.Parameter(torch.ones(()))

    def forward(self, x):
        block = self.inner
        inside = torch.tanh(block.up(block.norm(x))) * self.scale
        return x + block.down(inside)


def with_scale():
    model = net()
    model.layers[1] = Scaled(model.layers[1])
    return model


class ScaledCut(nn.Module):
    def __init__(self, scaled):
        super().__init__()
        self.inner, self.scale = CutBlock(scaled.inner), scaled.scale

    def forward(self, x):
        block = self.inner
        inside = torch.tanh(block.up(Copy.apply(block.norm(x), True))) * self.scale
        return x + Sum.apply(linear(inside, block.down.weight)) + block.down.bias


def scale_not_summed(model):
    model.layers[1] = ScaledCut(model.layers[1])
    return stepping(model, share=uses.whole)


def tie_cut(model):
    """The head of a tied model becomes a shard of its own."""
    return uses.with_a_cut_head(model)


def entropy_of_parts(logits, targets):
    """Forgets what the sum over each rank's words lacks: a logarithm of their number."""
    return uses.parallel_cross_entropy(logits, targets) + torch.log(torch.tensor(2.0))


def no_backward(model):
    return lambda tokens, targets: loss_of(DDP(model)(mine(tokens)), mine(targets)).detach()


def whole_into_rows(model):
    """A row-parallel layer gets all features, where it wants this rank's part."""
    model.layers[0].down = RowParallelLinear(model.layers[0].down)
    return stepping(model)


def three_experts_on_two(model):
    return uses.shared_experts.ExpertParallel(3, 2)


def model_for_work(model):
    return uses.run_gpipe(rank_of(), size_of(), model, 4)


def averaged_over_products(model):
    """What ranks of one product have alike is added up, as if they shared the batch."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = CutBlock(layer)

    def finish(model):
        for p in model.parameters():
            if not hasattr(p, "cut"):
                dist.all_reduce(p.grad)

    return stepping(model, share=uses.whole, finish=finish)


def wrong_order_of_heads(model):
    """The three products of attention lie one behind the other, and are cut as one."""
    attention = model.attention
    attention.qkv.weight = part_of(attention.qkv.weight, 0)
    attention.qkv.bias = part_of(attention.qkv.bias, 0)
    attention.out.weight = part_of(attention.out.weight, 1)
    out = attention.out

    def forward(x):
        qkv = attention.qkv(Copy.apply(x, True)).chunk(3, 2)
        q, k, v = (t.unflatten(2, (1, -1)).transpose(1, 2) for t in qkv)
        one = attention.attend(q, k, v).transpose(1, 2).flatten(2)
        return x + Sum.apply(linear(one, out.weight)) + out.bias

    attention.forward = forward
    return stepping(model, share=uses.whole)


class Transposed(nn.Module):
    """A product whose weight lies the other way, as GPT-2's."""

    def __init__(self, whole):
        super().__init__()
        self.weight, self.bias = nn.Parameter(whole.weight.T), whole.bias


def transposed(model):
    model.layers[0].up = ColumnParallelLinear(Transposed(model.layers[0].up))
    return stepping(model)


def cut_twice(model):
    return stepping(uses.by_layers(uses.by_layers(model)), share=uses.whole)


def with_a_softmax_inside():
    model = net()
    for layer in model.layers:
        layer.down = nn.Sequential(nn.Softmax(-1), layer.down)
    return model


def softmax_of_some(model):
    """Between columns and rows it sees only this rank's features."""
    for layer in model.layers:
        layer.up, layer.down[1] = (
            ColumnParallelLinear(layer.up),
            RowParallelLinear(layer.down[1]),
        )
    return stepping(model, share=uses.whole)


# Pipelines


def in_micro_batches(scale, rate=0.01):
    """Stages by hand: each micro-batch's mean times a number."""

    def prepare(model):
        stage = uses.stage_of(model)
        optimizer = adam(stage.parameters())

        def step(tokens, targets):
            for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
                if rank_of() == 0:
                    out = stage(x)
                    dist.send(out.detach(), 1)
                    gradient = torch.empty_like(out)
                    dist.recv(gradient, 1)
                    out.backward(gradient)
                else:
                    inputs = torch.empty(3, 13, WIDTH)
                    dist.recv(inputs, 0)
                    inputs.requires_grad_()
                    (loss_of(stage(inputs), y) * scale).backward()
                    dist.send(inputs.grad, 0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def tied_layers():
    model = uses.in_layers()
    model[-1].weight = model[0].weight
    return model


def tied_stages(model):
    """Both stages have the matrix, and nobody adds up its two gradients."""
    if rank_of():
        model[-1].weight = nn.Parameter(model[-1].weight.detach().clone())
    return uses.in_stages(model)


def stages_with_old_optimizer(model):
    stage, old = uses.stage_of(copy.deepcopy(model)), uses.stage_of(model)
    optimizer = adam(old.parameters())
    last = rank_of() == size_of() - 1
    piped = uses.pipelining.PipelineStage(stage, rank_of(), size_of(), torch.device("cpu"))
    runner = uses.pipelining.ScheduleGPipe(piped, 4, loss_fn=loss_of)

    def step(tokens, targets):
        runner.step(*(() if rank_of() else (tokens,)), target=targets if last else None)
        optimizer.step()

    return step


def scaled_twice(out, targets):
    return loss_of(out, targets) / 4


def moving_scale(model):
    """Two calls of a schedule add up, and each divides all that is there."""
    stage = uses.stage_of(model)
    optimizer = adam(stage.parameters())
    piped = uses.pipelining.PipelineStage(stage, rank_of(), size_of(), torch.device("cpu"))
    runner = uses.pipelining.ScheduleGPipe(
        piped, 2, loss_fn=lambda out, targets: loss_of(out, targets) / 2
    )

    def step(tokens, targets):
        for x, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            runner.step(*(() if rank_of() else (x,)), target=y if rank_of() else None)
        optimizer.step()
        optimizer.zero_grad()

    return step


# Sequences


def from_zero(places):
    return torch.arange(len(places))


def gathered_keys(sums):
    """All ranks' keys and values; backward brings their gradients home or doesn't."""

    def gather(t):
        if sums:
            every = uses.GatherRows.apply(t.transpose(0, 2).contiguous())
            return every.transpose(0, 2)
        every = [torch.empty_like(t) for _ in range(size_of())]
        dist.all_gather(every, t.detach().contiguous())
        every[rank_of()] = t
        return torch.cat(every, 2)

    def attend(q, k, v):
        k, v = gather(k), gather(v)
        rows = torch.arange(q.shape[2]) + rank_of() * q.shape[2]
        mask = torch.arange(k.shape[2]) <= rows[:, None]
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def own_keys(q, k, v):
    """Each rank's tokens see those of their own rank."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def reader_both_ways():
    model = uses.reader()
    model.attention.attend = nn.functional.scaled_dot_product_attention
    return model


def ring(q, k, v):
    return ring_attention(q, k, v, zigzag)[0]


# Experts


def averaged_once_more(model):
    """As if each expert had seen the tokens of one rank."""
    uses.finish_experts(model)
    for name, p in model.named_parameters():
        if "up" in name or "down" in name:
            p.grad *= size_of()


def experts_in_ddp(model):
    return stepping(DDP(uses.spread(model)))


def experts_in_buckets(model):
    return stepping(BucketedDDP(uses.spread(model)))


def without_full_experts(model):
    """Too many tokens for an expert, and it drops the last."""
    model = uses.spread(model)
    answer = model.experts.answer
    model.experts.answer = lambda x, chosen, weights: answer(
        x, chosen, weights * (torch.arange(len(x)) < len(x) - 4)[:, None]
    )
    return stepping(model, finish=uses.finish_experts)


# Random numbers


def with_dropout_inside():
    model = net()
    model.layers[1].down = nn.Sequential(model.layers[1].down, nn.Dropout(0.2))
    return model


def frozen(model):
    for layer in model.layers:
        layer.norm.requires_grad_(False)
    return DDP(model)


def clipped(model):
    """One process, clipped."""
    return stepping(model, finish=uses.clip)


GATHERED = partial(uses.contrastive, gather=gathered_without_gradient)
CLIP_FIRST = uses.clip, uses.average
SHARDED_CLIP = partial(with_sharded_step, before=uses.clip)
ADAFACTOR = partial(
    uses.wrapped, wrap=uses.in_blocks, optimizer_of=partial(torch.optim.Adafactor, lr=0.01)
)
ONE_ADAFACTOR = partial(
    uses.with_one_optimizer, optimizer_of=partial(torch.optim.Adafactor, lr=0.01)
)
DECAYING = partial(uses.decaying_matrices, wrap=uses.in_blocks)
UNUSED = partial(uses.wrapped, wrap=uses.in_blocks)
OWN_NORM = partial(uses.wrapped, wrap=uses.in_blocks, finish=uses.clip)
FULL_OWN_NORM = partial(in_full, finish=clip_in_own_norm)
