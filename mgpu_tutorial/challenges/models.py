"""The problems after part III: a model, or a sequence, over several ranks."""

import random
from collections import Counter
from itertools import accumulate
from typing import Any

from mgpu_tutorial.challenges.figures import IDLE
from mgpu_tutorial.challenges.score import Problem, require, rows_of, whole


class OrdersInSlots(Problem):
    """The order of a pipeline's tasks, with at most `held` micro-batches on a stage.

    Each of F3, B3 and W3 takes a slot: the forward of micro-batch 3, the gradient of its
    input, and that of the weights. A stage holds a micro-batch from the begin of its F to
    the end of its W. F waits for F of the stage before, B for B of the stage behind, and W
    for its own B.
    """

    chapter = "pipelines"
    unit = "slots"
    must = "do each F, B and W once on each stage, and hold no more than allowed"
    why = (
        "Stage 0 has 3m slots of work, of which only `held` can come before the first "
        "gradient is back after 2p − 1 slots. The last stage has as much, after the p − 1 "
        "that the first micro-batch takes to come. And stage 0 holds each for 2p + 1 or "
        "more. At the page's size this count gives 28, and a search of all states 31."
    )
    shown = (4, 8, 3)  # stages, micro-batches, held
    target = 31

    def other(self, rng: random.Random) -> tuple:
        stages = rng.randint(2, 5)
        return stages, rng.randint(stages, 12), rng.randint(2, stages + 1)

    def bound(self, case: tuple) -> float:
        stages, micro, held = case
        idle = max(0, 2 * stages - 1 - min(held, micro))
        turns = -(-micro // held) * (2 * stages + 1)
        if case == self.shown:
            return 31  # by a search, which the tests repeat
        return max(3 * micro + idle, 3 * micro + stages - 1, turns)

    def placed(self, case: tuple, answer: Any) -> dict[tuple, int]:
        """The slot in which each task (stage, name) begins."""
        stages, micro, held = case
        require(isinstance(answer, list), f"{answer!r:.60} is no list of orders")
        require(len(answer) == stages, f"{len(answer)} orders for {stages} stages")
        names = Counter(f"{kind}{i}" for kind in "FBW" for i in range(micro))
        for stage, order in enumerate(answer):
            is_texts = isinstance(order, list) and all(
                isinstance(name, str) for name in order
            )
            require(is_texts, f"stage {stage}: {order!r:.60} is no list of names")
            for name in names - Counter(order):
                raise AssertionError(f"stage {stage}: {name} is missing")
            for name in Counter(order) - names:
                times = f"{order.count(name)} times, expected {names[name]}"
                raise AssertionError(f"stage {stage}: {name:.20} stands there {times}")
            holds = accumulate({"F": 1, "B": 0, "W": -1}[name[0]] for name in order)
            most = max(holds)
            require(most <= held, f"stage {stage} holds {most} micro-batches")
        begins, free, todo = {}, [0] * stages, [list(order) for order in answer]
        moved = True
        while moved:
            moved = False
            for stage in range(stages):
                while todo[stage]:
                    name = todo[stage][0]
                    kind, number = name[0], name[1:]
                    before = {"F": (stage - 1, name), "B": (stage + 1, name)}
                    needs = [before[kind]] if kind in before else [(stage, f"B{number}")]
                    needs += [(stage, f"F{number}")] if kind != "F" else []
                    needs = [need for need in needs if need[0] in range(stages)]
                    if any(need not in begins for need in needs):
                        break
                    begin = max([free[stage], *(begins[need] + 1 for need in needs)])
                    begins[stage, name] = begin
                    free[stage] = begin + 1
                    todo[stage].pop(0)
                    moved = True
        stuck = [(stage, order[0]) for stage, order in enumerate(todo) if order]
        if stuck:
            raise AssertionError(f"stage {stuck[0][0]} waits for ever before {stuck[0][1]}")
        return begins

    def play(self, case: tuple, answer: Any) -> float:
        return max(self.placed(case, answer).values()) + 1

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows = [(f"stage {stage}", []) for stage in range(case[0])]
        begins = self.placed(case, answer)
        for (stage, name), begin in sorted(begins.items(), key=lambda task: task[1]):
            rows[stage][1].append((begin, begin + 1, name, "FBW".index(name[0])))
        return rows


class SharedHeads(Problem):
    """Attention's heads over ranks that don't divide them: pieces of heads, by rows.

    Row r of a causal head is r + 1 blocks of work. A rank that computes any row of a head
    also makes all its keys and values, which is as much as `keys` blocks. An answer has for
    each rank its pieces [head, begin, end]. The score is what the fullest rank does.
    """

    chapter = "tensor_parallel"
    unit = "blocks of work on the busiest rank"
    axis = "blocks of work"
    must = "give each row of each head to one rank"
    why = (
        "The rank with the most rows has the mean of the work or more, which is that of "
        "heads / ranks whole heads. So it has rows of so many heads, rounded up, and makes "
        "the keys of each."
    )
    slack = 1.25
    shown = (12, 8, 64, 64)  # heads, ranks, rows of a head, work of its keys
    target = 3248

    def other(self, rng: random.Random) -> tuple:
        ranks, rows = rng.choice([4, 6, 8]), rng.choice([15, 16, 32, 64])
        heads = rng.randint(-(-5 * ranks // 4), 3 * ranks // 2)
        return heads, ranks, rows, rows * rng.randint(0, 1)

    def bound(self, case: tuple) -> float:
        heads, ranks, rows, keys = case
        squares = heads * rows * (rows + 1) // 2
        return -(-squares // ranks) + keys * -(-heads // ranks)

    def shares(self, case: tuple, answer: Any) -> list[dict[int, int]]:
        """Of each rank its heads, with the blocks of their rows there."""
        heads, ranks, rows, _ = case
        require(isinstance(answer, list), f"{answer!r:.60} is no list of ranks")
        require(len(answer) == ranks, f"{len(answer)} lists for {ranks} ranks")
        taken: set[tuple] = set()
        shares: list[dict[int, int]] = []
        for rank, pieces in enumerate(answer):
            own: dict[int, int] = {}
            for head, begin, end in rows_of(pieces, 3, f"rank {rank}"):
                whole(head, heads, f"rank {rank}, a head")
                whole(begin, rows, f"rank {rank}, head {head}, the first row")
                whole(end, rows + 1, f"rank {rank}, head {head}, the row behind the last")
                require(
                    begin < end, f"rank {rank}, head {head}: no rows from {begin} to {end}"
                )
                for row in range(begin, end):
                    twice = (head, row) in taken
                    require(not twice, f"row {row} of head {head} is given twice")
                    taken.add((head, row))
                    own[head] = own.get(head, 0) + row + 1
            shares.append(own)
        lost = heads * rows - len(taken)
        require(not lost, f"{lost} of {heads * rows} rows are nobody's")
        return shares

    def play(self, case: tuple, answer: Any) -> float:
        shares = self.shares(case, answer)
        return max(sum(own.values()) + case[3] * len(own) for own in shares)

    def named(self, case: tuple) -> str:
        return "{} heads on {} ranks, {} rows, {} for the keys".format(*case)

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows = []
        for rank, own in enumerate(self.shares(case, answer)):
            at, bars = 0, []
            for head, blocks in own.items():
                bars.append((at, at + case[3], "", IDLE))  # its keys and values
                bars.append((at + case[3], at + case[3] + blocks, f"h{head}", head))
                at += case[3] + blocks
            rows.append((f"rank {rank}", bars))
        return rows


class Gathers(Problem):
    """When a sharded model gathers and frees its blocks, so that little is gathered again.

    `sizes` are the blocks' in MB, `cap` is what a rank can have gathered at a time. Steps are
    ["gather", i], ["free", i], ["F", i], ["B", i]. While a block computes, it is there, and
    so is the one that computes next, because its gather runs under this one's work. The
    score counts what is gathered a second time, and later.
    """

    chapter = "sharding"
    unit = "MB gathered again"
    axis = "steps of work"
    must = (
        "run all forwards, then all backwards, with each block and the next there, within cap"
    )
    why = (
        "Again is gathered what does not stay from forward to backward. What stays must fit "
        "beside any two neighbours further on, and the judge has tried each choice that does."
    )
    shown = ([300, 420, 160, 380, 240, 500, 220, 340, 180, 260], 1890)
    target = 1120

    def other(self, rng: random.Random) -> tuple:
        sizes = [20 * rng.randint(5, 25) for _ in range(rng.randint(4, 11))]
        widest = max(a + b for a, b in zip(sizes, sizes[1:], strict=False))
        return sizes, widest + 20 * rng.randint(0, max(0, sum(sizes[:-2]) - 100) // 40)

    def bound(self, case: tuple) -> float:
        sizes, cap = case
        last = len(sizes) - 2  # this and the next are there at the turn in any case
        stays = {0}  # MB that can stay of the blocks so far
        for i in range(last + 1):
            stays = {s for s in stays if s + sizes[i] + sizes[i + 1] <= cap}
            stays |= {s + sizes[i] for s in stays if i < last}
        return sum(sizes[:last]) - max(stays)

    def play(self, case: tuple, answer: Any) -> float:
        return self.walked(case, answer)[0]

    def walked(self, case: tuple, answer: Any) -> tuple[float, list, float]:
        """What is gathered again; when each block is there, in steps of work; the fullest."""
        sizes, cap = case
        count = len(sizes)
        work = [["F", i] for i in range(count)] + [["B", i] for i in reversed(range(count))]
        there, total, spans, done, most = {}, 0, [], 0, 0
        for number, (what, block) in enumerate(rows_of(answer, 2, "the steps"), 1):
            place = f"step {number}, {[what, block]}"
            whole(block, count, f"{place}, the block")
            if what == "gather":
                require(block not in there, f"{place}: the block is there already")
                there[block] = done
                total += sizes[block]
                full = sum(sizes[b] for b in there)
                require(full <= cap, f"{place}: {full} MB would be gathered at a time")
                most = max(most, full)
            elif what == "free":
                require(block in there, f"{place}: the block is not there")
                spans.append((block, there.pop(block), done))
            else:
                expected = work[done] if done < len(work) else "nothing more"
                require([what, block] == expected, f"{place}, expected {expected}")
                coming = work[done + 1][1] if done + 1 < len(work) else block
                lacks = [b for b in (block, coming) if b not in there]
                require(not lacks, f"{place}: block {lacks[:1]} is not there")
                done += 1
        require(done == len(work), f"it ends before {work[done % len(work)]}")
        spans += [(block, begin, done) for block, begin in there.items()]
        return total - sum(sizes), spans, most

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        _, spans, _ = self.walked(case, answer)
        rows = [(f"block {i}: {size} MB", []) for i, size in enumerate(case[0])]
        for block, begin, end in sorted(spans):
            rows[block][1].append((begin, end, "gathered", block))
        return rows

    def named(self, case: tuple) -> str:
        return f"blocks of {', '.join(map(str, case[0]))} MB within {case[1]}"


class RowsOfARing(Problem):
    """Which tokens of packed documents a rank of a causal ring gets.

    The documents of `lengths`, in blocks of tokens, stand one behind the other. Each rank
    gets equally many blocks, as a list of their numbers. In step s of the ring, rank r
    multiplies the queries of its blocks with the keys of rank r − s: a pair of blocks of one
    document is two units of work if the key stands before the query, and one for a block with
    itself. All wait for the slowest of a step.
    """

    chapter = "long_sequences"
    unit = "units of work"
    axis = "units of work"
    must = "give each block to one rank, and equally many to each"
    why = (
        "The ranks share all pairs, and can't do better than an equal share. A pair counts "
        "two, so the sum over the steps is even or odd as the number of a rank's blocks is."
    )
    shown = ([20, 3, 9, 14, 6, 12], 4)
    target = 218

    def other(self, rng: random.Random) -> tuple:
        ranks, lengths = rng.choice([2, 3, 4, 5, 8]), []
        blocks = ranks * rng.randint(10, 20)
        while sum(lengths) < blocks:
            lengths.append(min(rng.randint(2, 24), blocks - sum(lengths)))
        return lengths, ranks

    def bound(self, case: tuple) -> float:
        lengths, ranks = case
        share = -(-sum(length**2 for length in lengths) // ranks)
        return share + (share - sum(lengths) // ranks) % 2

    def steps(self, case: tuple, answer: Any) -> list[list[int]]:
        """The work of each rank in each step."""
        lengths, ranks = case
        document = [d for d, length in enumerate(lengths) for _ in range(length)]
        require(isinstance(answer, list), f"{answer!r:.60} is no list")
        require(len(answer) == ranks, f"{len(answer)} lists for {ranks} ranks")
        owner = {}
        for rank, own in enumerate(answer):
            require(isinstance(own, list), f"rank {rank}: {own!r:.60} is no list")
            share = len(document) // ranks
            require(len(own) == share, f"rank {rank} has {len(own)} blocks, expected {share}")
            for block in own:
                whole(block, len(document), f"rank {rank}, a block")
                require(block not in owner, f"block {block} is given twice")
                owner[block] = rank
        work = [[0] * ranks for _ in range(ranks)]
        for query, own in enumerate(document):
            for key in range(query + 1):
                if document[key] == own:
                    step = (owner[query] - owner[key]) % ranks
                    work[step][owner[query]] += 2 if key < query else 1
        return work

    def play(self, case: tuple, answer: Any) -> float:
        return sum(map(max, self.steps(case, answer)))

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        rows, begin = [(f"rank {rank}", []) for rank in range(case[1])], 0
        for step, work in enumerate(self.steps(case, answer)):
            end = begin + max(work)
            for rank, own in enumerate(work):
                keys = (rank - step) % case[1]
                rows[rank][1].append((begin, begin + own, str(own), keys))
                if own < max(work):
                    rows[rank][1].append((begin + own, end, "", IDLE))
            begin = end
        return rows
