"""What cannot be cut is refused on every rank; a shard does what the whole does."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.shared import models
from mgpu_tutorial.tensor_parallel import block, layers
from mgpu_tutorial.tensor_parallel.block import PLAN, Block, parallelize, whole_of
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mgpu_tutorial.tensor_parallel_in_practice.vocabulary import (
    VocabularyParallelEmbedding as Embedding,
)
from mgpu_tutorial.tensor_parallel_in_practice.vocabulary import VocabularyParallelHead


def cut(rank, world_size, width=48, heads=12, plan=PLAN, times=1):
    model = Block(width, heads)
    for _ in range(times):
        parallelize(model, plan)


def cut_tied(rank, world_size):
    model = Block()
    model.extra = nn.Linear(48, 192, bias=False)
    model.extra.weight = model.mlp.up.weight
    parallelize(model, PLAN)


def cut_layer(rank, world_size, kind, outputs, inputs):
    kind(nn.Linear(inputs, outputs))


def cut_twice(rank, world_size, kind):
    kind(kind(nn.Linear(8, 8)))


def gather_nothing(rank, world_size):
    model = parallelize(Block(), PLAN)
    whole_of(model.mlp.up.weight.grad, model.mlp.up.weight)


def assign(rank, world_size, kind):
    """Load this rank's own file; with assign=True its parameters would be no shards."""
    model = nn.Sequential(kind(nn.Embedding(4, 2) if kind is Embedding else nn.Linear(4, 4)))
    model.load_state_dict(model.state_dict())
    assert isinstance(model[0].weight, layers.Shard)
    model.load_state_dict(model.state_dict(), assign=True)


@pytest.mark.parametrize(
    "kind", [ColumnParallelLinear, RowParallelLinear, Embedding, VocabularyParallelHead]
)
def test_a_shard_is_not_replaced_by_what_a_file_has(refused, kind):
    """copies_that_differ, clipping and whole_of would take the shards for copies."""
    refused(2, "in place of the shard 0.weight", assign, kind)


@pytest.mark.parametrize(
    "count, words, worker, given",
    [
        (5, "5 ranks cannot share 12 heads evenly: attention", cut, ()),
        (8, "8 ranks cannot share 12 heads evenly: attention", cut, ()),
        (2, "5 heads cannot share 48 features evenly", cut, (48, 5)),
        (2, "no layer's name ends with 'atention.qkv'", cut, (48, 12, {"atention.qkv": 0})),
        (2, "no layer's name ends with 'tention.qkv'", cut, (48, 12, {"tention.qkv": 0})),
        (2, "has shards already: cut a model once", cut, (48, 12, PLAN, 2)),
        (2, "mlp.up.weight and extra.weight are one parameter", cut_tied, ()),
        (2, "a shard already", cut_twice, (ColumnParallelLinear,)),
        (2, "a shard already", cut_twice, (RowParallelLinear,)),
        (3, "8 features cannot be cut into 3", cut_layer, (ColumnParallelLinear, 8, 9)),
        (3, "8 features cannot be cut into 3", cut_layer, (RowParallelLinear, 9, 8)),
        (3, "2 features cannot be cut into 3", cut_layer, (RowParallelLinear, 9, 2)),
        (2, "has no gradient: is it frozen, or unused?", gather_nothing, ()),
    ],
)
def test_it_is_refused_on_every_rank(refused, count, words, worker, given):
    refused(count, words, worker, *given)


def cut_norm(rank, world_size):
    parallelize(Block(), {"mlp_norm": ColumnParallelLinear})


def multiply(rank, world_size, shape):
    RowParallelLinear(nn.Linear(8, 4))(torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 8), (2, 3), (2, 5, 8), ()])
def test_an_input_that_is_not_this_ranks_part_is_refused(refused, shape):
    words = f"an input of shape {shape}, and this rank multiplies 4 of its features"
    refused(2, words, multiply, shape)


IN_A_ROW = {"0": ColumnParallelLinear, "3": RowParallelLinear}


def cut_around(rank, world_size, layer):
    row = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), layer, nn.Linear(16, 8))
    plan = {f"mlp.{number}": kind for number, kind in IN_A_ROW.items()}
    parallelize(nn.ModuleDict({"mlp": row}), plan)


MIXES = nn.GLU(), nn.Softmax(-1), nn.LogSoftmax(-1), nn.LayerNorm(16), nn.RMSNorm(16)
MIXES += nn.InstanceNorm1d(16), nn.BatchNorm1d(16), nn.PReLU()


@pytest.mark.parametrize("layer", MIXES, ids=lambda layer: type(layer).__name__)
def test_what_mixes_columns_does_not_stand_between_them_and_rows(refused, layer):
    words = f"mlp.2 is a {type(layer).__name__}, which mixes the columns of mlp.0"
    refused(2, words, cut_around, layer)


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 2


def hooked():
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda module, given, out: out * 0.5)
    return layer


MORE = {
    "a forward": lambda: Halved(8, 8),
    "an embedding": lambda: Scaled(8, 8),
    "a hook": hooked,
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "an old weight norm": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
}


def cut_more(rank, world_size, name):
    layer = MORE[name]()
    kind = Embedding if "embedding" in name else ColumnParallelLinear
    parallelize(nn.ModuleDict({"up": layer}), {"up": kind})


@pytest.mark.parametrize("name", MORE)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_what_a_layer_does_besides_its_product_is_not_left_out(refused, name):
    refused(2, "a hook or a parametrization of its own, which", cut_more, name)


def beside_one_process(rank, world_size):
    """A norm before the columns, one after the rows, and between them what is alone."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8)
    one = nn.Sequential(nn.LayerNorm(8), *inner, nn.LayerNorm(8), nn.Softmax(-1)).double()
    plan = {"1": ColumnParallelLinear, "4": RowParallelLinear}
    shared, x = (
        parallelize(deepcopy(one), plan),
        torch.linspace(-1, 1, 24).view(3, 8).double(),
    )
    return largest_difference(shared(x), one(x))


def test_norms_around_columns_and_rows_are_right(ranks):
    assert max(ranks(2, beside_one_process).results) < 1e-14


def cut_heads(rank, world_size, kind):
    plan = dict.fromkeys(("query", "key", "value"), ColumnParallelLinear)
    parallelize(kind(), plan | {"out": RowParallelLinear})


class FewKeys(models.Attention):
    """Four heads of queries, two of keys and values."""

    def __init__(self):
        super().__init__(8, 4)
        self.key, self.value = nn.Linear(8, 4), nn.Linear(8, 4)


@pytest.mark.parametrize(
    "kind, count, words",
    [
        (lambda: models.Block(48, 4), 3, "3 ranks cannot share 4 heads evenly: attention"),
        (lambda: models.Block(48, 4), 6, "6 ranks cannot share 4 heads evenly: attention"),
        (lambda: nn.Sequential(FewKeys()), 4, "4 ranks cannot share 2 heads evenly: 0"),
    ],
)
def test_heads_of_other_attention_are_not_cut_through(refused, kind, count, words):
    refused(count, words, cut_heads, kind)


def cut_attention(rank, world_size, inside):
    attention = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"attention": attention}) if inside else attention
    parallelize(model, {"out_proj": RowParallelLinear})


@pytest.mark.parametrize("inside", [True, False])
def test_attention_that_reads_its_weights_itself_is_refused(refused, inside):
    refused(2, "is a MultiheadAttention, which reads the weights", cut_attention, inside)


def cut_embedding(rank, world_size, kind):
    kind(nn.Embedding(8, 4))


def test_what_is_no_product_is_not_cut(refused):
    refused(2, "mlp_norm is a LayerNorm, of which ColumnParallelLinear cannot", cut_norm)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        refused(2, "Embedding is no product of matrices", cut_embedding, kind)


def differentiate_twice(rank, world_size, operator):
    x = torch.ones(2, requires_grad=True)
    loss = operator.apply(x).square().sum()
    torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("operator", [layers.CopyToRanks, layers.SumOverRanks])
def test_a_second_derivative_is_refused(refused, operator):
    words = f"a second derivative through {operator.__name__} is not computed"
    sent = operator is layers.SumOverRanks  # in forward
    refused(2, words, differentiate_twice, operator, sent=sent)


def compare_copies(rank, world_size, how):
    own = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    if rank and how == "fewer":
        del own["a"]
    if rank and how == "more":
        own["c"] = torch.ones(1)
    if rank and how == "turned":  # the same bytes
        own["a"] = torch.ones(3, 2)
    block.copies_that_differ(nn.ParameterDict(own))


@pytest.mark.parametrize(
    "how, words",
    [
        ("fewer", "`a` is (2, 3) on rank 0 and missing on rank 1"),
        ("more", "`c` is missing on rank 0 and (1,) on rank 1"),
        ("turned", "`a` is (2, 3) on rank 0 and (3, 2) on rank 1"),
    ],
)
def test_copies_of_other_models_are_refused_on_every_rank(refused, how, words):
    refused(2, words, compare_copies, how, sent=True)


def marks_of_a_copy(rank, world_size):
    group = dist.new_group([0, 1])
    model = deepcopy(parallelize(block.new_block(), PLAN, group))
    shards = [p for p in model.parameters() if isinstance(p, layers.Shard)]
    weight = model.mlp.up.weight
    block.gradients_of(model)
    return len(shards), {p.group is group for p in shards}, whole_of(weight.grad, weight)


def test_a_deep_copy_knows_its_shards(ranks):
    """Without their marks a wrapper would average them, and rank 0's replace the others."""
    block.gradients_of(one := block.new_block())
    for count, in_group, gradient in ranks(2, marks_of_a_copy).results:
        assert (count, in_group) == (6, {True})
        assert largest_difference(gradient, one.mlp.up.weight.grad) < 1e-14


def of_a_layer(rank, world_size, kind, dtype, bias, frozen):
    """A layer twice in a row: output and gradients, put together, and those of the whole."""
    torch.manual_seed(0)
    whole = nn.Linear(12, 24, bias, dtype=dtype)
    if frozen:
        whole.weight.requires_grad_(False)
    layer, x = kind(deepcopy(whole)), torch.randn(2, 12, dtype=dtype)
    part = x.chunk(world_size, -1)[rank] if kind is RowParallelLinear else x
    for _ in range(2):
        output, expected = layer(part), whole(x)
        if output.requires_grad:
            output.square().sum().backward()
            expected.square().sum().backward()
    if kind is ColumnParallelLinear:
        expected = expected.chunk(world_size, -1)[rank]
    pairs = [(output.detach(), expected.detach())]
    for name, parameter in layer.named_parameters():
        one = whole.get_parameter(name)
        assert parameter.requires_grad == one.requires_grad and parameter.dtype == dtype
        if parameter.requires_grad:
            pairs.append((whole_of(parameter.grad, parameter), one.grad))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "count, dtype, bias",
    [(1, torch.float64, True), (3, torch.float64, False), (2, torch.float16, True)]
    + [(2, torch.bfloat16, False)],
)
def test_a_layer_is_the_whole_one(ranks, count, dtype, bias, frozen, kind):
    far = max(ranks(count, of_a_layer, kind, dtype, bias, frozen).results)
    assert far < (1e-14 if dtype == torch.float64 else 2e-2)


def turned(rank, world_size):
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    other = x.T.contiguous() if rank else x.T  # the same numbers, in another order in memory
    both = [layers.sum_of(other.detach()), layers.SumOverRanks.apply(other)]
    layers.CopyToRanks.apply(x).T.square().sum().backward()
    return [*both, x.grad]


def test_a_part_may_lie_in_any_order_in_memory(ranks):
    x = torch.arange(6.0).view(2, 3)
    for found in ranks(2, turned).results:
        assert largest_difference(found, [2 * x.T, 2 * x.T, 4 * x]) == 0


def sum_truths(rank, world_size):
    layers.sum_of(torch.ones(2, dtype=torch.bool))


def test_truths_are_not_summed(refused):
    refused(2, "a sum of torch.bool counts nothing: sum tensor.int()", sum_truths)


def odd_sums(rank, world_size):
    parts = torch.zeros(0, 3), torch.tensor(3), torch.tensor([1, 2]), torch.ones(2).half()
    return [layers.sum_of(part) for part in parts]


def test_a_part_may_be_empty_a_number_whole_or_short(ranks):
    numbers = torch.tensor(6), torch.tensor([2, 4]), 2 * torch.ones(2).half()
    for found in ranks(2, odd_sums).results:
        torch.testing.assert_close(found, [torch.zeros(0, 3), *numbers])


def frozen_attention(rank, world_size):
    """A block whose attention is frozen: which parameters are trained, and the others'."""
    model = block.new_block()
    model.attention.requires_grad_(False)
    one = deepcopy(model)
    parallelize(model, PLAN)
    block.gradients_of(model)
    block.gradients_of(one)
    far = {}
    for name, parameter in model.named_parameters():
        whole = one.get_parameter(name)
        assert (parameter.grad is None) == (whole.grad is None), name
        if whole.grad is not None:
            far[name] = largest_difference(whole_of(parameter.grad, parameter), whole.grad)
    return far


def test_what_was_frozen_stays_frozen(ranks):
    for far in ranks(2, frozen_attention).results:
        assert len(far) == 8 and max(far.values()) < 1e-14


def in_another_group(rank, world_size, call):
    groups = [dist.new_group([r]) for r in range(world_size)]
    return call(groups[1 - rank])


@pytest.mark.parametrize(
    "call",
    [
        lambda group: layers.SumOverRanks.apply(torch.ones(1), group),
        lambda group: ColumnParallelLinear(nn.Linear(4, 4), group),
        lambda group: RowParallelLinear(nn.Linear(4, 4), group),
    ],
)
def test_a_group_without_this_rank_is_refused(refused, call):
    """torch's calls would return at once, and leave each rank with its own part."""
    refused(2, "isn't in the group that it was given", in_another_group, call, sent=True)


def cut_a_fast_path(rank, world_size):
    plan = {"linear1": ColumnParallelLinear, "linear2": RowParallelLinear}
    parallelize(nn.TransformerEncoderLayer(8, 2, 16), plan)


def test_a_layer_that_reads_its_weights_itself_in_eval_is_refused(refused):
    refused(2, "is a TransformerEncoderLayer, whose fast path", cut_a_fast_path)


FORGOTTEN = [
    {"attention.qkv": ColumnParallelLinear},
    {"mlp.up": ColumnParallelLinear, "mlp.down": ColumnParallelLinear},
    PLAN | {"mlp.down": ColumnParallelLinear},
]


def cut_by(rank, world_size, plan):
    parallelize(block.new_block(), plan)


@pytest.mark.parametrize("plan", FORGOTTEN)
def test_columns_without_rows_are_refused(refused, plan):
    """Each rank would go on with its own features, and none would know."""
    refused(2, "is cut by columns, and nothing in", cut_by, plan)


def cut_a_perceptron_in_a_row(rank, world_size):
    """Columns in an inner Sequential, rows in the one around it."""
    model = nn.Sequential()
    model.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    model.down = nn.Linear(8, 4)
    one = deepcopy(model.double())
    parallelize(model, {"inner.0": ColumnParallelLinear, "down": RowParallelLinear})
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    return largest_difference(model(x), one(x))


def test_rows_may_stand_around_the_columns(ranks):
    assert max(ranks(2, cut_a_perceptron_in_a_row).results) < 1e-14
