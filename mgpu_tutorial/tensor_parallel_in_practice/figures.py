"""Apparatus, not the lesson: errors, bytes and rounding in tables, films and a picture."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import Ledger, Table, frame, launch, span
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import ALARM
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import ring_passes
from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import copies, copies_that_differ
from mgpu_tutorial.tensor_parallel.figures import Step, distances, each, whole
from mgpu_tutorial.tensor_parallel_in_practice.sequence import gathered, scattered_sum
from mgpu_tutorial.tensor_parallel_in_practice.torch_plan import on_a_mesh, step_on_a_mesh
from mgpu_tutorial.tensor_parallel_in_practice.vocabulary import (
    gradients_of,
    new_batch,
    new_model,
    parallel_cross_entropy,
    parallelize,
    whole_gradients,
)

Prepare = Callable[[SmallTransformer], SmallTransformer]
GREY = 7  # the number of a colour that is no rank's here
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


# The vocabulary, the sequence and the mesh as films


def share_vocabulary(rank: int, world_size: int) -> float:
    """A token through embedding, head and loss on two ranks, which have three tokens each."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 5.0]])[rank]
    largest, here = logits.max(), torch.tensor(float(rank))  # token 4 is on rank 1
    held = {"tokens": ("0 1 2", "3 4 5")[rank]}
    frame("Each rank has the rows of three tokens. It has to look up token 4.", held)
    held["lookup"] = ("zeros", "row 4")[rank]
    frame("The rank that has token 4 takes its row. The other takes zeros.", held)
    dist.all_reduce(here)
    held["lookup"] = "row 4", GREY
    frame("g adds them up, by an all-reduce: every rank has the right row.", held)
    held |= {"logits": " ".join(f"{number:g}" for number in logits), "max": f"{largest:g}"}
    frame(
        "After the head each rank has the logits of its own tokens, and their maximum.", held
    )
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    held["max"] = f"{largest:g}", GREY
    frame("All-reduce: the largest logit of all. Every rank subtracts it.", held)
    total, right = (logits - largest).exp().sum(), torch.zeros(())
    if rank == 0:  # the right next token is 0
        right = logits[0] - largest
    held |= {"sum": f"{total:.2f}", "right": f"{right:g}"}
    says = "Each has a part of the sum. The right token is 0: rank 0 has its logit, 1 − 5."
    frame(says, held)
    dist.all_reduce(total)
    dist.all_reduce(right)
    held |= {"sum": (f"{total:.2f}", GREY), "right": (f"{right:g}", GREY)}
    frame("Two more all-reduces, and every rank has the loss: log(sum) − right.", held)
    return (total.log() - right).item()


def share_sequence(rank: int, world_size: int) -> torch.Tensor:
    """A layer of attention on two ranks: four tokens in two parts, four heads."""
    tokens = torch.full((1, 2, 1), float(rank))
    held = {"part": ("0 1", "2 3")[rank]}
    frame("Norm: each rank has two of the four tokens, and all their features.", held)
    whole, other = gathered(tokens), 1 - rank
    held["input"] = range(world_size)
    says = "All-gather, in place of f: every rank has both parts."
    frame(says, held, {"input": (other, "part")})
    held["heads"] = ("0 1", "2 3")[rank]
    frame("Attention: each rank computes its own heads, for all tokens.", held)
    held["product"] = [rank]
    frame("Its rows of the last matrix: a part of the sum, for all tokens.", held)
    mine = scattered_sum(whole)
    held["sum"] = range(world_size)
    says = "Reduce-scatter, in place of g: the whole sum, but only for its own tokens."
    frame(says, held, {"sum": (other, "product")})
    return mine


def travel(rank: int, world_size: int) -> None:
    """A layer on a mesh of 2 x 2 ranks, forward and back; a film of what a rank holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = ({rank // 2 * 2, rank // 2 * 2 + 1}, {rank % 2, rank % 2 + 2})
    held = {"reads": (f"batch {rank // 2}", min(row)), "layer": [rank]}
    number = torch.ones(4)
    says = "Each rank has a quarter of the layer. The ranks of a row read the same."
    frame(says, held)
    dist.all_reduce(number, group=mesh.get_group("dp"))
    held["layer"] = column
    frame("dp: fully_shard gathers the layer's half, in the columns of the mesh.", held)
    held["product"] = [rank]
    frame("Each rank multiplies by its half, and has a part of the product.", held)
    dist.all_reduce(number, group=mesh.get_group("tp"))
    held["product"] = row
    frame("tp: g adds up the parts of the product, in the rows.", held)
    held["gradient"] = [rank]
    frame("Back. Each rank has the gradient of its half, from what its row read.", held)
    dist.all_reduce(number, group=mesh.get_group("dp"))
    held |= {"gradient": column, "layer": [rank]}
    frame("dp: the columns add it up. Each rank keeps its quarter.", held)


# How wrong


def step_once(rank: int, world_size: int, prepare: Prepare) -> Step:
    """A step of SGD: its loss, all gradients, and which copies then differ between ranks."""
    model = prepare(new_model())
    loss = gradients_of(model)
    gradients = flat(whole_gradients(model).values())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss, gradients, copies_that_differ(model)


def step_table(*prepares: Prepare) -> Table:
    """Launch a step of each on four ranks; how far from one process, and what differs."""
    return distances(step_once, prepares, ranks=4)


def flat(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """All gradients side by side, in float64."""
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def mesh_steps(
    rank: int, world_size: int, shapes: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """A step by PyTorch on a mesh (dp, tp) of each shape: all gradients."""
    device, found = "cuda" if "nccl" in dist.get_backend() else "cpu", []
    for shape in shapes:
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
        model = on_a_mesh(new_model(), mesh)
        step_on_a_mesh(model, mesh, *new_batch())
        found.append(flat(p.grad.full_tensor() for p in model.parameters()))
    return found


def tabulate_distances(prepares: list[Prepare], shapes: list[tuple[int, int]]) -> Table:
    """Launch a step of each on 2 to 4 ranks, and on meshes: is a gradient off by 1e-14?"""
    _, expected, _ = launch(step_once, 1, whole).results[0]
    found = {(prepare.__name__, "2, 3 and 4 ranks"): [] for prepare in prepares}
    for n in (2, 3, 4):
        for steps in launch(each, n, step_once, prepares).results:
            for gradients, step in zip(found.values(), steps, strict=True):
                gradients.append(step[1])
    meshes = ", ".join(f"{dp} x {tp}" for dp, tp in shapes)
    results = launch(mesh_steps, 4, shapes).results
    found["PyTorch's, on meshes", f"{meshes} ranks"] = sum(results, start=[])
    rows = []
    for name, gradients in found.items():
        far = largest_difference(gradients, [expected] * len(gradients))
        rows.append([*name, "below 1e-14" if far < 1e-14 else f"{far:.0e}"])
    return Table(["", "", "every gradient of every rank"], rows)


# What is sent, and what is kept


def trace_steps(rank: int, world_size: int, prepares: list[Prepare]) -> None:
    """A step of each, with one block and with two."""
    for prepare in prepares:
        for depth in (1, 2):
            model = prepare(new_model(torch.float32, depth=depth))
            with span(f"{prepare.__name__} {depth}"):
                gradients_of(model)


def bytes_table(*prepares: Prepare) -> Table:
    """Launch two ranks and four; the bytes that a block sends in a ring."""
    rows = []
    for n in (2, 4):
        report = launch(trace_steps, n, prepares, trace=True)
        for prepare in prepares:
            name = prepare.__name__
            one, two = (ring_passes(report, f"{name} {depth}") for depth in (1, 2))
            sent = Counter({op: nbytes * (n - 1) // n for op, nbytes in (two - one).items()})
            calls = ", ".join(f"{nbytes:,} {op}" for op, nbytes in sorted(sent.items()))
            rows.append([name, n, calls, sum(sent.values())])
    return Table(["", "ranks", "bytes per block and step", "in all"], rows)


def count_kept(rank: int, world_size: int, prepares: list[Prepare]) -> list[int]:
    """The bytes of activations that autograd keeps on this rank after forward."""
    found = []
    for prepare in prepares:
        model, ledger = prepare(new_model(torch.float32, width=96)), Ledger()
        tokens, targets = new_batch(sequences=8, length=24)
        ledger.add("batch", [tokens, targets])
        with ledger.saved_for_backward(model):
            loss = parallel_cross_entropy(model(tokens), targets)
        found.append(ledger.saved_now("cpu"))
        loss.backward()
    return found


def kept_table(*prepares: Prepare) -> Table:
    """Launch 1, 2 and 4 ranks; the KiB that a rank keeps for backward."""
    kept = [launch(count_kept, n, prepares).results[0] for n in (1, 2, 4)]
    rows = [
        [prepare.__name__, *(f"{nbytes / 1024:,.0f}" for nbytes in row)]
        for prepare, row in zip(prepares, zip(*kept, strict=True), strict=True)
    ]
    return Table(["KiB kept for backward", "of 1", "of 2", "of 4"], rows)


# Rounding: a sum of rounded numbers depends on its order


def share_otherwise(model: SmallTransformer, seed: int) -> SmallTransformer:
    """The same function with its heads and features in another order."""
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        heads = attention.out.in_features // attention.per_head
        for first, second, count in (
            (attention.qkv, attention.out, heads),
            (mlp.up, mlp.down, mlp.up.out_features),
        ):
            order = torch.randperm(count, generator=generator)
            for p in (first.weight, first.bias):
                p.data = p.data.unflatten(0, (count, -1))[order].flatten(0, 1)
            columns = second.weight.data.unflatten(1, (count, -1))
            second.weight.data = columns[:, order].flatten(1)
    return model


def orders(rank: int, world_size: int, tokens: int) -> dict[str, dict[str, list[float]]]:
    """How far the copies' gradients are from one process, in each of sixteen orders."""
    batch, targets = new_batch()
    found = {name: {"right": [], "without mask": []} for name in DTYPES}
    for name, dtype in DTYPES.items():
        one = new_model(dtype, vocabulary=tokens)
        wide = one(batch).flatten(0, 1).to(torch.promote_types(dtype, torch.float32))
        cross_entropy(wide, targets.flatten()).backward()
        for seed in range(16):
            model = parallelize(share_otherwise(new_model(dtype, vocabulary=tokens), seed))
            for which in found[name]:
                if which == "without mask":
                    model.head.real = len(model.head.weight)
                model.zero_grad()
                gradients_of(model)
                mine = {path: p.grad for path, p in copies(model).items()}
                expected = flat(one.get_parameter(path).grad for path in mine)
                far = (flat(mine.values()) - expected).norm() / expected.norm()
                found[name][which].append(far.item())
    return found


def orders_picture(measured: Mapping[str, Mapping[str, list[float]]]) -> Plot:
    """Draw the distance from one process of each order, by precision; bfloat16 once more."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    every, last = figure.subplots(1, 2, width_ratios=(3, 2))
    looks = {"right": (COLOURS[0], "o", -0.12), "without mask": (ALARM, "x", 0.12)}
    for axes, names in ((every, list(measured)), (last, list(measured)[-1:])):
        for place, name in enumerate(names):
            for which, values in measured[name].items():
                ink, marker, shift = looks[which]
                label = f"{which}, sixteen orders" if place == 0 else None
                xs = [place + shift] * len(values)
                axes.scatter(xs, values, 60, color=ink, marker=marker, label=label, alpha=0.7)
        axes.set_xticks(range(len(names)), names, fontsize=12)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    every.set(yscale="log", ylabel="gradients off, as a share", ylim=(1e-17, 1))
    every.legend(frameon=False, fontsize=11, loc="lower right")
    last.set(xlim=(-0.5, 0.5), title="the last column, enlarged")
    words = "distance of sixteen orders from one process, right and without the mask, in "
    return Plot(figure, words + ", ".join(measured))
