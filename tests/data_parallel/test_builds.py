"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.data_parallel.builds import build
from tests.builds import Right, Wrong, edited

BY_SIZE = """size = -(-len(batch) // len(devices))
    starts = range(0, len(batch), size)
    return [place(batch[i : i + size], devices[i // size]) for i in starts]"""
PIECES = "batch.chunk(len(devices))"
SCATTER = [
    Right("scatter", replace={"pairs =…": BY_SIZE}),
    Wrong(
        "scatter",
        replace={"place(piece, device)": "piece"},
        says="3 devices: the devices, entry 0 of 3",
    ),
    Wrong(
        "scatter",
        replace={PIECES: "batch.tensor_split(len(devices))"},
        says="10 samples on 4 devices: the rows, entry",
    ),
    Wrong(
        "scatter",
        replace={PIECES: "batch.detach().chunk(len(devices))"},
        says="does not require grad",
    ),
]
MOVED, BOTH = "place(output, device)", "torch.cat(moved) if moved[0].dim() else"
GATHER = [
    Right(
        "gather",
        replace={
            f"{BOTH} torch.stack(moved)": "torch.cat([m if m.dim() else m[None] "
            "for m in moved])"
        },
    ),
    Wrong("gather", replace={MOVED: "output"}, says="virtual:"),
    Wrong(
        "gather",
        replace={MOVED: "place(output, outputs[0].device)"},
        says="the device of what is joined: 'virtual:0'",
    ),
    Wrong(
        "gather",
        replace={f"{BOTH} torch.stack(moved)": "torch.cat(moved)"},
        says="zero-dimensional",
    ),
    Wrong("gather", replace={"cat(moved)": "cat(moved[::-1])"}, says="the rows"),
    Wrong("gather", replace={MOVED: f"{MOVED}.detach()"}, says="does not require grad"),
    Wrong(
        "gather",
        replace={"torch.stack(moved)": "torch.tensor(moved)"},
        says="the device of what is joined: 'cpu'",
    ),
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
    Right(
        "sync_batch_norm",
        replace={"torch.stack([count,": "torch.cat([count[:1],", CALL: SPLIT},
    ),
    Wrong(
        "sync_batch_norm",
        replace={VARIANCE: VARIANCE.replace("/ count", "/ (count - 1)")},
        says="on 1 rank: the",
    ),
    Wrong(
        "sync_batch_norm",
        replace={"(variance + eps)": "variance"},
        says="on 1 rank: the output",
    ),
    Wrong(
        "sync_batch_norm",
        replace={"channels.double()": "channels"},
        says="the squared mean agree",
    ),
    Wrong(
        "sync_batch_norm",
        replace={".to(images.dtype)": ""},
        says="the output of float32 images is torch.float64",
    ),
    Wrong("sync_batch_norm", replace={CALL: LOCAL}, says="on 2 ranks: the output"),
    Wrong(
        "sync_batch_norm",
        replace={"channels.shape[1])": "1)", ".sum(1)": ".mean(1)"},
        says="on 3 ranks: the output",
    ),
    Wrong("sync_batch_norm", replace={CALL: NO_GRAD}, says="on 2 ranks: the gradient is"),
    Wrong("sync_batch_norm", replace={CALL: THREE}, says="expected 2"),
    Wrong(
        "sync_batch_norm",
        replace={"group=group)": "group=None)"},
        says="ranks 0 and 2, 1 and 3, with images of 10**r: rank 0",
    ),
]
edits = [*SCATTER, *GATHER, *SYNC]
test_right, test_wrong = edited(build, edits)
