"""The job equals one process; each fault is told by the tests of which the page says so."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from mgpu_tutorial.wrong_gradient import curves, figures, job, kinds, trials, zoo
from mgpu_tutorial.wrong_gradient.builds import KINDS
from mgpu_tutorial.wrong_gradient.faults import FAULTS, job_with
from mgpu_tutorial.wrong_gradient.seeds import hidden, judge, line_of

HIDDEN = [f"seed {number}" for number in range(1, 9)]


def one_process(random):
    """Loss and gradients of the whole batch, token by token."""
    model, (x, targets) = job.new_model(random), job.batch_of()
    losses = [
        cross_entropy(score, target)
        for score, target in zip(model(x).flatten(0, 1), targets.flatten(), strict=True)
        if target >= 0
    ]
    loss = sum(losses) / len(losses)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def off(found, right):
    assert list(found) == list(right)
    return max(((found[n] - g).norm() / g.norm()).item() for n, g in right.items())


PLANS = [
    "dp=1",
    "dp=4",
    "tp=4",
    "pp=4",
    "tp=2,pp=2",
    "tp=2,pp=4",
    pytest.param("dp=2,tp=2,pp=2", id="once"),
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_job_equals_one_process_gradient_by_gradient(ranks, plan):
    loss, right = one_process(random=True)
    report = ranks(job.ranks_of(plan), trials.one_step, plan, random=True, timeout=60)
    for found in report.results:
        assert math.isclose(found.loss, loss, rel_tol=1e-12)
        assert off(found.gradients, right) < 1e-12 and found.differ == []
        norm = sum(g.square().sum() for g in right.values()).sqrt().item()
        assert math.isclose(found.norm, norm, rel_tol=1e-12)


def test_the_reference_of_the_page_is_one_process():
    for random in (False, True):
        assert off(trials.alone(*job.batch_of(), random), one_process(random)[1]) < 1e-12


@pytest.mark.parametrize("most, factor", [(0.5, 0.5), (100.0, None)])
def test_clipped_gradients_have_that_norm_and_no_other_direction(ranks, most, factor):
    _, right = one_process(random=True)
    norm = sum(g.square().sum() for g in right.values()).sqrt().item()
    found = ranks(4, trials.one_step, "tp=2,pp=2", most=most, random=True).results[0]
    share = 1.0 if factor is None else factor / norm
    assert off(found.gradients, {n: g * share for n, g in right.items()}) < 1e-12
    assert math.isclose(found.norm, norm, rel_tol=1e-12)


def clip_nan(rank, world_size):
    mesh = job.mesh_of("pp=2", world_size)
    stage = torch.nn.Linear(1, 1, bias=False)
    stage.weight.grad = torch.tensor([[(300.0, math.nan)[rank]]])
    job.clip(stage, mesh, 1.0)
    return stage.weight.grad.item()


def test_a_norm_that_is_nan_leaves_no_gradient_as_torch_leaves_none(ranks):
    assert all(math.isnan(each) for each in ranks(2, clip_nan).results)


# One process, copies, twice the ranks; with biases of 0 and norms of 1.
TOLD = {
    "times micro": (True, False, True),
    "last only": (True, False, True),
    "sum": (True, False, False),
    "means": (True, False, False),
    "scaled again": (True, False, True),
    "no f": (True, True, True),
    "bias": (False, False, False),
    "own order": (False, True, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_tests_tell_what_the_page_says_and_the_loss_nothing(ranks, name):
    loss, right = one_process(random=False)
    half, full = (
        ranks(job.ranks_of(plan), trials.one_step, plan, name, timeout=60).results[0]
        for plan in FAULTS[name].plans
    )
    moved = abs(full.norm / half.norm - 1) > 1e-13
    assert (off(full.gradients, right) > 1e-13, bool(full.differ), moved) == TOLD[name]
    assert math.isclose(full.loss, loss, rel_tol=1e-12)
    assert job.ranks_of(FAULTS[name].plans[1]) == 2 * job.ranks_of(FAULTS[name].plans[0])


@pytest.mark.slow
def test_the_bias_tells_where_it_is_not_0(ranks):
    _, right = one_process(random=True)
    found = ranks(2, trials.one_step, "tp=2", "bias", random=True).results[0]
    assert off(found.gradients, right) > 0.1 and found.differ == []


@pytest.mark.slow
@pytest.mark.timeout(300)  # five launches
@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_fault_leaves_the_loss_and_the_tests_tell_what_the_judge_says(ranks, name):
    loss, right = one_process(random=True)
    norm = sum(g.square().sum() for g in right.values()).sqrt().item()
    clipped = {n: g * 0.5 / norm for n, g in right.items()}
    given = {"random": True, "timeout": 60}
    free, cut = (
        ranks(8, trials.one_step, "dp=2,tp=2,pp=2", name, most, **given).results[0]
        for most in (math.inf, 0.5)
    )
    told = []
    if off(free.gradients, right) > 1e-9:
        told.append("one process")
    elif off(cut.gradients, clipped) > 1e-9:
        told.append("one process, after the clip")
    if free.differ:
        told.append("copies")
    for dimension in ("dp", "tp", "pp"):
        plan = ",".join(f"{other}=2" for other in ("dp", "tp", "pp") if other != dimension)
        half = ranks(4, trials.one_step, plan, name, random=True, timeout=60).results[0]
        if abs(half.norm / free.norm - 1) > 1e-9:
            told.append(f"twice the ranks along {dimension}")
    assert told == hidden(name).tests
    assert math.isclose(free.loss, loss, rel_tol=1e-12)


def test_every_fault_is_a_line_of_the_job_and_a_different_one():
    faults = [FAULTS[name] for name in FAULTS] + [hidden(name) for name in HIDDEN]
    for fault, name in zip(faults, [*FAULTS, *HIDDEN], strict=True):
        assert job_with(name) is not job and fault.right != fault.wrong
        assert fault.right.count("\n") == fault.wrong.count("\n")
    wrong = {(fault.right, fault.wrong) for fault in faults}
    assert len(wrong) == len(faults) == 16
    for name in HIDDEN:
        for text in hidden(name).also:
            assert job_with("") is job and line_of(text) > 1


@pytest.mark.parametrize("number", range(1, 9))
def test_the_judge_takes_the_line_in_its_function_and_no_other(capsys, number):
    fault = hidden(f"seed {number}")
    line = line_of(fault.right)
    judge(number, [fault.function, line])
    assert fault.tests[0] in capsys.readouterr().out
    judge(number, [fault.function.split(".")[0], line])
    assert fault.tests[0] in capsys.readouterr().out
    judge(number, [fault.function, line + 9])
    assert capsys.readouterr().out == "not yet: the function is right, the line is not\n"
    judge(number, [f"job.{fault.function}()", line])
    assert fault.tests[0] in capsys.readouterr().out
    judge(number, ["train", line])
    assert capsys.readouterr().out == "not yet: the fault is in another function\n"
    for wrong in (..., [fault.function, "line"], ["train", line], "clip", [fault.function]):
        judge(number, wrong)
        assert capsys.readouterr().out.startswith("not yet")


@given(
    st.dictionaries(
        st.sampled_from(list(one_process(True)[1])), st.sampled_from([2.0, 0.9, math.nan])
    ),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_the_first_difference_is_the_last_name_that_is_off(factors, dtype):
    x, targets = job.batch_of()
    right = trials.alone(x.to(dtype), targets, random=True)
    found = {name: g * factors.get(name, 1.0) for name, g in right.items()}
    wrong = [name for name in right if name in factors]
    said = trials.first_difference(
        found, lambda x: trials.alone(x, targets, random=True), x.to(dtype)
    )
    assert said == (wrong[-1] if wrong else None)


def test_a_kind_on_ranks_is_a_missing_sum_in_every_group_or_some_right_rows():
    right, part = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0])
    groups, limit = {"dp": [[0, 1], [2, 3]]}, 1e-3
    ranks = [part, right - part, part, right - part]
    said = trials.kind_on_ranks(ranks, right, limit, groups)
    assert said == "never summed over dp"
    ranks[3] = part
    assert trials.kind_on_ranks(ranks, right, limit, groups) == "neither"
    half = [torch.tensor([3.0, 9.0])] * 4
    assert trials.kind_on_ranks(half, right, limit, groups) == "right in 1 of 2 rows"


ZOO = "positions", "gathered_loss", "experts", "bfloat16_sum"


@pytest.mark.slow
def test_the_table_of_the_zoo_says_what_finds_a_fault():
    rows = figures.zoo_table(zoo.prove_all(ZOO)).rows
    assert [row[:2] for row in rows] == [
        ["positions", "prove"],
        ["gathered loss", "prove"],
        ["experts", "one process"],
        ["bfloat16 sum", "nothing"],
    ]
    assert [row[3] for row in rows] == ["head", "right", "", ""]
    assert rows[2][2] == "its tensor is 2.00 times"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_another_plan_is_rounding_in_every_dtype(ranks, dtype):
    x, targets = job.batch_of()
    given = {"dtype": dtype, "random": True, "timeout": 60}
    found = ranks(4, trials.one_step, "tp=2,pp=2", **given).results[0].gradients
    alone = lambda x: trials.alone(x, targets, random=True)  # noqa: E731
    assert trials.first_difference(found, alone, x.to(trials.DTYPES[dtype])) is None


@pytest.mark.parametrize(
    "optimizer, apart", [("SGD", True), ("SGD, clipped", False), ("AdamW", False)]
)
def test_only_plain_sgd_shows_a_factor(ranks, optimizer, apart):
    one, four = (ranks(1, curves.losses, optimizer, f, 8).results[0] for f in (1, 4))
    far = max(abs(a - b) for a, b in zip(one, four, strict=True))
    assert (far > 1e-3, far > 1e-5) == (apart, apart)


def after(operations):
    """The kind behind each operation, as far as each can take its input."""
    kind, kinds_seen = "invariant", []
    for operation in operations:
        if (operation, kind) not in kinds.RULES:
            return [*kinds_seen, f"no {operation} of {kind}"]
        kind = kinds.RULES[operation, kind]
        kinds_seen.append(kind)
    return kinds_seen


@pytest.mark.parametrize(
    "operations, seen",
    [
        (
            "norm f columns gelu rows g bias",
            "invariant replicated varying varying partial invariant invariant",
        ),
        ("norm columns", "invariant no columns of invariant"),
        ("f columns rows bias", "replicated varying partial no bias of partial"),
        ("f g", "replicated no g of replicated"),
    ],
)
def test_the_rules_refuse_a_missing_f_and_a_bias_in_a_sum(operations, seen):
    assert " ".join(after(operations.split())) == seen


def test_the_kind_of_a_gradient_of_a_gradient_is_the_kind():
    assert all(kinds.dual(kinds.dual(kind)) == kind for kind in KINDS)


def test_clues_put_like_gradients_in_a_row_and_clip_the_right_ones():
    right = {name: torch.tensor([3.0, 4.0], dtype=torch.float64) for name in "abcdefg"}
    norm = 5 * 7**0.5
    found = right | {"b": 2 * right["b"], "a": right["a"].flip(0), "c": 1.5 * right["c"]}
    clues = figures.clues(trials.Trial(0.0, norm, found, []), right)
    assert clues.rows == [
        ["4: g, f, e, d", "right"],
        ["1: c", "1.50 times"],
        ["1: b", "2.00 times"],
        ["1: a", "off by 28%"],
    ]
    half = {name: g / norm / 2 for name, g in right.items()}
    clues = figures.clues(trials.Trial(0.0, norm, half, []), right, 0.5)
    assert clues.rows == [["7: g, f, e, …, a", "right"]]
    assert "clipped to 0.5" in clues.header[1]
