"""What we reach. Open it when you have a score of your own."""


def all_to_all_on_a_ring(ranks):
    """Each link takes the block with farthest to go; halfway round, both ways are used."""
    waiting = {}  # (place, direction): blocks as (links to go, origin, destination)
    for origin in range(ranks):
        for destination in set(range(ranks)) - {origin}:
            right = (destination - origin) % ranks
            left = ranks - right
            clockwise = right < left or right == left and origin % 2 == 0
            way = (origin, 1) if clockwise else (origin, -1)
            waiting.setdefault(way, []).append((min(right, left), origin, destination))
    rounds = []
    while any(waiting.values()):
        round_, arrived = [], []
        for (place, step), blocks in waiting.items():
            if blocks:
                togo, origin, destination = max(blocks)
                blocks.remove((togo, origin, destination))
                target = (place + step) % ranks
                round_.append((place, target, origin, destination))
                if togo > 1:
                    arrived.append(((target, step), (togo - 1, origin, destination)))
        for way, block in arrived:
            waiting.setdefault(way, []).append(block)
        rounds.append(round_)
    return rounds


def all_reduce_over_nodes(nodes, per_node):
    """Reduce-scatter in the nodes, a ring over them for each place, all-gather in them."""
    ranks = nodes * per_node
    shard = [range(place * nodes, (place + 1) * nodes) for place in range(per_node)]

    def inside(step):
        """Each rank sends a chunk of shard `place - step` to its neighbour in the node."""
        return [
            [
                (node * per_node + place, node * per_node + (place + 1) % per_node, chunk)
                for node in range(nodes)
                for place in range(per_node)
                for chunk in [shard[(place - step) % per_node][part]]
            ]
            for part in range(nodes)
        ]

    def between(step):
        """Each rank sends one chunk of its own shard to its place in the next node."""
        return [
            (rank, (rank + per_node) % ranks, shard[(rank + 1) % per_node][part])
            for rank in range(ranks)
            for part in [(rank // per_node - step) % nodes]
        ]

    scatter = [round_ for step in range(per_node - 1) for round_ in inside(step)]
    over = [between(step) for step in range(nodes - 1)]
    over += [between(step) for step in range(-1, nodes - 2)]
    gather = [round_ for step in range(-1, per_node - 2) for round_ in inside(step)]
    return scatter + over + gather


def broadcast_in_chunks(ranks, chunks):
    """In each round as many messages as can be, of what fewest have; the best of 12 tries."""
    import random

    def one_round(has, rng):
        """A receiver for as many senders as possible, and a rare chunk for each."""
        spread = [sum(chunk in own for own in has) for chunk in range(chunks)]
        new = {chunk for chunk in range(chunks) if spread[chunk] == 1}
        gives = {}  # who sends to each receiver

        def offers(source, target):
            """What a rank can send; rank 0 what nobody has yet, while there is such."""
            useful = has[source] - has[target]
            return useful & {min(new)} if source == 0 and new else useful

        def matched(source, seen):
            """Find a receiver, if need be by moving its sender to a different one."""
            targets = [t for t in range(1, ranks) if offers(source, t)]
            for target in sorted(targets, key=lambda t: (len(has[t]), rng.random())):
                if target not in seen:
                    seen.add(target)
                    if target not in gives or matched(gives[target], seen):
                        gives[target] = source
                        return True
            return False

        for source in (0, *rng.sample(range(1, ranks), ranks - 1)):
            matched(source, set())
        messages = []
        for target, source in gives.items():
            chunk = min(offers(source, target), key=lambda c: (spread[c], rng.random()))
            spread[chunk] += 1
            messages.append((source, target, chunk))
        return messages

    def attempt(rng):
        has, rounds = [set(range(chunks)), *(set() for _ in range(ranks - 1))], []
        while any(len(own) < chunks for own in has):
            rounds.append(one_round(has, rng))
            for _, target, chunk in rounds[-1]:
                has[target].add(chunk)
        return rounds

    rng = random.Random(0)
    return min((attempt(rng) for _ in range(12)), key=len)


def orders_in_slots(stages, micro, held):
    """All states that can be after each slot: how many F, B and W each stage has done.

    Whatever can be done now need not wait, so a stage idles only where it can do nothing. At
    other sizes than the page's there may be too many states: 1,000 with most work done stay.
    """
    slots = [{((0, 0, 0),) * stages: None}]  # of each slot its states, and how they came
    end = ((micro,) * 3,) * stages
    while end not in slots[-1]:
        new = {}
        for state in slots[-1]:
            ways = [()]
            for stage, (f, b, w) in enumerate(state):
                arrived = state[stage - 1][0] if stage else micro
                back = state[stage + 1][1] if stage < stages - 1 else f
                can = [(f, b + 1, w)] * (b < min(f, back))
                can += [(f + 1, b, w)] * (f < min(arrived, w + held))
                can += [(f, b, w + 1)] * (w < b)
                ways = [(*way, one) for way in ways for one in can or [(f, b, w)]]
            for way in ways:
                new.setdefault(way, state)
        most = sorted(new, key=lambda state: sum(map(sum, state)), reverse=True)
        slots.append({state: new[state] for state in most[:1000]})
    orders, state = [[] for _ in range(stages)], end
    for states in reversed(slots[1:]):
        before = states[state]
        for order, old, own in zip(orders, before, state, strict=True):
            done = zip("FBW", old, own, strict=True)
            order += [f"{kind}{i}" for kind, i, j in done if i < j]
        state = before
    return [order[::-1] for order in orders]


def gathers(sizes, cap):
    """Keep the blocks between forward and backward that fill the room best, by all sums."""
    last = len(sizes) - 2
    sums = {0: ()}
    for i in range(last + 1):
        sums = {s: own for s, own in sums.items() if s + sizes[i] + sizes[i + 1] <= cap}
        if i < last:
            sums |= {s + sizes[i]: (*own, i) for s, own in sums.items()}
    kept = {*sums[max(sums)], last, last + 1}
    steps = [("gather", 0)]
    for i in range(last + 2):
        steps += [("gather", i + 1)] if i <= last else []
        steps += [("F", i)]
        steps += [("free", i)] if i not in kept else []
    for i in reversed(range(last + 2)):
        steps += [("gather", i - 1)] if i and i - 1 not in kept else []
        steps += [("B", i), ("free", i)]
    return steps


def rows_of_a_ring(lengths, ranks):
    """Swaps that make the ring shorter, and at first, while it is warm, some that do not."""
    import math
    import random

    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    begins = [sum(lengths[:d]) for d in document]
    owner = [
        i % ranks if i // ranks % 2 == 0 else -1 - i % ranks for i in range(len(document))
    ]
    owner = [rank % ranks for rank in owner]
    work = [[0] * ranks for _ in range(ranks)]  # by the ranks of queries and of keys

    def count(block, sign, earlier=False):
        """Add, or take away, the pairs of a block; or only those with earlier keys."""
        begin, own = begins[block], owner[block]
        end = block if earlier else begin + lengths[document[block]]
        for other in range(begin, end):
            if other < block:
                work[own][owner[other]] += 2 * sign
            elif other > block:
                work[owner[other]][own] += 2 * sign
        work[own][own] += sign

    def units():
        each = range(ranks)
        return sum(max(work[r][r - step] for r in each) for step in each)

    def swap(a, b):
        for block, rank in (a, owner[b]), (b, owner[a]):
            count(block, -1)
            owner[block] = rank
            count(block, 1)

    for block in range(len(owner)):
        count(block, 1, earlier=True)
    rng, now, tries = random.Random(0), units(), 120_000
    least = -(-sum(length**2 for length in lengths) // ranks)
    best, kept = now, list(owner)
    for i in range(tries):
        a, b = rng.randrange(len(owner)), rng.randrange(len(owner))
        if owner[a] != owner[b]:
            swap(a, b)
            new, warm = units(), 3 * (1 - i / tries) ** 2 + 0.1
            if rng.random() < math.exp(min(0, (now - new) / warm)):
                now = new
                if now < best:
                    best, kept = now, list(owner)
            else:
                swap(a, b)
        if best <= least + 1:
            break
    return [[i for i, own in enumerate(kept) if own == rank] for rank in range(ranks)]


def placed_experts(loads, ranks, slots):
    """Choose the copies first, then fill each rank to exactly the mean, if one can."""
    import math
    from itertools import combinations, combinations_with_replacement, islice

    extra = ranks * slots - len(loads)  # places for second copies
    unit = ranks * math.lcm(*range(1, extra + 2))  # of a token: so all parts are whole
    mean = sum(loads) * unit // ranks
    largest = sorted(range(len(loads)), key=lambda expert: -loads[expert])

    def places_of(more):
        """The tokens of each place, most first; `more` has the experts of extra ones."""
        copies = [1 + more.count(expert) for expert in range(len(loads))]
        places = []
        for expert, count in enumerate(copies):
            places += [(loads[expert] * unit // count, expert)] * count
        return sorted(places, reverse=True)

    def filled(places):
        """Ranks that all get the mean; None if the fullest place finds no others for it."""
        if not places:
            return []
        first, *rest = places
        for others in combinations(rest, slots - 1):
            if first[0] + sum(tokens for tokens, _ in others) == mean:
                left = list(rest)
                for place in others:
                    left.remove(place)
                found = filled(left)
                if found is not None:
                    return [[first, *others], *found]
        return None

    def emptiest(places):
        """Each place on the rank with the fewest tokens that has room."""
        placed = [[] for _ in range(ranks)]
        for place in places:
            free = [own for own in placed if len(own) < slots]
            min(free, key=lambda own: sum(tokens for tokens, _ in own)).append(place)
        return placed

    # copies of the larger half, as many choices of them as there is time for
    choices = combinations_with_replacement(largest[: len(loads) // 2], extra)
    placed = None
    for more in islice(choices, 300_000 // math.comb(ranks * slots - 1, slots - 1)):
        placed = placed or filled(places_of(more))
    if not placed:
        more = []
        for _ in range(extra):
            more.append(max(largest, key=lambda e: loads[e] / (1 + more.count(e))))
        placed = emptiest(places_of(more))
    return [[expert for _, expert in own] for own in placed]


def buckets(ready, sizes, latency, per_mb):
    """The best cut for the first gradients, then for one more: each end tries each begin."""
    best = [(0, [])]  # for the first i gradients: when they have arrived, and the buckets
    for end in range(1, len(ready) + 1):
        best.append(
            min(
                (
                    max(best[begin][0], ready[end - 1])
                    + latency
                    + per_mb * sum(sizes[begin:end]),
                    [*best[begin][1], end - begin],
                )
                for begin in range(end)
            )
        )
    return best[-1][1]


class TokenStream:
    """Keeps the number of the next token; a document is found by its first one."""

    def __init__(self, lengths, open_document, length, rank, world_size, state=None):
        self.starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self.open, self.length, self.rank, self.ranks = (
            open_document,
            length,
            rank,
            world_size,
        )
        self.position = state or 0
        self.last = (None, [])  # the document that is open

    def next(self):
        begin = self.position + self.rank * self.length
        self.position += self.ranks * self.length
        tokens, place = [], begin
        number = max(i for i, start in enumerate(self.starts[:-1]) if start <= begin)
        while len(tokens) < self.length:
            if self.last[0] != number:
                self.last = (number, self.open(number))
            offset = place - self.starts[number]
            tokens += self.last[1][offset : offset + self.length - len(tokens)]
            place = begin + len(tokens)
            number += 1
        return tokens

    def state(self):
        return self.position


def planned_step(layers, heads, gpus, batch, ask):
    """From two ranks a product under ZeRO 3, always to the best neighbour that is new."""
    known = {}

    def time_of(plan):
        if plan not in known and len(known) < 12:
            known[plan] = ask(plan) or float("inf")
        return known.get(plan, float("inf"))

    def neighbours(tp, pp, dp, micro, zero, recompute):
        if tp < 8 and dp > 1:
            yield 2 * tp, pp, dp // 2, micro, zero, recompute
        if tp > 1:
            yield tp // 2, pp, 2 * dp, micro, zero, recompute
        for other in (1, 2, 4):
            if other != micro and batch % (dp * other) == 0:
                yield tp, pp, dp, other, zero, recompute
        for other in ("none", "selective", "full"):
            if other != recompute:
                yield tp, pp, dp, micro, zero, other
        if zero == 3 and dp > 1:  # a pipeline gathers no parameters
            yield tp, 2 * pp, dp // 2, micro, 1, recompute

    best, before = (2, 1, gpus // 2, 1, 3, "selective"), None
    while best != before:
        before = best
        best = min([best, *neighbours(*best)], key=time_of)
    return min(known, key=known.get)


def shared_heads(heads, ranks, rows, keys):
    """The first row of a head with its last: such pairs are equal, and go out in turn."""
    order = []
    for i in range((rows + 1) // 2):
        order += [i, rows - 1 - i] if i < rows - 1 - i else [i]
    total, done = heads * rows * (rows + 1) // 2, 0
    pieces = [[] for _ in range(ranks)]
    for head in range(heads):
        for row in order:
            pieces[done * ranks // total].append((head, row, row + 1))
            done += row + 1
    return pieces


def cheapest_tests(ranks, sees):
    """The cheapest tests for each set of faults, from one test more to the next."""
    best = {frozenset(): (0, [])}
    for test, faults in enumerate(sees):
        for seen, (cost, chosen) in list(best.items()):
            more = seen.union(faults)
            new = cost + ranks[test], [*chosen, test]
            best[more] = min(best.get(more, new), new)
    return best[frozenset().union(*sees)][1]


class ShardedTrainer:
    """A layer is a bucket; its share steps in backward, and every third is gathered there.

    All other layers are gathered when the next step begins, those that it needs first at the
    head, because there is more room on the link under the forward of late layers. Four
    layers keep only their input, so that it fits.
    """

    def __init__(self, model, rank, world_size, optimizer):
        import torch

        self.layers, self.ranks = list(model), world_size
        self.whole, self.shares, self.optimizers = [], [], []
        for number, layer in enumerate(self.layers):
            parameters = list(layer.parameters())
            whole = self.joined([p.data for p in parameters])
            pieces = whole.split([p.numel() for p in parameters] + [self.rest(parameters)])
            for p, piece in zip(parameters, pieces, strict=False):
                p.data = piece.view_as(p)
                p.register_post_accumulate_grad_hook(lambda p, n=number: self.reduce(n))
            layer.register_forward_pre_hook(lambda *_, n=number: self.arrive(n))
            share = torch.nn.Parameter(whole.chunk(world_size)[rank].clone())
            self.whole.append(whole)
            self.shares.append(share)
            self.optimizers.append(optimizer([share]))
        self.reduces, self.gathers, self.waiting = {}, {}, set()

    def rest(self, tensors):
        """So many numbers are missing until all ranks have equally many."""
        return -sum(t.numel() for t in tensors) % self.ranks

    def joined(self, tensors):
        import torch

        empty = tensors[0].new_zeros(self.rest(tensors))
        return torch.cat([*(t.flatten() for t in tensors), empty])

    def reduce(self, number):
        """Send a layer's gradients when all are there; the layer three before it steps."""
        import torch
        import torch.distributed as dist

        parameters = list(self.layers[number].parameters())
        if any(p.grad is None for p in parameters):
            return
        gradients = self.joined([p.grad for p in parameters])
        for p in parameters:
            p.grad = None
        share = self.shares[number]
        share.grad = torch.empty_like(share)
        work = dist.reduce_scatter_single(share.grad, gradients, async_op=True)
        self.reduces[number] = work
        if number + 3 in self.reduces:
            self.update(number + 3)

    def update(self, number):
        """Step a share whose gradient has arrived, and gather every third layer at once."""
        self.reduces.pop(number).wait()
        self.shares[number].grad /= self.ranks
        self.optimizers[number].step()
        self.shares[number].grad = None
        self.waiting.add(number)
        if number % 3 == 0:
            self.gather(number)

    def gather(self, number):
        import torch.distributed as dist

        self.waiting.remove(number)
        whole, share = self.whole[number], self.shares[number].data
        self.gathers[number] = dist.all_gather_single(whole, share, async_op=True)

    def arrive(self, number):
        if number in self.gathers:
            self.gathers.pop(number).wait()

    def step(self, tokens, targets):
        from torch.nn.functional import cross_entropy
        from torch.utils.checkpoint import checkpoint

        for number in sorted(self.waiting):
            self.gather(number)
        x = tokens
        for number, layer in enumerate(self.layers):
            if 0 < number < 5:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x)
        loss = cross_entropy(x.mT, targets)
        loss.backward()
        for number in list(self.reduces):
            self.update(number)
        return loss.detach()

    def weights(self):
        for number in sorted(self.waiting):
            self.gather(number)
        for number in range(len(self.layers)):
            self.arrive(number)
        return [p.data for layer in self.layers for p in layer.parameters()]
