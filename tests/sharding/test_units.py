"""Which parameter belongs to which unit, without any rank."""

import torch
from torch import nn

from mgpu_tutorial.sharding.units import alike, blocks_of, outermost, owners, places_of
from mgpu_tutorial.shared.models import SmallTransformer


def named(module, units):
    """The owners by name, of parameters by name."""
    modules = {m: name for name, m in module.named_modules()}
    parameters = {p: name for name, p in module.named_parameters()}
    mine = owners(module, units).items()
    return {modules[unit]: [parameters[p] for p in own] for unit, own in mine}


def test_the_units_are_the_blocks_and_the_whole():
    model = SmallTransformer()
    assert blocks_of(model) == [*model.blocks, model]
    nested = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    assert blocks_of(nested) == [nested[0], nested[1][0], nested]
    assert blocks_of(nn.Linear(1, 1))[0].in_features == 1


def test_a_parameter_belongs_to_the_innermost_unit():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert named(module, [module, module[1], module[1][0]]) == {
        "": ["0.weight", "0.bias"],
        "1.0": ["1.0.weight"],
    }
    assert named(module, [module[1]]) == {"1": ["1.0.weight"]}


def test_what_two_units_share_belongs_to_one_around_both_or_to_none():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    both = [module[0], module[1]]
    assert named(module, both) == {"0": ["0.bias"], "1": ["1.bias"]}
    assert named(module, [*both, module])[""] == ["0.weight"]


def test_a_tied_parameter_has_two_places():
    model = SmallTransformer()
    places = list(places_of(model, [model.norm.bias, model.token.weight]))
    assert places == [
        (model.token, "weight", 1),
        (model.norm, "bias", 0),
        (model.head, "weight", 1),
    ]


def test_one_tensor_holds_one_dtype_and_one_kind():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).double())
    third, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1), False)
    groups = alike([first, second, third, frozen])
    assert [[id(p) for p in g] for g in groups] == [
        [id(first), id(third)],
        [id(second)],
        [id(frozen)],
    ]


def test_an_outermost_unit_is_inside_no_other():
    model = SmallTransformer()
    assert outermost([*model.blocks, model]) == {model}
    assert outermost(model.blocks) == set(model.blocks)
