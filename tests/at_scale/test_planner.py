"""Plans, questions and the command line."""

import itertools
import math
import re
from pathlib import Path

import nbformat
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from mgpu_tutorial.at_scale import __main__ as terminal
from mgpu_tutorial.at_scale import commands, figures, planner
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import Model, Plan, model_of
from mgpu_tutorial.shared.cost_model.step import predict_step
from mgpu_tutorial.step_time import published
from tests.lab.draw.test_contrast import in_the_dark
from tests.lab.test_colours import contrast

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "estimates.md").read_text("utf-8")
NOTEBOOK = nbformat.read(next((ROOT / "notebooks").glob("*_at_scale.ipynb")), as_version=4)
CELLS = "\n".join(cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown")
H100 = CLUSTERS["H100"]
SMALL = model_of(7e9)


def all_plans(model, per_node, gpus, batch, context):
    """Written out: every number, and each reason to leave a plan out."""
    sizes = range(1, gpus + 1)
    for tp, pp, cp, dp, ep in itertools.product(sizes, repeat=5):
        if tp * pp * cp * dp != gpus or tp > 2 * per_node or model.heads % tp or batch % dp:
            continue
        if cp > context or cp > 1 and model.sequence % (2 * cp):  # zig-zag
            continue
        if dp % ep or model.experts % ep:
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
            for zero in zeros if dp * cp > 1 else [0]:
                for recompute in ("none", "selective", "full"):
                    yield tp, pp, dp, micro_batch, v, zero, recompute, cp, ep


@settings(max_examples=40)
@given(
    layers=some.integers(1, 14),
    heads=some.integers(1, 24),
    sequence=some.integers(1, 12),
    experts=some.integers(1, 4),
    per_node=some.integers(1, 4),
    gpus=some.integers(1, 12),
    batch=some.integers(1, 48),
    context=some.integers(1, 4),
)
@example(2, 1, 8, 1, 1, 4, 4, 1)  # no four stages of two layers
@example(4, 8, 8, 4, 8, 8, 16, 2)
def test_every_plan_that_can_be_run_is_tried_once(
    layers, heads, sequence, experts, per_node, gpus, batch, context
):
    model = Model(layers, 64 * heads, heads, sequence, experts=experts)
    cluster = H100._replace(gpus_per_node=per_node)
    plans = list(planner.plans(model, cluster, gpus, batch, context))
    expected = list(all_plans(model, per_node, gpus, batch, context))
    assert [(*plan[:8], plan.ep) for plan in plans] == expected
    for plan in plans:
        assert plan.ranks == gpus
        predict_step(model, cluster, plan, batch)


@given(
    layers=some.integers(1, 14),
    sizes=some.tuples(*[some.integers(1, 8)] * 5),
    interleaving=some.integers(1, 4),
    batch=some.integers(1, 64),
)
@example(layers=4, sizes=(1, 6, 1, 1, 1), interleaving=1, batch=8)
def test_a_step_is_priced_where_the_plan_can_be_run(layers, sizes, interleaving, batch):
    """The page's rules and those of the cost model, which names the one that is broken."""
    tp, pp, dp, micro_batch, cp = sizes
    plan = Plan(tp, pp, dp, micro_batch, interleaving if pp > 1 else 1, cp=cp)
    model = Model(layers, 512, 8, sequence=24)
    try:
        predict_step(model, H100, plan, batch)
    except ValueError:
        assert not planner.can_run(model, plan, batch)
    else:
        assert planner.can_run(model, plan, batch)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "context"),
    [(SMALL, 64, 512, 1), (Model(4, 512, 8, sequence=4096, experts=4, active=2), 8, 16, 2)],
)
def test_each_kind_has_the_fastest_of_its_variants_that_fit(model, gpus, batch, context):
    """By seconds; a place is shared by all within 5 % of its first."""
    choices = planner.rank_plans(model, H100, gpus, batch, context)
    fastest = {}
    for plan in planner.plans(model, H100, gpus, batch, context):
        step = predict_step(model, H100, plan, batch)
        if step.memory.total <= 0.90 * 80e9:
            kind = *plan[:3], plan.cp, plan.ep, plan.zero == 3
            fastest[kind] = min(step.seconds, fastest.get(kind, step.seconds))
    kinds = [(*c.plan[:3], c.plan.cp, c.plan.ep, c.plan.zero == 3) for c in choices]
    seconds = [c.step.seconds for c in choices]
    assert dict(zip(kinds, seconds, strict=True)) == pytest.approx(fastest)
    assert len(kinds) == len(fastest) and seconds == sorted(seconds)
    place = 1
    for number, choice in enumerate(choices, 1):
        if choice.step.seconds > 1.05 * seconds[place - 1]:
            place = number
        assert choice.rank == place


# Questions


@pytest.mark.parametrize("count, text", [(25, PAGE), (4, CELLS)], ids=["page", "notebook"])
def test_each_answer_is_what_its_line_of_arithmetic_gives(count, text):
    """`6 · 4,096 = **24,576 tokens**`, with powers of ten in raised digits."""
    text = re.sub("10([⁰¹²³⁴-⁹]+)", lambda m: f"10**{raised(m[1])}", text)
    text = text.replace(",", "").replace("·", "*").replace("√", "math.sqrt")
    lines = re.findall(r"^(\d+)\. (?:.*: )?(.*) = \*\*([\d.* ]*\d)", text, re.M)
    assert [int(number) for number, *_ in lines] == list(range(1, count + 1))
    for _, working, answer in lines:
        assert eval(answer) == pytest.approx(eval(working), rel=5e-3), working


def raised(digits):
    return digits.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))


# The map


def test_the_map_has_the_fastest_of_each_tp_and_pp():
    choices = planner.rank_plans(SMALL, H100, 16, 64)
    drawing = figures.plan_map(choices)
    seconds = {}
    for choice in choices:
        key = choice.plan.tp, choice.plan.pp
        seconds[key] = min(choice.step.seconds, seconds.get(key, math.inf))
    for line in drawing.text.splitlines()[2:-1]:
        _, tp, *cells = re.split(r" +", re.sub("no plan|> 16 GPUs", "-", line))
        columns = drawing.text.splitlines()[1].split("PP ")[1:]
        for pp, cell in zip(map(int, columns), cells, strict=True):
            found = seconds.pop((int(tp), pp), None)
            assert cell == ("-" if found is None else f"{found:.1f}")
            assert found is None or f">{found:.1f}</text>" in drawing.svg()
    assert not seconds


def test_the_map_tells_too_many_gpus_from_too_little_memory():
    rows = figures.plan_map(planner.rank_plans(SMALL, H100, 16, 64)).text.splitlines()
    columns = [int(pp) for pp in rows[1].split("PP ")[1:]]
    for row in rows[2:-1]:
        cells = re.split("  +", row)
        for pp, cell in zip(columns, cells[1:], strict=True):
            assert (cell == "> 16 GPUs") == (int(cells[0][3:]) * pp > 16), row


def test_the_map_frames_the_best_and_dots_what_ties_with_it():
    choices = planner.rank_plans(SMALL, H100, 16, 64)
    cells = {(c.plan.tp, c.plan.pp): c for c in reversed(choices)}.values()
    others = [choice for choice in cells if choice is not choices[0]]
    drawing = figures.plan_map(choices)
    assert f"The best is {choices[0].plan} with ZeRO {choices[0].plan.zero}, " in drawing.alt
    ties = [choice for choice in others if choice.rank == 1]
    assert all(str(choice.plan) in drawing.alt for choice in ties)
    frames = [part for part in drawing.parts if figures.FRAME in part]
    assert len(frames) == 1 + len(ties)
    assert sum("dasharray" in part for part in frames) == len(ties)
    shown = figures.plan_map(choices, sizes=(1, 2))
    assert shown.text.splitlines()[1].split() == ["PP", "1", "PP", "2"]
    assert len(shown.text.splitlines()) == 5


def test_what_is_written_on_a_colour_can_be_read():
    """At least 4.5 to 1, as WCAG 2.1 AA asks for, in light and in dark."""
    for hundredth in range(101):
        pair = figures.mixed(hundredth / 100), "#ffffff" if hundredth < 50 else "#1a1a1a"
        assert contrast(*pair) >= 4.5, hundredth
        assert contrast(*map(in_the_dark, pair)) >= 4.5, hundredth


# The command line


def test_most_published_runs_in_16_bits_are_inside_the_spread():
    """Of programs that the planner knows nothing of; and how far outside the others are."""
    errors = []
    for family in published.TABLES:
        for run in published.runs_of(family):
            odd = "float8" in family or "torchtitan 405B" in family or run.model.experts > 1
            if odd or run.model.sequence > 16_384:
                continue
            fast, slow = planner.spread(run.model, run.cluster, run.plan, run.batch)
            errors.append(min(0, run.seconds / fast - 1) + max(0, run.seconds / slow - 1))
    outside = [error for error in errors if abs(error) > 0.005]
    assert len(errors) == 71 and len(outside) == 15
    assert sum(error < 0 for error in outside) == 14 and min(outside) > -0.17
    assert max(outside) == pytest.approx(0.25, abs=0.005)  # SmolLM3


def test_a_gpu_of_ones_own_has_its_own_share_and_only_the_error_of_a_fit():
    cluster, plan = H100._replace(gpu=H100.gpu._replace(name="mine")), Plan(dp=8, zero=3)
    step = predict_step(SMALL, cluster, plan, 8).seconds
    assert planner.spread(SMALL, cluster, plan, 8) == pytest.approx((step, 1.1 * step))


def run(capsys, *words):
    code = terminal.main(["--params", "7e9", "--gpus", "64", "--batch", "512", *words])
    return code, capsys.readouterr().out


def test_the_terminal_prints_plans_and_a_range_of_days_and_cost(capsys):
    small = planner.rank_plans(SMALL, H100, 64, 512)
    code, out = run(capsys, "--tokens", "2e12", "--price", "3")
    assert code == 0 and "6.7 billion parameters: 32 layers of 4,096, 32 heads" in out
    lines = [line for line in out.splitlines() if "ZeRO" in line]
    assert len(lines) == 8
    assert all(str(c.plan) in line for c, line in zip(small[:8], lines, strict=True))
    spread = planner.spread(SMALL, H100, small[0].plan, 512)
    tokens = 512 * 2048
    fast, slow = (2e12 / tokens * seconds / 3600 for seconds in spread)
    assert f"2e+12 tokens in {fast / 24:,.1f} to {slow / 24:,.1f} days" in out
    cost = f"{64 * fast * 3 / 1e6:,.2f} to {64 * slow * 3 / 1e6:,.2f} million"
    rates = " to ".join(f"{tokens / 64 / seconds:,.0f}" for seconds in reversed(spread))
    assert f"for {cost} at 3 per GPU and hour" in out and f"{rates} tokens/s per GPU" in out
    code, out = run(capsys, "--sequence", "131072", "--batch", "16", "--context", "8")
    assert code == 0 and "CP 4" in out


@pytest.mark.parametrize(
    "name, flag",
    [("megatron", "--seq-length 2048"), ("torchtitan", "--training.seq_len=2048")],
)
def test_the_terminal_prints_the_best_plan_as_flags(capsys, name, flag):
    code, out = run(capsys, "--flags", name)
    best = planner.rank_plans(SMALL, H100, 64, 512)[0].plan
    assert code == 0 and flag in out
    assert str(getattr(commands, name)(SMALL, best, 512)) in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--params 405e9 --gpus 8 --cluster A100", "No plan fits into 90% of a GPU's 80 GB."),
        (
            "--gpus 7",
            "No plan gives each GPU an equal share: 32 heads and 32 layers leave DP 7. "
            "Give a --batch that one divides.\nWith --batch 448: DP 7, 57% MFU.",
        ),
    ],
)
def test_the_terminal_says_why_there_is_no_plan(capsys, words, message):
    code, out = run(capsys, *words.split())
    assert code == 1 and out.endswith(f"\n{message}\n")


def test_the_terminal_says_the_batch_and_a_better_one_nearby(capsys):
    """Four million tokens to the letter leave few plans."""
    words = "--params", "70e9", "--gpus", "512", "--sequence", "8192"
    _, out = run(capsys, *words, "--batch", "488")
    assert "512 × H100 80GB, a batch of 488 sequences of 8,192 tokens" in out.splitlines()[1]
    model = model_of(70e9, 8192)
    best = planner.rank_plans(model, H100, 512, 512)[0]
    assert f"With --batch 512: {best.plan}, {best.step.mfu:.0%} MFU." in out.splitlines()
    assert "With --batch" not in run(capsys, *words)[1]


def test_the_nearby_batch_is_one_that_gpus_divide():
    assert [terminal.rounded(n, 512) for n in (488, 512, 1900, 768, 1)] == [
        512,
        512,
        2048,
        768,
        1,
    ]
    assert terminal.rounded(512, 7) == 448 and terminal.rounded(2048, 1000) == 2000
    assert terminal.rounded(1, 7) == 1


@pytest.mark.parametrize("batch, tokens", [("4194304", "8,589,934,592"), ("8", "16,384")])
def test_a_batch_in_tokens_or_a_tiny_one_is_remarked(capsys, batch, tokens):
    _, out = run(capsys, "--batch", batch)
    assert f"That is {tokens} tokens per step" in out


@pytest.mark.slow
def test_a_network_changes_its_rate_and_not_its_latency(capsys):
    """50 GB/s is what the cluster has; the other values are those that the help tells."""
    _, plain = run(capsys)
    told = "--sequence 2048 --context 1 --cluster H100 --tokens 1e12 --price 2.0"
    assert run(capsys, "--between", "50", *told.split()) == (0, plain)
    _, slow = run(capsys, "--between", "0.5")
    assert "PP" in slow.splitlines()[4] and "PP" not in plain.splitlines()[4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "7"], "50 million or more"),
        (["--params", "inf"], "--params: must be a number above 0, got inf"),
        (["--gpus", "0"], "--gpus: must be a number above 0, got 0"),
        (["--gpus", "1000000007"], "--gpus: more than a million are not planned"),
        (["--between", "nan"], "--between: must be a number above 0"),
        (["--flags", "deepspeed"], "invalid choice: 'deepspeed'"),
    ],
)
def test_the_terminal_refuses_what_makes_no_sense(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        run(capsys, *words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
