"""Workers of the tests: each compares with what plain tensors of all ranks give."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel import training
from mgpu_tutorial.tensor_parallel.block import parallelize
from mgpu_tutorial.tensor_parallel.copies import copies_that_differ, replicated
from mgpu_tutorial.tensor_parallel.dropout import keep_half, own_draws
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    Piece,
    RowParallelLinear,
    joined,
    whole_of,
)
from mgpu_tutorial.tensor_parallel.operators import (
    CopyToRanks,
    GatherSequence,
    ScatterSequence,
    SumOverRanks,
    sum_of,
)
from mgpu_tutorial.tensor_parallel.sequence import (
    parallelize_with_sequence,
    sum_replicated_gradients,
)
from mgpu_tutorial.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    parallel_cross_entropy,
)


def run_all(rank, world_size, workers):
    """Several workers in the same ranks: their results by name."""
    return {
        name: worker(rank, world_size, *args) for name, (worker, *args) in workers.items()
    }


def draw(seed, *shape):
    """Whole numbers as float64: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def off(found, expected):
    """The largest difference; infinite where one is no number, which max() may overlook."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    away = (found - expected).abs().nan_to_num(torch.inf)
    return away.max().item() if found.numel() else 0.0


def pair_of_mine():
    """Of four ranks the first two are a group, and the last two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group("tp")


# Operators


def apply_operators(rank, world_size):
    """How far each operator's output and gradient are from what they must be."""
    slices = [draw(r, 2, 3, 5) for r in range(world_size)]
    wholes = [draw(100 + r, 2, 3 * world_size, 5) for r in range(world_size)]
    cases = {  # operator: inputs, outputs, gradients of outputs, of inputs
        CopyToRanks: (wholes, wholes[rank], wholes, sum(wholes)),
        SumOverRanks: (wholes, sum(wholes), wholes, wholes[rank]),
        GatherSequence: (
            slices,
            torch.cat(slices, 1),
            wholes,
            sum(wholes)[:, 3 * rank : 3 * rank + 3],
        ),
        ScatterSequence: (
            wholes,
            sum(wholes)[:, 3 * rank : 3 * rank + 3],
            slices,
            torch.cat(slices, 1),
        ),
    }
    found = {}
    for operator, (inputs, output, gradients, gradient) in cases.items():
        mine = inputs[rank].clone().requires_grad_()
        before = mine.detach().clone()
        result = operator.apply(mine, None)
        # as it comes from a transposition: not contiguous
        given = gradients[rank].transpose(0, 2).contiguous().transpose(0, 2)
        kept = given.clone()
        result.backward(given)
        assert torch.equal(mine, before) and torch.equal(given, kept)
        found[operator.__name__] = off(result, output) + off(mine.grad, gradient)
    return found


# Layers


def apply_layers(rank, world_size):
    """How far layers in pieces are from F.linear: output, gradients of input and pieces."""
    torch.manual_seed(0)
    found = {}
    for bias in (True, False):
        up, down = nn.Linear(3, 24, bias=bias), nn.Linear(24, 5, bias=bias)
        for layer in (up, down):
            for p in layer.parameters():
                p.data = draw(p.numel(), *p.shape)
        x, gradient = draw(1, 2, 4, 3), draw(2, 2, 4, 5)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        expected = down(up(inputs[0]).square())
        expected.backward(gradient)
        columns, rows = ColumnParallelLinear(up), RowParallelLinear(down)
        # the bias of the rows is the whole layer's own parameter: forget its gradient
        kept = {name: p.grad.clone() for name, p in down.named_parameters()}
        down.zero_grad()
        result = rows(columns(inputs[1]).square())
        result.backward(gradient)
        errors = [off(result, expected), off(inputs[1].grad, inputs[0].grad)]
        errors += [off(whole_of(columns.weight), up.weight.detach())]
        errors += [off(whole_of(rows.weight), down.weight.detach())]
        errors += [off(joined(columns.weight.grad, columns.weight), up.weight.grad)]
        errors += [off(joined(rows.weight.grad, rows.weight), kept["weight"])]
        if bias:
            errors += [off(joined(columns.bias.grad, columns.bias), up.bias.grad)]
            errors += [off(rows.bias.grad, kept["bias"])]
        found[f"bias {bias}"] = max(errors)
        shapes = [list(columns.weight.shape), list(rows.weight.shape)]
        assert shapes == [[24 // world_size, 3], [5, 24 // world_size]]
    frozen = nn.Linear(4, 24).requires_grad_(False)
    assert not ColumnParallelLinear(frozen).weight.requires_grad
    return found


# Vocabulary


def share_a_vocabulary(rank, world_size, vocabulary, scale=1.0):
    """How far embedding, head and loss in pieces are from the whole ones, with gradients."""
    torch.manual_seed(0)
    embedding = nn.Embedding(vocabulary, 4).double()
    head = nn.Linear(4, vocabulary, bias=False).double()
    head.weight.data *= scale
    tokens = torch.arange(vocabulary).repeat(2).view(2, -1)
    targets = tokens.flip(1)
    expected = cross_entropy(head(embedding(tokens)).flatten(0, 1), targets.flatten())
    expected.backward()
    ours = VocabularyParallelEmbedding(embedding), VocabularyParallelHead(head)
    logits = ours[1](ours[0](tokens))
    assert logits.shape == (2, vocabulary, -(-vocabulary // world_size))
    with span("loss"):
        loss = parallel_cross_entropy(logits, targets, vocabulary)
    loss.backward()
    return [
        off(loss, expected),
        off(joined(ours[0].weight.grad, ours[0].weight), embedding.weight.grad),
        off(joined(ours[1].weight.grad, ours[1].weight), head.weight.grad),
        off(whole_of(ours[1].weight), head.weight.detach()),
    ]


# Models


def train_in_groups(rank, world_size):
    """Two models of two ranks each, on batches of their own, as in one process."""
    group = pair_of_mine()
    found = []
    for cut in (parallelize, parallelize_with_sequence):
        model = cut(training.new_model(torch.float64), group)
        loss_of = partial(parallel_cross_entropy, vocabulary=61, group=group)
        tokens, targets = training.new_batch(step=rank // 2)
        loss = loss_of(model(tokens), targets)
        whole = training.new_model(torch.float64)
        expected = training.flat_cross_entropy(whole(tokens), targets)
        found.append(off(loss, expected))
        loss.backward()
        expected.backward()
        if cut is parallelize_with_sequence:
            sum_replicated_gradients(model, group)
        for name, parameter in replicated(model).items():
            found.append(off(parameter.grad, whole.get_parameter(name).grad))
        weight = model.blocks[0].mlp.up.weight
        found.append(off(joined(weight.grad, weight), whole.blocks[0].mlp.up.weight.grad))
    return max(found)


def start_from_other_values(rank, world_size):
    """Rank 1 draws other values: all train with those of rank 0."""
    torch.manual_seed(rank)
    model = SmallTransformer(tied=False)
    first = SmallTransformer(tied=False)
    torch.manual_seed(0)
    first = SmallTransformer(tied=False)
    parallelize(model)
    expected = dict(first.named_parameters())
    values = training.whole_values(model)
    return max(off(values[name], expected[name].detach()) for name in expected)


def take_apart(rank, world_size):
    """Which parameters become pieces, and whether the tied two are still one."""
    model = parallelize(training.new_model(tied=True))
    pieces = [n for n, p in model.named_parameters() if isinstance(p, Piece)]
    return pieces, model.head.weight is model.token.weight


def lose_a_copy(rank, world_size, in_pairs=False):
    """One bit of one copy on the last rank, which may be in a group of two."""
    group = pair_of_mine() if in_pairs else None
    model = parallelize(training.new_model(), group)
    same = copies_that_differ(model, group)
    if rank == world_size - 1:
        with torch.no_grad():
            model.norm.weight[3] += 1e-7
    return same, copies_that_differ(model, group)


def draw_often(rank, world_size):
    """Dropout's masks, and what is drawn inside `own_draws` at two entries."""
    masks = keep_half(rank, world_size)
    torch.manual_seed(1)
    entries = []
    for _ in range(2):
        with own_draws():
            entries.append(torch.rand(8).tolist())
    return masks, entries, torch.rand(1).item()


def draw_in_pairs(rank, world_size):
    """What is drawn inside `own_draws` of a group of two."""
    torch.manual_seed(2)
    with own_draws(pair_of_mine()):
        return torch.rand(8).tolist()


# A mistake that equal bits do not find


class SumBothWays(torch.autograd.Function):
    """The sum of all ranks in forward, and once more in backward."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return sum_of(part, group)

    @staticmethod
    def backward(ctx, gradient):
        return sum_of(gradient, ctx.group), None


def with_sum_both_ways(model):
    return training.in_pieces(model, leave=SumBothWays)


# Bad input


def message(call):
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def make_every_mistake(rank, world_size):
    """What each of them raises on this rank, by name; with four ranks."""
    new = training.new_model
    tokens, targets = training.new_batch(0)
    found = {
        "kv heads": message(lambda: parallelize(new(kv_heads=2))),
        "heads": message(lambda: parallelize(new(heads=6, kv_heads=6))),
        "features": message(lambda: ColumnParallelLinear(nn.Linear(4, 10))),
        "rows": message(lambda: RowParallelLinear(nn.Linear(10, 4))),
        "twice": message(lambda: parallelize(parallelize(new()))),
    }
    deeper = new(depth=2 + (rank == 1))
    found["other model"] = message(lambda: parallelize(deeper))
    other = training.new_batch(step=rank // 2)[0]
    model = parallelize(new())
    wider = new(max_length=64 + (rank == 2))
    found["other table"] = message(lambda: parallelize(wider))
    double = new(torch.float64 if rank == 3 else torch.float32)
    found["other dtype"] = message(lambda: parallelize(double))
    found["other batch"] = message(lambda: model(other))
    longer = training.new_batch(0, length=12 + 4 * (rank == 3))[0]
    found["other shape"] = message(lambda: model(longer))
    logits = model(tokens)
    unknown = tokens.clone()
    unknown[0, 0] = 61
    found["token"] = message(lambda: model(unknown))
    found["negative"] = message(lambda: model(-unknown))
    loss = parallel_cross_entropy
    found["target"] = message(lambda: loss(logits, unknown, 61))
    sliced = parallelize_with_sequence(new())
    odd = training.new_batch(0, length=10)[0]
    found["sequence"] = message(lambda: sliced(odd))
    return found
