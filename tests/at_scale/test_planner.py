"""Plans and failures, questions and the command line."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mgpu_tutorial.at_scale import __main__ as terminal
from mgpu_tutorial.at_scale import failures, planner, questions
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.models import Model, model_of
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import predict_step

H100 = CLUSTERS["H100"]
SMALL = model_of(7e9)


@pytest.fixture(scope="module")
def small():
    return planner.rank_plans(SMALL, H100, 64, 512)


def all_plans(model, per_node, gpus, batch):
    """Written out: every number, and each reason to leave a plan out."""
    sizes = range(1, gpus + 1)
    for tp, pp, dp in itertools.product(sizes, sizes, sizes):
        if tp * pp * dp != gpus or tp > 2 * per_node or model.heads % tp or batch % dp:
            continue
        for micro_batch, v in itertools.product((1, 2, 4, 8, 16), range(1, 9)):
            pieces = batch / dp / micro_batch
            stages = pp * v
            layers = [model.layers, model.layers + 2]  # embedding and head may count
            if pieces % 1 or v > 1 and (pp == 1 or pieces % pp):
                continue
            if stages > 1 and all(n % stages for n in layers):
                continue
            if v == 1 and stages > model.layers or stages > model.layers + 2:
                continue
            zeros = range(4) if pp == 1 else range(2)
            for zero in zeros if dp > 1 else [0]:
                for recompute in ("none", "selective", "full"):
                    yield tp, pp, dp, micro_batch, v, zero, recompute


@settings(max_examples=40)
@given(
    layers=some.integers(1, 14),
    heads=some.integers(1, 24),
    per_node=some.integers(1, 4),
    gpus=some.integers(1, 16),
    batch=some.integers(1, 48),
)
def test_every_plan_that_can_be_run_is_tried_once(layers, heads, per_node, gpus, batch):
    model = Model(layers, 64 * heads, heads)
    cluster = H100._replace(gpus_per_node=per_node)
    plans = list(planner.plans(model, cluster, gpus, batch))
    assert [plan[:7] for plan in plans] == list(all_plans(model, per_node, gpus, batch))
    for plan in plans:
        assert plan.ranks == gpus
        predict_step(model, cluster, plan, batch)


def test_sequences_and_experts_are_shared_where_that_is_allowed():
    model = Model(4, 512, 8, sequence=4096, experts=4, active=2)
    found = {
        (p.tp, p.pp, p.cp, p.dp, p.ep) for p in planner.plans(model, H100, 8, 16, context=2)
    }
    expected = set(planner.splits(8, 16, 2, 4)) - {(1, 8, 1, 1, 1)}  # four layers
    assert found == expected
    ranked = planner.rank_plans(model, H100, 8, 16, context=2)
    assert {c.plan.cp for c in ranked} == {1, 2} and {c.plan.ep for c in ranked} == {1, 2, 4}
    assert len(
        {(*c.plan[:3], c.plan.cp, c.plan.ep, c.plan.zero == 3) for c in ranked}
    ) == len(ranked)
    assert all(c.plan.cp == 1 for c in planner.rank_plans(model, H100, 8, 16))


def test_long_sequences_get_the_plan_that_llama_3_was_trained_with():
    model = Model(126, 16_384, 128, 131_072, 128_256, 8, 53_248, gated=True, tied=False)
    best = planner.rank_plans(model, H100, 16_384, 128, context=16)[0]
    assert str(best.plan) == "TP 8 · CP 16 · PP 16 · DP 8"


def test_the_ranking_is_by_seconds_and_ties_share_a_rank(small):
    seconds = [choice.step.seconds for choice in small]
    assert seconds == sorted(seconds)
    place = 0
    for i, choice in enumerate(small):
        if seconds[i] > 1.05 * seconds[place]:
            place = i
        assert choice.rank == place + 1
    assert 1 < len({choice.rank for choice in small}) < len(small)


def test_each_kind_has_the_fastest_of_its_variants_that_fit(small):
    fastest = {}
    for plan in planner.plans(SMALL, H100, 64, 512):
        step = predict_step(SMALL, H100, plan, 512)
        if step.memory.total <= 0.90 * 80e9:
            kind = *plan[:3], plan.zero == 3
            fastest[kind] = min(step.seconds, fastest.get(kind, step.seconds))
    ranked = {(*c.plan[:3], c.plan.zero == 3): c.step.seconds for c in small}
    assert len(ranked) == len(small) and ranked == pytest.approx(fastest)


def test_of_plans_that_take_equally_long_the_simplest_stands(small):
    step = small[0].step
    plans = [Plan(zero=1), Plan(pp=2), Plan(tp=2), Plan()]
    assert sorted(plans, key=lambda plan: planner.order(plan, step)) == plans[::-1]
    slower = step._replace(seconds=2 * step.seconds)
    assert planner.order(plans[0], step) < planner.order(plans[-1], slower)


def test_nothing_fits_where_memory_is_too_small():
    gpu = H100.gpu._replace(memory=1e9)
    assert planner.rank_plans(SMALL, H100._replace(gpu=gpu), 8, 8) == []
    for gpus, batch in ((0, 8), (8, 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            planner.rank_plans(SMALL, H100, gpus, batch)


def test_days_and_cost_by_hand(small):
    step = small[0].step._replace(tokens_per_second=1000.0)
    days, price = planner.training(step, 86.4e9, 100, 3.0)
    assert days == pytest.approx(10) and price == pytest.approx(240 * 100 * 3)


# Failures


SECONDS = some.floats(1, 1e6)


@given(save=SECONDS, restart=SECONDS, failure=SECONDS, interval=SECONDS)
def test_what_is_lost_and_the_interval_that_loses_least(save, restart, failure, interval):
    loss = failures.lost(save, restart, failure, interval)
    by_hand = save / interval, interval / (2 * failure), restart / failure
    assert loss == pytest.approx(by_hand)
    least = failures.lost(save, restart, failure, best_interval(save, failure))
    assert least[0] == pytest.approx(least[1])
    assert sum(least) <= sum(loss) * (1 + 1e-9)
    gpus = round(interval)
    between = failures.between_failures(gpus)
    assert between * gpus == pytest.approx(54 * 86_400 / 419 * 16_384)


# Questions


def test_the_answers_by_hand():
    expected = {
        1: 8.4e22, 2: 8.4e22 / (512 * 395.6e12) / 86400, 3: 118_000, 4: 952, 5: 0.477, 6: 0.6,
        7: 24_576, 8: 208, 9: 3.25, 10: 54.4, 11: 14.26, 12: 0.839, 13: 8.41, 14: 4.86,
        15: 0.2344, 16: 0.0586, 17: 8, 18: 254.8, 19: 19.8, 20: 0.99, 21: 3.0, 22: 88.1,
        23: 10.23, 24: 49.5, 25: 19.3,
    }  # fmt: skip
    answers = {i: question.answer for i, question in enumerate(questions.QUESTIONS, 1)}
    assert answers == pytest.approx(expected, rel=5e-3)


# The command line


def run(capsys, *words):
    code = terminal.main(["--params", "7e9", "--gpus", "64", "--batch", "512", *words])
    return code, capsys.readouterr().out


def test_the_terminal_prints_plans_days_and_cost(capsys, small):
    code, out = run(capsys, "--tokens", "2e12", "--price", "3")
    assert code == 0 and "6.7 billion parameters: 32 layers of 4,096, 32 heads" in out
    lines = [line for line in out.splitlines() if "ZeRO" in line]
    assert len(lines) == 8
    assert all(str(c.plan) in line for c, line in zip(small[:8], lines, strict=True))
    days, cost_of_it = planner.training(small[0].step, 2e12, 64, 3.0)
    assert f"2e+12 tokens with the first: {days:,.1f} days, {cost_of_it / 1e6:,.2f} " in out
    code, out = run(capsys, "--sequence", "131072", "--batch", "16", "--context", "8")
    assert code == 0 and "CP 4" in out
    code, out = run(capsys, "--params", "405e9", "--gpus", "8")
    assert code == 1 and "No plan fits" in out


@pytest.mark.slow
def test_a_network_changes_its_rate_and_not_its_latency(capsys):
    """50 GB/s is what the cluster has."""
    _, plain = run(capsys)
    assert run(capsys, "--between", "50") == (0, plain)
    _, slow = run(capsys, "--between", "0.5")
    assert "PP" in slow.splitlines()[4] and "PP" not in plain.splitlines()[4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "7"], "50 million or more"),
        (["--gpus", "0"], "--gpus: must be above 0, got 0"),
        (["--gpus", "8.5"], "--gpus: invalid whole value"),
        (["--between", "nan"], "--between: must be above 0"),
    ],
)
def test_the_terminal_refuses_what_makes_no_sense(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        run(capsys, *words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
