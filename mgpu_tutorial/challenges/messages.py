"""The problems after part I: who sends what to whom in which round."""

import random
from collections import defaultdict
from typing import Any

from mgpu_tutorial.challenges.score import Problem, require, rows_of, whole

Rounds = list[list[list[int]]]


def messages_of(answer: Any, ranks: int, fields: int) -> Rounds:
    """Rounds of messages, each [source, target, …]; AssertionError for what is none."""
    require(isinstance(answer, list), f"{answer!r:.60} is no list of rounds")
    for number, round_ in enumerate(answer, 1):
        for row in rows_of(round_, fields, f"round {number}"):
            what = f"round {number}, message {row}"
            source, target = (whole(rank, ranks, f"{what}, a rank") for rank in row[:2])
            require(source != target, f"{what}: rank {source} sends to itself")
    return answer


def once(seen: set, key: Any, what: str) -> None:
    """AssertionError if this has been seen in the round; then it has."""
    require(key not in seen, what)
    seen.add(key)


class AllToAllOnARing(Problem):
    """A block from every rank to every other, where links join neighbours only.

    In a round each link carries one block in each direction. A message is [source, target,
    origin, destination]: the block from origin to destination goes one link on. A block that
    arrives can leave in the next round.
    """

    chapter = "nonblocking"
    unit = "rounds"
    must = "bring each rank's block to each other rank, a block a round on each link"
    why = "All blocks together travel n · ⌊n² / 4⌋ links, and each of 2n carries one a round."
    shown = (8,)
    target = 8
    slack = 1.25

    def other(self, rng: random.Random) -> tuple:
        return (rng.choice([3, 4, 5, 6, 7, 9, 10, 11, 12]),)

    def bound(self, case: tuple) -> float:
        return -(-(case[0] ** 2 // 4) // 2)

    def play(self, case: tuple, answer: Any) -> float:
        (ranks,) = case
        at = {(a, b): a for a in range(ranks) for b in range(ranks) if a != b}
        for number, round_ in enumerate(messages_of(answer, ranks, 4), 1):
            busy, moved = set(), {}
            for source, target, *block in round_:
                what = f"round {number}, message {[source, target, *block]}"
                require((target - source) % ranks in (1, ranks - 1), f"{what}: no link")
                once(busy, (source, target), f"{what}: the link is taken in this round")
                require(at.get(tuple(block)) == source, f"{what}: rank {source} lacks it")
                moved[tuple(block)] = target
            at |= moved
        lost = [block for block, place in at.items() if place != block[1]]
        require(not lost, f"{len(lost)} blocks are not where they belong, such as {lost[:1]}")
        return len(answer)

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        links = defaultdict(list)
        for i, round_ in enumerate(answer):
            for source, target, origin, destination in round_:
                bar = i, i + 1, f"{origin}→{destination}", origin
                links[source, target].append(bar)
        ranks = case[0]
        every = [(r, (r + d) % ranks) for d in (1, -1) for r in range(ranks)]
        return [(f"link {a} → {b}", links[a, b]) for a, b in dict.fromkeys(every)]


class AllReduceOverNodes(Problem):
    """The sum of all ranks on all ranks; a message between nodes takes SLOW times as long.

    Each rank has its numbers in `chunks` chunks, as many as there are ranks. A message is
    [source, target, chunk]. What arrives is added where the target has none of its summands,
    and takes the place of the target's where it has all of them. In a round each rank sends
    one chunk at most, and receives one at most.
    """

    SLOW = 4
    chapter = "collectives"
    unit = "units of time"
    must = "leave the whole sum of every chunk on every rank, each summand counted once"
    why = (
        "A rank sends one chunk a round, and a chunk needs 2(n − 1) messages, so there are "
        "2(n − 1) rounds or more; in 2(nodes − 1) of them or more something goes between."
    )
    shown = (2, 4)
    target = 20

    def other(self, rng: random.Random) -> tuple:
        return rng.choice([(2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (2, 5), (3, 4), (4, 3)])

    def bound(self, case: tuple) -> float:
        nodes, per_node = case
        return 2 * (nodes * per_node - 1) + (self.SLOW - 1) * 2 * (nodes - 1)

    def times(self, case: tuple, answer: Rounds) -> list[int]:
        """What each round takes."""
        node = case[1]
        between = [any(s // node != t // node for s, t, _ in round_) for round_ in answer]
        return [self.SLOW if far else 1 for far in between]

    def play(self, case: tuple, answer: Any) -> float:
        ranks = case[0] * case[1]
        has = {(r, c): frozenset([r]) for r in range(ranks) for c in range(ranks)}
        for number, round_ in enumerate(messages_of(answer, ranks, 3), 1):
            sends, receives, arrived = set(), set(), {}
            for source, target, chunk in round_:
                what = f"round {number}, message {[source, target, chunk]}"
                whole(chunk, ranks, f"{what}, the chunk")
                once(sends, source, f"{what}: rank {source} sends twice in this round")
                once(receives, target, f"{what}: rank {target} receives twice in this round")
                new, old = has[source, chunk], has[target, chunk]
                twice = sorted(new & old)
                fits = not twice or new >= old
                require(fits, f"{what}: the summand of rank {twice[:1]} would count twice")
                arrived[target, chunk] = new | old
            has |= arrived
        every = frozenset(range(ranks))
        short = next((key for key, got in has.items() if got != every), None)
        if short:
            got = sorted(has[short])
            raise AssertionError(f"at the end rank {short[0]} has of chunk {short[1]} {got}")
        return sum(self.times(case, answer))

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows, begin = defaultdict(list), 0
        for time, round_ in zip(self.times(case, answer), answer, strict=True):
            for source, target, chunk in round_:
                is_far = source // case[1] != target // case[1]
                end = begin + (self.SLOW if is_far else 1)
                rows[source].append((begin, end, f"{chunk}→{target}", target))
            begin += time
        return [(f"rank {rank} sends", rows[rank]) for rank in range(case[0] * case[1])]


class BroadcastInChunks(Problem):
    """Rank 0's chunks on every rank, where a rank sends and receives one chunk a round.

    A message is [source, target, chunk], from any rank to any other. What arrives can be sent
    on in the next round.
    """

    chapter = "collectives"
    unit = "rounds"
    must = "bring every chunk of rank 0 to every rank"
    why = (
        "Rank 0 sends one chunk a round, so the last leaves in round `chunks` at the "
        "earliest, and from then on the ranks that have it can at most double in a round."
    )
    shown = (12, 8)
    target = 11

    def other(self, rng: random.Random) -> tuple:
        return rng.randint(3, 16), rng.randint(4, 10)

    def bound(self, case: tuple) -> float:
        ranks, chunks = case
        return chunks - 1 + (ranks - 1).bit_length()

    def play(self, case: tuple, answer: Any) -> float:
        ranks, chunks = case
        has = {(0, chunk) for chunk in range(chunks)}
        for number, round_ in enumerate(messages_of(answer, ranks, 3), 1):
            sends, receives, arrived = set(), set(), set()
            for source, target, chunk in round_:
                what = f"round {number}, message {[source, target, chunk]}"
                whole(chunk, chunks, f"{what}, the chunk")
                once(sends, source, f"{what}: rank {source} sends twice in this round")
                once(receives, target, f"{what}: rank {target} receives twice in this round")
                require((source, chunk) in has, f"{what}: rank {source} does not have it")
                arrived.add((target, chunk))
            has |= arrived
        missing = ranks * chunks - len(has)
        require(not missing, f"{missing} chunks have not arrived at the end")
        return len(answer)

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows = defaultdict(list)
        for i, round_ in enumerate(answer):
            for source, target, chunk in round_:
                rows[target].append((i, i + 1, f"{chunk}", source))
        return [(f"rank {rank} gets", rows[rank]) for rank in range(1, case[0])]
