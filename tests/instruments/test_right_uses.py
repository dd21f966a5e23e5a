"""`prove` calls right what is right: forty ways to share one job."""

from functools import partial

import pytest
import torch
from torch.distributed import pipelining
from torch.optim import SGD, Adafactor

from mgpu_tutorial import language_model
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.ddp_in_practice.practice import AccumulatingDDP
from mgpu_tutorial.long_sequences.ring import contiguous, zigzag
from mgpu_tutorial.sharding.blocks import ahead
from tests.instruments import uses
from tests.instruments.jobs import net, tied
from tests.instruments.misuses import with_sharded_step
from tests.instruments.uses import wrapped

momentum, adafactor = partial(SGD, lr=0.1, momentum=0.9), partial(Adafactor, lr=0.01)


def same(prepare):
    """One process prepares by the same function."""
    return {"one": prepare, "several": prepare}


def by_optimizer(optimizer_of):
    one = partial(uses.with_one_optimizer, optimizer_of=optimizer_of)
    return {"one": one, "several": partial(wrapped, optimizer_of=optimizer_of)}


USES = {
    "NaiveDDP": (2, {"several": partial(wrapped, wrap=NaiveDDP)}),
    "NaiveDDP, its bits on three": (
        3,
        {"several": partial(wrapped, wrap=NaiveDDP), "model_of": tied},
    ),
    "BucketedDDP": (2, {"several": partial(wrapped, wrap=BucketedDDP)}),
    "BucketedDDP, small buckets": (
        2,
        {"several": partial(wrapped, wrap=BucketedDDP, bucket_cap_mb=0.002)},
    ),
    "AccumulatingDDP": (2, {"several": partial(uses.accumulating, wrap=AccumulatingDDP)}),
    "DDP, accumulating": (2, {"several": uses.accumulating}),
    "DDP, parts of 1 and 5": (2, {"several": partial(uses.accumulating, sizes=(1, 5))}),
    "DDP, two backwards": (2, {"several": uses.in_two_backwards}),
    "DDP, in one bucket": (2, {"several": partial(wrapped, gradient_as_bucket_view=True)}),
    "DDP, a static graph": (2, {"several": partial(wrapped, static_graph=True)}),
    "DDP, SGD with momentum": (2, by_optimizer(momentum)),
    "DDP, Adafactor": (2, by_optimizer(adafactor)),
    "DDP, scheduled": (2, same(uses.scheduled)),
    "DDP, frozen": (2, {"several": wrapped, "model_of": uses.with_frozen_norms}),
    "DDP, a bias of keys": (2, {"several": wrapped, "model_of": uses.with_a_bias_of_keys}),
    "DDP, a gradient of 0": (2, {"several": wrapped, "model_of": uses.shifted}),
    "fully_shard, a bias of keys": (
        4,
        {
            "several": partial(wrapped, wrap=uses.in_full_by_blocks),
            "model_of": uses.with_a_bias_of_keys,
        },
    ),
    "DDP, unused": (
        2,
        {
            "several": partial(wrapped, find_unused_parameters=True),
            "model_of": uses.with_an_unused_layer,
        },
    ),
    "DDP, one layer three times": (
        2,
        {"several": wrapped, "model_of": uses.with_one_layer_three_times},
    ),
    "DDP, adapters": (2, {"several": wrapped, "model_of": uses.adapted}),
    "DDP, a buffer": (2, {"several": wrapped, "model_of": uses.with_a_sum_of_values}),
    "DDP, a hook": (2, {"several": wrapped, "model_of": uses.with_a_hook}),
    "DDP, recomputed": (
        2,
        {"several": wrapped, "model_of": partial(uses.checkpointed, False)},
    ),
    "DDP, recomputed by another backward": (
        2,
        {"several": wrapped, "model_of": partial(uses.checkpointed, True)},
    ),
    "DDP, another order of memory": (2, {"several": wrapped, "model_of": uses.images}),
    "compiled": (
        2,
        {"several": partial(uses.compiled, backend="eager"), "model_of": uses.tower},
    ),
    "compiled inside": (
        2,
        {
            "several": partial(uses.compiled, backend="aot_eager", inside=True),
            "model_of": uses.tower,
        },
    ),
    "by hand": (3, {"several": partial(uses.stepping, finish=uses.average)}),
    "a rank without tokens": (3, same(uses.tokens_of_one_rank)),
    "contrastive": (2, same(uses.contrastive)),
    "fully_shard, whole in backward": (
        2,
        {"several": partial(wrapped, wrap=uses.in_full, reshard_after_forward=False)},
    ),
    "fully_shard of one matrix": (
        3,
        {"several": partial(wrapped, wrap=uses.in_full), "model_of": tied},
    ),
    "fully_shard, copies": (4, {"several": partial(wrapped, wrap=uses.on_a_mesh)}),
    "fully_shard, accumulating": (2, {"several": uses.in_full_accumulating}),
    "fully_shard, frozen": (
        2,
        {"several": partial(wrapped, wrap=uses.in_full), "model_of": uses.with_frozen_norms},
    ),
    "fully_shard, decaying matrices": (
        2,
        {
            "one": uses.decaying_matrices,
            "several": partial(uses.decaying_matrices, wrap=uses.in_full),
        },
    ),
    "fully_shard, adapters": (
        2,
        {"several": partial(wrapped, wrap=uses.in_full), "model_of": uses.adapted},
    ),
    "fully_sharded": (2, {"several": partial(wrapped, wrap=uses.in_blocks)}),
    "fully_sharded, one layer three times": (
        3,
        {
            "several": partial(wrapped, wrap=uses.in_blocks),
            "model_of": uses.with_one_layer_three_times,
        },
    ),
    "fully_sharded, ahead": (
        2,
        {"several": partial(wrapped, wrap=ahead), "model_of": uses.tower},
    ),
    "ShardedOptimizer": (2, {"several": uses.with_owners}),
    "sharded_step, a generator": (2, {"several": partial(with_sharded_step, given=iter)}),
    "ShardedOptimizer in groups": (
        3,
        {"one": uses.decaying_matrices, "several": uses.with_owners_in_groups},
    ),
    "one owner": (2, {"several": uses.first_owns_all}),
    "stage 1, clipped": (2, same(partial(uses.at_stage, stage=1, most=0.1))),
    "stage 2": (2, same(partial(uses.at_stage, stage=2))),
    "stage 3": (2, same(partial(uses.at_stage, stage=3))),
    "stage 3, clipped": (3, same(partial(uses.at_stage, stage=3, most=0.1))),
    "parallelize_module": (2, {"several": uses.by_plan}),
    "layers of the course": (
        2,
        {"several": lambda model: uses.stepping(uses.by_layers(model), share=uses.whole)},
    ),
    "a cut head": (2, {"several": uses.with_a_cut_head}),
    "a padded head": (3, {"several": uses.with_a_cut_head}),
    "a sequence cut": (2, same(uses.by_tokens) | {"model_of": uses.transformer}),
    "float32 inside": (
        2,
        {
            "several": lambda model: uses.stepping(uses.by_layers(model), share=uses.whole),
            "model_of": uses.with_float32_inside,
        },
    ),
    "two dimensions": (4, {"several": uses.by_layers_and_ddp}),
    "GPipe": (
        2,
        {"several": partial(uses.in_stages, scale_grads=True), "model_of": uses.in_layers},
    ),
    "1F1B": (
        4,
        {
            "several": partial(uses.in_stages, schedule=pipelining.Schedule1F1B),
            "model_of": uses.in_layers,
        },
    ),
    "GPipe, copied stages": (
        2,
        {"several": partial(uses.in_stages, copied=True), "model_of": uses.in_layers},
    ),
    "run_gpipe": (2, {"several": uses.in_works, "model_of": uses.in_layers}),
    "run_in_order": (
        2,
        {"several": partial(uses.in_works, run=uses.one_f_one_b), "model_of": uses.in_layers},
    ),
    "ring_attention": (
        2,
        same(partial(uses.in_sequences, deal=zigzag)) | {"model_of": uses.reader},
    ),
    "ring_attention on three": (
        3,
        same(partial(uses.in_sequences, deal=contiguous)) | {"model_of": uses.reader},
    ),
    "experts": (2, {"several": uses.sharing_experts, "model_of": uses.with_experts}),
    "mixtures": (2, same(uses.in_mixtures) | {"model_of": uses.layers_with_mlp}),
}


@pytest.mark.parametrize("name", USES)
def test_a_right_use_is_called_right(proved, name):
    world_size, how = USES[name]
    both = {key: value for key, value in how.items() if key not in {"one", "several"}}
    several = {"several": how["several"]}
    one = {"several": None, "one": how.get("one")}
    proof = proved(world_size, uses.train, **both, one=one, several=several)
    assert proof.right, proof
    assert proof.tensors > 3
    assert proof.furthest("gradients") < 1e-6  # also where a gradient is but rounding


OTHERS = "BucketedDDP", "fully_sharded", "DDP, a bias of keys", "ring_attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["BucketedDDP", "fully_sharded", "DDP, a bias of keys", "ring_attention"]
)
def test_a_right_use_is_called_right_in_other_dtypes(proved, name, dtype):
    world_size, how = USES[name]
    proof = proved(
        world_size,
        uses.train,
        dtype=dtype,
        model_of=how.get("model_of", net),
        one={"several": None, "one": how.get("one")},
        several={"several": how["several"]},
    )
    assert proof.right, proof


PLANS = "dp=2,tp=2", "pp=2", "cp=2", "dp=2,zero=1", "dp=2,zero=3"


@pytest.mark.parametrize("plan", [*PLANS, "dp=2,ep=2"])
def test_plans_of_the_language_model_are_right(proved, plan):
    experts, world_size = 4 if "ep" in plan else 0, 4 if "tp" in plan else 2
    one, several = ({"plan": words, "dtype": "float64"} for words in ("dp=1", plan))
    job = language_model.train
    proof = proved(world_size, job, steps=2, experts=experts, one=one, several=several)
    assert proof.right, proof
    assert proof.tensors > 40
