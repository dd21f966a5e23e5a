"""Models, memory and the parts of a step against arithmetic by hand."""

import pytest

from mgpu_tutorial.shared import cost_model as cost
from mgpu_tutorial.shared.cost_model import machines, memory, step
from mgpu_tutorial.shared.cost_model.plans import RECOMPUTATIONS, check_plan

MODEL = cost.Model(layers=4, hidden=8, heads=2, sequence=16, vocabulary=32)
GPU = cost.GPU(
    "toy",
    peak=1e6,
    memory=1e9,
    memory_bandwidth=1e6,
    matmul_efficiency=0.5,
    activation_passes=3.0,
)
CLUSTER = cost.Cluster(GPU, cost.Link(1e-3, 1e6), cost.Link(1e-2, 1e5), gpus_per_node=4)
OLD = {"flash": False, "sequence_parallel": False}
RATE = 0.85e6  # bytes per second through the toy's memory


def test_parameters_and_operations_by_hand():
    """12 h² a layer; 2 operations per parameter, 4 s h of attention, twice more backward."""
    assert MODEL.layer_parameters == 12 * 64
    assert MODEL.parameters == 4 * 768 + 32 * 8
    forward = 4 * (2 * 768 + 4 * 16 * 8)
    assert MODEL.flops_per_token() == 3 * forward + 6 * 32 * 8
    assert MODEL.flops_per_token(recompute=True) == 4 * forward + 6 * 32 * 8
    half = 4 * (2 * 768 + 2 * 16 * 8)
    assert MODEL.flops_per_token(causal=True) == 3 * half + 6 * 32 * 8


def test_a_llama_has_the_parameters_that_its_name_says():
    found = cost.Model(126, 16384, 128, 8192, 128_256, 8, 53_248, gated=True, tied=False)
    assert found.parameters == pytest.approx(405.8e9, rel=1e-3)
    assert found.kv_width == 1024 and found.ffn_width == 53_248
    assert cost.Model(1, 4096, 32, kv_heads=8, gated=True, ffn=14_336).layer_parameters == (
        2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    )


def test_the_equation_of_the_paper():
    """F = 96 B s l h² (1 + s / 6h + V / 16 l h), equation (3) of arXiv 2104.04473."""
    model = cost.Model(96, 12288, 96)
    factor = 1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)
    expected = 96 * 96 * 12288**2 * factor
    assert model.flops_per_token(recompute=True) == pytest.approx(expected)


@pytest.mark.parametrize("billions", [0.1, 1, 7, 13, 70, 175, 405, 1000])
def test_a_model_is_made_up_of_about_so_many_parameters(billions):
    found = cost.model_of(billions * 1e9)
    assert found.parameters == pytest.approx(billions * 1e9, rel=0.12)
    assert found.hidden == 128 * found.heads and 2 <= found.layers <= 160


def test_a_model_of_too_few_parameters_is_refused():
    for wrong in (0, -1, 1e6, float("nan")):
        with pytest.raises(ValueError, match="50 million or more"):
            cost.model_of(wrong)


# Memory


def test_what_a_layer_keeps_is_as_in_the_paper():
    """s b h (10 + 24 + 5 a s / h) bytes: arXiv 2205.05198, equation (1)."""
    found = memory.saved_activations(MODEL, flash=False)
    assert found == (10 * 8, 24 * 8, 5 * 2 * 16)
    assert memory.saved_activations(MODEL, flash=True).scores == 0


def test_a_gated_layer_keeps_three_inner_vectors_and_no_dropout():
    model = MODEL._replace(gated=True, ffn=20, kv_heads=1)
    assert memory.saved_activations(model, flash=True) == (
        8 * 8,
        2 * 8 + 2 * (8 + 2 * 4) + 6 * 20,
        0,
    )


def test_activations_by_hand():
    """A micro-batch of 2 sequences, two ranks of TP, with each way to recompute."""
    tokens = 2 * 16
    plan = cost.Plan(tp=2, micro_batch=2, **OLD)
    whole = 80 + 192 / 2 + 160 / 2
    assert memory.activations(MODEL, plan, 2) == tokens * 4 * whole
    full = plan._replace(recompute="full")
    assert memory.activations(MODEL, full, 2) == tokens * (4 * 2 * 8 + whole)
    selective = plan._replace(recompute="selective")
    assert memory.activations(MODEL, selective, 2) == tokens * (4 * (whole - 80) + 80)
    parallel = cost.Plan(tp=2, micro_batch=2, recompute="selective")
    cheap = (4 * 8 + 2 * 32) / 2
    assert memory.activations(MODEL, parallel, 2) == tokens * (4 * (272 / 2 - cheap) + cheap)


def test_the_first_stage_holds_a_micro_batch_per_stage():
    whole = memory.activations(MODEL, cost.Plan(), 1)
    assert memory.activations(MODEL, cost.Plan(pp=4), 8) == whole
    assert memory.activations(MODEL, cost.Plan(pp=4), 2) == whole / 2
    assert memory.activations(MODEL, cost.Plan(pp=2, interleaving=2), 8) == whole * 1.25


def test_state_by_stage_of_zero():
    """Weights 2, gradients 4, optimizer 12 bytes; over eight ranks of DP and CP."""
    parameters = MODEL.parameters
    expected = {
        0: (2, 4, 12),
        1: (2, 4, 12 / 8),
        2: (2, 4 / 8, 12 / 8),
        3: (2 / 8, 4 / 8, 12 / 8),
    }
    for zero, nbytes in expected.items():
        found = cost.memory_of(MODEL, cost.Plan(dp=4, cp=2, zero=zero), 4)
        assert found[:3] == pytest.approx([parameters * n for n in nbytes])
        assert (found.gathered > 0) == (zero == 3)
    assert cost.memory_of(MODEL, cost.Plan(dp=8, zero=3), 8).gathered == 768 * 8
    assert found.total == pytest.approx(sum(found)) and found.logits == 6 * 8 * 32
    assert cost.memory_of(MODEL, cost.Plan(pp=2), 4).logits == 0


def test_the_first_stage_has_the_embedding():
    found = cost.memory_of(MODEL, cost.Plan(pp=4), 4)
    assert found.parameters == 2 * (768 + 32 * 8)
    untied = MODEL._replace(tied=False)
    assert cost.memory_of(untied, cost.Plan(pp=4), 4).parameters == found.parameters
    assert cost.memory_of(untied, cost.Plan(), 4).parameters == 2 * (4 * 768 + 2 * 32 * 8)


# Seconds


def test_a_slot_by_hand():
    """One GPU, one sequence of 16 tokens, nothing computed again."""
    slot = step.micro_batch_seconds(MODEL, CLUSTER, cost.Plan(flash=False))
    assert slot["matmul"] == pytest.approx(16 * MODEL.flops_per_token() / 5e5)
    kept = 80 + 192 + 160
    assert slot["elementwise"] == pytest.approx(3 * 16 * 4 * 2 * kept / RATE)
    assert slot["weights"] == pytest.approx((2 * 2 + 2 * 4) * MODEL.parameters / RATE)
    assert slot["tensor"] == slot["context"] == 0


def test_what_is_computed_again_by_hand():
    full = step.micro_batch_seconds(MODEL, CLUSTER, cost.Plan(flash=False, recompute="full"))
    assert full["matmul"] == pytest.approx(16 * MODEL.flops_per_token(True) / 5e5)
    assert full["elementwise"] == pytest.approx(3 * 16 * 4 * 3 * 432 / RATE)
    assert full["weights"] == pytest.approx((3 * 2 + 2 * 4) * MODEL.parameters / RATE)
    some = step.micro_batch_seconds(
        MODEL, CLUSTER, cost.Plan(flash=False, recompute="selective")
    )
    again = 16 * 4 * 4 * 16 * 8 / 5e5
    assert some["matmul"] == pytest.approx(16 * MODEL.flops_per_token() / 5e5 + again)
    assert some["elementwise"] == pytest.approx(3 * 16 * 4 * (2 * 432 + 160) / RATE)


def test_flash_does_half_the_scores_and_again_in_backward():
    found = step.micro_batch_seconds(MODEL, CLUSTER, cost.Plan())
    layer = 3 * 2 * 768 + 3.5 * 2 * 16 * 8
    assert found["matmul"] == pytest.approx(16 * (4 * layer + 6 * 32 * 8) / 5e5)


def test_all_reduces_of_a_layer():
    """2 forward, 2 backward, 2 again; a half each for two inputs gathered once more."""
    nbytes = 2 * 16 * 8
    one = 2 * (1e-3 + nbytes / 2 / 0.7e6)
    for plan, calls in (
        (cost.Plan(tp=2, sequence_parallel=False), 4),
        (cost.Plan(tp=2, recompute="full", sequence_parallel=False), 6),
        (cost.Plan(tp=2, recompute="selective"), 5),
    ):
        assert step.tensor_seconds(MODEL, CLUSTER, plan, 16) == pytest.approx(calls * one)


def test_a_tensor_parallel_group_over_two_nodes_is_slower():
    model = MODEL._replace(heads=8, hidden=64)
    inside, across = (
        step.tensor_seconds(model, CLUSTER, cost.Plan(tp=tp), 16) for tp in (4, 8)
    )
    assert across > 3 * inside


def test_messages_of_a_pipeline():
    """Forward and backward for each chunk, over the slow link unless all is one node."""
    nbytes = 2 * 16 * 8
    slow, fast = 1e-2 + nbytes / 0.7e5, 1e-3 + nbytes / 0.7e6
    assert step.pipeline_seconds(MODEL, CLUSTER, cost.Plan(pp=4)) == pytest.approx(2 * fast)
    plan = cost.Plan(pp=4, dp=2, interleaving=2)
    assert step.pipeline_seconds(MODEL, CLUSTER, plan) == pytest.approx(4 * slow)
    assert step.pipeline_seconds(MODEL, CLUSTER, cost.Plan(dp=8)) == 0


def test_keys_and_values_of_the_other_parts():
    """Two ranks of a node gather 2 · 2 bytes · 16 tokens · 8, forward and backward."""
    one = 1e-3 + 2 * 2 * 16 * 8 / 2 / 0.7e6
    plan = cost.Plan(cp=2)
    assert step.context_seconds(MODEL, CLUSTER, plan, 8) == pytest.approx(2 * one)
    again = plan._replace(recompute="full")
    assert step.context_seconds(MODEL, CLUSTER, again, 8) == pytest.approx(3 * one)


def test_what_replicas_send_by_stage():
    """Two ranks of a node: 4-byte gradients twice; or once, and 2-byte parameters once."""

    def gather(nbytes, calls=1):
        return calls * 1e-3 + nbytes * MODEL.parameters / 2 / 0.7e6

    send = {zero: step.data_seconds(MODEL, CLUSTER, cost.Plan(dp=2, zero=zero), 3)
            for zero in (0, 1, 2, 3)}  # fmt: skip
    assert send[0] == (pytest.approx(2 * gather(4)), True)
    assert send[1][0] == send[2][0] == pytest.approx(gather(4) + gather(2))
    assert send[3] == (pytest.approx(3 * (2 * gather(2, 4) + gather(4, 4))), True)
    assert step.data_seconds(MODEL, CLUSTER, cost.Plan(), 3) == (0, False)
    late = cost.Plan(dp=2, overlap=False)
    assert step.data_seconds(MODEL, CLUSTER, late, 3) == (send[0][0], False)


def test_zero_3_in_a_pipeline_gathers_once():
    plan = cost.Plan(pp=2, dp=2, zero=3)
    mine = MODEL.parameters / 2
    once = 2 * 2e-3 + (2 + 4) * mine / 2 / 0.7e6
    assert step.data_seconds(MODEL, CLUSTER, plan, 8)[0] == pytest.approx(once)


def test_gpus_that_do_not_share_take_everything_over_their_own_card():
    shared, alone = (
        step.data_seconds(MODEL, CLUSTER, cost.Plan(dp=8, zero=3, share_node=s), 1)[0]
        for s in (True, False)
    )
    latency = 3 * 4 * 7 * 1e-2
    moved = (2 + 2 + 4) * MODEL.parameters * 7 / 8 / 0.7e5
    assert alone == pytest.approx(latency + moved) and shared < alone / 2


def test_overlap_lies_between_the_longer_and_the_sum():
    assert step.exposed_seconds(4.0, 3.0) == pytest.approx(2.0)
    assert step.exposed_seconds(4.0, 0.0) == 4.0 and step.exposed_seconds(0.0, 5.0) == 0.0


def test_a_whole_step_by_hand():
    """Two stages, two replicas, four micro-batches each; gradients at the end."""
    plan = cost.Plan(pp=2, dp=2, zero=1, overlap=False)
    found = cost.predict_step(MODEL, CLUSTER, plan, 8)
    slot = sum(step.micro_batch_seconds(MODEL, CLUSTER, plan).values())
    send, _ = step.data_seconds(MODEL, CLUSTER, plan, 4)
    messages = 4 * step.pipeline_seconds(MODEL, CLUSTER, plan)
    state = 50 * MODEL.parameters / 2 / 2 / RATE
    assert found.seconds == pytest.approx(4 * slot + slot + messages + send + state)
    assert found.parts.bubble == pytest.approx(slot)
    assert found.seconds == pytest.approx(sum(found.parts))
    tokens = 8 * 16 / 4 / found.seconds
    assert found.tokens_per_second == pytest.approx(tokens)
    assert found.tflops == pytest.approx(tokens * MODEL.flops_per_token() / 1e12)
    assert found.mfu == pytest.approx(found.tflops * 1e12 / 1e6) and found.hfu == found.mfu
    assert (
        found.fits
        and found.bottleneck in found.parts._fields
        and found.bottleneck != "matmul"
    )
    chunks = cost.predict_step(MODEL, CLUSTER, plan._replace(interleaving=2), 8)
    assert chunks.parts.bubble == pytest.approx(slot / 2)


def test_hidden_communication_costs_less_and_never_nothing():
    late = cost.Plan(dp=2, overlap=False)
    early = late._replace(overlap=True)
    shown, hidden = (
        cost.predict_step(MODEL, CLUSTER, plan, 8).parts.data for plan in (late, early)
    )
    slot = sum(step.micro_batch_seconds(MODEL, CLUSTER, early).values())
    assert (
        hidden == pytest.approx(step.exposed_seconds(shown, slot * 2 / 3))
        and 0 < hidden < shown
    )
    plan = cost.Plan(dp=2, zero=3)
    sent, _ = step.data_seconds(MODEL, CLUSTER, plan, 4)
    found = cost.predict_step(MODEL, CLUSTER, plan, 8).parts.data
    assert found == pytest.approx(step.exposed_seconds(sent, 4 * slot))


def test_hfu_counts_what_is_computed_again():
    full = cost.predict_step(MODEL, CLUSTER, cost.Plan(recompute="full"), 8)
    ratio = MODEL.flops_per_token(True) / MODEL.flops_per_token()
    assert full.hfu / full.mfu == pytest.approx(ratio)
    plan = cost.Plan(recompute="selective", flash=False)
    some = cost.predict_step(MODEL, CLUSTER, plan, 8)
    extra = 4 * 4 * 16 * 8 / MODEL.flops_per_token()
    assert some.hfu / some.mfu == pytest.approx(1 + extra)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (cost.Plan(tp=0), "tp must be 1 or more"),
        (cost.Plan(micro_batch=0), "micro_batch must be 1 or more"),
        (cost.Plan(recompute="some"), "recompute must be one of none, selective, full"),
        (cost.Plan(zero=4), "zero must be a stage from 0 to 3"),
        (cost.Plan(dp=16), "a batch of 8 sequences is too small"),
        (cost.Plan(tp=4), "tp = 4 does not divide 2 heads"),
        (cost.Plan(pp=4, interleaving=2), "4 layers do not make 8 stages"),
        (cost.Plan(interleaving=2), "interleaving needs a pipeline"),
        (cost.Plan(cp=3), "cp = 3 does not divide 16 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        cost.predict_step(MODEL, CLUSTER, plan, 8)


def test_embedding_and_head_may_have_stages_of_their_own():
    check_plan(MODEL, cost.Plan(pp=3, interleaving=2), 8)
    assert RECOMPUTATIONS == ("none", "selective", "full")


def test_plans_are_written_as_people_say_them():
    assert str(cost.Plan()) == "one GPU"
    assert str(cost.Plan(8, 4, 16, cp=2)) == "TP 8 · CP 2 · PP 4 · DP 16"
    assert cost.Plan(8, 4, 16, cp=2).ranks == 1024 and cost.Plan(dp=4, cp=2).shards == 8


# Fitting


def test_a_fit_finds_the_numbers_that_made_the_times():
    wanted = GPU._replace(matmul_efficiency=0.61, activation_passes=2.2)
    cluster = CLUSTER._replace(gpu=wanted)
    runs = []
    for plan in (cost.Plan(flash=False), cost.Plan(2, 2, 2, recompute="full", zero=3)):
        seconds = cost.predict_step(MODEL, cluster, plan, 8).seconds
        runs.append(cost.MeasuredStep(MODEL, CLUSTER, plan, 8, seconds))
    assert cost.fit_gpu(runs)[-2:] == pytest.approx([0.61, 2.2])
    assert cost.fit_gpu(runs[:1], activation_passes=2.2)[-2:] == pytest.approx([0.61, 2.2])
    for few, passes in (([], 2.2), (runs[:1], None)):
        with pytest.raises(ValueError, match="too few"):
            cost.fit_gpu(few, passes)


def test_a_cluster_reaches_a_share_of_what_is_nominal():
    inside, between = CLUSTER.reached()
    assert inside == pytest.approx((1e-3, 0.7e6)) and between == pytest.approx((1e-2, 0.7e5))
    assert CLUSTER.memory_rate() == pytest.approx(RATE)
    assert machines.LINK_SHARE == 0.70 and set(cost.CLUSTERS) >= {"A100", "H100"}
