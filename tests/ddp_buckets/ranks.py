"""Workers of these tests: odd modules, trained with each wrapper and without any."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import measurements
from mgpu_tutorial.ddp_buckets.experiments import Setting, Tower, shares
from mgpu_tutorial.ddp_buckets.wrappers import (
    BucketedDDP,
    NaiveDDP,
    finish_gradient_synchronization,
    wrap,
)


class Mixed(nn.Module):
    """Layers of float32, float64 and bfloat16, one after the other."""

    def __init__(self):
        super().__init__()
        self.kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float64]
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=kind) for kind in self.kinds)

    def forward(self, x):
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = torch.tanh(layer(x.to(kind)))
        return x.float()


def module(kind):
    """A module whose values depend on the caller's seed."""
    if kind == "mixed":
        return Mixed()
    if kind == "norm":
        return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    tower = Tower()
    if kind == "frozen":
        tower.body[1].requires_grad_(False)
    if kind == "tied":
        tower.body[3].weight = tower.body[2].weight
    return tower


def state(plain):
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    return {n: g if g is None else g.clone() for n, g in gradients.items()}, {
        n: t.detach().clone() for n, t in plain.state_dict().items()
    }


def train(rank, world_size, wrapper, kind="plain", cap=0.02, set_to_none=True, micro=1):
    """Three steps on this rank's shares; the wrapper None is one process without a wrapper.

    The first fills one bucket, the second has those of `cap`, the third goes on.
    """
    torch.manual_seed(rank)
    plain = module(kind)
    model = wrap(wrapper, plain, cap) if wrapper else plain
    trainable = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
    for batch in shares(rank, world_size, 3, 64):
        optimizer.zero_grad(set_to_none=set_to_none)
        for i, part in enumerate(batch.chunk(micro)):
            last = i == micro - 1 or wrapper is None
            with nullcontext() if last else model.no_sync():
                (model(part).square().mean() / micro).backward()
        if wrapper:
            finish_gradient_synchronization(model)
        optimizer.step()
    return state(plain)


def cut_buckets(rank, world_size, cap, own):
    """Which parameters are in which bucket after the rebuilding."""
    tower = Tower(48, 7)
    if own:
        model = BucketedDDP(tower, cap)
        for _ in range(2):
            model(torch.ones(1, 48)).sum().backward()
            model.finish_gradient_synchronization()
        names = {p: n for n, p in tower.named_parameters()}
        return [[names[p] for p in bucket.views] for bucket in model.buckets]
    from mgpu_tutorial.ddp_reducer.reducer import note_buckets

    model = DistributedDataParallel(tower, bucket_cap_mb=cap)
    seen = note_buckets(model)
    for _ in range(2):
        model(torch.ones(1, 48)).sum().backward()
    return seen[1]


def use_another_order(rank, world_size):
    """Rank 1 uses the layers in another order: all must cut as rank 0 does."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x)) if rank == 0 else self.a(self.b(x))

    model = BucketedDDP(Either(), 1e-6)
    found = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        model.finish_gradient_synchronization()
        found.append(model.module.a.weight.grad.clone())
    names = {p: n for n, p in model.module.named_parameters()}
    return [names[p] for b in model.buckets for p in b.views], found


def use_half(rank, world_size, wrapper):
    """Rank 1 leaves the last layer out; returns its gradient, twice."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.a(x) + (self.b(x) if rank == 0 else 0)

    model = wrap(wrapper, Half(), 1e-6)
    found = []
    for factor in (1.0, 3.0):  # the second time stale values must not come back
        model.zero_grad()
        model(torch.full((1, 4), factor)).sum().backward()
        finish_gradient_synchronization(model)
        found.append(model.module.b.weight.grad.tolist())
    return found


def go_back_twice(rank, world_size, wrapper):
    model = wrap(wrapper, Tower())
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()


def tell_refusal(rank, world_size, worker, **given):
    """The ValueError of a worker, which all ranks raise alike, so that they can go on."""
    try:
        worker(rank, world_size, **given)
    except ValueError as error:
        return str(error)


def wrap_another_dtype(rank, world_size, wrapper):
    """Rank 1's head is float64."""
    tower = Tower()
    tower.head.to(torch.float64 if rank == 1 else torch.float32)
    wrap(wrapper, tower)


class SlowAtFirst(NaiveDDP):
    """The n-th forward takes n seconds on a clock that only it moves."""

    clock = steps = 0

    def forward(self, x):
        SlowAtFirst.steps += 1
        SlowAtFirst.clock += SlowAtFirst.steps
        return super().forward(x)


def time_on_a_clock_of_our_own(rank, world_size):
    real = measurements.time.perf_counter
    measurements.time.perf_counter = lambda: SlowAtFirst.clock
    setting = Setting(width=4, depth=1, batch=2)
    try:
        return measurements.time_steps(rank, world_size, [SlowAtFirst], setting, steps=3)
    finally:
        measurements.time.perf_counter = real


def go_past_the_wrapper(rank, world_size):
    """The gradient of rank + 1 after a forward through `.module`."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.module(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()


def freeze_everything(rank, world_size, wrapper):
    wrap(wrapper, Tower().requires_grad_(False))


def follow_buffers(rank, world_size, wrapper, forwards):
    """The running means on every rank, after construction and after each forward.

    `forwards` are of the kinds "averaged", "no_sync" (backward without averaging) and
    "no_grad".
    """
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(float(rank + 5))
    model = wrap(wrapper, norm)
    found = [norm.running_mean.item()]
    around = {"averaged": nullcontext, "no_sync": model.no_sync, "no_grad": torch.no_grad}
    for kind in forwards:
        with around[kind]():
            output = model(torch.full((4, 1), 10.0 * (rank + 1)))
            found.append(round(norm.running_mean.item(), 4))
            if kind != "no_grad":
                output.sum().backward()
        if kind == "averaged":
            finish_gradient_synchronization(model)
    return found


def go_forward_twice(rank, world_size, wrapper):
    """The gradient of one backward after two forwards through a BatchNorm."""
    torch.manual_seed(0)
    model = wrap(wrapper, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    generator = torch.Generator().manual_seed(rank)
    one, two = torch.randn(2, 5, 3, generator=generator)
    (model(one).square().sum() + model(two).abs().sum()).backward()
    finish_gradient_synchronization(model)
    return model.module[0].weight.grad


def look_for_views(rank, world_size, set_to_none):
    """Whether all gradients are views into the buckets after each of three steps."""
    model = BucketedDDP(Tower(), 0.02)
    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        buckets = model.buckets  # in the first step those that are cut anew at its end
        model(torch.ones(2, 64)).sum().backward()
        model.finish_gradient_synchronization()
        inside = {view.data_ptr() for b in buckets for view in b.views.values()}
        found.append(all(p.grad.data_ptr() in inside for p in model.parameters()))
    return found


def carry_a_state_dict(rank, world_size, wrapper):
    """A state_dict goes to a plain module, and from a plain module into a new wrapper."""
    torch.manual_seed(rank)
    model = wrap(wrapper, Tower())
    plain = Tower()
    plain.load_state_dict(model.module.state_dict())
    keys = list(model.state_dict()) == list(DistributedDataParallel(Tower()).state_dict())
    torch.manual_seed(7)
    other = Tower()
    fresh = wrap(wrapper, Tower())
    fresh.module.load_state_dict(other.state_dict())
    fresh(torch.ones(1, 64)).sum().backward()
    finish_gradient_synchronization(fresh)
    other(torch.ones(1, 64)).sum().backward()
    same = all(
        torch.allclose(p.grad, q.grad)
        for p, q in zip(fresh.module.parameters(), other.parameters(), strict=True)
    )
    copied = all(
        torch.equal(p, q)
        for p, q in zip(plain.parameters(), model.module.parameters(), strict=True)
    )
    return keys, copied, same
