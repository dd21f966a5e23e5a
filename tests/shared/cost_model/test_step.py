"""Models, memory and the parts of a step against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.shared.cost_model import memory, step
from mgpu_tutorial.shared.cost_model.fitting import MeasuredStep, fit_gpu
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, GPU, Cluster
from mgpu_tutorial.shared.cost_model.models import Model, model_of
from mgpu_tutorial.shared.cost_model.plans import RECOMPUTATIONS, Plan, check_plan

MODEL = Model(layers=4, hidden=8, heads=2, sequence=16, vocabulary=32)
TOY = GPU("toy", 1e6, 1e9, 1e6, matmul_efficiency=0.5, activation_passes=3.0)
CLUSTER = Cluster(TOY, Link(1e-3, 1e6), Link(1e-2, 1e5), gpus_per_node=4)
OLD = {"flash": False, "sequence_parallel": False}
RATE = 0.85e6  # bytes per second through the toy's memory
BATCH = 16
PLANS = st.builds(
    Plan,
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2]),
    interleaving=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(RECOMPUTATIONS),
    cp=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    flash=st.booleans(),
    overlap=st.booleans(),
    gradient_bytes=st.sampled_from([2, 4]),
    share_node=st.booleans(),
).map(lambda plan: plan if plan.pp > 1 else plan._replace(interleaving=1))


# Models


def test_parameters_and_operations_by_hand():
    """12 h² a layer; 2 operations per parameter, 4 s h of attention, twice more backward."""
    assert MODEL.layer_parameters == 12 * 64
    assert MODEL.parameters == 4 * 768 + 32 * 8
    assert MODEL._replace(tied=False).parameters == MODEL.parameters + 32 * 8
    forward = 4 * (2 * 768 + 4 * 16 * 8)
    assert MODEL.flops_per_token() == 3 * forward + 6 * 32 * 8
    assert MODEL.flops_per_token(recompute=True) == 4 * forward + 6 * 32 * 8
    half = 4 * (2 * 768 + 2 * 16 * 8)
    assert MODEL.flops_per_token(causal=True) == 3 * half + 6 * 32 * 8


def test_a_llama_has_the_parameters_that_its_name_says():
    llama = Model(126, 16384, 128, 8192, 128_256, 8, 53_248, gated=True, tied=False)
    assert llama.parameters == pytest.approx(405.8e9, rel=1e-3)
    assert llama.kv_width == 1024 and llama.ffn_width == 53_248
    assert Model(1, 4096, 32, kv_heads=8, gated=True, ffn=14_336).layer_parameters == (
        2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    )


def test_the_equation_of_the_paper():
    """F = 96 B s l h² (1 + s / 6h + V / 16 l h), equation (3) of arXiv 2104.04473."""
    model = Model(96, 12288, 96)
    factor = 1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)
    expected = 96 * 96 * 12288**2 * factor
    assert model.flops_per_token(recompute=True) == pytest.approx(expected)


@pytest.mark.parametrize("billions", [0.05, 0.1, 1, 7, 13, 70, 175, 405, 1000])
def test_a_model_is_made_up_of_about_so_many_parameters(billions):
    model = model_of(billions * 1e9, sequence=4096, vocabulary=50_000)
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.12)
    assert model.hidden == 128 * model.heads and 2 <= model.layers <= 160
    assert model.layers <= 16 or model.layers % 8 == 0  # stages can be equal
    assert model.heads <= 32 or model.heads % 8 == 0  # heads can be shared out by eight
    assert (model.sequence, model.vocabulary) == (4096, 50_000)


@pytest.mark.parametrize("parameters", [0, -1, 4.99e7, float("nan")])
def test_a_model_of_too_few_parameters_is_refused(parameters):
    with pytest.raises(ValueError, match="50 million or more"):
        model_of(parameters)


# Memory


def test_what_a_layer_saves_is_as_in_the_paper():
    """s b h (10 + 24 + 5 a s / h) bytes: arXiv 2205.05198, equation (1)."""
    assert memory.saved_activations(MODEL, flash=False) == (10 * 8, 24 * 8, 5 * 2 * 16)
    assert memory.saved_activations(MODEL, flash=True) == (10 * 8, 24 * 8, 0)
    # gated: three inner vectors and no dropout
    model = MODEL._replace(gated=True, ffn=20, kv_heads=1)
    inputs = 2 * 8 + 2 * (8 + 2 * 4) + 6 * 20
    assert memory.saved_activations(model, flash=True) == (8 * 8, inputs, 0)
    assert memory.recomputed_activations(model, flash=True) == (4 * 8, 2 * 20, 0)
    assert memory.recomputed_activations(model, flash=False) == (0, 0, 5 * 2 * 16)


def test_activations_by_hand():
    """A micro-batch of 2 sequences, two ranks of TP, with each way to recompute."""
    tokens = 2 * 16
    plan = Plan(tp=2, micro_batch=2, **OLD)
    whole = 80 + 192 / 2 + 160 / 2
    assert memory.activations(MODEL, plan, 2) == tokens * 4 * whole
    full = plan._replace(recompute="full")
    assert memory.activations(MODEL, full, 2) == tokens * (4 * 2 * 8 + whole)
    selective = plan._replace(recompute="selective")
    assert memory.activations(MODEL, selective, 2) == tokens * (4 * (whole - 80) + 80)
    parallel = Plan(tp=2, micro_batch=2, recompute="selective")
    cheap = (4 * 8 + 2 * 32) / 2
    assert memory.activations(MODEL, parallel, 2) == tokens * (4 * (272 / 2 - cheap) + cheap)
    full = Plan(tp=2, cp=2, micro_batch=2, recompute="full")
    assert memory.activations(MODEL, full, 2) == tokens / 2 * (4 * 8 + 272 / 2)


def test_the_first_stage_holds_a_micro_batch_per_stage():
    whole = memory.activations(MODEL, Plan(), 1)
    assert memory.activations(MODEL, Plan(pp=4), 8) == whole
    assert memory.activations(MODEL, Plan(pp=4), 4) == whole
    assert memory.activations(MODEL, Plan(pp=4), 2) == whole / 2
    assert memory.activations(MODEL, Plan(pp=4, dp=2), 4) == whole / 2
    assert memory.activations(MODEL, Plan(pp=2, interleaving=2), 8) == whole * 1.25


@given(PLANS)
def test_the_state_of_the_first_stage(plan):
    """Weights 2, Adam 12 bytes; ZeRO cuts state, gradients, weights, one a stage."""
    embeddings = 1 if plan.pp == 1 else 1 / 2  # the head is on the last stage
    model = MODEL._replace(tied=False)
    ours = (4 / plan.pp * 768 + embeddings * 2 * 32 * 8) / plan.tp
    shards = plan.dp * plan.cp
    found = memory.memory_of(model, plan, BATCH)
    assert found.parameters == pytest.approx(2 * ours / (shards if plan.zero == 3 else 1))
    gradients = plan.gradient_bytes * ours
    assert found.gradients == pytest.approx(gradients / (shards if plan.zero >= 2 else 1))
    assert found.optimizer == pytest.approx(12 * ours / (shards if plan.zero >= 1 else 1))
    layer = 768 / plan.tp
    gathered = (2 * 2 + plan.gradient_bytes) * layer if plan.zero == 3 else 0
    assert found.gathered == pytest.approx(gathered)
    tokens = plan.micro_batch * 16 / plan.cp
    assert found.logits == (6 * tokens * 32 / plan.tp if plan.pp == 1 else 0)
    assert found.total == pytest.approx(sum(found))
    tied = memory.memory_of(MODEL, plan._replace(zero=0), BATCH)
    assert tied.parameters == pytest.approx(2 * (4 / plan.pp * 768 + 32 * 8) / plan.tp)


# Seconds


@given(PLANS)
def test_a_micro_batch_pass_by_pass(plan):
    """Each pass written out: what it computes, and what it moves through the memory."""
    tokens, layers = plan.micro_batch * 16 / plan.cp, 4 / plan.pp
    forwards = ["forward", "again"] if plan.recompute == "full" else ["forward"]
    products = scores = 0.0
    for _ in [*forwards, "gradient of inputs", "gradient of weights"]:
        products += layers * 2 * 768
        scores += layers * 4 * 16 * 8 * (0.5 if plan.flash else 1)
    one = layers * 4 * 16 * 8
    if plan.flash:
        scores += one / 4  # half of the scores, half of their forward, again in backward
    elif plan.recompute == "selective":
        scores += one
    head = 3 * 2 * 32 * 8 / plan.pp
    found = step.micro_batch_seconds(MODEL, CLUSTER, plan)
    operations = tokens * (products + scores + head) / plan.tp
    assert found["matmul"] == pytest.approx(operations / (1e6 * 0.5))

    saved = memory.by_rank(memory.saved_activations(MODEL, plan.flash), plan)
    again = memory.by_rank(memory.recomputed_activations(MODEL, plan.flash), plan)
    assert saved.matmul == 192 / plan.tp
    assert saved.scores == (0 if plan.flash else 160 / plan.tp)
    assert saved.elementwise == 80 / (plan.tp if plan.sequence_parallel else 1)
    moved = sum(saved)  # backward reads it
    for _ in forwards:
        moved += sum(saved)
    if plan.recompute == "selective":
        moved += sum(again)
    assert found["elementwise"] == pytest.approx(3.0 * tokens * layers * moved / RATE)
    weights = (len(forwards) + 1) * 2 + 2 * plan.gradient_bytes
    ours = MODEL.parameters / plan.tp / plan.pp
    assert found["weights"] == pytest.approx(weights * ours / RATE)
    tensor = step.tensor_seconds(MODEL, CLUSTER, plan, tokens)
    context = step.context_seconds(MODEL, CLUSTER, plan, tokens)
    assert found["tensor"] == layers * tensor and (tensor > 0) == (plan.tp > 1)
    assert found["context"] == layers * context and (context > 0) == (plan.cp > 1)


def test_all_reduces_of_a_layer():
    """2 forward, 2 backward, 2 again; a half each for two inputs gathered once more."""
    nbytes = 2 * 16 * 8
    one = 2 * (1e-3 + nbytes / 2 / 0.7e6)
    for plan, calls in (
        (Plan(tp=2, sequence_parallel=False), 4),
        (Plan(tp=2, recompute="full", sequence_parallel=False), 6),
        (Plan(tp=2, recompute="selective"), 5),
    ):
        assert step.tensor_seconds(MODEL, CLUSTER, plan, 16) == pytest.approx(calls * one)
    model = MODEL._replace(heads=8, hidden=64)
    inside, across = (step.tensor_seconds(model, CLUSTER, Plan(tp=tp), 16) for tp in (4, 8))
    assert across > 3 * inside


def test_messages_of_a_pipeline():
    """Forward and backward for each chunk, over the slow link unless all is one node."""
    nbytes = 2 * 16 * 8
    slow, fast = 1e-2 + nbytes / 0.7e5, 1e-3 + nbytes / 0.7e6
    assert step.pipeline_seconds(MODEL, CLUSTER, Plan(pp=4)) == pytest.approx(2 * fast)
    plan = Plan(pp=4, dp=2, interleaving=2)
    assert step.pipeline_seconds(MODEL, CLUSTER, plan) == pytest.approx(4 * slow)
    assert step.pipeline_seconds(MODEL, CLUSTER, Plan(dp=8)) == 0
    half = 1e-3 + nbytes / 2 / 0.7e6
    plan = Plan(pp=2, tp=2, micro_batch=1)
    assert step.pipeline_seconds(MODEL, CLUSTER, plan) == pytest.approx(2 * half)
    plan = Plan(pp=2, cp=2, micro_batch=2)
    assert step.pipeline_seconds(MODEL, CLUSTER, plan) == pytest.approx(2 * fast)


def test_keys_and_values_of_the_other_parts():
    """Two ranks of a node gather 2 · 2 bytes · 16 tokens · 8, forward and backward."""
    one = 1e-3 + 2 * 2 * 16 * 8 / 2 / 0.7e6
    plan = Plan(cp=2)
    assert step.context_seconds(MODEL, CLUSTER, plan, 8) == pytest.approx(2 * one)
    again = plan._replace(recompute="full")
    assert step.context_seconds(MODEL, CLUSTER, again, 8) == pytest.approx(3 * one)
    few = step.context_seconds(MODEL._replace(kv_heads=1), CLUSTER, plan, 8)
    assert few == pytest.approx(2 * (1e-3 + 2 * 2 * 16 * 4 / 2 / 0.7e6))
    # two nodes, as TP fills one of them, and half of the numbers
    across = step.context_seconds(MODEL, CLUSTER, Plan(cp=2, tp=4), 8)
    assert across == pytest.approx(2 * (1e-2 + 2 * 2 * 16 * 2 / 2 / 0.7e5))


def test_what_replicas_send_by_stage():
    """Two ranks of a node: 4-byte gradients twice; or once, and 2-byte parameters once."""

    def gather(nbytes, calls=1):
        return calls * 1e-3 + nbytes * MODEL.parameters / 2 / 0.7e6

    def send(**plan):
        return step.data_seconds(MODEL, CLUSTER, Plan(dp=2, **plan), 3)

    assert send() == (pytest.approx(2 * gather(4)), True)
    assert send(overlap=False) == (pytest.approx(2 * gather(4)), False)
    for zero in (1, 2):
        assert send(zero=zero) == (pytest.approx(gather(4) + gather(2)), True)
        assert not send(zero=zero, overlap=False)[1]
    three = pytest.approx(3 * (2 * gather(2, calls=4) + gather(4, calls=4)))
    assert send(zero=3) == send(zero=3, overlap=False) == (three, True)
    assert send(gradient_bytes=2)[0] == pytest.approx(2 * gather(2))
    assert step.data_seconds(MODEL, CLUSTER, Plan(), 3) == (0, False)
    assert step.data_seconds(MODEL, CLUSTER, Plan(cp=2), 3) == send()  # CP is a replica too


def test_zero_3_in_a_pipeline_gathers_once():
    plan = Plan(pp=2, dp=2, zero=3)
    once = 2 * 2e-3 + (2 + 4) * MODEL.parameters / 2 / 2 / 0.7e6
    assert step.data_seconds(MODEL, CLUSTER, plan, 8)[0] == pytest.approx(once)


def test_gpus_that_do_not_share_take_everything_over_their_own_card():
    shared, alone = (
        step.data_seconds(MODEL, CLUSTER, Plan(dp=8, zero=3, share_node=s), 1)[0]
        for s in (True, False)
    )
    latency = 3 * 4 * 7 * 1e-2
    moved = (2 + 2 + 4) * MODEL.parameters * 7 / 8 / 0.7e5
    assert alone == pytest.approx(latency + moved) and shared < alone / 2


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_overlap_lies_between_the_longer_and_the_sum(communication, compute):
    together = compute + step.exposed_seconds(communication, compute)
    assert together**2 == pytest.approx(communication**2 + compute**2)


@given(PLANS)
def test_a_step_is_the_sum_of_its_parts(plan):
    found = step.predict_step(MODEL, CLUSTER, plan, BATCH)
    one = step.micro_batch_seconds(MODEL, CLUSTER, plan)
    count = BATCH / plan.dp / plan.micro_batch
    for name, seconds in one.items():
        assert getattr(found.parts, name) == pytest.approx(count * seconds)
    sent, overlaps = step.data_seconds(MODEL, CLUSTER, plan, count)
    under = 2 / 3 * sum(one.values()) if overlaps else 0  # the last micro-batch's backward
    if plan.zero == 3:
        under = count * sum(one.values())
    assert found.parts.data == pytest.approx(step.exposed_seconds(sent, under))
    messages = step.pipeline_seconds(MODEL, CLUSTER, plan)
    assert found.parts.pipeline == pytest.approx(count * messages)
    waits = (plan.pp - 1) / plan.interleaving
    assert found.parts.bubble == pytest.approx(waits * sum(one.values()))
    state = MODEL.parameters / plan.tp / plan.pp
    state /= plan.dp * plan.cp if plan.zero else 1
    assert found.parts.optimizer == pytest.approx(50 * state / RATE)
    assert found.seconds == pytest.approx(sum(found.parts))
    assert found.memory == memory.memory_of(MODEL, plan, BATCH)

    tokens = BATCH * 16 / (plan.tp * plan.cp * plan.pp * plan.dp) / found.seconds
    assert found.tokens_per_second == pytest.approx(tokens)
    flops = MODEL.flops_per_token()
    assert found.tflops == pytest.approx(tokens * flops / 1e12)
    assert found.mfu == pytest.approx(tokens * flops / 1e6)
    if plan.recompute == "full":
        flops = MODEL.flops_per_token(recompute=True)
    if plan.recompute == "selective" and not plan.flash:
        flops += 4 * 4 * 16 * 8
    assert found.hardware_tflops == pytest.approx(tokens * flops / 1e12)
    assert found.hfu == pytest.approx(tokens * flops / 1e6)
    others = {name: part for name, part in found.parts._asdict().items() if name != "matmul"}
    assert others[found.bottleneck] == max(others.values())


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_a_plan_fits_up_to_the_last_byte(spare, fits):
    total = memory.memory_of(MODEL, Plan(), 8).total
    cluster = CLUSTER._replace(gpu=TOY._replace(memory=total + spare))
    assert step.predict_step(MODEL, cluster, Plan(), 8).fits is fits


# Plans


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(tp=0), "tp must be 1 or more, got 0"),
        (Plan(cp=0), "cp must be 1 or more, got 0"),
        (Plan(micro_batch=0), "micro_batch must be 1 or more"),
        (Plan(recompute="some"), "recompute must be one of none, selective, full"),
        (Plan(zero=4), "zero must be a stage from 0 to 3"),
        (Plan(dp=3, micro_batch=3), "a batch of 8 sequences is too small: .* at least 9"),
        (Plan(tp=4), "tp = 4 does not divide 2 heads"),
        (Plan(pp=7), "4 layers do not make 7 stages"),
        (Plan(pp=4, interleaving=2), "4 layers do not make 8 stages"),
        (Plan(interleaving=2), "interleaving needs a pipeline"),
        (Plan(cp=3), "cp = 3 does not divide 16 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        step.predict_step(MODEL, CLUSTER, plan, 8)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=4, micro_batch=2),
        Plan(tp=2),
        Plan(pp=6),
        Plan(pp=3, interleaving=2),
        Plan(cp=16),
    ],
)
def test_what_just_can_be_run_is_taken(plan):
    """All sequences; as many heads as ranks; embedding and head in stages of their own."""
    check_plan(MODEL, plan, 8)


def test_plans_are_written_as_people_say_them():
    assert str(Plan()) == "one GPU"
    assert str(Plan(8, 4, 16, cp=2)) == "TP 8 · CP 2 · PP 4 · DP 16"
    assert Plan(8, 4, 16, cp=2).ranks == 1024 and Plan(dp=4, cp=2).shards == 8
    assert Plan(dp=4, micro_batch=2).micro_batches(24) == 3


# Fitting


def test_a_fit_finds_the_numbers_that_made_the_times():
    wanted = TOY._replace(matmul_efficiency=0.61, activation_passes=2.2)
    runs = []
    for plan in (Plan(flash=False), Plan(2, 2, 2, recompute="full", zero=3)):
        seconds = step.predict_step(MODEL, CLUSTER._replace(gpu=wanted), plan, 8).seconds
        runs.append(MeasuredStep(MODEL, CLUSTER, plan, 8, seconds))
    assert fit_gpu(runs) == pytest.approx(wanted)
    assert fit_gpu(runs[:1], activation_passes=2.2) == pytest.approx(wanted)
    for few, passes in (([], 2.2), (runs[:1], None)):
        with pytest.raises(ValueError, match=f"{len(few)} runs are too few"):
            fit_gpu(few, passes)


def test_a_fit_has_the_least_squares_of_relative_errors():
    """Of a short and a long step that no efficiency explains both."""
    runs = []
    for batch, factor in ((1, 1.1), (100, 0.9)):
        seconds = factor * step.predict_step(MODEL, CLUSTER, Plan(), batch).seconds
        runs.append(MeasuredStep(MODEL, CLUSTER, Plan(), batch, seconds))

    def squares(gpu):
        cluster = CLUSTER._replace(gpu=gpu)
        steps = [step.predict_step(MODEL, cluster, run.plan, run.batch) for run in runs]
        return sum(
            (s.seconds / run.seconds - 1) ** 2 for s, run in zip(steps, runs, strict=True)
        )

    gpu = fit_gpu(runs, activation_passes=3.0)
    for factor in (0.99, 1.01):
        other = gpu._replace(matmul_efficiency=factor * gpu.matmul_efficiency)
        assert squares(gpu) < squares(other)


def test_a_cluster_reaches_a_share_of_what_is_nominal():
    inside, between = CLUSTER.reached()
    assert inside == pytest.approx((1e-3, 0.7e6)) and between == pytest.approx((1e-2, 0.7e5))
    assert CLUSTER.memory_rate() == pytest.approx(RATE)
    assert set(CLUSTERS) >= {"A100", "H100"}
