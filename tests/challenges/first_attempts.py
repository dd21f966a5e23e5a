"""What comes to mind first, and attacks on the judge: sources of cells."""

FIRST = {
    "all_to_all_on_a_ring": """
def all_to_all_on_a_ring(ranks):
    rounds = []
    for distance in range(1, ranks // 2 + 1):
        for step in (1, -1) if 2 * distance < ranks else (1,):
            for hop in range(distance):
                at = [(r + step * hop) % ranks for r in range(ranks)]
                end = [(r + step * distance) % ranks for r in range(ranks)]
                own = range(ranks)
                rounds.append([(at[r], (at[r] + step) % ranks, r, end[r]) for r in own])
    return rounds
""",
    "all_reduce_over_nodes": """
def all_reduce_over_nodes(nodes, per_node):
    n = nodes * per_node
    first = [[(r, (r + 1) % n, (r - s) % n) for r in range(n)] for s in range(n - 1)]
    last = [[(r, (r + 1) % n, (r + 1 - s) % n) for r in range(n)] for s in range(n - 1)]
    return first + last
""",
    "broadcast_in_chunks": """
def broadcast_in_chunks(ranks, chunks):
    last = range(ranks + chunks - 2)
    links = range(ranks - 1)
    return [[(s, s + 1, t - s) for s in links if 0 <= t - s < chunks] for t in last]
""",
    "buckets": """
def buckets(ready, sizes, latency, per_mb):
    return [1] * len(ready)
""",
    "TokenStream": """
class TokenStream:
    def __init__(self, lengths, open_document, length, rank, world_size, state=None):
        self.documents = iter(range(len(lengths)))
        self.open, self.length = open_document, length
        self.rank, self.ranks = rank, world_size
        self.tokens, self.begin, self.at = [], 0, state or 0

    def next(self):
        begin = self.at + self.rank * self.length
        while len(self.tokens) < begin + self.length:
            self.tokens += self.open(next(self.documents))
        self.at += self.ranks * self.length
        return self.tokens[begin : begin + self.length]

    def state(self):
        return self.at
""",
    "gathers": """
def gathers(sizes, cap):
    n, steps = len(sizes), [("gather", 0)]
    for i in range(n):
        steps += [("gather", i + 1)] if i < n - 1 else []
        steps += [("F", i)] + ([("free", i)] if i < n - 2 else [])
    for i in reversed(range(n)):
        steps += [("gather", i - 1)] if 0 < i < n - 1 else []
        steps += [("B", i), ("free", i)]
    return steps
""",
    "orders_in_slots": """
def orders_in_slots(stages, micro, held):
    order = []
    for begin in range(0, micro, held):
        group = range(begin, min(micro, begin + held))
        order += [f"F{i}" for i in group]
        order += [name for i in group for name in (f"B{i}", f"W{i}")]
    return [order] * stages
""",
    "rows_of_a_ring": """
def rows_of_a_ring(lengths, ranks):
    share = sum(lengths) // ranks
    return [list(range(r * share, (r + 1) * share)) for r in range(ranks)]
""",
    "placed_experts": """
def placed_experts(loads, ranks, slots):
    placed = [[] for _ in range(ranks)]
    for expert in range(len(loads)):
        min(placed, key=len).append(expert)
    return placed
""",
    "shared_heads": """
def shared_heads(heads, ranks, rows, keys):
    return [[(h, 0, rows) for h in range(r, heads, ranks)] for r in range(ranks)]
""",
    "cheapest_tests": """
def cheapest_tests(ranks, sees):
    missing, chosen = set().union(*sees), []
    while missing:
        new = [len(missing.intersection(s)) / r for s, r in zip(sees, ranks)]
        chosen.append(new.index(max(new)))
        missing -= set(sees[chosen[-1]])
    return chosen
""",
    "planned_step": """
def planned_step(layers, heads, gpus, batch, ask):
    for tp, pp, zero, recompute in (4, 2, 1, "full"), (8, 8, 1, "full"), (8, 1, 3, "full"):
        plan = (tp, pp, gpus // tp // pp, 1, zero, recompute)
        if ask(plan):
            return plan
""",
    "ShardedTrainer": """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint


class ShardedTrainer:
    def __init__(self, model, rank, world_size, optimizer):
        self.layers, self.ranks, self.shares = list(model), world_size, {}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.reduce)
            share = self.padded(p.data).chunk(world_size)[rank].clone()
            self.shares[p] = torch.nn.Parameter(share)
        self.optimizer = optimizer(list(self.shares.values()))

    def padded(self, tensor):
        return pad(tensor.flatten(), (0, -tensor.numel() % self.ranks))

    def reduce(self, p):
        share = self.shares[p]
        share.grad = torch.empty_like(share)
        dist.reduce_scatter_single(share.grad, self.padded(p.grad))
        share.grad /= self.ranks
        p.grad = None

    def step(self, tokens, targets):
        x = tokens
        for number, layer in enumerate(self.layers):
            if 0 < number < 5:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x)
        loss = cross_entropy(x.mT, targets)
        loss.backward()
        self.optimizer.step()
        for p, share in self.shares.items():
            share.grad = None
            whole = p.new_empty(len(share) * self.ranks)
            dist.all_gather_single(whole, share.data)
            p.data.copy_(whole[: p.numel()].view_as(p))
        return loss.detach()

    def weights(self):
        return [p.data for p in self.shares]
""",
}

# by the name of the function: what is added, or stands instead, and what the row says
ARGUMENTS = {
    "all_to_all_on_a_ring": "ranks",
    "all_reduce_over_nodes": "nodes, per_node",
    "broadcast_in_chunks": "ranks, chunks",
    "buckets": "ready, sizes, latency, per_mb",
    "gathers": "sizes, cap",
    "orders_in_slots": "stages, micro, held",
    "shared_heads": "heads, ranks, rows, keys",
    "rows_of_a_ring": "lengths, ranks",
    "placed_experts": "loads, ranks, slots",
    "cheapest_tests": "ranks, sees",
}
