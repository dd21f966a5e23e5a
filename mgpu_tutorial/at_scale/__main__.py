"""The best plans for a model and a cluster, from a terminal.

python -m mgpu_tutorial.at_scale --params 70e9 --gpus 512
python -m mgpu_tutorial.at_scale --params 405e9 --gpus 16384 --sequence 8192 --between 25
"""

import argparse
import sys

from mgpu_tutorial.at_scale.figures import plan_table, with_network
from mgpu_tutorial.at_scale.planner import TIE, rank_plans, training
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.models import model_of


def positive(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def whole(text: str) -> int:
    """A whole number above 0."""
    positive(text)
    return int(text)


def main(words: list[str] | None = None) -> int:
    """Print the plans; 2 for a question that makes no sense, 1 where nothing fits."""
    parser = argparse.ArgumentParser(
        prog="mgpu_tutorial.at_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--params", type=positive, required=True, help="parameters of the model")
    add("--gpus", type=whole, required=True, help="GPUs, all of which are used")
    add("--batch", type=whole, default=2048, help="sequences per step, on all GPUs (2048)")
    add("--sequence", type=whole, default=2048, help="tokens per sequence (2048)")
    add("--context", type=whole, default=1, help="GPUs that may share a sequence (1)")
    add("--cluster", choices=CLUSTERS, default="H100", help="GPUs and links (H100)")
    add("--between", type=positive, help="GB/s per GPU and direction between nodes")
    add("--tokens", type=positive, default=1e12, help="tokens to train on (1e12)")
    add("--price", type=positive, default=2.0, help="per GPU and hour (2.0)")
    given = parser.parse_args(words)
    cluster = CLUSTERS[given.cluster]
    if given.between:
        cluster = with_network(cluster, given.between)
    try:
        model = model_of(given.params, given.sequence)
        choices = rank_plans(model, cluster, given.gpus, given.batch, given.context)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{model.parameters / 1e9:,.1f} billion parameters: {model.layers} layers of "
        f"{model.hidden:,}, {model.heads} heads\n{given.gpus:,} × {cluster.gpu.name}\n"
    )
    if not choices:
        print("No plan fits: more GPUs, more memory, or a batch that they divide.")
        return 1
    print(plan_table(choices[:8]))
    days, cost = training(choices[0].step, given.tokens, given.gpus, given.price)
    print(
        f"\nPlans of one rank are within {TIE:.0%} of its first, about the model's error.\n"
        f"{given.tokens:g} tokens with the first: {days:,.1f} days, "
        f"{cost / 1e6:,.2f} million at {given.price:g} per GPU and hour."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
