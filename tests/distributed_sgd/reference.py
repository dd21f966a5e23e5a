"""Plain training in one process, written out: nothing of it is the chapter's."""

import torch

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def losses_of(output, labels):
    return -output.gather(1, labels[:, None])[:, 0]


def mean_loss(output, labels):
    return losses_of(output, labels).mean()


def one_process(batches, loss_of=mean_loss, lr=0.01, dtype=torch.float32):
    """The parameters after a step per batch, of SGD with a momentum of 0.5."""
    torch.manual_seed(0)
    model = SmallConvNet().to(dtype)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    data = digits(dtype=dtype)
    for batch in batches:
        loss = loss_of(model(data.images[batch]), data.labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                v.mul_(0.5).add_(g)
                p.sub_(v, alpha=lr)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batches_of(batch, epoch=0):
    generator = torch.Generator().manual_seed(1 + epoch)
    return torch.randperm(len(digits()), generator=generator).split(batch)


def require_equal(results, expected, within=1e-6):
    """All ranks have the same bits, and nearly those of one process."""
    assert all(torch.equal(other, results[0]) for other in results)
    assert largest_difference(results[0], expected) < within
