"""The best plans for a model and a cluster, from a terminal.

python -m mgpu_tutorial.at_scale --params 70e9 --gpus 512
python -m mgpu_tutorial.at_scale --params 405e9 --gpus 16384 --sequence 8192 --between 25
python -m mgpu_tutorial.at_scale --params 70e9 --gpus 64 --batch 512 --flags megatron

The batch is counted in sequences: tokens per step / tokens per sequence.
"""

import argparse
import math
import sys

from mgpu_tutorial.at_scale import commands
from mgpu_tutorial.at_scale.planner import (
    TIE,
    USABLE,
    plan_table,
    plans,
    rank_plans,
    spread,
    with_network,
)
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, Cluster
from mgpu_tutorial.shared.cost_model.plans import Model, model_of

BETTER = 1.1  # a nearby batch is named from so many times the MFU on


def main(words: list[str] | None = None) -> int:
    """Print the plans; 2 for a question that makes no sense, 1 where nothing fits."""
    parser = argparse.ArgumentParser("mgpu_tutorial.at_scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--params", type=float, required=True, help="parameters of the model")
    add("--gpus", type=int, required=True, help="GPUs, all of which are used")
    add("--batch", type=int, default=2048, help="sequences per step, on all GPUs (2048)")
    add("--sequence", type=int, default=2048, help="tokens per sequence (2048)")
    add("--context", type=int, default=1, help="GPUs that may share a sequence (1)")
    add("--cluster", choices=CLUSTERS, default="H100", help="GPUs and links (H100)")
    add("--between", type=float, help="GB/s per GPU and direction between nodes")
    add("--tokens", type=float, default=1e12, help="tokens to train on (1e12)")
    add("--price", type=float, default=2.0, help="per GPU and hour (2.0)")
    programs = {"megatron": commands.megatron, "torchtitan": commands.torchtitan}
    add("--flags", choices=programs, help="print the best plan as flags of this program")
    given = parser.parse_args(words)
    for name, value in vars(given).items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            parser.error(f"--{name}: must be a number above 0, got {value}")
    if given.gpus > 10**6:
        parser.error("--gpus: more than a million are not planned")
    cluster = CLUSTERS[given.cluster]
    try:
        if given.between:
            cluster = with_network(cluster, given.between)
        model = model_of(given.params, given.sequence)
    except ValueError as error:
        parser.error(str(error))
    asked = model, cluster, given.gpus, given.batch, given.context
    choices, tokens = rank_plans(*asked), given.batch * given.sequence
    print(
        f"{model.parameters / 1e9:,.1f} billion parameters: {model.layers} layers of "
        f"{model.hidden:,}, {model.heads} heads\n{given.gpus:,} × {cluster.gpu.name}, "
        f"a batch of {given.batch:,} sequences of {given.sequence:,} tokens\n"
    )
    if not 1e5 <= tokens <= 1e8:
        usual = "usual are 0.1 to 100 million, and --batch counts sequences"
        print(f"That is {tokens:,} tokens per step: {usual}.")
    if not choices:
        fits = f"fits into {USABLE:.0%} of a GPU's {cluster.gpu.memory / 1e9:.0f} GB"
        print(f"No plan {fits if any(plans(*asked)) else unequal(*asked)}.")
    else:
        print(plan_table(choices[:8]))
    nearby = rounded(given.batch, given.gpus)
    other = [] if nearby == given.batch else rank_plans(*asked[:3], nearby, given.context)
    if other and not (choices and other[0].step.mfu < BETTER * choices[0].step.mfu):
        print(f"With --batch {nearby}: {other[0].plan}, {other[0].step.mfu:.0%} MFU.")
    if not choices:
        return 1
    if given.flags:
        try:
            command = programs[given.flags](model, choices[0].plan, given.batch)
        except ValueError as error:
            parser.error(str(error))
        print(f"\n{command}")
    print(f"\nPlans of one place are within {TIE:.0%} of its first.")
    print_spread(given, spread(*asked[:2], choices[0].plan, given.batch))
    return 0


def print_spread(given: argparse.Namespace, seconds: tuple[float, float]) -> None:
    """How long and how dear the first plan is, by the fastest and the slowest program."""
    tokens = given.batch * given.sequence
    fast, slow = (tokens / given.gpus / step for step in seconds)
    hours = [given.tokens / tokens * step / 3600 for step in seconds]
    days = " to ".join(f"{h / 24:,.1f}" for h in hours)
    cost = " to ".join(f"{h * given.gpus * given.price / 1e6:,.2f}" for h in hours)
    print(
        "The first, between the fastest and the slowest published program on such GPUs:\n"
        f"{slow:,.0f} to {fast:,.0f} tokens/s per GPU; {given.tokens:g} tokens in {days} "
        f"days,\nfor {cost} million at {given.price:g} per GPU and hour.\n"
        "Measure a step of your own program, and fit your GPU to it as in chapter 23."
    )


def rounded(batch: int, gpus: int) -> int:
    """A batch near this one, within an eighth if there is one, that divides often by 2."""
    unit = gpus // (gpus & -gpus)  # what of the GPUs is not a power of two
    while abs(round(batch / (2 * unit)) * 2 * unit - batch) <= batch / 8:
        unit *= 2
    return round(batch / unit) * unit or batch


def unequal(model: Model, cluster: Cluster, gpus: int, batch: int, context: int) -> str:
    """Why no plan can be run: with one sequence per GPU there is one, all of them DP."""
    sizes = sorted({plan.dp for plan in plans(model, cluster, gpus, gpus, context)})
    shown = ", ".join(map(str, sizes[:4])) + ", …" * (len(sizes) > 4)
    shares = f"{model.heads} heads and {model.layers} layers leave DP {shown}"
    return f"gives each GPU an equal share: {shares}. Give a --batch that one divides"


if __name__ == "__main__":
    sys.exit(main())
