"""One job, and right ways to share it: each prepares a model, and returns its step."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial import watched
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.ddp_in_practice.practice import accumulate
from mgpu_tutorial.experts import layer as experts
from mgpu_tutorial.experts import mixture
from mgpu_tutorial.experts import parallel as shared_experts
from mgpu_tutorial.fully_shard.units import Adapted
from mgpu_tutorial.instruments.price.models import GatedMLP
from mgpu_tutorial.long_sequences.ring import ring_attention, zigzag
from mgpu_tutorial.pipelines.stages import isend, order_of_1f1b, run_gpipe, run_in_order
from mgpu_tutorial.sharding.blocks import fully_sharded
from mgpu_tutorial.sharding.stages import ShardedOptimizer, clip_shards, prepare
from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import parallelize
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mgpu_tutorial.tensor_parallel_in_practice import vocabulary
from mgpu_tutorial.tensor_parallel_in_practice.sequence import cut_sequence, sum_copies
from mgpu_tutorial.tensor_parallel_in_practice.vocabulary import (
    PLAN,
    VocabularyParallelHead,
    parallel_cross_entropy,
)
from tests.instruments.jobs import WIDTH, WORDS, batch_of, net

adam = partial(AdamW, lr=0.01)


def rank_of():
    return dist.get_rank() if dist.is_initialized() else 0


def size_of():
    return dist.get_world_size() if dist.is_initialized() else 1


def mine(tensor, dim=0):
    """This rank's share of a batch."""
    return tensor.tensor_split(size_of(), dim)[rank_of()]


def loss_of(out, targets):
    return cross_entropy(out.flatten(0, 1), targets.flatten())


def train(rank, ranks, several, one=None, model_of=net, steps=2):
    """The job: a model, and a step for each batch."""
    step = (several if ranks > 1 else one or stepping)(watched(model_of()))
    return [step(*batch_of(number)) for number in range(steps)]


def stepping(
    model, optimizer=None, share=mine, finish=None, loss_of=loss_of, zero=True, parts=1
):
    """Forward, backward, what the ranks do then, and the optimizer's step."""
    optimizer = optimizer or AdamW(model.parameters(), lr=0.01)

    def step(tokens, targets):
        loss = 0.0
        for x, y in zip(share(tokens).chunk(parts), share(targets).chunk(parts), strict=True):
            each = loss_of(model(x), y) / parts
            each.backward()
            loss += each.detach()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        if finish:
            finish(model)
        optimizer.step()
        if zero:
            (model if isinstance(optimizer, ShardedOptimizer) else optimizer).zero_grad()
        return loss

    return step


def wrapped(model, wrap=DDP, optimizer_of=adam, finish=None, **how):
    model = wrap(model, **how)
    return stepping(model, optimizer_of(model.parameters()), finish=finish)


def average(model):
    """By hand: what one rank lacks counts as zeros."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def with_one_optimizer(model, optimizer_of, **how):
    return stepping(model, optimizer_of(model.parameters()), **how)


# Data parallel


def accumulating(model, wrap=DDP, sizes=(3, 3)):
    """Two parts of each share, and one average."""
    model = wrap(model)
    optimizer = AdamW(model.parameters(), lr=0.01)

    def step(tokens, targets):
        parts = list(zip(*(mine(x).split(sizes) for x in (tokens, targets)), strict=True))
        accumulate(model, parts, lambda model, part: loss_of(model(part[0]), part[1]))
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_two_backwards(model):
    return stepping(DDP(model), parts=2)


def scheduled(model, wrap=DDP):
    optimizer = AdamW(model.parameters(), lr=0.01)
    if size_of() > 1:
        model = wrap(model)
    step = stepping(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def both(tokens, targets):
        loss = step(tokens, targets)
        schedule.step()
        return loss

    return both


def compiled(model, backend, inside=False):
    if inside:
        return stepping(DDP(torch.compile(model, backend=backend)))
    return stepping(torch.compile(DDP(model), backend=backend))


class Checkpointed(nn.Module):
    """A layer of which backward repeats the forward."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def checkpointed(reentrant):
    model = net()
    for i, layer in enumerate(model.layers):
        model.layers[i] = Checkpointed(layer, reentrant)
    return model


def with_frozen_norms():
    model = net()
    for layer in model.layers:
        layer.norm.requires_grad_(False)
    return model


def with_an_unused_layer():
    model = net()
    model.unused = nn.Linear(WIDTH, WIDTH)
    return model


def with_one_layer_three_times():
    model = net()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    return model


def adapted():
    model = net().requires_grad_(False)
    for layer in model.layers:
        layer.up = Adapted(layer.up, 4)
    return model


def with_a_sum_of_values():
    """Its buffer counts what all ranks have alike."""
    model = net()
    model.layers[0].register_buffer("counted", torch.zeros(()))

    def count(module, inputs):
        module.counted += 1

    model.layers[0].register_forward_pre_hook(count)
    return model


def with_a_hook():
    model = net()
    model.head.weight.register_hook(lambda gradient: 2 * gradient)
    return model


class Images(nn.Module):
    """Convolutions in another order of memory, over tokens as images."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.emb(tokens)[:, None].permute(0, 3, 1, 2)
        return self.head(self.conv(x)[:, :, 0].transpose(1, 2))


def images():
    torch.manual_seed(0)
    return Images().to(memory_format=torch.channels_last)


def tokens_of_one_rank(model):
    """The last rank has no sequence: the loss is the sum over the number of all tokens."""

    def share(tensor):
        parts = tensor.tensor_split(size_of() - 1 or 1)
        return parts[rank_of()] if rank_of() < len(parts) else tensor[:0]

    def part_of_mean(out, targets):
        total = cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum")
        return total * size_of() / (12 * 13)

    finish = average if size_of() > 1 else None
    return stepping(model, share=share, loss_of=part_of_mean, finish=finish)


class GatherRows(torch.autograd.Function):
    """All ranks' rows; backward sums what all ranks want of mine."""

    @staticmethod
    def forward(ctx, x):
        every = [torch.empty_like(x) for _ in range(size_of())]
        dist.all_gather(every, x.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(size_of())[rank_of()]


def contrastive(model, gather=GatherRows.apply):
    """Each sequence beside all others: the loss is of the whole batch."""
    several = size_of() > 1

    def loss_of(out, targets):
        means = out.mean(1)
        every = gather(means) if several else means
        return cross_entropy(every @ every.T, torch.arange(len(every)).roll(1))

    return stepping(DDP(model) if several else model, loss_of=loss_of)


# Shards


def in_full(model, **how):
    for layer in model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def in_full_by_blocks(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def on_a_mesh(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return in_full(model, mesh=mesh)


def in_full_accumulating(model):
    model = in_full(model)
    step = AdamW(model.parameters(), lr=0.01)

    def train_step(tokens, targets):
        parts = list(zip(mine(tokens).chunk(2), mine(targets).chunk(2), strict=True))
        for i, (x, y) in enumerate(parts):
            model.set_requires_gradient_sync(i == 1)
            (loss_of(model(x), y) / 2).backward()
        step.step()
        step.zero_grad()

    return train_step


def in_blocks(model):
    return fully_sharded(model, list(dict.fromkeys(model.layers)))


def with_owners(model, optimizer=AdamW, **how):
    return stepping(model, ShardedOptimizer(model.parameters(), optimizer, lr=0.01, **how))


def with_owners_in_groups(model):
    matrices, others = in_groups(model)
    return stepping(model, ShardedOptimizer([matrices, others], AdamW, lr=0.01))


def in_groups(model):
    ps = list(model.parameters())
    return (
        {"params": [p for p in ps if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0.0},
    )


def decaying_matrices(model, wrap=None):
    model = wrap(model) if wrap else model
    groups = [group for group in in_groups(model) if group["params"]]
    return stepping(model, AdamW(groups, lr=0.01))


def first_owns_all(model):
    """ZeRO 1 by hand: rank 0 steps everything, and has the only optimizer."""
    optimizer = AdamW(model.parameters(), lr=0.01) if rank_of() == 0 else None

    def step(tokens, targets):
        loss = loss_of(model(mine(tokens)), mine(targets))
        loss.backward()
        average(model)
        if optimizer:
            optimizer.step()
        for p in model.parameters():
            dist.broadcast(p.data, 0)
        model.zero_grad()
        return loss.detach()

    return step


def at_stage(model, stage, most=None):
    """A stage of ZeRO, clipped or not."""
    if size_of() == 1:
        return stepping(model, finish=clip if most else None)
    ready = prepare(stage, model, partial(AdamW, lr=0.01))
    if most:
        clip_shards(ready.optimizer, most)

    def step(tokens, targets):
        loss = loss_of(ready.model(mine(tokens)), mine(targets))
        loss.backward()
        ready.step()
        ready.model.zero_grad()
        return loss.detach()

    return step


def tower():
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(*layers)


def whole(tensor):
    return tensor


# Tensor parallel


def mesh_of(*names):
    size = size_of()
    shape = (size,) if len(names) == 1 else (2, size // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def by_plan(model, share=whole):
    mesh = mesh_of("tp")
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return stepping(model, share=share)


def by_layers(model, group=None):
    """The course's layers, in each block."""
    for layer in model.layers:
        layer.up = ColumnParallelLinear(layer.up, group)
        layer.down = RowParallelLinear(layer.down, group)
    return model


def with_a_cut_head(model, loss_of=parallel_cross_entropy):
    """The vocabulary is shared, with zeros behind it where it can't be shared evenly."""
    model.head = VocabularyParallelHead(model.head)

    def loss(out, targets):
        return loss_of(out.flatten(0, 1), targets.flatten())

    return stepping(model, share=whole, loss_of=loss)


class InFloat32(nn.Module):
    """A norm that computes in float32, whatever comes in, as many models have."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm = self.norm
        how = norm.normalized_shape, norm.weight.float(), norm.bias.float()
        return nn.functional.layer_norm(x.float(), *how).to(x)


def with_float32_inside():
    model = net()
    for layer in model.layers:
        layer.norm = InFloat32(layer.norm)
    return model


class Shifted(nn.Module):
    """All logits are shifted alike, which a softmax takes away again."""

    def __init__(self, model):
        super().__init__()
        self.model, self.shift = model, nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        return self.model(tokens) + self.shift


def shifted():
    return Shifted(net())


def with_a_bias_of_keys():
    """Its gradient is 0, but for rounding; the head is tied."""
    torch.manual_seed(0)
    return SmallTransformer(WORDS, WIDTH, depth=1)


def transformer():
    return vocabulary.new_model(vocabulary=WORDS, depth=1)


def by_tokens(model, sums=True):
    """Between the products each rank has some tokens: twelve of them."""
    if size_of() > 1:
        model = cut_sequence(parallelize(model, PLAN))
        model = sum_copies(model) if sums else model
    loss = parallel_cross_entropy if size_of() > 1 else cross_entropy

    def loss_of(out, targets):
        return loss(out.flatten(0, 1), targets.flatten())

    step = stepping(model, share=whole, loss_of=loss_of)
    return lambda tokens, targets: step(tokens[:, :12], targets[:, :12])


def by_layers_and_ddp(model):
    """Two dimensions: a product is shared by neighbours, the batch by those two apart."""
    mesh = mesh_of("dp", "tp")
    model = by_layers(model, mesh.get_group("tp"))
    model = BucketedDDP(model, group=mesh.get_group("dp"))
    return stepping(model, share=lambda t: t.tensor_split(2)[mesh.get_local_rank("dp")])


# Pipelines


def in_layers():
    """The net as a row of layers."""
    model = net()
    return nn.Sequential(model.emb, *model.layers, model.head)


def stage_of(model, copied=False):
    cuts = [0, 2, 5] if size_of() == 2 else [0, 2, 3, 4, 5]
    stage = model[cuts[rank_of()] : cuts[rank_of() + 1]]
    return copy.deepcopy(stage) if copied else stage


def in_stages(model, schedule=pipelining.ScheduleGPipe, copied=False, loss_of=loss_of, **how):
    stage = stage_of(model, copied)
    optimizer = AdamW(stage.parameters(), lr=0.01)
    piped = pipelining.PipelineStage(stage, rank_of(), size_of(), torch.device("cpu"))
    runner = schedule(piped, 4, loss_fn=loss_of, **how)
    last = rank_of() == size_of() - 1

    def step(tokens, targets):
        losses = []
        given = () if rank_of() else (tokens,)
        runner.step(*given, target=targets if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if last else None

    return step


class Stages:
    """A Work of the course: this rank's stage."""

    def __init__(self, stage, tokens, targets, loss=None):
        self.stage, self.given = stage, (tokens, targets)
        self.loss = loss or (lambda out, targets: cross_entropy(out.mT, targets))

    def module(self, index):
        return self.stage

    def shape(self, index, micro):
        last = index == size_of()
        return [12 // micro, 13, *([WORDS] if last else [WIDTH] if index else [])]

    def batch(self, micro):
        return self.given


def in_works(model, run=run_gpipe, loss=None):
    stage = stage_of(model)
    optimizer = AdamW(stage.parameters(), lr=0.01)

    def step(tokens, targets):
        work = Stages(stage, tokens, targets, loss)
        losses, _ = run(rank_of(), size_of(), work, 4)
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) if losses else None

    return step


one_f_one_b = partial(run_in_order, order_of=order_of_1f1b, send_on=isend)


# Sequences


class Attention(nn.Module):
    """One causal head; `attend` can be replaced."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Reader(nn.Module):
    """Tokens and their positions, one layer of attention, a head."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, places=None):
        places = torch.arange(tokens.shape[1]) if places is None else places
        return self.head(self.attention(self.token(tokens) + self.position(places)))


def reader():
    torch.manual_seed(0)
    return Reader()


def in_a_ring(q, k, v, deal):
    return ring_attention(q, k, v, deal)[0].to(q)


def in_sequences(model, deal=zigzag, attend=None, places_of=None, finish=average):
    """Each rank has some positions of all sequences: twelve of them."""
    places = deal(12, rank_of(), size_of())
    if size_of() > 1:
        model.attention.attend = attend or (
            lambda q, k, v: ring_attention(q, k, v, deal)[0].to(q)
        )
    told = places_of(places) if places_of else places
    inner = stepping(
        model, share=whole, finish=finish if size_of() > 1 else None, loss_of=loss_of
    )
    model.forward = partial(model.forward, places=told)
    return lambda tokens, targets: inner(tokens[:, places], targets[:, places])


# Experts


class WithExperts(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.emb, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.experts = make(4, 2)

    def forward(self, tokens):
        x = self.emb(tokens)
        return self.head(x + self.experts(x.flatten(0, 1)).view_as(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = GatedMLP(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return x + self.mlp(x)


def layers_with_mlp():
    torch.manual_seed(0)
    around = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(around[0], Layer(), *around[1:])


def in_mixtures(model):
    """Each MLP becomes four experts, which the ranks share."""
    dispatch, combine = shared_experts.dispatch, shared_experts.combine
    return stepping(mixture.ExpertsDDP(model, 4, dispatch, combine))


def with_experts():
    torch.manual_seed(0)
    return WithExperts(experts.Experts)


def spread(model, group=None, order=None):
    """Each rank keeps its share of the experts of a whole model."""
    whole, layer = model.experts, shared_experts.ExpertParallel(4, 2, group)
    layer.router = whole.router
    for name in ("up", "down"):
        t = getattr(whole, name).detach()
        t = t if order is None else t[order]
        getattr(layer, name).data = t.chunk(size_of())[rank_of()].clone()
    model.experts = layer
    return model


def finish_experts(model, own=True, router=True):
    """The sum over all ranks of what all have, over the ranks whose tokens it saw."""
    for name, p in model.named_parameters():
        if not hasattr(p, "own") and (router or "router" not in name):
            dist.all_reduce(p.grad)
        if own or not hasattr(p, "own"):
            p.grad /= size_of()


def sharing_experts(model, finish=finish_experts, **how):
    return stepping(spread(model, **how), finish=finish)
