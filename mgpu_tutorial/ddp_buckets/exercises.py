"""What the exercises need: a wrapper with a planted bug, and its grader."""

import copy

import torch
from torch import nn

from mgpu_tutorial.ddp_buckets.experiments import Tower, shares
from mgpu_tutorial.ddp_buckets.wrappers import (
    BucketedDDP,
    Wrapper,
    finish_gradient_synchronization,
    wrap,
)


class PlantedDDP(BucketedDDP):
    """BucketedDDP with a bug: some modules get gradients that are not the mean."""

    def _attach(self) -> None:
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: nn.Parameter) -> None:
        bucket = self.bucket_of[parameter]
        if self.synchronises and bucket.missing:
            bucket.missing.pop()  # one gradient less to wait for
            self.order.append(parameter)
            self._send_complete()


def check_tied_gradients(rank: int, world_size: int, wrapper: Wrapper) -> bool:
    """Whether the ranks' mean gradients of a Tower with a tied weight are one process's.

    The last two layers share their weight. Whatever was sent has arrived before the last
    gradient of backward is added, as on a fast network.
    """
    torch.manual_seed(0)
    tower = Tower()
    tower.body[3].weight = tower.body[2].weight
    alone = copy.deepcopy(tower)
    model = wrap(wrapper, tower)

    def wait_for_what_was_sent(gradient: torch.Tensor) -> None:
        for bucket in getattr(model, "buckets", []):
            if bucket.work:
                bucket.work.wait()

    tower.body[0].weight.register_hook(wait_for_what_was_sent)
    (share,) = shares(rank, world_size, 1, 64)
    model(share).square().mean().backward()
    finish_gradient_synchronization(model)
    (whole,) = shares(0, 1, 1, 64)
    alone(whole).square().mean().backward()
    pairs = zip(tower.parameters(), alone.parameters(), strict=True)
    return all(torch.allclose(p.grad, q.grad, atol=1e-7) for p, q in pairs)
