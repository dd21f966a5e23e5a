"""What `scatter`, `gather` and `sync_batch_norm` must do, on devices and on real ranks."""

from collections.abc import Callable

import torch
from torch import nn

from mgpu_tutorial.data_parallel import sync, wrapper
from mgpu_tutorial.lab.devices import devices, place
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

# scatter


def gives_rows(scatter: Callable) -> None:
    """give each device its rows of the batch, in order, in pieces as chunk cuts them"""
    for samples, count in (6, 3), (10, 4), (10, 8):
        several, batch = devices(count), torch.arange(2.0 * samples).view(samples, 2)
        pieces = scatter(batch, several)
        expect(pieces is None, False, "nothing was returned")
        what = f"{samples} samples on {count} devices"
        wanted = [str(device) for device, _ in zip(several, pieces, strict=False)]
        expect(str([str(p.device) for p in pieces]), str(wanted), f"{what}: the devices")
        expect(torch.cat([p.cpu() for p in pieces]), batch, f"{what}: all rows")
        lengths = [len(piece) for piece in batch.chunk(count)]
        found = str([len(piece) for piece in pieces])
        expect(found, str(lengths), f"{what}: the rows of each piece")


def gives_gradients_back(scatter: Callable) -> None:
    """let the gradient of each piece find its way back to the batch"""
    batch = torch.ones(4, 1, requires_grad=True)
    pieces = scatter(batch, devices(2))
    sum((r + 1) * piece.cpu().sum() for r, piece in enumerate(pieces)).backward()
    expect(batch.grad, torch.tensor([[1.0], [1.0], [2.0], [2.0]]), "the batch's gradient")


# gather


def joins_rows(gather: Callable) -> None:
    """join the rows of all devices on one, in the devices' order"""
    several = devices(3)
    parts = [torch.full((3 - r, 2), float(r)) for r in range(3)]
    for home in several[0], several[2]:
        outputs = [place(part, device) for part, device in zip(parts, several, strict=True)]
        found = gather(outputs, home)
        expect(found is None, False, "nothing was returned")
        expect(str(found.device), str(home), "the device of what is joined")
        expect(found.cpu(), torch.cat(parts), "the rows")


def makes_a_vector(gather: Callable) -> None:
    """make a vector of single numbers"""
    several = devices(3)
    losses = [place(torch.tensor(float(r)), device) for r, device in enumerate(several)]
    expect(gather(losses, several[0]).cpu(), torch.arange(3.0), "of the numbers 0, 1 and 2")


def sends_gradients_back(gather: Callable) -> None:
    """send the gradient of each row, or number, back to its device"""
    several = devices(2)
    outputs = [place(torch.ones(2, 1), device).requires_grad_() for device in several]
    (
        gather(outputs, several[0]) * place(torch.arange(4.0)[:, None], several[0])
    ).sum().backward()
    for r, output in enumerate(outputs):
        wanted = torch.tensor([[2.0 * r], [2.0 * r + 1]])
        found = output.grad if output.grad is None else output.grad.cpu()
        expect(found, wanted, f"the gradient on {several[r]}")
    losses = [place(torch.tensor(1.0), device).requires_grad_() for device in several]
    joined = gather(losses, several[0])
    assert joined.requires_grad, "the vector has lost its way back to the single numbers"
    joined.sum().backward()
    for loss, device in zip(losses, several, strict=True):
        found = loss.grad if loss.grad is None else loss.grad.cpu()
        expect(found, torch.tensor(1.0), f"the gradient of the number on {device}")


# sync_batch_norm

SIZES = (1, 4), (2, 4), (3, 7)  # ranks, and the images that they share


def _normalised(
    rank: int, world_size: int, normalise: Callable, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of images, which grow brighter, normalised; and its gradient."""
    images = _images(samples).tensor_split(world_size)[rank].requires_grad_()
    output = normalise(images)
    (output * _images(samples).flip(0).tensor_split(world_size)[rank]).sum().backward()
    return output.detach(), images.grad


def _images(samples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    bright = torch.linspace(0.1, 0.4, samples).view(-1, 1, 1, 1)  # so dim that eps counts
    return bright * torch.rand(samples, 2, 3, 3, generator=generator)


def _one_process(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _normalised(0, 1, nn.BatchNorm2d(2, affine=False), samples)


def normalises_together(normalise: Callable) -> None:
    """give the output of one process on 1, 2 and 3 ranks, whose shares may be unequal"""
    for world_size, samples in SIZES:
        results = launch(_normalised, world_size, normalise, samples).results
        images = _images(samples)
        for r, (output, _) in enumerate(results):
            share = images.tensor_split(world_size)[r]
            _expect_statistics(output, share, images, f"rank {r} of {world_size}")
        found = torch.cat([output for output, _ in results])
        _expect_near(found, _one_process(samples)[0], f"{world_size} ranks: the output")


def _expect_statistics(
    output: torch.Tensor, share: torch.Tensor, images: torch.Tensor, who: str
) -> None:
    """AssertionError unless a share is normalised by the mean and variance of all."""
    wanted = images.var((0, 2, 3), correction=0), images.mean((0, 2, 3))
    scale = share.std((0, 2, 3)) / output.std((0, 2, 3))  # what the share was divided by
    mean = share.mean((0, 2, 3)) - scale * output.mean((0, 2, 3))
    expect(scale.square() - 1e-5, wanted[0], f"{who}: the variance of each channel", 1e-5)
    expect(mean, wanted[1], f"{who}: the mean of each channel", 1e-4)


def sends_once(normalise: Callable) -> None:
    """send one message forward and one backward"""
    events = launch(_normalised, 2, normalise, 4, trace=True).events
    calls = [event.op for event in events if event.rank == 0 and event.kind == "collective"]
    both = f"forward and backward together ({', '.join(calls) or 'none'})"
    expect(len(calls), 2, f"the calls of rank 0 in {both}")


def goes_back(normalise: Callable) -> None:
    """give the gradient of one process on 1, 2 and 3 ranks"""
    for world_size, samples in SIZES:
        results = launch(_normalised, world_size, normalise, samples).results
        found = torch.cat([gradient for _, gradient in results])
        _expect_near(found, _one_process(samples)[1], f"{world_size} ranks: the gradient")


def _expect_near(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    far = (found - wanted).abs().max().item()
    assert far < 1e-4, f"{what} is {far:.2g} away from that of one process"


build = Builder(
    "data_parallel",
    {
        wrapper.scatter: [gives_rows, gives_gradients_back],
        wrapper.gather: [joins_rows, makes_a_vector, sends_gradients_back],
        sync.sync_batch_norm: [normalises_together, goes_back, sends_once],
    },
)
