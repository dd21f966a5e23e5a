"""The best plans for a model and a cluster, from a terminal.

python -m mgpu_tutorial.at_scale --params 70e9 --gpus 512
python -m mgpu_tutorial.at_scale --params 405e9 --gpus 16384 --batch 2048 --sequence 8192
python -m mgpu_tutorial.at_scale --layers 96 --hidden 12288 --heads 96 --gpus 384
"""

import argparse
import sys

from mgpu_tutorial.at_scale.measurements import plan_table
from mgpu_tutorial.at_scale.planner import TIE, rank_plans, training
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.models import Model, model_of


def parser() -> argparse.ArgumentParser:
    """All that can be said on the command line."""
    made = argparse.ArgumentParser(
        prog="mgpu_tutorial.at_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--params", type=float, help="parameters; the shape is made up from them")
    add("--layers", type=int, help="or the shape itself: --layers, --hidden and --heads")
    add("--hidden", type=int, help="width of the model")
    add("--heads", type=int, help="attention heads")
    add("--vocabulary", type=int, default=51_200, help="tokens known (51200)")
    add("--sequence", type=int, default=2048, help="tokens per sequence (2048)")
    add("--gpus", type=int, required=True, help="GPUs, all of which are used")
    add("--batch", type=int, default=2048, help="sequences per step, on all GPUs (2048)")
    add("--cluster", choices=CLUSTERS, default="H100", help="GPUs and links (H100)")
    add("--gpus-per-node", type=int, help="instead of the cluster's")
    add("--inside", type=float, help="GB/s per GPU and direction inside a node")
    add("--between", type=float, help="GB/s per GPU and direction between nodes")
    add("--memory", type=float, help="GB per GPU")
    add("--tokens", type=float, default=1e12, help="tokens to train on (1e12)")
    add("--price", type=float, default=2.0, help="per GPU and hour (2.0)")
    add("--top", type=int, default=8, help="plans to print (8)")
    return made


def model_from(given: argparse.Namespace) -> Model:
    """The model by its shape, or one of about so many parameters."""
    shape = [given.layers, given.hidden, given.heads]
    if given.params is not None and any(shape):
        raise ValueError("give either --params, or --layers, --hidden and --heads")
    if given.params is not None:
        return model_of(given.params, given.sequence, given.vocabulary)
    if not all(shape):
        raise ValueError("give --params, or all of --layers, --hidden and --heads")
    if given.hidden % given.heads:
        raise ValueError(f"--heads {given.heads} does not divide --hidden {given.hidden}")
    return Model(*shape, given.sequence, given.vocabulary)


def checked(given: argparse.Namespace) -> argparse.Namespace:
    """The same; raises ValueError for the first number that makes no sense."""
    for name, value in vars(given).items():
        if isinstance(value, int | float) and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    return given


def main(words: list[str] | None = None) -> int:
    """Prints the plans; 2 for what cannot be asked, 1 where nothing fits."""
    made = parser()
    given = made.parse_args(words)
    try:
        model = model_from(checked(given))
        cluster = CLUSTERS[given.cluster]
        if given.gpus_per_node:
            cluster = cluster._replace(gpus_per_node=given.gpus_per_node)
        for name in ("inside", "between"):
            if rate := getattr(given, name):
                link = Link(getattr(cluster, name).latency, rate * 1e9)
                cluster = cluster._replace(**{name: link})
        if given.memory:
            gpu = cluster.gpu._replace(memory=given.memory * 1e9)
            cluster = cluster._replace(gpu=gpu)
        choices = rank_plans(model, cluster, given.gpus, given.batch)
    except ValueError as error:
        made.error(str(error))
    print(
        f"{model.parameters / 1e9:,.1f} billion parameters: {model.layers} layers of "
        f"{model.hidden:,}, {model.heads} heads; {given.batch:,} sequences of "
        f"{model.sequence:,} tokens\n{given.gpus:,} × {cluster.gpu.name}, "
        f"{cluster.gpus_per_node} per node\n"
    )
    if not choices:
        print("No plan fits: more GPUs, more memory, or a batch that they divide.")
        return 1
    print(plan_table(choices[: given.top]))
    days, cost = training(choices[0].step, given.tokens, given.gpus, given.price)
    print(
        f"\nPlans of one rank are within {TIE:.0%} of its first, about the model's error.\n"
        f"{given.tokens:g} tokens with the first: {days:,.1f} days, "
        f"{cost / 1e6:,.2f} million at {given.price:g} per GPU and hour."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
