"""`prove` beside misuses: each is named by its first tensor and its kind, or refused."""

from functools import partial

import pytest
from torch.optim import Adafactor

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.ddp_in_practice.practice import AccumulatingDDP
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.long_sequences.others import ulysses
from mgpu_tutorial.long_sequences.ring import contiguous, zigzag
from tests.instruments import misuses, uses
from tests.instruments.jobs import by_tokens, net_of_this_rank, tied  # noqa: F401
from tests.instruments.misuses import after, by_hand, cut, cut_again, with_loss, with_share
from tests.instruments.uses import contrastive, wrapped

adafactor = partial(Adafactor, lr=0.01)
HEAD, FIRST = "head.weight", "gradients of step 1"


def same(prepare, **how):
    return {"several": prepare, "one": prepare} | how


def sequences(**how):
    one = partial(uses.in_sequences, deal=contiguous)
    several = partial(uses.in_sequences, deal=contiguous, **how)
    return {"several": several, "one": one, "model_of": uses.reader}


def layers(several, model_of=uses.in_layers):
    return {"several": several, "model_of": model_of}


def experts(**how):
    return {"several": partial(uses.sharing_experts, **how), "model_of": uses.with_experts}


OTHER_ORDER = partial(uses.in_sequences, deal=zigzag, attend=ulysses)

MISUSES = {  # ranks, the job, what is first, its kind, what else is said
    # data parallel
    "NaiveDDP unfinished": (
        *(2, partial(misuses.unfinished, wrap=NaiveDDP)),
        *(HEAD, "never averaged", "2 ranks"),
    ),
    "thawed late": (
        *(2, misuses.thawed_late, "layers.2.norm.bias", "never averaged"),
        "2 ranks",
    ),
    "replaced late": (2, misuses.replaced_late, HEAD, "never averaged", ""),
    "frozen on the ranks": (
        2,
        partial(wrapped, wrap=misuses.frozen),
        "layers.2.norm.bias",
        "no gradient",
        "frozen",
    ),
    "clipped, then averaged": (
        *(2, {"several": by_hand(misuses.clip_then_average), "one": misuses.clipped}),
        *(HEAD, "never averaged", "step 1, before clipping"),
    ),
    "clipped with its scale": (
        *(2, {"several": after(misuses.clip_with_scale), "one": misuses.clipped}),
        *(HEAD, "1024 times", "step 1, before clipping"),
    ),
    "added up, then clipped": (
        *(3, {"several": by_hand(misuses.add_up_then_clip), "one": misuses.clipped}),
        *(HEAD, "3 times", "number of ranks"),
    ),
    "clipped by value": (
        *(
            2,
            {"several": by_hand(misuses.average_then_clip_by_value), "one": misuses.clipped},
        ),
        *(HEAD, "direction", "clipped gradients of step 1"),
    ),
    "its scale is kept": (2, after(misuses.keep_scale), HEAD, "1024 times", ""),
    "averaged twice": (2, by_hand(misuses.average_twice), HEAD, "0.5 times", "once too"),
    "added up": (3, by_hand(misuses.add_up), HEAD, "3 times", "number of ranks"),
    "averaged in bfloat16": (2, by_hand(misuses.average_in_bfloat16), HEAD, "direct", "%"),
    "averaged on one rank": (2, by_hand(misuses.average_on_first), HEAD, "on rank 1", ""),
    "in each rank's order": (
        *(3, by_hand(misuses.average_in_own_order), HEAD, "not the same bits"),
        "beside rank 0",
    ),
    "parameters are averaged": (
        *(2, misuses.average_parameters_in_place_of_gradients),
        *(HEAD, "never averaged", ""),
    ),
    "averaged in pairs": (
        *(4, misuses.average_with_neighbour, HEAD, "never averaged"),
        "the 2 ranks of tp",
    ),
    "matrices are averaged": (
        *(2, by_hand(misuses.average_matrices), "layers.2.down.bias"),
        *("never averaged", ""),
    ),
    "NaN": (2, by_hand(misuses.nan_on_last), HEAD, "not finite", "on rank 1"),
    "alone, three": (3, uses.stepping, HEAD, "never averaged", "the 3 ranks"),
    "a remainder": (
        *(2, layers(by_hand(misuses.leave_a_remainder), uses.shifted)),
        *("shift", "not zero", "rounding"),
    ),
    "zeros": (2, by_hand(misuses.zero_head), HEAD, "all zeros", ""),
    "one parameter is skipped": (
        *(2, by_hand(misuses.skip_on_last), "layers.1.up.weight", "on rank 1", ""),
    ),
    "stale": (2, misuses.stale, HEAD, "direction", "gradients of step 2"),
    "no zero_grad": (2, misuses.moving, HEAD, "direction", "gradients of step 2"),
    "compressed": (2, misuses.compressed, HEAD, "direction", "%"),
    "float32": (2, misuses.in_short_numbers, HEAD, "direction", "%"),
    "a hook for each rank": (
        *(2, misuses.with_a_hook_on_ranks, HEAD),
        *("2 times", "number of ranks"),
    ),
    "started apart": (
        *(2, {"several": by_hand(uses.average), "model_of": net_of_this_rank}),
        *(HEAD, "on rank 1", "suspect: first numbers differ"),
    ),
    # the loss, and the batch
    "a sum": (2, with_loss(misuses.summed), HEAD, "78 times", "a sum taken for a mean"),
    "everybody's first share": (
        *(2, with_share(misuses.first_share), HEAD, "direction", "off"),
    ),
    "shares of 3 and 5": (2, with_share(misuses.uneven), HEAD, "direction", "off"),
    "shares that overlap": (2, with_share(misuses.overlapping), HEAD, "direction", "off"),
    "parts of 1 and 5": (2, misuses.in_parts([1], 0.5), HEAD, "direction", "off"),
    "parts not divided": (2, misuses.in_parts([3], 1.0), HEAD, "2 times", ""),
    "parts divided twice": (2, misuses.in_parts([3], 0.25), HEAD, "0.5 times", ""),
    "always no_sync": (2, misuses.never_synced, HEAD, "never averaged", ""),
    "no backward": (2, misuses.no_backward, HEAD, "no gradient", "in no optimizer"),
    "a loss of three parts": (
        *(2, misuses.told_by_parts, "number 1", "another value", "values returned"),
    ),
    "one step less": (2, misuses.one_step_less, "the job", "number of steps", "1 on rank"),
    "contrastive": (
        *(2, same(contrastive) | {"several": misuses.GATHERED}),
        *(HEAD, "0.5 times", "2 is the number of ranks"),
    ),
    # state and updates
    "statistics of a rank": (
        *(2, {"several": wrapped, "model_of": misuses.with_statistics}),
        *("layers.0.mean", "direction", "buffers"),
    ),
    "max_norm": (
        *(2, {"several": uses.with_owners, "model_of": misuses.with_max_norm}),
        *("emb.weight", "", "max_norm"),
    ),
    "another rate": (2, misuses.with_other_rate, HEAD, "on rank 1", "after step 1"),
    "a schedule on one rank": (
        *(2, misuses.scheduled_on_first, HEAD, "on rank 0", "after step 2"),
    ),
    "moments forgotten": (2, misuses.forgetful, HEAD, "direction", "after step 2"),
    "decayed twice": (2, misuses.decayed_twice, HEAD, "0.99 times", "after step 1"),
    "owners do not send": (
        *(2, partial(misuses.with_owners, sends=False), HEAD, "on rank 0", "after step 1"),
    ),
    "rank 0 sends all": (
        *(2, partial(misuses.with_owners, source=0), HEAD, "not changed", "after step 1"),
    ),
    "an owner steps nothing": (
        *(2, partial(misuses.with_owners, left_out=(0, 1))),
        *("layers.0.norm.weight", "no gradient", "in no optimizer"),
    ),
    "sharded_step, an owner steps nothing": (
        *(2, partial(misuses.with_sharded_step, held=lambda own: own[:1])),
        *(HEAD, "no gradient", "in no optimizer"),
    ),
    "ShardedOptimizer, thawed late": (
        *(2, misuses.thawed_for_owners, "layers.2.norm.bias", "no gradient", ""),
    ),
    "ShardedOptimizer, its inner steps": (2, misuses.inner_step, HEAD, "direction", ""),
    "copies clipped as shards": (
        *(2, {"several": misuses.clip_copies, "one": misuses.clipped}),
        *(HEAD, "", "clipped"),
    ),
    "the optimizer before FlatParameters": (
        *(2, misuses.views_of_flat, HEAD, "never averaged", ""),
    ),
    "FlatParameters, an old optimizer": (
        *(2, misuses.flat_by_an_old_optimizer, HEAD, "no gradient", ""),
    ),
    "the optimizer before fully_sharded": (
        *(2, misuses.blocks_after_optimizer, HEAD, "no gradient", ""),
    ),
    "sharded blocks without a root": (
        *(2, misuses.blocks_alone, HEAD, "never averaged", ""),
    ),
    "fully_sharded, started apart": (
        *(2, {"several": misuses.UNUSED, "model_of": net_of_this_rank}),
        *(HEAD, "direction", "at the start"),
    ),
    "owners clip first": (
        *(2, {"several": partial(misuses.with_owners, order=misuses.CLIP_FIRST)}),
        *(HEAD, "direction", ""),
    ),
    "sharded_step, started apart": (
        *(2, {"several": misuses.with_sharded_step, "model_of": net_of_this_rank}),
        *(HEAD, "on rank 1", "at the start"),
    ),
    "sharded_step, clipped before": (
        *(2, {"several": misuses.SHARDED_CLIP, "one": misuses.clipped}),
        *(HEAD, "direction", "step 1, before clipping"),
    ),
    "Adafactor on shards": (
        *(2, {"several": misuses.ADAFACTOR, "one": misuses.ONE_ADAFACTOR}),
        *(HEAD, "direction", "after step 1"),
    ),
    "decay of flat shards by dim": (
        *(2, same(uses.decaying_matrices) | {"several": misuses.DECAYING}),
        *(HEAD, "direction", "after step 1"),
    ),
    "an unused layer decays": (
        *(2, {"several": misuses.UNUSED, "model_of": uses.with_an_unused_layer}),
        *("unused.bias", "", "after step 1"),
    ),
    "shards clipped in their own norm": (
        *(2, {"several": misuses.OWN_NORM, "one": misuses.clipped}),
        *(HEAD, "times too long", "clipped gradients of step 1"),
    ),
    "fully_shard, clipped in its own norm": (
        *(2, {"several": misuses.FULL_OWN_NORM, "one": misuses.clipped}),
        *(HEAD, "", "suspect: gradients are clipped"),
    ),
    "the optimizer before fully_shard": (2, misuses.optimizer_first, HEAD, "no grad", ""),
    "a forward before the optimizer": (2, misuses.forward_first, HEAD, "no gradient", ""),
    "blocks without a root": (2, misuses.blocks_without_root, HEAD, "never averaged", ""),
    "adapters after fully_shard": (
        *(2, layers(misuses.adapted_late, uses.adapted)),
        *("layers.2.up.up.weight", "never averaged", "2 ranks"),
    ),
    "fully_shard adds up": (2, misuses.in_full_summed, HEAD, "2 times", "number of ranks"),
    "fully_shard, never synced": (2, misuses.in_full_never_synced, HEAD, "all zeros", ""),
    # tensor parallel
    "no f": (2, cut(f=False), "layers.2.norm.bias", "never summed", "2 ranks"),
    "a bias on each": (2, cut(bias_on_each=True), HEAD, "direction", "output of layers.0"),
    "ranks of one tp group see other samples": (
        *(2, cut(share=uses.mine), HEAD, "direction", "output of layers.0"),
    ),
    "a bias of zeros on each": (
        *(2, layers(cut(bias_on_each=True), misuses.with_biases_of_zero)),
        *(HEAD, "direction", "gradients of step 1"),
    ),
    "clipped parts": (
        *(2, {"several": cut(finish=uses.clip), "one": misuses.clipped}),
        *(HEAD, "times too long", "20 of 20 clipped gradients of step 1"),
    ),
    "g sums backward too": (
        *(2, cut_again(sum_of=misuses.SumBothWays)),
        *("layers.2.down.weight", "2 times", "number of ranks"),
    ),
    "a part without its mark": (2, cut_again(mark=False), "layers.2.up.weight", "shape", ""),
    "a part with another mark": (2, cut_again(dim=0), "layers.2.down.weight", "shape", ""),
    "a scale is not summed": (
        *(2, {"several": misuses.scale_not_summed, "model_of": misuses.with_scale}),
        *("layers.1.scale", "never summed", "2 ranks"),
    ),
    "a tie is cut": (
        *(2, {"several": misuses.tie_cut, "model_of": tied}),
        *("emb.weight", "two tensors where one was tied", "sum of both"),
    ),
    "a loss of parts of the words": (
        *(2, partial(uses.with_a_cut_head, loss_of=misuses.entropy_of_parts)),
        *("number 1", "another value", "expected"),
    ),
    "a sequence cut, copies not summed": (
        *(2, same(partial(uses.by_tokens, sums=False)) | {"model_of": uses.transformer}),
        *("norm.bias", "never summed", "2 ranks"),
    ),
    "a softmax over some features": (
        *(2, {"several": misuses.softmax_of_some, "model_of": misuses.with_a_softmax_inside}),
        *(HEAD, "direction", "output of layers.0"),
    ),
    "copies are added up": (2, misuses.averaged_over_products, HEAD, "2 times", ""),
    "heads in a wrong order": (
        *(2, {"several": misuses.wrong_order_of_heads, "model_of": uses.reader}),
        *("head.bias", "direction", "output of attention"),
    ),
    # pipelines
    "micro-batches not divided": (
        *(2, layers(misuses.in_micro_batches(1.0)), "4.weight", "4 times", "4 micro-batches"),
    ),
    "micro-batches divided twice": (
        *(2, layers(misuses.in_micro_batches(1 / 16)), "4.weight", "0.25 times", "once too"),
    ),
    "a sum in stages": (
        *(2, layers(partial(uses.in_stages, loss_of=misuses.summed))),
        *("4.weight", "39 times", ""),
    ),
    "a sum in run_gpipe": (
        *(2, layers(partial(uses.in_works, loss=misuses.summed_by_rows))),
        *("4.weight", "39 times", ""),
    ),
    "weighted words in run_gpipe": (
        *(2, misuses.in_works_by(misuses.weighted_words), "4.weight", "direction", ""),
    ),
    "ignored words in run_gpipe": (
        *(2, misuses.in_works_by(misuses.without_one_word), "4.weight", "direction", ""),
    ),
    "scale_grads and a scaled loss": (
        *(2, layers(partial(uses.in_stages, loss_of=misuses.scaled_twice))),
        *("4.weight", "0.25 times", ""),
    ),
    "no scale_grads": (
        *(2, layers(partial(uses.in_stages, scale_grads=False)), "4.weight", "4 times", ""),
    ),
    "scale_grads over two calls": (
        *(2, layers(misuses.moving_scale), "4.weight", "direction", "off"),
    ),
    "a tie over two stages": (
        *(2, layers(misuses.tied_stages, misuses.tied_layers)),
        *("0.weight", "never summed", "2 ranks"),
    ),
    "the optimizer of other layers": (
        *(2, layers(misuses.stages_with_old_optimizer), "4.weight", "no gradient", ""),
    ),
    # sequences
    "positions from zero": (
        *(2, sequences(places_of=misuses.from_zero), "head.bias", "direction"),
        "output of attention",
    ),
    "keys' gradients stay away": (
        *(2, sequences(attend=misuses.gathered_keys(False))),
        *("attention.qkv.bias", "16 of 48 rows", "forward is right"),
    ),
    "own keys": (
        *(2, sequences(attend=misuses.own_keys), "head.bias", "direction"),
        "output of attention",
    ),
    "another deal": (
        *(2, sequences(attend=misuses.ring), "head.bias", "direction", "output of attention"),
    ),
    "Ulysses over a zig-zag": (
        *(2, sequences() | {"several": OTHER_ORDER}, "head.bias", "direction"),
        "output of attention",
    ),
    "causal where it is not": (
        *(2, sequences() | {"model_of": misuses.reader_both_ways}, "head.bias", "direction"),
        "output of attention",
    ),
    "parts of a sequence are not averaged": (
        *(2, sequences(finish=None), "head.bias", "never averaged", ""),
    ),
    # experts
    "a router is not summed": (
        *(2, experts(finish=partial(uses.finish_experts, router=False))),
        *("experts.router", "never summed", "2 ranks"),
    ),
    "experts too large": (
        *(2, experts(finish=misuses.averaged_once_more)),
        *("experts.down", "2 times", "number of ranks"),
    ),
    "experts not divided": (
        *(2, experts(finish=partial(uses.finish_experts, own=False))),
        *("experts.down", "2 times", ""),
    ),
    "experts in DDP": (
        *(2, {"several": misuses.experts_in_ddp, "model_of": uses.with_experts}),
        *("experts.down", "right in 2 of 4 rows", "part 1 of 2"),
    ),
    "experts in BucketedDDP": (
        *(2, {"several": misuses.experts_in_buckets, "model_of": uses.with_experts}),
        *("experts.down", "2 times", "number of ranks"),
    ),
    "experts in another order": (
        *(2, experts(order=[2, 3, 0, 1]), "experts.down", "order", "at the start"),
    ),
    "experts drop tokens": (
        *(2, {"several": misuses.without_full_experts, "model_of": uses.with_experts}),
        *("experts.down", "direction", "in forward"),
    ),
    # random numbers
    "dropout": (
        *(2, {"several": wrapped, "model_of": misuses.with_dropout_inside}),
        *(HEAD, "direction", "random"),
    ),
}


def run(proved, world_size, job):
    how = job if isinstance(job, dict) else {"several": job}
    both = {key: value for key, value in how.items() if key not in {"one", "several"}}
    one = {"several": None, "one": how.get("one")}
    return proved(
        world_size, uses.train, **both, one=one, several={"several": how["several"]}
    )


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_named_by_its_first_tensor_and_its_kind(proved, name):
    world_size, job, first, kind, said = MISUSES[name]
    proof = run(proved, world_size, job)
    assert not proof.right
    assert proof.first.name == first, proof
    assert kind in proof.first.kind, proof
    assert said in str(proof), proof


RAISES = {  # the job, and a word of the one sentence
    "BucketedDDP unfinished": (partial(misuses.unfinished, wrap=BucketedDDP), "finish"),
    "frozen late": (partial(misuses.frozen_late, wrap=BucketedDDP), "head.weight"),
    "BucketedDDP always no_sync": (
        partial(misuses.never_synced, wrap=AccumulatingDDP),
        "emb.weight",
    ),
    "sharded_step, no zero_grad": (
        partial(misuses.with_sharded_step, zero=False),
        "zero_grad",
    ),
    "a model is cut twice": (misuses.cut_twice, "ColumnParallelLinear is no nn.Linear"),
    "a transposed weight": (misuses.transposed, "Transposed is no nn.Linear"),
    "all features for a part": (misuses.whole_into_rows, "give this rank's part"),
    "three experts on two": (misuses.three_experts_on_two, "3 experts"),
    "a model in place of work": (misuses.model_for_work, "is no Work"),
}


@pytest.mark.parametrize("name", RAISES)
def test_a_misuse_is_refused_in_a_sentence(proved, name):
    job, word = RAISES[name]
    with pytest.raises(RankFailed, match="raised") as error:
        run(proved, 2, job)
    assert word in str(error.value)
