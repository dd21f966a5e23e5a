"""The problems after part II: gradients on their way, and a stream of tokens."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_tutorial.challenges.score import SECONDS, Problem, require, whole
from mgpu_tutorial.lab.run.launch import launch


class Buckets(Problem):
    """How many gradients each bucket takes, so that the last one has arrived soonest.

    Gradient i is ready after `ready[i]` microseconds and has `sizes[i]` MB. A bucket takes
    the next gradients in order. It leaves when all of them are ready and the bucket before it
    has arrived, and takes `latency` microseconds, and `per_mb` for each MB.
    """

    chapter = "ddp_buckets"
    unit = "µs after the last gradient"
    axis = "µs"
    must = "put each gradient into one bucket, in the order in which they are ready"
    why = "The judge has looked for the best cut before every gradient, and so has found it."
    shown = (
        [200, 380, 500, 740, 900, 1010, 1300, 1420, 1600, 1710, 1900, 2000],
        [24, 3, 8, 30, 3, 8, 30, 3, 8, 30, 3, 6],
        140,
        10,
    )
    target = 610

    def other(self, rng: random.Random) -> tuple:
        count = rng.randint(4, 30)
        ready = sorted(rng.sample(range(100, 6000, 20), count))
        sizes = [rng.choice([2, 3, 8, 30, 60]) for _ in ready]
        return ready, sizes, rng.choice([20, 100, 300, 600]), rng.choice([4, 10, 20])

    def bound(self, case: tuple) -> float:
        ready, sizes, latency, per_mb = case
        best = [0.0]  # when the first i gradients can have arrived
        for i in range(1, len(ready) + 1):
            ways = [
                max(best[j], ready[i - 1]) + latency + per_mb * sum(sizes[j:i])
                for j in range(i)
            ]
            best.append(min(ways))
        return best[-1] - ready[-1]

    def sent(self, case: tuple, answer: Any) -> list[tuple[int, int, float, float]]:
        """Of each bucket the gradients, from and to, and when it leaves and has arrived."""
        ready, sizes, latency, per_mb = case
        require(isinstance(answer, list), f"{answer!r:.60} is no list of numbers")
        counts = [whole(c, len(ready) + 1, "the size of a bucket") for c in answer]
        require(0 not in counts, "a bucket without a gradient")
        require(sum(counts) == len(ready), f"{sum(counts)} gradients, expected {len(ready)}")
        first, now, buckets = 0, 0.0, []
        for count in counts:
            end = first + count
            begin = max(now, ready[end - 1])
            now = begin + latency + per_mb * sum(sizes[first:end])
            buckets.append((first, end, begin, now))
            first = end
        return buckets

    def play(self, case: tuple, answer: Any) -> float:
        return self.sent(case, answer)[-1][3] - case[0][-1]

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        ready, _, _, _ = case
        colours = [
            n for n, (a, b, _, _) in enumerate(self.sent(case, answer)) for _ in range(a, b)
        ]
        edges = [0, *ready]
        backward = [(edges[i], edges[i + 1], str(i), colours[i]) for i in range(len(ready))]
        link = [
            (begin, end, f"{a}" if b == a + 1 else f"{a}–{b - 1}", n)
            for n, (a, b, begin, end) in enumerate(self.sent(case, answer))
        ]
        return [("backward", backward), ("link", link)]

    def named(self, case: tuple) -> str:
        return f"{len(case[0])} gradients, latency {case[2]}"


class TokenStreams(Problem):
    """A stream of tokens that stops anywhere and goes on, with more or fewer ranks.

    All documents one behind the other are cut into sequences of `length` tokens, and in each
    step every rank takes one, in the order of ranks. After `steps` steps the job is killed,
    and another number of ranks goes on to the end with what `state()` of rank 0 gave, at the
    next token. The score is how often a rank opened a document, in all.
    """

    chapter = "survival"
    unit = "documents opened"
    axis = "documents"
    must = "give every token once and in order, across a kill, from a state of 60 characters"
    why = "Each rank has to open each document of which it has a token."
    shown = ([30, 9, 64, 12, 5, 41, 17, 80, 22, 13, 7, 35, 51, 26, 10, 58], 16, 2, 6, 3)
    target = 35

    def other(self, rng: random.Random) -> tuple:
        lengths = [rng.randint(3, 90) for _ in range(rng.randint(8, 24))]
        length, ranks = rng.choice([4, 6, 10, 16]), rng.randint(1, 4)
        steps = sum(lengths) // length // ranks
        return lengths, length, ranks, rng.randint(1, max(1, steps - 2)), rng.randint(1, 4)

    @staticmethod
    def documents(lengths: Sequence[int]) -> list[list[int]]:
        """The tokens of each document, drawn."""
        rng = random.Random(str(lengths))
        return [[rng.randrange(50_000) for _ in range(length)] for length in lengths]

    @staticmethod
    def phases(case: tuple) -> list[tuple[int, int, int]]:
        """Of both runs: the first sequence, the ranks, the steps."""
        lengths, length, before, steps, after = case
        rest = sum(lengths) // length - before * steps
        return [(0, before, steps), (before * steps, after, max(0, rest) // after)]

    def ask(self, function: Callable, cases: Sequence[tuple]) -> list:
        states: list = [None] * len(cases)
        phases, answers = [self.phases(case) for case in cases], [[] for _ in cases]
        for run in 0, 1:
            jobs = [
                (case[0], case[1], *phase[run][1:], state)
                for case, phase, state in zip(cases, phases, states, strict=True)
            ]
            more = {"backend": "none", "device": "cpu", "timeout": SECONDS}
            texts = launch(_read, 4, function, jobs, **more).results
            found = [json.loads(text) for text in texts]  # by rank and job
            states = [one["state"] for one in found[0]]
            for i, answer in enumerate(answers):
                answer.append([own[i] for own in found[: phases[i][run][1]]])
        return answers

    def play(self, case: tuple, answer: Any) -> float:
        lengths, length, *_ = case
        row = [token for document in self.documents(lengths) for token in document]
        opened = 0
        for run, (first, ranks, steps) in enumerate(self.phases(case)):
            for rank, own in enumerate(answer[run]):
                where = f"rank {rank} of {ranks}{', after the kill' if run else ''}"
                for step in range(steps):
                    begin = (first + step * ranks + rank) * length
                    got, expected = own["tokens"][step], row[begin : begin + length]
                    if got != expected:
                        at = next(
                            (i for i, t in enumerate(expected) if got[i : i + 1] != [t]), 0
                        )
                        said = f"{where}, step {step}: token {begin + at} of all is wrong"
                        raise AssertionError(f"{said}: {got!r:.50}")
                opened += own["opened"]
            letters = len(json.dumps(answer[run][0]["state"]))
            require(letters <= 60, f"the state has {letters} characters")
        return opened

    def bound(self, case: tuple) -> float:
        lengths, length, *_ = case
        document = [i for i, size in enumerate(lengths) for _ in range(size)]
        total = 0
        for first, ranks, steps in self.phases(case):
            for rank in range(ranks):
                begins = [(first + s * ranks + rank) * length for s in range(steps)]
                total += len({i for b in begins for i in document[b : b + length]})
        return total

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows = []
        for run, own in enumerate(answer):
            for rank, one in enumerate(own):
                name = f"rank {rank}{' after' if run else ''}"
                bars = [(i, i + 1, f"d{d}", d) for i, d in enumerate(one["which"])]
                rows.append((name, bars))
        return rows

    def arguments(self, case: tuple) -> tuple:
        """What rank 0 gets before the kill."""
        lengths, length, ranks, *_ = case
        return lengths, opening_of(lengths, []), length, 0, ranks

    def named(self, case: tuple) -> str:
        _, length, before, steps, after = case
        return f"{before} ranks, {steps} steps, then {after} ranks, sequences of {length}"


def opening_of(lengths: Sequence[int], opened: list[int]) -> Callable:
    """A function that returns the tokens of a document, and notes that it did."""
    documents = TokenStreams.documents(lengths)

    def open_document(number: int) -> list[int]:
        opened.append(number)
        return list(documents[number])

    return open_document


def _read(rank: int, world_size: int, stream: Callable, jobs: Sequence[tuple]) -> str:
    """A rank of a run: of each job its tokens, what it opened, and the state at the end."""
    found = []
    for lengths, length, ranks, steps, state in jobs:
        if rank >= ranks:
            found.append({})
            continue
        opened: list[int] = []
        opening = opening_of(lengths, opened)
        one = stream(list(lengths), opening, length, rank, ranks, state)
        tokens = [[int(token) for token in one.next()] for _ in range(steps)]
        more = {"opened": len(opened), "which": opened, "state": one.state()}
        found.append({"tokens": tokens} | more)
    return json.dumps(found)
