"""An answer to the last exercise: stage 3 with prefetching, in one class."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial import price, prove
from mgpu_tutorial.shared import small_and_large as sizes


class FSDP(nn.Module):
    """The parts of a model in a row are units; gradients are scattered after backward."""

    def __init__(self, model):
        super().__init__()
        self.hidden = [model]  # in a list: its parameters are not among ours
        self.n, rank = dist.get_world_size(), dist.get_rank()
        self.shards, self.wholes = nn.ParameterList(), []
        self.works = [None] * len(model)
        for i, part in enumerate(model):
            flat = self.padded([p.detach() for p in part.parameters()])
            self.shards.append(nn.Parameter(flat.chunk(self.n)[rank].clone()))
            self.wholes.append(flat)
            for p, view in self.views(part, flat):
                p.data = view
            self.free(i)
            part.register_forward_pre_hook(lambda *_, i=i: self.need(i, i + 1))
            part.register_forward_hook(lambda _part, _x, output, i=i: self.leave(i, output))

    def padded(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.n))

    def views(self, part, flat):
        for p in part.parameters():
            yield p, flat[: p.numel()].view_as(p)
            flat = flat[p.numel() :]

    def begin(self, i):
        whole = self.wholes[i]
        if not whole.untyped_storage().size():
            whole.untyped_storage().resize_(whole.nbytes)
            self.works[i] = dist.all_gather_single(
                whole, self.shards[i].detach(), async_op=True
            )

    def need(self, now, following):
        for i in (now, following):
            if 0 <= i < len(self.wholes):
                self.begin(i)
        if self.works[now]:
            self.works[now].wait()
            self.works[now] = None

    def free(self, i):
        self.wholes[i].untyped_storage().resize_(0)

    def leave(self, i, output):
        self.free(i)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.need(i, i - 1))

    def forward(self, x):
        return self.hidden[0](x)

    def finish_gradient_synchronization(self):
        for i, part in enumerate(self.hidden[0]):
            gradient = self.padded([p.grad for p in part.parameters()])
            mean = torch.empty_like(self.shards[i])
            dist.reduce_scatter_single(mean, gradient)
            self.shards[i].grad = mean / self.n
            for p in part.parameters():
                p.grad = None
            self.free(i)

    def whole_tensors(self, own):
        """For `prove`: the whole of each shard, or of its gradient, by the model's names."""
        found = {}
        for name, mine in own.items():
            i = int(name.removeprefix("shards."))
            whole = mine.new_empty(self.n * len(mine))
            dist.all_gather_single(whole, mine.detach())
            part = self.hidden[0][i]
            names = [f"{i}.{name}" for name, _ in part.named_parameters()]
            found |= zip(names, (view for _, view in self.views(part, whole)), strict=True)
        return found


@pytest.mark.slow
def test_it_trains_as_one_process():
    proof = prove(sizes.train, 4, FSDP, sizes.small, sizes.SMALL)
    assert proof and proof.tensors == 21


@pytest.mark.slow
def test_a_step_takes_what_the_text_says():
    ms, *_ = price(sizes.train, 8, FSDP, sizes.large, sizes.LARGE[:, :2049]).row(0)
    assert round(ms) == 96
