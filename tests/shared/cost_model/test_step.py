"""Models, memory and the parts of a step against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.shared.cost_model import plans, step
from mgpu_tutorial.shared.cost_model.links import Link, all_gather_seconds
from mgpu_tutorial.shared.cost_model.machines import GPU, Cluster
from mgpu_tutorial.shared.cost_model.plans import (
    RECOMPUTATIONS,
    Model,
    Plan,
    check_plan,
    model_of,
)

MODEL = Model(layers=4, hidden=8, heads=2, sequence=16, vocabulary=32)
TOY = GPU("toy", 1e6, 1e9, 1e6, matmul_efficiency=0.5, activation_passes=3.0)
CLUSTER = Cluster(TOY, Link(1e-3, 1e6), Link(1e-2, 1e5), gpus_per_node=4)
FAST, SLOW = Link(1e-3, 0.7e6), Link(1e-2, 0.7e5)  # what is reached of its links
RATE = 0.85e6  # bytes per second through the toy's memory
BATCH = 48  # each pipeline of PLANS takes it in whole rounds
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
    ep=st.just(1),
).map(lambda plan: plan if plan.pp > 1 else plan._replace(interleaving=1))
SIZE = st.integers(1, 64)


@given(SIZE, SIZE, SIZE, SIZE, SIZE, st.integers(0, 4), st.booleans(), st.booleans())
def test_parameters_and_operations(layers, kv, group, tokens, words, ffn, gated, tied):
    """Each matrix listed; 2 operations per parameter, 4 s h of attention, twice backward."""
    heads, width = kv * group, 4 * kv * group
    model = Model(layers, width, heads, tokens, words, kv, ffn * width, gated, tied)
    inside = (ffn or 4) * width
    matrices = [(width, width), (width, 4 * kv), (width, 4 * kv), (width, width)]
    matrices += [(width, inside), (inside, width)]
    matrices += [(width, inside)] if gated else []
    layer = sum(rows * columns for rows, columns in matrices)
    head = words * width
    assert model.parameters == pytest.approx(layers * layer + (1 if tied else 2) * head)
    for again, causal in ((False, False), (True, False), (False, True)):
        pairs = tokens / 2 if causal else tokens
        passes = 4 if again else 3
        flops = passes * layers * (2 * layer + 4 * pairs * width) + 3 * 2 * head
        assert model.flops_per_token(recompute=again, causal=causal) == pytest.approx(flops)


@given(st.floats(5e7, 1e12))
def test_a_model_is_made_up_of_about_so_many_parameters(parameters):
    model = model_of(parameters, sequence=4096, vocabulary=50_000)
    assert model.parameters == pytest.approx(parameters, rel=0.2)
    assert model.hidden == 128 * model.heads and 2 <= model.layers <= 176
    assert model.layers <= 16 or model.layers % 8 == 0  # stages can be equal
    assert model.heads <= 32 or model.heads % 8 == 0  # heads can be shared out by eight


# Memory


def test_what_a_layer_saves_is_as_in_the_paper():
    """s b h (10 + 24 + 5 a s / h) bytes: arXiv 2205.05198, equation (1)."""
    plain = Plan(flash=False)
    assert plans.saved_bytes(MODEL, plain) == (10 * 8 + 24 * 8 + 5 * 2 * 16, 5 * 2 * 16)
    # gated: three inner vectors and no dropout
    model = MODEL._replace(gated=True, ffn=20, kv_heads=1)
    inputs = 2 * 8 + 2 * (8 + 2 * 4) + 6 * 20
    assert plans.saved_bytes(model, Plan()) == (8 * 8 + inputs, 4 * 8 + 2 * 20)
    assert plans.saved_bytes(model, plain) == (8 * 8 + inputs + 160, 160)


@given(PLANS, st.integers(1, 8))
def test_activations_of_the_first_stage(plan, pieces):
    """A micro-batch for each stage is in flight, and one layer is at work."""
    pieces *= plan.pp if plan.interleaving > 1 else 1  # in rounds
    between = 1 / plan.tp if plan.sequence_parallel else 1
    saved = 80 * between + 192 / plan.tp + (0 if plan.flash else 160 / plan.tp)
    keeps, works = saved, 0
    if plan.recompute == "selective":
        works = 32 * between + 64 / plan.tp if plan.flash else 160 / plan.tp
        keeps = saved - works
    if plan.recompute == "full":
        keeps, works = 2 * 8 * between, saved
    layers = min(pieces, plan.pp) * 4 / plan.pp
    if plan.interleaving > 1:
        layers *= 1 + (plan.pp - 1) / plan.pp / plan.interleaving
    tokens = plan.micro_batch * 16 / plan.cp
    batch = pieces * plan.dp * plan.micro_batch
    expected = pytest.approx(tokens * (layers * keeps + works))
    assert plans.memory_of(MODEL, plan, batch).activations == expected


@given(PLANS, st.booleans())
def test_the_state_of_the_first_stage(plan, tied):
    """Weights 2, Adam 12 bytes; ZeRO cuts state, gradients, weights, one a stage."""
    embeddings = 1 if plan.pp == 1 or tied else 1 / 2  # a second one is on the last stage
    ours = (4 / plan.pp * 768 + embeddings * (1 if tied else 2) * 32 * 8) / plan.tp
    cut = [plan.dp * plan.cp if plan.zero >= stage else 1 for stage in (1, 2, 3)]
    found = plans.memory_of(MODEL._replace(tied=tied), plan, BATCH)
    assert found.optimizer == pytest.approx(12 * ours / cut[0])
    assert found.gradients == pytest.approx(plan.gradient_bytes * ours / cut[1])
    assert found.parameters == pytest.approx(2 * ours / cut[2])
    gathered = (2 * 2 + plan.gradient_bytes) * 768 / plan.tp if plan.zero == 3 else 0
    assert found.gathered == pytest.approx(gathered)
    tokens = plan.micro_batch * 16 / plan.cp
    assert found.logits == (6 * tokens * 32 / plan.tp if plan.pp == 1 else 0)
    assert found.total == pytest.approx(sum(found))


# Seconds


@given(PLANS)
def test_a_micro_batch_pass_by_pass(plan):
    """Each pass written out: what it computes, and what it moves through the memory."""
    tokens, layers = plan.micro_batch * 16 / plan.cp, 4 / plan.pp
    forwards = 2 if plan.recompute == "full" else 1
    scores = 4 * 16 * 8
    layer = (forwards + 2) * (2 * 768 + scores * (0.5 if plan.flash else 1))
    if plan.flash:
        layer += scores / 4  # half of the scores, half of their forward, again in backward
    elif plan.recompute == "selective":
        layer += scores
    operations = tokens * (layers * layer + 3 * 2 * 32 * 8 / plan.pp) / plan.tp
    seconds = step.micro_batch_seconds(MODEL, CLUSTER, plan)
    assert seconds["matmul"] == pytest.approx(operations / (1e6 * 0.5))
    saved, again = plans.saved_bytes(MODEL, plan)
    moved = (forwards + 1) * saved  # written forward, read backward
    moved += again if plan.recompute == "selective" else 0
    assert seconds["elementwise"] == pytest.approx(3.0 * tokens * layers * moved / RATE)
    ours = MODEL.parameters / plan.tp / plan.pp
    weights = (forwards + 1) * 2 + 2 * plan.gradient_bytes
    assert seconds["weights"] == pytest.approx(weights * ours / RATE)
    for name, sent in step.layer_messages(MODEL, CLUSTER, plan, tokens).items():
        assert seconds[name] == layers * sent


@given(PLANS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 3]))
def test_what_a_rank_sends(plan, tp, pieces):
    """Every gather and scatter of a layer, of a micro-batch and of a step, listed."""
    plan = plan._replace(tp=tp)
    model = MODEL._replace(kv_heads=1)
    per_node = max(1, 4 // tp)
    trips = ["forward", "backward"] + ["again"] * (plan.recompute == "full")
    tokens = plan.micro_batch * 16 / plan.cp
    halves = ["scatter", "gather"] * 2 * len(trips)  # of attention and perceptron
    halves += ["inputs, once more"] * 2 * plan.sequence_parallel
    one = all_gather_seconds(2 * tokens * 8, tp, 4, FAST, SLOW)
    sent = step.layer_messages(model, CLUSTER, plan, tokens)
    assert sent["tensor"] == pytest.approx(len(halves) * one)
    keys_and_values = 2 * 2 * plan.micro_batch * 16 * 4 / tp
    one = all_gather_seconds(keys_and_values, plan.cp, per_node, FAST, SLOW)
    assert sent["context"] == pytest.approx(len(trips) * one) and sent["experts"] == 0
    link = FAST if plan.ranks <= 4 else SLOW
    one = link.latency + 2 * tokens * 8 / tp / link.bandwidth
    messages = 2 * plan.interleaving if plan.pp > 1 else 0
    seconds = step.pipeline_seconds(model, CLUSTER, plan)
    assert seconds == pytest.approx(messages * one)

    whole = model.parameters / tp / plan.pp
    units = 4 / plan.pp if plan.zero == 3 else 1
    replicas = plan.dp * plan.cp, per_node if plan.share_node else 1, FAST, SLOW
    gather, scatter = (
        units * all_gather_seconds(nbytes * whole / units, *replicas)
        for nbytes in (2, plan.gradient_bytes)
    )
    expected = 2 * scatter if plan.zero == 0 else gather + scatter
    if plan.zero == 3 and plan.pp == 1:
        expected = pieces * (2 * gather + scatter)
    seconds = step.data_seconds(model, CLUSTER, plan, pieces)
    assert seconds == pytest.approx(expected)


def test_experts_by_hand():
    """Eight experts of 2 · 8 · 32 parameters in 4 layers, two for each token; TP 2, EP 4."""
    model = MODEL._replace(experts=8, active=2)
    attention, expert = 4 * 8 * 8, 2 * 8 * 32
    assert model.layer_flops() == 2 * (attention + 2 * expert)
    saved = 80 + 64 + 2 * (4 * 32 + 2 * 8)
    assert plans.saved_bytes(model, Plan()) == (saved, 4 * 8 + 2 * 2 * 32)
    dense = (4 * attention + 32 * 8) / 2  # on each rank of two that share matrices
    for zero, copies, own in ((0, 1, 4), (1, 8, 8)):
        plan = Plan(tp=2, dp=8, ep=4, zero=zero)
        state = plans.memory_of(model, plan, BATCH)
        assert state.optimizer == 12 * (dense / copies + 4 * 8 * expert / 2 / own)
        assert state.parameters == 2 * (dense + 4 * 8 * expert / 2 / 4)
    # 16 tokens in halves of 4 numbers of 2 bytes, to two experts each; two GPUs of a node
    # are in the group, and two elsewhere
    nbytes = 16 * 4 * 2 * 2
    between = SLOW.latency + nbytes * 2 / 4 / SLOW.bandwidth
    found = step.layer_messages(model, CLUSTER, plan, 16)["experts"]
    assert found == pytest.approx(4 * between)
    full = plan._replace(recompute="full", tp=1)
    inside = FAST.latency + 2 * nbytes * 3 / 4 / FAST.bandwidth
    found = step.layer_messages(model, CLUSTER, full, 16)["experts"]
    assert found == pytest.approx(6 * inside)
    # dense gradients over all eight, two to a node; of each expert there are two copies
    mine = 4 * 8 * expert / 2 / 4
    sent = sum(
        all_gather_seconds(size * dense, 8, 2, FAST, SLOW)
        + all_gather_seconds(size * mine, 2, 1, FAST, SLOW)
        for size in (2, 4)
    )
    assert step.data_seconds(model, CLUSTER, plan, 1) == pytest.approx(sent)


def test_experts_beside_parts_of_a_sequence():
    """CP 2 and EP 4 on nodes of four: neighbours share a sequence, so two of the four ranks
    of an exchange are in each node, and both copies of an expert."""
    model = MODEL._replace(experts=8, active=2)
    plan = Plan(cp=2, dp=4, ep=4)
    nbytes = 16 * 8 * 2 * 2  # 16 tokens of 8 numbers of 2 bytes, to two experts each
    between = SLOW.latency + nbytes * 2 / 4 / SLOW.bandwidth
    found = step.layer_messages(model, CLUSTER, plan, 16)["experts"]
    assert found == pytest.approx(4 * between)
    dense, mine = 4 * 4 * 8 * 8 + 32 * 8, 4 * 8 * 2 * 8 * 32 / 4
    sent = 2 * all_gather_seconds(4 * dense, 8, 4, FAST, SLOW)
    sent += 2 * all_gather_seconds(4 * mine, 2, 2, FAST, SLOW)
    assert step.data_seconds(model, CLUSTER, plan, 1) == pytest.approx(sent)


@given(PLANS)
def test_a_step_is_the_sum_of_its_parts(plan):
    result = step.predict_step(MODEL, CLUSTER, plan, BATCH)
    one = step.micro_batch_seconds(MODEL, CLUSTER, plan)
    count = BATCH / plan.dp / plan.micro_batch
    for name, seconds in one.items():
        assert result.parts[name] == pytest.approx(count * seconds)
    sent = step.data_seconds(MODEL, CLUSTER, plan, count)
    under = 2 / 3 * sum(one.values()) * plan.overlap  # the last micro-batch's backward
    if plan.zero == 3:
        under = count * sum(one.values())
    # at once: the root of the sum of squares
    assert (under + result.parts["data"]) ** 2 == pytest.approx(under**2 + sent**2)
    messages = step.pipeline_seconds(MODEL, CLUSTER, plan)
    assert result.parts["pipeline"] == pytest.approx(count * messages)
    waits = (plan.pp - 1) / plan.interleaving
    assert result.parts["bubble"] == pytest.approx(waits * sum(one.values()))
    state = MODEL.parameters / plan.tp / plan.pp
    state /= plan.dp * plan.cp if plan.zero else 1
    assert result.parts["optimizer"] == pytest.approx(50 * state / RATE)
    assert result.seconds == pytest.approx(sum(result.parts.values()))
    tokens = BATCH * 16 / (plan.tp * plan.cp * plan.pp * plan.dp) / result.seconds
    assert result.tokens_per_second == pytest.approx(tokens)
    assert result.mfu == pytest.approx(tokens * MODEL.flops_per_token() / 1e6)


@pytest.mark.parametrize(
    ("just", "too_much", "words"),
    [
        ({}, {"recompute": "some"}, "none, selective, full, got 'some'"),
        ({"dp": 4, "micro_batch": 2}, {"dp": 3, "micro_batch": 3}, "micro_batch is 9"),
        ({"tp": 2}, {"tp": 4}, "does not divide 2 heads"),
        ({"pp": 4}, {"pp": 6}, "do not make 6 stages"),
        ({"pp": 3, "interleaving": 2}, {"pp": 4, "interleaving": 2}, "do not make 8 stages"),
        ({"dp": 2}, {"dp": 2, "ep": 2}, "ep = 2 does not divide dp and 1 experts"),
    ],
)
def test_what_cannot_be_run_is_refused_and_what_just_can_is_taken(just, too_much, words):
    check_plan(MODEL, Plan(**just), 24)
    with pytest.raises(ValueError, match=words):
        step.predict_step(MODEL, CLUSTER, Plan(**too_much), 24)
