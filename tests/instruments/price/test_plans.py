"""Four plans of one model in their order, and five programs beside what they published."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.models import Attention, llama, mpt_7b
from mgpu_tutorial.lab import span
from mgpu_tutorial.pipelines.llama import LlamaStages
from mgpu_tutorial.pipelines.stages import isend, order_of_1f1b, run_in_order
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.step_time.published import Run, runs_of
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.instruments.price.test_tape import preloaded  # noqa: F401

pytestmark = pytest.mark.timeout(600)

HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Scores(Attention):
    """With all scores in memory, and scale, mask and softmax in one kernel."""

    def attend(self, q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


def network_of(run, layers, tp):
    """Llama or GPT with so many layers, each cut over the group `tp`, as is the head."""
    width, heads = run.model.hidden, run.model.heads
    if run.model.gated:
        network = llama(layers, width, heads, run.model.ffn)
    else:
        network = mpt_7b(layers, width, heads)
        network[0] = nn.Embedding(run.model.vocabulary, width)
        network[-1] = nn.Linear(width, run.model.vocabulary, bias=False)
    body = list(network)[1:-2]
    if not run.plan.flash:
        for layer in body:
            layer.attention.__class__ = Scores
    if run.plan.tp > 1:
        for part in [part for layer in body for part in (layer.attention, layer.mlp)]:
            for name, whole in list(part.named_children()):
                is_row = name in ("out", "down")
                kind = RowParallelLinear if is_row else ColumnParallelLinear
                setattr(part, name, kind(whole, tp))
        network[-1] = ColumnParallelLinear(network[-1], tp)
    network[-1].out_features = run.model.vocabulary // run.plan.tp
    if run.plan.recompute == "full":
        for layer in body:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return network


def train(rank, world_size, run, layers):
    """Two steps of a plan, with so many layers on each stage, in 16 bits."""
    plan = run.plan
    shape = {"dp": plan.dp, "pp": plan.pp, "tp": plan.tp}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    dp, pp, tp = (mesh[name].get_group() for name in shape)
    module = network_of(run, layers * plan.pp, tp)
    micro = int(plan.micro_batches(run.batch))
    tokens = torch.zeros(run.batch // plan.dp, run.model.sequence + 1, dtype=torch.long)
    if plan.zero:
        for layer in list(module)[1:-2]:
            fully_shard(layer, mesh=mesh["dp"], mp_policy=HALVES)
        fully_shard(module, mesh=mesh["dp"], mp_policy=HALVES)
    else:
        module = module.to(torch.bfloat16)
        torch.set_default_dtype(torch.bfloat16)  # that of the messages
    if plan.pp > 1:
        stage = dist.get_rank(pp)
        work = LlamaStages(module, [layers] * plan.pp, stage, tokens)
        module = work.module(stage)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    for _ in range(2):
        with span("step"):
            if plan.pp > 1:
                run_in_order(stage, plan.pp, work, micro, order_of_1f1b, isend, pp)
            else:
                for part in tokens.chunk(micro):
                    logits = module(part[:, :-1]).flatten(0, 1)
                    cross_entropy(logits.float(), part[:, 1:].flatten()).backward()
                    del logits
            if not plan.zero and plan.dp > 1:
                for parameter in module.parameters():
                    dist.all_reduce(parameter.grad, group=dp)
            optimizer.step()
            optimizer.zero_grad()


def tokens_per_second(run):
    """Of a GPU: one layer and two on each stage, and all others like the second."""
    name = next(name for name, cluster in CLUSTERS.items() if cluster is run.cluster)
    machine = f"{run.plan.ranks} x {name}"
    one, two = (
        price(train, run.plan.ranks, run, layers, machine=machine, timeout=300).seconds
        for layers in (1, 2)
    )
    seconds = one + (run.model.layers / run.plan.pp - 1) * (two - one)
    return run.batch * run.model.sequence / run.plan.ranks / seconds


MPT = {run.name: run.model for run in runs_of("MPT, FSDP")}


def of_mpt(name, batch, published, **plan):
    """MPT on A100s of 80 GB."""
    plan = Plan(**{"recompute": "none"} | plan)
    return Run(name, MPT[name], CLUSTERS["A100"], plan, batch, published, "tokens/s")


@pytest.mark.slow
def test_four_plans_of_13b_on_64_gpus_stay_in_their_order():
    """From sharding alone, which is published as fastest, to eight GPUs for each product."""
    plans = [
        (128, {"dp": 64, "zero": 3, "micro_batch": 2}),
        (256, {"dp": 64, "zero": 3, "micro_batch": 4, "recompute": "full"}),
        (256, {"pp": 4, "dp": 16}),
        (128, {"tp": 8, "dp": 8, "zero": 3, "micro_batch": 16}),
    ]
    rates = [
        tokens_per_second(of_mpt("13B on 16", batch, 1, **plan)) for batch, plan in plans
    ]
    assert rates == sorted(rates, reverse=True), rates


(LLAMA,) = [run for run in runs_of("NeMo AutoModel") if run.name == "Llama 70B"]
ROWS = {
    "7B, dp 8": of_mpt("7B on 8", 48, 4641, dp=8, zero=3, micro_batch=6),
    "13B, dp 8": of_mpt("13B on 16", 16, 2262, dp=8, zero=3, micro_batch=2),
    "22B, tp 8": runs_of("Megatron 2022")[0],
    "39B, tp 8, pp 2, dp 32": runs_of("Megatron 2021, table 1")[4],
    # there two GPUs share a sequence, and have two of them
    "70B, dp 64": LLAMA._replace(plan=Plan(dp=64, zero=3, recompute="full")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_default_price_is_near_what_was_published(name):
    """Nothing is fitted to the row: the share of the peak is the default of its GPU.

    MPT's rows repeat nothing. They are in the table of 80 GB in
    `scripts/train/benchmarking/README.md` of mosaicml/llm-foundry, at
    061f2c7ce64e655100286584a7629e2a09f827ba.
    """
    run = ROWS[name]
    published = run.batch * run.model.sequence / run.plan.ranks / run.seconds
    assert tokens_per_second(run) == pytest.approx(published, rel=0.15)
