"""Apparatus, not the lesson: errors, bytes and rounding in tables, films and a picture."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector as flat

from mgpu_tutorial.lab import Ledger, Table, frame, launch, span
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import ALARM
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.intervals import ring_passes
from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel import figures
from mgpu_tutorial.tensor_parallel.block import copies, parallelize
from mgpu_tutorial.tensor_parallel_in_practice.sequence import gathered, scattered_sum
from mgpu_tutorial.tensor_parallel_in_practice.vocabulary import PLAN, gradients_of, new_model

GREY = 7  # the number of a colour that is no rank's here
Distances = dict[str, list[float]]  # right, and without the mask
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

step_table = partial(figures.step_table, ranks=4, new=new_model, backward=gradients_of)


def share_vocabulary(rank: int, world_size: int) -> None:
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


def share_sequence(rank: int, world_size: int) -> None:
    """A layer of attention on two ranks: four tokens in two parts, four heads."""
    tokens, other = torch.full((1, 2, 1), float(rank)), 1 - rank
    held = {"part": ("0 1", "2 3")[rank]}
    frame("Norm: each rank has two of the four tokens, and all their features.", held)
    whole = gathered(tokens)
    held["input"] = range(world_size)
    says = "All-gather, in place of f: every rank has both parts."
    frame(says, held, {"input": (other, "part")})
    held["heads"] = ("0 1", "2 3")[rank]
    frame("Attention: each rank computes its own heads, for all tokens.", held)
    held["product"] = [rank]
    frame("Its rows of the last matrix: a part of the sum, for all tokens.", held)
    scattered_sum(whole)
    held["sum"] = range(world_size)
    says = "Reduce-scatter, in place of g: the whole sum, but only for its own tokens."
    frame(says, held, {"sum": (other, "product")})


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


def trace_step(rank: int, world_size: int, prepare: Callable) -> int:
    """A step with one block and one with two; the bytes that two keep for backward."""
    for depth in (1, 2):
        model, ledger = prepare(new_model(torch.float32, depth=depth)), Ledger()
        with span(f"depth {depth}"), ledger.saved_for_backward(model):
            gradients_of(model)
    return ledger.saved_peak("cpu")


def bytes_table(*prepares: Callable) -> Table:
    """Launch 1, 2 and 4 ranks; what a block sends in a ring, and what a rank keeps."""
    rows = []
    for n, prepare in product((1, 2, 4), prepares):
        report = launch(trace_step, n, prepare, trace=True, device="cpu")
        one, two = (ring_passes(report, f"depth {depth}") for depth in (1, 2))
        sent = Counter({op: nbytes * (n - 1) // n for op, nbytes in (two - one).items()})
        calls = ", ".join(f"{nbytes:,} {op}" for op, nbytes in sorted(sent.items()))
        rows.append([prepare.__name__, n, calls, sum(sent.values()), report.results[0]])
    return Table(["", "ranks", "bytes that a block sends", "in all", "bytes kept"], rows)


def shuffled(model: SmallTransformer, seed: int) -> SmallTransformer:
    """The same function with the features of its MLPs in another order."""
    generator = torch.Generator().manual_seed(seed)
    for mlp in (block.mlp for block in model.blocks):
        order = torch.randperm(mlp.up.out_features, generator=generator)
        mlp.up.weight.data, mlp.up.bias.data = mlp.up.weight[order], mlp.up.bias[order]
        mlp.down.weight.data = mlp.down.weight[:, order]
    return model


def orders(rank: int, world_size: int, tokens: int, dtype: torch.dtype) -> Distances:
    """How far the copies' gradients are from one process, in each of sixteen orders."""
    alone, _ = dist.new_subgroups(1)
    one = new_model(dtype, tokens)
    gradients_of(one, alone)
    found: Distances = {"right": [], "without mask": []}
    for seed in range(16):
        model = parallelize(shuffled(new_model(dtype, tokens), seed), PLAN)
        for which, distances in found.items():
            if which == "without mask":
                model.head.real = len(model.head.weight)
            model.zero_grad()
            gradients_of(model)
            distances.append(distance(model, one))
    return found


def distance(model: SmallTransformer, one: SmallTransformer) -> float:
    """How far the gradients of a cut model's copies are from those of one process."""
    same = copies(model)
    ours = flat(p.grad for p in same.values()).double()
    its = flat(one.get_parameter(n).grad for n in same).double()
    return ((ours - its).norm() / its.norm()).item()


def orders_picture(measured: Mapping[str, Distances]) -> Plot:
    """Draw the distance from one process of each order: a strip for each precision.

    Sixteen right runs stand above sixteen wrong ones. The last strip is drawn once more,
    enlarged.
    """
    from matplotlib.figure import Figure

    figure, names = Figure(figsize=(10, 5), layout="constrained"), list(measured)
    *every, last = figure.subplots(len(names) + 1, 1, height_ratios=[*[2] * len(names), 3])
    kinds = (("right", COLOURS[0], "o", 1), ("without mask", ALARM, "x", 0))
    for axes, name in zip([*every, last], [*names, names[-1]], strict=True):
        for which, ink, marker, row in kinds:
            far = measured[name][which]
            spread = [row + 0.5 * (i / len(far) - 0.5) for i in range(len(far))]
            label = f"{which}, sixteen orders"
            axes.scatter(far, spread, s=40, c=ink, marker=marker, label=label)
        axes.set(ylim=(-0.6, 1.6), yticks=[], ylabel=name, axisbelow=True)
        axes.yaxis.label.set(rotation="horizontal", ha="right", va="center")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right", "left"]].set_visible(False)
    for axes in every:
        axes.set(xscale="log", xlim=(1e-17, 1))
        axes.tick_params(labelbottom=axes is every[-1])
    every[0].legend(frameon=False, fontsize=11, loc="center")
    last.set(ylabel=f"{names[-1]},\nenlarged", xlabel="gradients off, as a share")
    words = "distance of sixteen orders from one process, right and without the mask, in "
    return Plot(figure, words + ", ".join(names))
