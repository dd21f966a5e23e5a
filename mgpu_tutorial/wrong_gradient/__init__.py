"""Right loss, wrong gradient: is a training run computing what it should?"""

from copy import deepcopy
from importlib import import_module

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from mgpu_tutorial.wrong_gradient.job import disturbed
from mgpu_tutorial.wrong_gradient.trials import copies_that_differ, whole_gradients

ROUNDING = 1e-10  # of a gradient's norm: float64 rounds at 1e-16, a fault is above 1e-4
MODEL = "language_model"  # the chapter whose model is checked; it comes later


def check(rank: int, world_size: int, plan: str = "dp=2,tp=2") -> list[str]:
    """Compare a step of the language model on a plan with one process, and copy with copy.

    In float64, with random numbers added to all parameters. Rank 0 prints three lines; every
    rank returns the names of the gradients that are wrong, or differ between copies.
    Raises ValueError on every rank, before anything is sent, for a plan that cannot be.
    """
    stage, mesh, first, right = step_of(plan, world_size)
    found = whole_gradients(stage, mesh, first)
    far = {n: ((found[n] - g).norm() / g.norm()).item() for n, g in right.items()}
    wrong = [name for name in reversed(far) if not far[name] <= ROUNDING]
    differ = copies_that_differ(stage, mesh, first)
    if rank == 0:
        print(f"one process: {len(wrong)} of {len(far)} gradients are off", *wrong[:1])
        print(f"copies: {len(differ)} differ", *differ[:1])
        norms = [sum(g.square().sum() for g in one.values()).sqrt() for one in (found, right)]
        print(f"norm: {norms[0]:.6f} on {world_size} ranks, {norms[1]:.6f} on one process")
    return wrong + [name for name in differ if name not in wrong]


def step_of(
    plan: str, world_size: int
) -> tuple[nn.Sequential, DeviceMesh, int, dict[str, Tensor]]:
    """A step of the language model on a plan and in one process, without the optimizer's.

    Returns this rank's stage, which has its gradients, the mesh, the number of the stage's
    first layer, and the gradients of one process.
    """
    trained = import_module(f"mgpu_tutorial.{MODEL}")
    plans, models, parts = trained.plans, trained.models, trained.PARTS
    sizes = plans.plan_of(plan, world_size)
    mesh, whole = plans.mesh_of(sizes), disturbed(models.new_model().double())
    inputs, targets = models.batch_of(0)

    alone = deepcopy(whole)
    cross_entropy(alone(inputs).flatten(0, 1), targets.flatten()).backward()
    right = {name: p.grad for name, p in alone.named_parameters()}

    job = trained.build_rank(whole, sizes._replace(zero=0), mesh, parts)
    rows = slice(mesh["dp"].get_local_rank(), None, sizes.dp)
    batch = inputs[rows][:, job.places], targets[rows][:, job.places]
    loss_of = plans.loss_over(mesh["tp"].get_group(), cross_entropy, parts)
    plans.forward_backward(job.model, mesh, *batch, parts.order_of_1f1b, loss_of)
    job.model.finish_gradient_synchronization()

    blocks, number = (len(alone) - 2) // sizes.pp, mesh["pp"].get_local_rank()
    first = 1 + number * blocks if number else 0  # the embedding comes before the blocks
    return job.stage, mesh, first, right


def _ranks_for(plan: str = "dp=2,tp=2") -> int:
    """For the command line: the number of ranks that the plan takes."""
    return import_module(f"mgpu_tutorial.{MODEL}").plans.plan_of(plan).ranks


check.ranks_for = _ranks_for
