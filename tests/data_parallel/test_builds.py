"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.data_parallel.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from mgpu_tutorial.lab import place


"""


def function(head, *lines):
    return IMPORTS + "\n    ".join([f"def {head}:", *lines])


def scatter(*lines):
    return function("scatter(batch, devices)", *lines)


def gather(*lines):
    return function("gather(outputs, device)", *lines)


def sync(*lines):
    first = "channels = images.transpose(0, 1).flatten(1)"
    end = "return (images - mean.view(-1, 1, 1)) / (variance + eps).sqrt().view(-1, 1, 1)"
    return function("sync_batch_norm(images, eps=1e-5)", first, *lines, end)


MOVED = "moved = [place(output, device) for output in outputs]"
JOINED = "return torch.cat(moved) if moved[0].dim() else torch.stack(moved)"
COUNT = "count = torch.full_like(channels[:, 0], channels.shape[1])"
SUMS = "sums = torch.stack([count, channels.sum(1), (channels**2).sum(1)])"
ADDED = "count, total, squares = all_reduce(sums)"
MEAN = "mean, variance = total / count, squares / count - (total / count) ** 2"
RIGHT = [
    scatter("return [place(p, d) for p, d in zip(batch.chunk(len(devices)), devices)]"),
    scatter(
        "size = -(-len(batch) // len(devices))",
        "pieces = []",
        "for r, begin in enumerate(range(0, len(batch), size)):",
        "    pieces.append(place(batch[begin : begin + size], devices[r]))",
        "return pieces",
    ),
    gather(MOVED, JOINED),
    gather("return torch.cat([place(o if o.dim() else o[None], device) for o in outputs])"),
    sync(COUNT, SUMS, ADDED, MEAN),
    sync(
        "size = channels.new_tensor([channels.shape[1]])",
        "sums = torch.cat([size, channels.sum(1), channels.square().sum(1)])",
        "count, total, squares = all_reduce(sums).split([1, len(channels), len(channels)])",
        MEAN,
    ),
]
WRONG = [
    (scatter("return list(batch.chunk(len(devices)))"), "the devices of the pieces: 'cpu"),
    (
        scatter("return [place(batch[r :: len(devices)], d) for r, d in enumerate(devices)]"),
        "all rows",
    ),
    (
        scatter(
            "pieces = batch.tensor_split(len(devices))",
            "return [place(p, d) for p, d in zip(pieces, devices)]",
        ),
        "10 samples on 4 devices: the rows of each piece",
    ),
    (
        scatter(
            "pieces = batch.detach().chunk(len(devices))",
            "return [place(p, d) for p, d in zip(pieces, devices)]",
        ),
        "does not require grad",
    ),
    (gather("return torch.cat(outputs)"), "virtual:"),
    (gather(MOVED, "return torch.cat(moved)"), "zero-dimensional"),
    (gather(MOVED, "return torch.cat(moved[::-1])"), "the rows"),
    (gather(MOVED, "moved = [m.detach() for m in moved]", JOINED), "does not require grad"),
    (
        gather(MOVED, "return torch.cat(moved) if moved[0].dim() else torch.tensor(moved)"),
        "the vector has lost its way back",
    ),
    (sync("mean, variance = channels.mean(1), channels.var(1)"), "the output is"),
    (
        sync("mean, variance = channels.mean(1), channels.var(1, correction=0)"),
        "2 ranks: the output is",
    ),
    (
        sync(
            "moments = torch.stack([channels.mean(1), channels.square().mean(1)])",
            "mean, squares = all_reduce(moments) / dist.get_world_size()",
            "variance = squares - mean**2",
        ),
        "3 ranks: the output is",
    ),
    (
        sync(COUNT, SUMS, "with torch.no_grad():", "    dist.all_reduce(sums)")
        .replace("dist.all_reduce(sums)", "dist.all_reduce(sums.data)")
        .replace(
            "\n    return", f"\n    count, total, squares = sums\n    {MEAN}\n    return"
        ),
        "2 ranks: the gradient is",
    ),
    (
        sync(
            COUNT,
            "count, total = all_reduce(count), all_reduce(channels.sum(1))",
            "squares = all_reduce(channels.square().sum(1))",
            MEAN,
        ),
        "expected 2",
    ),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
