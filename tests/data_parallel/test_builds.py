"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.data_parallel.builds import build
from tests.builds import edited

BY_SIZE = """size = -(-len(batch) // len(devices))
    starts = range(0, len(batch), size)
    return [place(batch[i : i + size], devices[i // size]) for i in starts]"""
PIECES = "batch.chunk(len(devices))"
SCATTER = [
    ("pieces =…", BY_SIZE),
    ("place(piece, device)", "piece", "3 devices: the devices, entry 0 of 3"),
    (PIECES, "batch.tensor_split(len(devices))", "10 samples on 4 devices: the rows, entry"),
    (PIECES, "batch.detach().chunk(len(devices))", "does not require grad"),
]
MOVED, BOTH = "place(output, device)", "torch.cat(moved) if moved[0].dim() else"
GATHER = [
    (f"{BOTH} torch.stack(moved)", "torch.cat([m if m.dim() else m[None] for m in moved])"),
    (MOVED, "output", "virtual:"),
    (MOVED, "place(output, outputs[0].device)", "the device of what is joined: 'virtual:0'"),
    (f"{BOTH} torch.stack(moved)", "torch.cat(moved)", "zero-dimensional"),
    ("cat(moved)", "cat(moved[::-1])", "the rows"),
    (MOVED, f"{MOVED}.detach()", "does not require grad"),
    ("torch.stack(moved)", "torch.tensor(moved)", "the device of what is joined: 'cpu'"),
]
CALL = "count, total, squares = all_reduce(sums, group=group)"
LOCAL = "count, total, squares = sums"
NO_GRAD = f"""with torch.no_grad():
        torch.distributed.all_reduce(sums.data)
    {LOCAL}"""
THREE = """count, total = all_reduce(count), all_reduce(channels.sum(1))
    squares = all_reduce(channels.square().sum(1))"""
SPLIT = f"{CALL}.split([1, len(channels), len(channels)])"
VARIANCE = "variance = (squares / count).view(-1, 1, 1) - mean**2"
SYNC = [
    ("torch.stack([count,", "torch.cat([count[:1],", CALL, SPLIT),
    (VARIANCE, VARIANCE.replace("/ count", "/ (count - 1)"), "on 1 rank: the"),
    ("(variance + eps)", "variance", "on 1 rank: the output"),
    (").double()", ")", "the squared mean agree"),
    (".to(images.dtype)", "", "the output of float32 images is torch.float64"),
    (CALL, LOCAL, "on 2 ranks: the output"),
    ("channels.shape[1])", "1)", ".sum(1)", ".mean(1)", "on 3 ranks: the output"),
    (CALL, NO_GRAD, "on 2 ranks: the gradient is"),
    (CALL, THREE, "expected 2"),
    ("group=group)", "group=None)", "ranks 0 and 2, 1 and 3, with images of 10**r: rank 0"),
]
edits = {"scatter": SCATTER, "gather": GATHER, "sync_batch_norm": SYNC}
test_right, test_wrong = edited(build, edits)
