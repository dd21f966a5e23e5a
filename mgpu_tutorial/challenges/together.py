"""Experts on ranks, and the problems after part IV."""

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from mgpu_tutorial.at_scale.planner import can_run, divisors
from mgpu_tutorial.challenges.score import SECONDS, Problem, require, returned, whole
from mgpu_tutorial.lab.run.launch import launch
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import RECOMPUTATIONS, Model, Plan, model_of
from mgpu_tutorial.shared.cost_model.step import predict_step

QUESTIONS = 12
# The eight faults of the chapter on gradients, in its order, and which of them a test sees
# where the parameters are disturbed first. A test runs one step on a plan, or on two.
TESTS = {  # what it compares, on which plan: the ranks it takes in all, the faults it sees
    "one process, dp=1": (2, [0, 1, 2, 3]),
    "one process, dp=2": (3, [0, 1, 2, 3]),
    "one process, dp=4": (5, [2, 3]),
    "one process, tp=2": (3, [0, 1, 2, 3, 5, 6]),
    "one process, pp=2": (3, [0, 1, 2, 3, 4]),
    "one process, dp=2,pp=2": (5, [0, 1, 2, 3, 4]),
    "one process, tp=2,pp=2": (5, [0, 1, 2, 3, 4, 5, 6]),
    "one process, dp=4,tp=2": (9, [2, 3, 5, 6]),
    "one process, dp=2,tp=2,pp=2": (9, [0, 1, 2, 3, 4, 5, 6]),
    "copies, tp=2": (2, [5]),
    "copies, dp=4": (4, [7]),
    "copies, dp=4,tp=2": (8, [5, 7]),
    "norm, dp=1 and dp=2": (3, [0, 1]),
    "norm, dp=1 and tp=2": (3, [5, 6]),
    "norm, dp=1 and pp=2": (3, [4]),
    "norm, dp=1 and dp=2,tp=2,pp=2": (9, [0, 1, 4, 5, 6]),
}
LLAMA_70B = Model(80, 8192, 64, 8192, 128_256, kv_heads=8, ffn=28_672, gated=True, tied=False)
MODELS = {"70B": LLAMA_70B, "30B": model_of(30e9, 4096), "13B": model_of(13e9, 4096)}


class PlacedExperts(Problem):
    """Experts on ranks, against the tokens that each was measured to get.

    Each rank has `slots` places and takes a list of experts. An expert may stand on several
    ranks: its tokens are then shared out equally among its places. The score is what the
    fullest rank gets.
    """

    chapter = "experts"
    unit = "tokens on the busiest rank"
    axis = "tokens"
    must = "place each expert at least once, and no more on a rank than it has places"
    why = "The ranks share all tokens, and the fullest has no fewer than the mean."
    shown = ([900, 410, 390, 260, 240, 210, 150, 140, 120, 90, 80, 70, 60, 40, 25, 15], 8, 3)
    target = 400

    def other(self, rng: random.Random) -> tuple:
        ranks, slots = rng.choice([(4, 3), (4, 4), (6, 3), (8, 3), (8, 4)])
        experts = ranks * slots - rng.randint(ranks // 2, ranks)
        loads = sorted(
            (1000 // (i + rng.randint(1, 3)) for i in range(experts)), reverse=True
        )
        rng.shuffle(loads)
        return loads, ranks, slots

    def bound(self, case: tuple) -> float:
        return sum(case[0]) / case[1]

    def shares(self, case: tuple, answer: Any) -> list[list[tuple[int, float]]]:
        """The experts of each rank, with their tokens there."""
        loads, ranks, slots = case
        require(isinstance(answer, list), f"{answer!r:.60} is no list")
        require(len(answer) == ranks, f"{len(answer)} lists for {ranks} ranks")
        for rank, own in enumerate(answer):
            require(isinstance(own, list), f"rank {rank}: {own!r:.60} is no list")
            require(len(own) <= slots, f"rank {rank}: {len(own)} experts in {slots} places")
            for expert in own:
                whole(expert, len(loads), f"rank {rank}, an expert")
        places = [expert for own in answer for expert in own]
        lost = sorted(set(range(len(loads))) - set(places))
        require(not lost, f"expert {lost[:1]} stands nowhere")
        return [[(e, loads[e] / places.count(e)) for e in own] for own in answer]

    def play(self, case: tuple, answer: Any) -> float:
        shares = self.shares(case, answer)
        return round(max(sum(tokens for _, tokens in own) for own in shares), 6)

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows = []
        for rank, own in enumerate(self.shares(case, answer)):
            begin, bars = 0.0, []
            for expert, tokens in own:
                bars.append((begin, begin + tokens, f"e{expert}", expert))
                begin += tokens
            rows.append((f"rank {rank}", bars))
        return rows


@lru_cache
def milliseconds(model: str, batch: int, *plan: Any) -> float | None:
    """Of a step on H100s by the cost model; None where a plan can't run, or does not fit."""
    tp, pp, dp, micro_batch, zero, recompute = plan
    made = Plan(tp, pp, dp, micro_batch, zero=zero, recompute=recompute)
    if not can_run(MODELS[model], made, batch):
        return None
    step = predict_step(MODELS[model], CLUSTERS["H100"], made, batch)
    return round(1000 * step.seconds, 1) if step.fits else None


@lru_cache
def every_plan(gpus: int) -> list[tuple]:
    """All plans that the problem allows: TP, PP, DP, micro-batch, ZeRO and recomputation."""
    return [
        (tp, pp, gpus // tp // pp, *rest)
        for tp in (1, 2, 4, 8)
        for pp in divisors(gpus // tp)
        for rest in product((1, 2, 4), (1, 3) if pp == 1 else (1,), RECOMPUTATIONS)
    ]


class PlannedSteps(Problem):
    """The plan for so many GPUs and a fixed batch, after a dozen questions.

    `ask(plan)` gives the milliseconds of a step by the cost model of the chapter on scale, or
    None where a plan can't run or does not fit. A plan is (tp, pp, dp, micro_batch, zero,
    recompute). It may be asked QUESTIONS times.
    """

    chapter = "at_scale"
    unit = "ms a step"
    axis = "ms a step"
    must = f"return a plan that runs and fits, after at most {QUESTIONS} questions"
    why = "The judge has asked for every plan."
    shown = ("70B", 512, 512)
    target = 8032.6

    def other(self, rng: random.Random) -> tuple:
        model = rng.choice(list(MODELS))
        gpus = rng.choice([128, 256, 512, 1024] if model == "70B" else [32, 64, 128, 256])
        return model, gpus, gpus * rng.choice([1, 2, 4])

    def bound(self, case: tuple) -> float:
        model, gpus, batch = case
        found = [milliseconds(model, batch, *plan) for plan in every_plan(gpus)]
        return min(filter(None, found))

    def ask(self, function: Callable, cases: Sequence[tuple]) -> list:
        more = {"backend": "none", "device": "cpu", "timeout": SECONDS}
        (text,) = returned(launch, _planned, 1, function, list(cases), **more).results
        return json.loads(text)

    def play(self, case: tuple, answer: Any) -> float:
        model, gpus, batch = case
        plan, asked = answer
        is_plan = isinstance(plan, list) and tuple(plan) in every_plan(gpus)
        require(is_plan, f"{plan!r:.60} is no plan of {gpus} GPUs")
        require(len(asked) <= QUESTIONS, f"{len(asked)} questions, expected {QUESTIONS}")
        score = milliseconds(model, batch, *plan)
        require(score is not None, f"{plan} can't run, or does not fit")
        return score

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows = []
        for plan in [*answer[1], answer[0]]:
            tp, pp, dp, micro, zero, recompute = plan
            score = milliseconds(case[0], case[2], *plan) or 0
            name = f"{tp}·{pp}·{dp} m{micro} z{zero} {recompute[0]}"
            rows.append((name, [(0, score, f"{score:,.0f}", 0)]))
        rows[-1] = ("returned", rows[-1][1])
        return rows

    def arguments(self, case: tuple) -> tuple:
        """What the function gets, with a dozen new questions."""
        shape = MODELS[case[0]]
        return shape.layers, shape.heads, *case[1:], asking(*case, [])

    def named(self, case: tuple) -> str:
        return f"{case[0]} on {case[1]} GPUs, batch {case[2]}"


def asking(model: str, gpus: int, batch: int, asked: list[tuple]) -> Callable:
    """A function that answers QUESTIONS questions, and notes them."""

    def ask(plan: Sequence) -> float | None:
        plan = tuple(plan)
        if plan not in every_plan(gpus):
            raise ValueError(f"{plan} is no plan of {gpus} GPUs")
        asked.append(plan)
        if len(asked) > QUESTIONS:
            raise RuntimeError(f"this is question {len(asked)} of {QUESTIONS}")
        return milliseconds(model, batch, *plan)

    return ask


def _planned(rank: int, world_size: int, function: Callable, cases: Sequence[tuple]) -> str:
    """In a process of its own: of each case the plan, and what was asked for."""
    found = []
    for model, gpus, batch in cases:
        asked: list[tuple] = []
        ask = asking(model, gpus, batch, asked)
        shape = MODELS[model]
        plan = function(shape.layers, shape.heads, gpus, batch, ask)
        found.append([plan, asked])
    return json.dumps(found)


class CheapestTests(Problem):
    """The tests that see every fault, on as few ranks in all as can be.

    Test i takes `ranks[i]` ranks, and sees the faults whose numbers are in `sees[i]`. An
    answer is a list of tests.
    """

    chapter = "wrong_gradient"
    unit = "ranks in all"
    must = "see every fault that any test sees"
    slack = 1.2
    why = "The judge has the cheapest tests for every set of faults."
    shown = (
        [ranks for ranks, _ in TESTS.values()],
        [list(sees) for _, sees in TESTS.values()],
    )
    target = 9

    def other(self, rng: random.Random) -> tuple:
        faults = rng.randint(4, 10)
        sees = [
            sorted(rng.sample(range(faults), rng.randint(1, faults - 1)))
            for _ in range(rng.randint(6, 18))
        ]
        return [len(each) + rng.randint(0, 3) for each in sees], sees

    def bound(self, case: tuple) -> float:
        best = {frozenset(): 0}  # what the cheapest tests take that see so much
        for ranks, sees in zip(*case, strict=True):
            for seen, cost in list(best.items()):
                more = seen.union(sees)
                best[more] = min(cost + ranks, best.get(more, cost + ranks))
        return best[frozenset().union(*case[1])]

    def play(self, case: tuple, answer: Any) -> float:
        ranks, sees = case
        require(isinstance(answer, list), f"{answer!r:.60} is no list of tests")
        chosen = [whole(test, len(ranks), "a test") for test in answer]
        require(len(set(chosen)) == len(chosen), "a test stands there twice")
        lost = sorted(set().union(*sees) - set().union(*(sees[test] for test in chosen)))
        require(not lost, f"fault {lost[:1]} is seen by no test")
        return sum(ranks[test] for test in chosen)

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows, at = [], 0
        for test in answer:
            ranks, sees = case[0][test], case[1][test]
            rows.append((f"test {test}", [(at, at + ranks, " ".join(map(str, sees)), test)]))
            at += ranks
        return rows

    def named(self, case: tuple) -> str:
        return f"{len(case[0])} tests and {len(set().union(*case[1]))} faults"
