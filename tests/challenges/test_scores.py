"""Our answers reach their targets, first attempts do not, and no attack on a judge passes."""

import importlib
import json
import sys
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mgpu_tutorial.challenges import batches, messages, models, score, solutions, together
from mgpu_tutorial.challenges.builds import build
from mgpu_tutorial.wrong_gradient import faults, job, trials
from tests.challenges.first_attempts import ARGUMENTS, FIRST

PROBLEMS = list(build.problems)


def first_wrong(source, cell):
    """The first row that does not hold, of a cell's last function or class."""
    *_, function = cell(source)
    return next((row for row in build.rows(function) if not row.holds), None)


@pytest.mark.parametrize("name", PROBLEMS)
def test_ours_reaches_the_target_and_not_more_than_the_bound(name):
    problem, ours = build.problems[name], build.ours[name]
    build.require(ours)
    assert problem.score(ours) == problem.target >= problem.bound(problem.shown)


# what a first attempt takes, as the page says it
TAKES = {
    "all_to_all_on_a_ring": 16,
    "all_reduce_over_nodes": 56,
    "broadcast_in_chunks": 18,
    "buckets": 1440,
    "TokenStream": 63,
    "gathers": 2560,
    "orders_in_slots": 42,
    "rows_of_a_ring": 384,
    "placed_experts": 1020,
    "planned_step": 11420.4,
    "shared_heads": 4288,
    "ShardedTrainer": 1905,
    "cheapest_tests": 12,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_first_attempt_is_right_and_far_from_the_target(name, cell):
    row = first_wrong(FIRST[name], cell)
    problem = build.problems[name]
    assert row.must.startswith("reach the target"), row
    assert row.seen.startswith(problem.told(TAKES[name])), row
    assert TAKES[name] >= 1.3 * problem.target


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_that_does_nothing_fails(name, cell):
    source = f"def {name}({ARGUMENTS[name]}):\n    pass\n"
    assert "None is no list" in first_wrong(source, cell).seen


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_that_has_an_empty_answer_fails(name, cell):
    source = f"def {name}({ARGUMENTS[name]}):\n    return []\n"
    assert not first_wrong(source, cell).must.startswith("reach")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_answer_to_the_page_s_sizes_alone_fails(name, cell):
    problem = build.problems[name]
    answer = json.loads(json.dumps(build.ours[name](*problem.shown)))
    source = f"def {name}({ARGUMENTS[name]}):\n    return {answer!r}\n"
    assert problem.play(problem.shown, answer) == problem.target
    assert first_wrong(source, cell).must.endswith("on 6 other sizes")


def test_a_plan_costs_questions(cell):
    """One that asks for every plan gets no answer to its thirteenth question."""
    source = """
def planned_step(layers, heads, gpus, batch, ask):
    plans = [(t, 1, gpus // t, 1, 3, r) for t in (1, 2, 4, 8) for r in ("none", "full")]
    plans += [(t, 2, gpus // t // 2, 1, 1, r) for t in (1, 2, 4, 8) for r in ("none", "full")]
    return min(plans, key=lambda plan: ask(plan) or 1e9)
"""
    assert "this is question 13 of 12" in first_wrong(source, cell).seen


@pytest.mark.parametrize(
    "name",
    ["all_reduce_over_nodes", "buckets", "placed_experts", "shared_heads", "cheapest_tests"],
)
def test_one_that_is_good_on_the_page_s_sizes_only_fails(name, cell):
    problem = build.problems[name]
    answer = json.loads(json.dumps(build.ours[name](*problem.shown)))
    shown = json.loads(json.dumps(problem.shown))
    slow = FIRST[name].replace(f"def {name}", "def slow")
    source = f"{slow}\n\ndef {name}({ARGUMENTS[name]}):\n"
    source += f"    if [{ARGUMENTS[name]}] == {shown!r}:\n        return {answer!r}\n"
    source += f"    return slow({ARGUMENTS[name]})\n"
    row = first_wrong(source, cell)
    assert "about as good" in row.must and "the page's size comes out better" in row.seen


OURS = "from mgpu_tutorial.challenges import solutions\n"
DOORS = {
    "ours by its module": (
        f"{OURS}\n\ndef buckets(*given):\n    return solutions.buckets(*given)\n",
        "`solutions` is of this course",
    ),
    "ours through a helper": (
        "from mgpu_tutorial.challenges.solutions import buckets as theirs\n\n\n"
        "def helper(*given):\n    return theirs(*given)\n\n\n"
        "def buckets(*given):\n    return helper(*given)\n",
        "`theirs` is of this course",
    ),
    "ours imported inside": (
        "def buckets(*given):\n    from mgpu_tutorial.challenges import solutions\n"
        "    return solutions.buckets(*given)\n",
        "`mgpu_tutorial.challenges.solutions` is of this course",
    ),
    "torch.distributed": (
        "import torch\n\n\ndef buckets(*given):\n    torch.distributed.barrier()\n",
        "`torch.distributed` is of torch.distributed",
    ),
    "torch.distributed by its own name": (
        "import torch.distributed as dist\n\n\ndef buckets(*given):\n    dist.barrier()\n",
        "`dist` is of torch.distributed",
    ),
    "a class of torch.distributed": (
        "def buckets(*given):\n    from torch.nn.parallel import DistributedDataParallel\n",
        "`torch.nn.parallel.DistributedDataParallel` is of torch.distributed",
    ),
    "a clock": (
        "import time\n\n\ndef buckets(*given):\n    return time.time()\n",
        "it imports time",
    ),
    "a library that has the answer": (
        "def buckets(*given):\n    import networkx\n",
        "it imports networkx",
    ),
    "ours behind a cache": (
        "from functools import lru_cache\n\n"
        "from mgpu_tutorial.challenges import solutions\n\n\n"
        "@lru_cache\ndef helper(n):\n    return solutions.buckets\n\n\n"
        "def buckets(*given):\n    return helper(1)(*given)\n",
        "`solutions` is of this course",
    ),
}


@pytest.mark.parametrize("attack", DOORS)
def test_a_side_door_is_named(attack, cell):
    source, says = DOORS[attack]
    row = first_wrong(source, cell)
    assert row.must.startswith("be written with Python and torch")
    assert says in row.seen, row


HONEST = """
from fractions import Fraction
from functools import lru_cache, singledispatch
from typing import NamedTuple


class Bin(NamedTuple):
    load: Fraction


@lru_cache
def half(count):
    return count // 2 if count < 2 else half(count // 2) + half(count - count // 2)


@singledispatch
def listed(counts):
    return [counts]


@listed.register
def _(counts: list):
    return counts


class Later:
    def __lt__(self, other):
        return type(self).__name__ < type(other).__name__


def buckets(ready, sizes, latency, per_mb):
    open, bins = [], [Bin(Fraction(size, 3)) for size in sizes]
    if sum(bin.load for bin in bins) and half(len(bins)) >= 0 and not Later() < Later():
        open += [1] * len(ready)
    return listed(open)
"""


def test_honest_words_are_no_doors(cell):
    row = first_wrong(HONEST, cell)
    assert row.must.startswith("reach the target") and row.seen.startswith("1,440 µs"), row


def test_an_edited_module_is_judged_anew(tmp_path, monkeypatch):
    """What was judged is what is on the screen: wrong, then right, then wrong again."""
    file = tmp_path / "own_buckets.py"
    wrong = "def buckets(ready, sizes, latency, per_mb):\n    return []\n"
    right = wrong.replace("[]", "[1] * len(ready)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file.write_text(wrong)
    own = importlib.import_module("own_buckets")
    for text in (wrong, right, wrong):
        file.write_text(text)
        importlib.reload(own)
        assert [row.holds for row in build.rows(own.buckets)][1] is (text == right)


LIES = {
    "a list that lies about its length": (
        "class Short(list):\n    def __len__(self):\n        return 1\n\n\n"
        "def broadcast_in_chunks(ranks, chunks):\n"
        "    links = range(1, ranks)\n"
        "    return Short([[(0, t, c)] for t in links for c in range(chunks)])\n",
        "reach the target",
    ),
    "a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other):\n        return True\n\n"
        "    def __hash__(self):\n        return 0\n\n\n"
        "def broadcast_in_chunks(ranks, chunks):\n"
        "    return [[(Any(0), Any(1), Any(0))]]\n",
        "bring every chunk",
    ),
    "a judge that is replaced where the function runs": (
        "def broadcast_in_chunks(ranks, chunks):\n"
        "    import json\n    json.dumps = lambda answer: '[]'\n    return []\n",
        "be written",
    ),
    "its own arguments changed": (
        "def buckets(ready, sizes, latency, per_mb):\n"
        "    n = len(ready)\n    ready[:] = sizes[:] = [0] * n\n    return [n]\n",
        "be about as good",
    ),
    "True for 1": (
        "def buckets(ready, sizes, latency, per_mb):\n    return [True] * len(ready)\n",
        "put each gradient",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_helps(lie, cell):
    source, must = LIES[lie]
    assert must in first_wrong(source, cell).must


PLAYS = {
    "no link": (messages.AllToAllOnARing(), (4,), [[[0, 2, 0, 2]]], "no link"),
    "taken": (messages.AllToAllOnARing(), (4,), [[[0, 1, 0, 1], [0, 1, 0, 2]]], "is taken"),
    "too early": (messages.AllToAllOnARing(), (4,), [[[1, 2, 0, 2]]], "rank 1 lacks it"),
    "not home": (messages.AllToAllOnARing(), (3,), [[[0, 1, 0, 1]]], "5 blocks are not"),
    "two sent": (
        messages.AllReduceOverNodes(),
        (1, 3),
        [[[0, 1, 0], [0, 2, 0]]],
        "sends twice",
    ),
    "two got": (
        messages.AllReduceOverNodes(),
        (1, 3),
        [[[0, 1, 0], [2, 1, 0]]],
        "receives twice",
    ),
    "counted twice": (
        messages.AllReduceOverNodes(),
        (1, 3),
        [[[0, 1, 0]], [[0, 2, 0]], [[1, 2, 0]]],
        "the summand of rank [0] would count twice",
    ),
    "lost": (
        messages.AllReduceOverNodes(),
        (1, 2),
        [[[0, 1, 0]]],
        "rank 0 has of chunk 0 [0]",
    ),
    "to itself": (messages.BroadcastInChunks(), (3, 1), [[[0, 0, 0]]], "sends to itself"),
    "no such rank": (messages.BroadcastInChunks(), (3, 1), [[[0, 3, 0]]], "from 0 to 2"),
    "not there": (messages.BroadcastInChunks(), (3, 1), [[[1, 2, 0]]], "does not have it"),
    "half a number": (messages.BroadcastInChunks(), (3, 1), [[[0, 1.0, 0]]], "1.0, expected"),
    "no gradient": (batches.Buckets(), ([1, 2], [1, 1], 1, 1), [0, 2], "without a gradient"),
    "too few": (batches.Buckets(), ([1, 2], [1, 1], 1, 1), [1], "1 gradients, expected 2"),
    "above the cap": (
        models.Gathers(),
        ([5, 5, 5], 10),
        [["gather", i] for i in range(3)],
        "15",
    ),
    "not gathered": (
        models.Gathers(),
        ([5, 5, 5], 10),
        [["gather", 0], ["F", 0]],
        "not there",
    ),
    "B first": (
        models.Gathers(),
        ([5, 5, 5], 10),
        [["gather", 0], ["B", 0]],
        "expected ['F'",
    ),
    "all held": (
        models.OrdersInSlots(),
        (1, 2, 1),
        [["F0", "F1", "B0", "W0", "B1", "W1"]],
        "holds 2",
    ),
    "W before B": (models.OrdersInSlots(), (1, 1, 1), [["F0", "W0", "B0"]], "waits for ever"),
    "twice F": (models.OrdersInSlots(), (1, 1, 1), [["F0", "F0", "B0", "W0"]], "2 times"),
    "unequal": (models.RowsOfARing(), ([2, 2], 2), [[0], [1, 2, 3]], "1 blocks, expected 2"),
    "given twice": (models.RowsOfARing(), ([2, 2], 2), [[0, 1], [1, 2]], "given twice"),
    "nowhere": (together.PlacedExperts(), ([2, 1], 2, 1), [[0], [0]], "stands nowhere"),
    "no row": (models.SharedHeads(), (2, 2, 2, 1), [[[0, 0, 2]], []], "2 of 4 rows are nob"),
    "a row twice": (
        models.SharedHeads(),
        (1, 2, 2, 1),
        [[[0, 0, 2]], [[0, 1, 2]]],
        "row 1 of head 0 is given twice",
    ),
    "no rows": (models.SharedHeads(), (1, 1, 2, 1), [[[0, 1, 1]]], "no rows from 1 to 1"),
    "no such head": (models.SharedHeads(), (1, 1, 2, 1), [[[1, 0, 2]]], "from 0 to 0"),
    "unseen": (
        together.CheapestTests(),
        ([1, 1], [[0], [1]]),
        [0],
        "fault [1] is seen by no",
    ),
    "a test twice": (together.CheapestTests(), ([1, 1], [[0], [1]]), [0, 1, 0], "twice"),
    "no such test": (together.CheapestTests(), ([1, 1], [[0], [1]]), [2], "from 0 to 1"),
    "no place": (together.PlacedExperts(), ([2, 1], 2, 1), [[0, 1], []], "2 experts in 1"),
}


@pytest.mark.parametrize("case", PLAYS)
def test_a_judge_says_what_breaks_a_rule(case):
    problem, sizes, answer, says = PLAYS[case]
    with pytest.raises(AssertionError, match=says.replace("[", r"\[")):
        problem.play(sizes, answer)


@given(st.integers(3, 12))
def test_the_bound_of_the_ring_is_a_count_of_links(ranks):
    travelled = sum(min(d, ranks - d) for d in range(1, ranks)) * ranks
    assert messages.AllToAllOnARing().bound((ranks,)) == -(-travelled // (2 * ranks))


@given(st.lists(st.integers(1, 9), min_size=3, max_size=7), st.integers(0, 30))
def test_no_choice_of_blocks_passes_the_bound(sizes, room):
    """Every set of blocks that could stay, tried one by one."""
    last, cap = len(sizes) - 2, max(map(sum, zip(sizes, sizes[1:], strict=False))) + room
    best = 0
    for choice in range(1 << last):
        kept = [i for i in range(last) if choice >> i & 1]
        beside = (
            sizes[j] + sizes[j + 1] + sum(sizes[i] for i in kept if i < j)
            for j in range(last + 1)
        )
        if max(beside) <= cap:
            best = max(best, sum(sizes[i] for i in kept))
    assert models.Gathers().bound((sizes, cap)) == sum(sizes[:last]) - best
    answer = json.loads(json.dumps(solutions.gathers(sizes, cap)))
    assert models.Gathers().play((sizes, cap), answer) == sum(sizes[:last]) - best


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(0, 30))
def test_no_cut_passes_the_bound_of_the_buckets(sizes, latency):
    ready = [7 * (i + 1) for i in range(len(sizes))]
    problem, case = batches.Buckets(), (ready, sizes, latency, 1)
    scores = []
    for cuts in range(1 << (len(sizes) - 1)):
        counts, count = [], 1
        for i in range(len(sizes) - 1):
            if cuts >> i & 1:
                counts, count = [*counts, count], 0
            count += 1
        scores.append(problem.play(case, [*counts, count]))
    assert problem.bound(case) == min(scores)


def test_30_slots_are_not_enough_for_the_pipeline():
    """Every state of counts, with each way to wait: 28 is too low a bound, 31 is best."""
    (stages, micro, held), slots = models.OrdersInSlots.shown, 30
    states = {((0, 0, 0),) * stages}
    for left in reversed(range(slots)):
        new = set()
        for state in states:
            choices = []
            for stage, (f, b, w) in enumerate(state):
                can = [(f, b, w)]
                if f < micro and f - w < held and (stage == 0 or state[stage - 1][0] > f):
                    can.append((f + 1, b, w))
                if b < f and (stage == stages - 1 or state[stage + 1][1] > b):
                    can.append((f, b + 1, w))
                if w < b:
                    can.append((f, b, w + 1))
                choices.append([one for one in can if 3 * micro - sum(one) <= left])
            new.update(product(*choices))
        states = new
    assert not states


def test_the_bounds_of_a_ring_and_of_experts_can_be_reached():
    rows = [
        [0, 6, 7, 13, 16, 18, 25, 26, 31, 37, 43, 46, 47, 50, 53, 58],
        [4, 12, 14, 17, 20, 23, 32, 33, 35, 40, 45, 48, 54, 57, 61, 62],
        [1, 3, 5, 8, 11, 19, 21, 24, 28, 29, 30, 38, 39, 51, 56, 63],
    ]
    rows.append(sorted(set(range(64)) - set().union(*rows)))
    ring = models.RowsOfARing()
    assert ring.play(ring.shown, rows) == ring.bound(ring.shown) == 218
    placed = [[3, 5, 12], [0, 0, 13], [15, 1, 0], [6, 8, 1]]
    placed += [[2, 3, 6], [9, 4, 11], [7, 0, 10], [14, 0, 2]]
    experts = together.PlacedExperts()
    assert experts.play(experts.shown, placed) == experts.bound(experts.shown) == 400


def test_the_first_blocks_that_fit_are_not_the_best():
    """What the page says of them: each is kept that fits beside the two widest neighbours."""
    sizes, cap = models.Gathers.shown
    room = cap - max(map(sum, zip(sizes, sizes[1:], strict=False)))
    last, kept = len(sizes) - 2, []
    for i in range(last):
        if sum(sizes[k] for k in kept) + sizes[i] <= room:
            kept.append(i)
    stays, steps = {*kept, last, last + 1}, [["gather", 0]]
    for i in range(last + 2):
        steps += [["gather", i + 1]] if i <= last else []
        steps += [["F", i]] + ([["free", i]] if i not in stays else [])
    for i in reversed(range(last + 2)):
        steps += [["gather", i - 1]] if i and i - 1 not in stays else []
        steps += [["B", i], ["free", i]]
    assert cap - room == 740 and kept == [0, 1, 2, 4]
    assert models.Gathers().play((sizes, cap), steps) == 1440


def test_eight_fixed_questions_find_every_plan():
    """As the page says, a list is enough: the greedy one, for all that the judge can draw."""
    problem = together.PlannedSteps()
    cases = [
        (model, gpus, gpus * more)
        for model in together.MODELS
        for gpus in ([128, 256, 512, 1024] if model == "70B" else [32, 64, 128, 256])
        for more in (1, 2, 4)
    ]

    bounds = {case: problem.bound(case) for case in cases}

    def off(choice, case):
        tp, pp, *rest = choice
        plan = tp, pp, case[1] // tp // pp, *rest
        took = together.milliseconds(case[0], case[2], *plan) if plan[2] else None
        return min(5, (took or float("inf")) / bounds[case])

    choices = {(p[0], p[1], *p[3:]) for p in together.every_plan(1024)}
    table = {choice: [off(choice, case) for case in cases] for choice in sorted(choices)}
    best, asked = [5.0] * len(cases), 0
    while max(best) > 1:
        ways = [list(map(min, best, row)) for row in table.values()]
        best, asked = min(ways, key=sum), asked + 1
    assert asked == 8 < together.QUESTIONS


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_no_share_of_the_heads_passes_the_bound(heads, ranks, rows, keys):
    """Every way to give out the rows, where there are few."""
    problem, case = models.SharedHeads(), (heads, ranks, rows, keys)
    every = list(product(range(heads), range(rows)))
    assume(ranks ** len(every) <= 3000)
    scores = []
    for owners in product(range(ranks), repeat=len(every)):
        answer = [[] for _ in range(ranks)]
        for (head, row), owner in zip(every, owners, strict=True):
            answer[owner].append([head, row, row + 1])
        scores.append(problem.play(case, answer))
    assert problem.bound(case) <= min(scores)
    ours = json.loads(json.dumps(solutions.shared_heads(*case)))
    assert problem.play(case, ours) >= min(scores)


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=7), st.data())
def test_no_tests_are_cheaper_than_the_bound(sees, data):
    problem = together.CheapestTests()
    ranks = data.draw(st.lists(st.integers(1, 9), min_size=len(sees), max_size=len(sees)))
    case, all_faults = (ranks, [sorted(each) for each in sees]), set().union(*sees)
    subsets = product([False, True], repeat=len(sees))
    chosen = [[i for i, taken in enumerate(one) if taken] for one in subsets]
    enough = [c for c in chosen if set().union(*(sees[i] for i in c)) == all_faults]
    best = min(sum(ranks[i] for i in c) for c in enough)
    assert problem.bound(case) == best == problem.play(case, solutions.cheapest_tests(*case))


def every_fault(rank, world_size, plan):
    """A step with each fault, one after another; what rank 0 sees of them."""
    runs = [trials.one_step(rank, world_size, plan, f, random=True) for f in faults.FAULTS]
    return runs if rank == 0 else None


@pytest.mark.parametrize("test", together.TESTS)
def test_the_table_of_tests_is_what_the_faulty_job_shows(ranks, test):
    """Each test on each fault, with the parameters disturbed."""
    kind, plans = test.split(", ", 1)
    cost, sees = together.TESTS[test]
    sizes = [job.ranks_of(plan) for plan in plans.split(" and ")]
    assert cost == sum(sizes) + (kind == "one process")
    right, found = trials.alone(*job.batch_of(), random=True), []
    each = zip(plans.split(" and "), sizes, strict=True)
    runs = [ranks(size, every_fault, plan, timeout=60).results[0] for plan, size in each]
    for number, (first, last) in enumerate(zip(runs[0], runs[-1], strict=True)):
        tells = {
            "copies": bool(last.differ),
            "norm": abs(last.norm / first.norm - 1) > 1e-13,
            "one process": any(
                (last.gradients[n] - g).norm() > 1e-13 * g.norm() for n, g in right.items()
            ),
        }
        found += [number] * tells[kind]
    assert found == sees


def test_numbers_of_numpy_are_numbers_and_a_set_is_no_list(cell):
    source = FIRST["buckets"].replace("[1] * len(ready)", "np.ones(len(ready), int)")
    *_, function = cell("import numpy as np\n" + source)
    assert build.problems["buckets"].score(function) == 1440
    (function,) = cell(FIRST["buckets"].replace("[1] * len(ready)", "set(ready)"))
    row = next(row for row in build.rows(function) if not row.holds)
    assert "the answer has a set in it" in row.seen


def test_other_sizes_depend_on_the_text_alone(cell):
    problem = build.problems["buckets"]
    (one,) = cell(FIRST["buckets"])
    (other,) = cell(FIRST["buckets"].replace("[1]", "[ 1]"))
    assert problem.cases(one) == problem.cases(one) != problem.cases(other)


def test_the_class_sees_the_best_first_and_ties_by_lines(tmp_path):
    kept = ("ada", 8, 20), ("bob", 8, 12), ("cleo", 8, 12), ("eve", 9, 3)
    for who, best, lines in kept:
        (tmp_path / who).mkdir()
        row = {"all_to_all_on_a_ring": {"score": best, "lines": lines}}
        (tmp_path / who / "challenges.json").write_text(json.dumps(row))
    (tmp_path / "mallory").mkdir()
    (tmp_path / "mallory" / "challenges.json").write_text("[1")
    rows = [line.split() for line in score.class_table(tmp_path, build).splitlines()[1:]]
    assert rows[0][-1] == "mallory" and "damaged" in rows[0]
    assert [(row[1], row[-1]) for row in rows[1:]] == [
        ("1", "bob"),
        ("1", "cleo"),
        ("3", "ada"),
        ("4", "eve"),
    ]
    with pytest.raises(ValueError, match=r"no challenges\.json below"):
        score.class_table(tmp_path / "ada" / "none", build)


def test_a_damaged_file_is_named_and_stays(tmp_path, monkeypatch, cell):
    monkeypatch.setattr(score, "FILE", tmp_path / "challenges.json")
    score.FILE.write_text("[1")
    (first,) = cell(FIRST["buckets"])
    assert "challenges.json is damaged" in score.keep(first, build.problems["buckets"])
    assert score.FILE.read_text() == "[1"


def test_a_long_line_counts_as_several(cell):
    numbers = " + ".join(["len(ready)"] * 30)
    source = FIRST["buckets"].replace("[1] * len(ready)", numbers)
    assert len(numbers) > 3 * score.WIDE
    assert score.lines_of(*cell(source)) == 5


def test_the_best_score_is_kept(tmp_path, monkeypatch, cell, capsys):
    monkeypatch.setattr(score, "FILE", tmp_path / "challenges.json")
    (first,) = cell(FIRST["buckets"])
    problem = build.problems["buckets"]
    assert "best so far" in score.keep(first, problem)
    (one,) = cell(FIRST["buckets"].replace("[1] * len(ready)", "[len(ready)]"))
    assert "Your best stays 1,440" in score.keep(one, problem)
    assert score.scores(score.FILE) == {"buckets": {"score": 1440, "lines": 2}}
    assert "1,440 (2 lines)" in score.listing(build)


def test_the_page_shows_rows_and_the_picture_and_keeps_ours_out(
    tmp_path, monkeypatch, capsys, cell
):
    monkeypatch.setattr(score, "FILE", tmp_path / "challenges.json")
    build(build.ours["buckets"])
    shown = capsys.readouterr().out
    assert shown.startswith("correct: buckets") and "ours: 610 µs" in shown
    assert not score.FILE.exists()
    build(*cell(FIRST["buckets"]))
    shown = capsys.readouterr().out
    assert shown.startswith("not yet: buckets") and "buckets: 1,440 µs" in shown
    assert score.FILE.exists()


def test_a_score_that_nobody_can_have_is_refused(monkeypatch):
    problem = build.problems["buckets"]
    monkeypatch.setattr(problem, "bound", lambda case: 10_000)
    _, holds, *_ = build.rows(solutions.buckets)
    assert "below 10,000, which nobody can be: it went around the judge" in holds.seen
