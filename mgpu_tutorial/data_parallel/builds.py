"""What `scatter`, `gather` and `sync_batch_norm` must do, on devices and on real ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.data_parallel import wrapper
from mgpu_tutorial.lab.devices import devices, place
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

ROWS = [torch.full((3 - r, 2), float(r)) for r in range(3)]
NOTHING = "nothing was returned. Is a `return` missing?"
NUMBERS = [torch.tensor(float(r)) for r in range(3)]


def gives_rows(scatter: Callable) -> None:
    """give each device its rows of the batch, in order, in pieces as chunk cuts them"""
    for samples, count in (6, 3), (10, 4), (10, 8):
        batch = torch.arange(2.0 * samples).view(samples, 2)
        pieces, wanted = scatter(batch, devices(count)), list(batch.chunk(count))
        what = f"{samples} samples on {count} devices: the"
        assert pieces is not None, NOTHING
        names = [str(device) for device in devices(len(wanted))]
        expect([str(piece.device) for piece in pieces], names, f"{what} devices")
        expect([piece.cpu() for piece in pieces], wanted, f"{what} rows")


def gives_gradients_back(scatter: Callable) -> None:
    """let the gradient of each piece find its way back to the batch"""
    batch = torch.ones(4, 1, requires_grad=True)
    pieces = scatter(batch, devices(2))
    sum((r + 1) * piece.cpu().sum() for r, piece in enumerate(pieces)).backward()
    expect(batch.grad, torch.tensor([[1.0], [1.0], [2.0], [2.0]]), "the batch's gradient")


def _outputs(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    pairs = zip(parts, devices(3), strict=True)
    return [place(part, device).requires_grad_() for part, device in pairs]


def joins_rows(gather: Callable) -> None:
    """join the rows of all devices on one, in the devices' order, and numbers to a vector"""
    for parts, joined in (ROWS, torch.cat(ROWS)), (NUMBERS, torch.stack(NUMBERS)):
        for home in devices(3)[0], devices(3)[2]:
            found = gather(_outputs(parts), home)
            assert found is not None, NOTHING
            expect(str(found.device), str(home), "the device of what is joined")
            expect(found.detach().cpu(), joined, "the rows")


def sends_gradients_back(gather: Callable) -> None:
    """send the gradient of each row, or number, back to its device"""
    for parts in ROWS, NUMBERS:
        outputs = _outputs(parts)
        joined = gather(outputs, outputs[0].device)
        found = torch.autograd.grad(joined.square().sum(), outputs)
        expect([g.cpu() for g in found], [2 * part for part in parts], "the gradients")


def _normalised(
    rank: int, world_size: int, normalise: Callable, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of images, which grow brighter; normalised; and its gradient."""
    generator = torch.Generator().manual_seed(0)
    bright = torch.linspace(0.1, 0.4, samples).view(-1, 1, 1, 1)  # so dim that eps counts
    images = bright * torch.rand(samples, 2, 3, 3, generator=generator)
    share, other = (t.tensor_split(world_size)[rank] for t in (images, images.flip(0)))
    output = normalise(share.requires_grad_())
    (output * other).sum().backward()
    return output.detach(), share.grad


def _expect_one_process(normalise: Callable, entry: int, name: str) -> None:
    for world_size, samples in (1, 4), (2, 4), (3, 7):
        results = launch(_normalised, world_size, normalise, samples).results
        norm = nn.BatchNorm2d(2, affine=False)
        found = torch.cat([result[entry] for result in results])
        far = (found - _normalised(0, 1, norm, samples)[entry]).abs().max().item()
        who = f"{samples} images on {world_size} rank{'s' * (world_size > 1)}: the {name}"
        assert far < 1e-4, f"{who} is {far:.2g} away from that of one process"


def normalises_together(normalise: Callable) -> None:
    """give the output of one process on 1, 2 and 3 ranks, whose shares may be unequal"""
    _expect_one_process(normalise, 0, "output")


def goes_back(normalise: Callable) -> None:
    """give the gradient of one process on 1, 2 and 3 ranks"""
    _expect_one_process(normalise, 1, "gradient")


def _far_from_zero(rank: int, world_size: int, normalise: Callable) -> torch.Tensor:
    """This rank's share of images around 100 that differ by a hundredth, normalised."""
    generator = torch.Generator().manual_seed(0)
    images = 100 + 0.01 * torch.randn(4, 2, 8, 8, generator=generator)
    return normalise(images.tensor_split(world_size)[rank]).detach()


def holds_far_from_zero(normalise: Callable) -> None:
    """do so for images far from zero, such as 100 ± 0.01, and leave their dtype"""
    norm = nn.BatchNorm2d(2, affine=False).double()
    expected = _far_from_zero(0, 1, lambda images: norm(images.double()))
    results = launch(_far_from_zero, 2, normalise).results
    dtype = results[0].dtype
    assert dtype == torch.float32, f"the output of float32 images is {dtype}"
    far = (torch.cat(results) - expected).abs().max().item()
    why = "the mean square and the squared mean agree in all digits that float32 has"
    assert far < 1e-2, f"the output is {far:.2g} away from that of one process: {why}"


def sends_once(normalise: Callable) -> None:
    """send one message forward and one backward"""
    events = launch(_normalised, 2, normalise, 4, trace=True).events
    calls = [event.op for event in events if event.rank == 0 and event.kind == "collective"]
    both = f"forward and backward together ({', '.join(calls) or 'none'})"
    expect(len(calls), 2, f"the calls of rank 0 in {both}")


def _in_pairs(rank: int, world_size: int, normalise: Callable) -> torch.Tensor:
    """Of four ranks 0 and 2 normalise together, and so do 1 and 3."""
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    images = torch.full((1, 1, 1, 2), 10.0**rank)
    return normalise(images, group=groups[rank % 2])


def normalises_in_a_group(normalise: Callable) -> None:
    """normalise over the ranks of `group` alone, if one is given"""
    for rank, found in enumerate(launch(_in_pairs, 4, normalise).results):
        sign = -1.0 if rank < 2 else 1.0  # one value is below the mean, one above
        what = f"groups of ranks 0 and 2, 1 and 3, with images of 10**r: rank {rank} has"
        expect(found.flatten(), torch.full((2,), sign), what, within=1e-3)


build = Builder(
    "data_parallel",
    {
        wrapper.scatter: [gives_rows, gives_gradients_back],
        wrapper.gather: [joins_rows, sends_gradients_back],
        wrapper.sync_batch_norm: [
            normalises_together,
            goes_back,
            holds_far_from_zero,
            sends_once,
            normalises_in_a_group,
        ],
    },
)
