"""Apparatus, not the lesson: errors, bytes and rounding in tables, films and a picture."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import Ledger, Table, frame, launch, span
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import ALARM
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.traffic import ring_passes
from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import copies, copies_that_differ
from mgpu_tutorial.tensor_parallel.figures import distances, whole
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


def step_once(
    rank: int, world_size: int, prepare: Prepare
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """A step of SGD: its loss, all gradients, and which copies then differ between ranks."""
    model = prepare(new_model())
    loss = gradients_of(model)
    gradients = flat(whole_gradients(model))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss, gradients, copies_that_differ(model)


def step_table(*prepares: Prepare) -> Table:
    """Launch a step of each on four ranks; how far from one process, and what differs."""
    return distances(step_once, prepares, ranks=4)


def flat(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All gradients side by side, in float64."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).double()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How long the difference is, as a share of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def mesh_step(rank: int, world_size: int, shape: tuple[int, int]) -> torch.Tensor:
    """A step on a mesh (dp, tp) by PyTorch; all gradients."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    model = on_a_mesh(new_model(), mesh)
    step_on_a_mesh(model, mesh, *new_batch())
    return flat({name: p.grad.full_tensor() for name, p in model.named_parameters()})


def tabulate_distances(
    prepares: Sequence[Prepare], shapes: Sequence[tuple[int, int]]
) -> Table:
    """Launch a step of each on 1 to 4 ranks, and on meshes: is a gradient off by 1e-14?"""
    _, expected, _ = launch(step_once, 1, whole).results[0]
    found = {
        (p.__name__, "1, 2, 3 and 4 ranks"): [
            result[1] for n in (1, 2, 3, 4) for result in launch(step_once, n, p).results
        ]
        for p in prepares
    }
    meshes = ", ".join(f"{dp} x {tp}" for dp, tp in shapes)
    found["PyTorch's, on meshes", f"{meshes} ranks"] = [
        result for shape in shapes for result in launch(mesh_step, 4, shape).results
    ]
    rows = []
    for name, results in found.items():
        far = largest_difference(results, [expected] * len(results))
        rows.append([*name, "below 1e-14" if far < 1e-14 else f"{far:.0e}"])
    return Table(["", "", "every gradient of every rank"], rows)


# What is sent, and what is kept


def trace_steps(rank: int, world_size: int, prepares: Sequence[Prepare]) -> None:
    """A step of each, with one block and with two."""
    for prepare in prepares:
        for depth in (1, 2):
            model = prepare(new_model(torch.float32, depth=depth))
            with span(f"{prepare.__name__} {depth}"):
                gradients_of(model)


def bytes_table(*prepares: Prepare, ranks: Sequence[int] = (2, 4)) -> Table:
    """Launch each; the bytes that a rank sends per block and step in a ring, and in all."""
    rows = []
    for n in ranks:
        report = launch(trace_steps, n, prepares, trace=True)
        for prepare in prepares:
            one, two = (
                ring_passes(report, f"{prepare.__name__} {depth}") for depth in (1, 2)
            )
            sent = Counter({op: nbytes * (n - 1) // n for op, nbytes in (two - one).items()})
            calls = ", ".join(f"{nbytes:,} {op}" for op, nbytes in sorted(sent.items()))
            rows.append([prepare.__name__, n, calls, sum(sent.values())])
    return Table(["", "ranks", "bytes per block and step", "in all"], rows)


def count_kept(rank: int, world_size: int, prepare: Prepare) -> int:
    """The bytes of activations that autograd keeps on this rank after forward."""
    model = prepare(new_model(torch.float32, width=96))
    tokens, targets = new_batch(sequences=8, length=24)
    ledger = Ledger()
    ledger.add("batch", [tokens, targets])
    with ledger.saved_for_backward(model):
        loss = parallel_cross_entropy(model(tokens), targets)
    found = ledger.saved_now("cpu")
    loss.backward()
    return found


def kept_table(*prepares: Prepare, ranks: Sequence[int] = (1, 2, 4)) -> Table:
    """Launch each; the KiB that a rank keeps for backward, a column per world size."""
    rows = [
        [p.__name__, *(f"{launch(count_kept, n, p).results[0] / 1024:,.0f}" for n in ranks)]
        for p in prepares
    ]
    return Table(["KiB kept for backward", *(f"of {n}" for n in ranks)], rows)


# Rounding: a sum of rounded numbers depends on its order

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def share_otherwise(model: SmallTransformer, seed: int) -> SmallTransformer:
    """The same function with its heads and features in another order."""
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        size = attention.per_head
        order = torch.randperm(attention.out.in_features // size, generator=generator)
        rows = torch.arange(3 * size * len(order)).view(-1, 3 * size)[order].flatten()
        columns = torch.arange(size * len(order)).view(-1, size)[order].flatten()
        features = torch.randperm(mlp.up.out_features, generator=generator)
        for first, second, outputs, inputs in (
            (attention.qkv, attention.out, rows, columns),
            (mlp.up, mlp.down, features, features),
        ):
            first.weight.data, first.bias.data = first.weight[outputs], first.bias[outputs]
            second.weight.data = second.weight[:, inputs]
    return model


def orders(
    rank: int, world_size: int, dtype: torch.dtype, has_mask: bool, tokens: int
) -> list[float]:
    """In each of sixteen orders: how far the copies' gradients are from one process."""
    one, (batch, targets) = new_model(dtype, vocabulary=tokens), new_batch()
    wide = one(batch).flatten(0, 1).to(torch.promote_types(dtype, torch.float32))
    cross_entropy(wide, targets.flatten()).backward()
    found = []
    for seed in range(16):
        model = parallelize(share_otherwise(new_model(dtype, vocabulary=tokens), seed))
        if not has_mask:
            model.head.real = len(model.head.weight)
        gradients_of(model)
        mine = {name: p.grad for name, p in copies(model).items()}
        expected = {name: one.get_parameter(name).grad for name in mine}
        found.append(distance(flat(mine), flat(expected)))
    return found


def measure_orders(tokens: int) -> dict[str, dict[str, list[float]]]:
    """Launch sixteen orders on four ranks in each precision, right and without the mask."""
    return {
        name: {
            which: launch(orders, 4, dtype, has_mask, tokens).results[0]
            for which, has_mask in (("right", True), ("without mask", False))
        }
        for name, dtype in DTYPES.items()
    }


def orders_picture(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> Plot:
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


def orders_table(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """The least and the greatest distance of the orders, by precision."""
    rows = [
        [name, *(f"{min(found[w]):.1e} to {max(found[w]):.1e}" for w in found)]
        for name, found in measured.items()
    ]
    return Table(["gradients off", "right", "without mask"], rows)
