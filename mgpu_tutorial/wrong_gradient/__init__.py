"""Right loss, wrong gradient: is a training run computing what it should?"""

from copy import deepcopy
from functools import partial
from importlib import import_module

from torch.nn.functional import cross_entropy

from mgpu_tutorial.wrong_gradient.job import disturbed
from mgpu_tutorial.wrong_gradient.trials import copies_that_differ, whole_gradients

ROUNDING = 1e-10  # of a gradient's norm: float64 rounds at 1e-16, a fault is above 1e-4


def check(
    rank: int, world_size: int, plan: str = "dp=2,tp=2", chapter: str = "language_model"
) -> list[str]:
    """Compare a step of the language model on a plan with one process, and copy with copy.

    In float64, with random numbers added to all parameters. Rank 0 prints three lines; every
    rank returns the names of the gradients that are wrong, or differ between copies.
    """
    trained = import_module(f"mgpu_tutorial.{chapter}")
    plans, models, parts = trained.plans, trained.models, trained.PARTS
    sizes = plans.plan_of(plan, world_size)
    mesh, whole = plans.mesh_of(sizes), disturbed(models.new_model().double())
    inputs, targets = models.batch_of(0)

    alone = deepcopy(whole)
    cross_entropy(alone(inputs).flatten(0, 1), targets.flatten()).backward()
    right = {name: p.grad for name, p in alone.named_parameters()}

    stage, number = (
        parts.cut_model(whole, mesh, partial(plans.share_products, parts=parts)),
        mesh["pp"].get_local_rank(),
    )
    places = parts.zigzag(models.CONTEXT, mesh["cp"].get_local_rank(), sizes.cp)
    if sizes.cp > 1:
        plans.share_sequence(stage, places, mesh["cp"].get_group(), parts)
    share = slice(mesh["dp"].get_local_rank(), None, sizes.dp)
    batch = inputs[share][:, places], targets[share][:, places]
    plans.forward_backward(stage, mesh, *batch, parts.order_of_1f1b)
    plans.average_gradients(stage, mesh)

    first = 1 + number * 4 // sizes.pp if number else 0  # of four blocks, after the embedding
    found = whole_gradients(stage, mesh, first)
    far = {n: ((found[n] - g).norm() / g.norm()).item() for n, g in right.items()}
    wrong = [name for name in reversed(far) if not far[name] <= ROUNDING]
    differ = copies_that_differ(stage, mesh, first)
    if rank == 0:
        said = f"the first on the way backward is {wrong[0]}" if wrong else "none is off"
        print(f"one process: of {len(far)} gradients {len(wrong)} are off; {said}")
        print(f"copies: {len(differ)} differ {differ[:1] or ''}")
        norms = [sum(g.square().sum() for g in one.values()).sqrt() for one in (found, right)]
        print(f"norm: {norms[0]:.6f} on {world_size} ranks, {norms[1]:.6f} on one process")
    return wrong + [name for name in differ if name not in wrong]


def _ranks_for(plan: str = "dp=2,tp=2", chapter: str = "language_model", **_: object) -> int:
    """For the command line: the number of ranks that the plan takes."""
    return import_module(f"mgpu_tutorial.{chapter}").plans.plan_of(plan).ranks


check.ranks_for = _ranks_for
