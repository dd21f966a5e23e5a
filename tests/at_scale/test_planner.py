"""Plans, failures, questions and the command line."""

import math

import pytest

from mgpu_tutorial.at_scale import __main__ as terminal
from mgpu_tutorial.at_scale import failures, measurements, planner, published, questions
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.memory import memory_of
from mgpu_tutorial.shared.cost_model.models import Model, model_of
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import predict_step

H100 = CLUSTERS["H100"]
SMALL = model_of(7e9)


@pytest.fixture(scope="module")
def small():
    return planner.rank_plans(SMALL, H100, 64, 512)


def test_every_plan_uses_all_gpus_and_can_be_run():
    seen = set()
    for plan in planner.plans(SMALL, H100, 48, 96):
        assert plan.ranks == 48 and 96 % (plan.dp * plan.micro_batch) == 0
        predict_step(SMALL, H100, plan, 96)
        seen.add((plan.tp, plan.pp, plan.zero, plan.recompute))
    assert {zero for _, pp, zero, _ in seen if pp == 1} == {0, 1, 2, 3}
    assert {zero for _, pp, zero, _ in seen if pp > 1} == {0, 1}
    assert {tp for tp, *_ in seen} == {1, 2, 4, 8, 16}
    assert {way for *_, way in seen} == {"none", "selective", "full"}


def test_stages_are_equal_with_embedding_and_head_or_without():
    llama = published.llama(8192)
    assert planner.equal_stages(llama, 16) and planner.equal_stages(llama, 18)
    assert planner.equal_stages(llama, 1) and not planner.equal_stages(llama, 11)
    assert not planner.equal_stages(SMALL, 33)


def test_the_ranking_is_by_seconds_and_ties_share_a_rank(small):
    seconds = [choice.step.seconds for choice in small]
    assert seconds == sorted(seconds)
    for choice in small:
        first = next(c for c in small if c.rank == choice.rank)
        assert choice.step.seconds <= 1.05 * first.step.seconds
        assert small[choice.rank - 1] is first
    assert len({choice.rank for choice in small}) < len(small)


def test_the_first_is_the_fastest_of_all_that_fit(small):
    fitting = [
        step.seconds
        for plan in planner.plans(SMALL, H100, 64, 512)
        if (step := predict_step(SMALL, H100, plan, 512)).memory.total <= 0.90 * 80e9
    ]
    assert small[0].step.seconds == min(fitting)
    assert len(fitting) > len(small)
    kinds = [(c.plan.tp, c.plan.pp, c.plan.dp, c.plan.zero == 3) for c in small]
    assert len(kinds) == len(set(kinds))


def test_the_planner_finds_the_plan_that_llama_3_was_trained_with():
    """TP 8, PP 16, DP 128 on 16,384 GPUs: arXiv 2407.21783, table 4."""
    ranked = planner.rank_plans(published.llama(8192), H100, 16_384, 2048)
    assert max(choice.step.memory.total for choice in ranked) <= 0.90 * 80e9
    best = ranked[0]
    assert best.plan[:3] == (8, 16, 128) and best.step.fits
    assert best.step.mfu == pytest.approx(0.41, abs=0.02)
    llama = published.llama(8192)
    half = llama.flops_per_token(causal=True) / llama.flops_per_token()
    assert half * best.step.mfu == pytest.approx(0.40, abs=0.01)


def test_a_slow_network_turns_the_plans_from_replicas_to_stages():
    def best(gigabytes):
        cluster = H100._replace(between=Link(5e-6, gigabytes * 1e9))
        return planner.rank_plans(SMALL, cluster, 64, 512)[0].plan

    assert best(50).pp == 1 and best(0.5).pp > 1


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


def test_the_tables_say_what_a_plan_is(small):
    table = measurements.plan_table(small)
    assert [row[0] for row in table.rows[:2]] == ["1=", "1="]
    assert len(table.header) == len(table.rows[0]) == 10
    assert "no plan fits" in str(measurements.best_plans(405, 8, 8, 50).header[0])
    assert len(measurements.best_plans(70, 512, 1024, 50).rows) == 6
    plans = {"a": Plan(dp=64, zero=3), "b": Plan(dp=64)}
    compared = measurements.compare_plans(SMALL, H100, 512, plans)
    assert "too many" in compared.rows[1][-1] and "too" not in compared.rows[0][-1]
    halved = H100._replace(between=H100.between._replace(bandwidth=25e9))
    slow = predict_step(SMALL, halved, plans["a"], 512).seconds
    assert H100.between.bandwidth == 50e9 and compared.rows[0][2] == f"{slow:.2f}"
    parts = measurements.parts_table({"x": small[0].step})
    assert sum(float(row[1]) for row in parts.rows[:-3]) == pytest.approx(100, abs=0.5)


# Failures


def test_failures_by_hand():
    """54 days over 419 for 16,384 GPUs, and sixteen times as long for 1,024."""
    assert failures.between_failures(16_384) == pytest.approx(54 * 86_400 / 419)
    assert failures.between_failures(1024) == pytest.approx(16 * 54 * 86_400 / 419)


def test_the_best_interval_loses_least():
    failure = failures.between_failures(16_384)
    best = best_interval(20, failure)
    assert best == pytest.approx(math.sqrt(2 * 20 * failure))
    least = failures.lost(20, 300, failure, best)
    assert least.saving == pytest.approx(least.repeating)
    for other in (0.5 * best, 0.9 * best, 1.1 * best, 2 * best):
        assert failures.lost(20, 300, failure, other).total > least.total
    expected = 20 / best + best / 2 / failure + 300 / failure
    assert least.total == pytest.approx(expected)


def test_the_failure_tables():
    rows = measurements.failure_table(20, 300, [1024, 16_384]).rows
    assert rows[0][:2] == ["1,024", "49.5"] and rows[1] == [
        "16,384",
        "3.1",
        "11",
        "8.7%",
        "2.7%",
    ]
    lines = measurements.lost_by_interval(20, 300, 16_384, [5, 10])
    assert list(lines) == ["in all", "saving", "repeating"]
    assert lines["saving"][1] == pytest.approx([100 * 20 / 300, 100 * 20 / 600])


def test_rings_trees_and_nodes_at_scale():
    small, large = measurements.all_reduce_table([2**10, 2**30], 1024, H100).rows
    ring, tree, nodes = (float(cell.replace(",", "")) for cell in small[1:])
    assert tree < nodes < ring
    ring, tree, nodes = (float(cell.replace(",", "")) for cell in large[1:])
    assert nodes < ring < tree


# Questions


def test_there_are_twenty_five_questions_and_each_is_answered():
    assert len(questions.QUESTIONS) == 25
    shown = questions.cards()
    page = shown._repr_html_()
    assert page.count("<details>") == page.count("<summary>") == 25
    for i, question in enumerate(questions.QUESTIONS, 1):
        assert question.text.endswith("?") and question.answer > 0
        assert f"{i}. {question.text}" in str(shown) and questions.told(question) in str(
            shown
        )


def test_the_answers_by_hand():
    expected = {
        1: 8.4e22, 2: 8.4e22 / (512 * 395.6e12) / 86400, 3: 118_000, 4: 952, 5: 0.477, 6: 0.6,
        7: 24_576, 8: 208, 9: 3.25, 10: 54.4, 11: 14.26, 12: 0.839, 13: 8.41, 14: 4.86,
        15: 0.2344, 16: 0.0586, 17: 8, 18: 254.8, 19: 19.8, 20: 0.99, 21: 3.0, 22: 88.1,
        23: 10.23, 24: 49.5, 25: 19.3,
    }  # fmt: skip
    found = {i: question.answer for i, question in enumerate(questions.QUESTIONS, 1)}
    assert found == pytest.approx(expected, rel=5e-3)


def test_the_questions_agree_with_the_cost_model():
    by_number = dict(enumerate(questions.QUESTIONS, 1))
    model = Model(40, 5120, 40, vocabulary=1)
    plan = Plan(sequence_parallel=False)
    kept = memory_of(model, plan, 1).activations / 1e9
    assert by_number[11].answer == pytest.approx(kept)
    link = Link(5e-6, 1e30)
    assert by_number[23].answer == pytest.approx(1e3 * ring_seconds(1, 1024, link))
    llama = Model(1, 4096, 32, sequence=by_number[7].answer)
    assert llama.attention_flops() == pytest.approx(llama.layer_flops())


def test_answers_are_marked_within_a_fifth():
    rows = questions.mark({1: 8e22, 8: 260, 17: -8}).rows
    assert [row[2] == "near enough" for row in rows] == [True, False, False]
    assert "13 · 16" in rows[1][2]
    with pytest.raises(KeyError, match="no question 26"):
        questions.mark({26: 1})


# The command line


def run(capsys, *words):
    code = terminal.main(list(words))
    return code, capsys.readouterr().out


def test_the_terminal_prints_plans_days_and_cost(capsys):
    words = ["--params", "7e9", "--gpus", "64", "--batch", "512", "--tokens", "2e12"]
    code, out = run(capsys, *words, "--price", "3", "--top", "2")
    assert code == 0 and "6.7 billion parameters: 32 layers of 4,096, 32 heads" in out
    assert "1=" in out and "2e+12 tokens with the first" in out and "3 per GPU" in out
    assert sum("DP" in line for line in out.splitlines()) == 2


def test_the_terminal_takes_a_shape_and_links(capsys):
    shape = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--batch", "512"]
    _, fast = run(capsys, *shape, "--gpus", "64", "--top", "1")
    slow = ["--between", "0.5", "--inside", "100", "--gpus-per-node", "4", "--memory", "60"]
    _, out = run(capsys, *shape, "--gpus", "64", "--top", "1", *slow)
    assert "4 per node" in out and "PP" not in fast and "PP" in out


def test_the_terminal_says_when_nothing_fits(capsys):
    code, out = run(capsys, "--params", "405e9", "--gpus", "8")
    assert code == 1 and "No plan fits" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "-5", "--gpus", "8"], "--params must be above 0, got -5"),
        (["--params", "7e9", "--gpus", "0"], "--gpus must be above 0"),
        (["--params", "7e9", "--gpus", "8", "--between", "nan"], "--between must be above 0"),
        (["--params", "7", "--gpus", "8"], "50 million or more"),
        (["--params", "7e9"], "--gpus"),
        (["--gpus", "8"], "give --params, or all of"),
        (["--gpus", "8", "--layers", "3", "--hidden", "64"], "or all of --layers"),
        (["--gpus", "8", "--params", "7e9", "--layers", "3"], "either --params"),
        (
            ["--gpus", "8", "--layers", "3", "--hidden", "64", "--heads", "3"],
            "does not divide",
        ),
        (["--gpus", "8", "--params", "7e9", "--cluster", "B200"], "invalid choice"),
        (["--gpus", "eight", "--params", "7e9"], "invalid int value"),
    ],
)
def test_the_terminal_refuses_what_makes_no_sense(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        terminal.main(words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
