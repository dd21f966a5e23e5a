"""Which parameter belongs to which unit, without any rank."""

from torch import nn

from mgpu_tutorial.sharding.units import blocks_of, outermost, owners
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
    assert outermost([*model.blocks, model]) == {model}
    assert outermost(model.blocks) == set(model.blocks)


def test_a_parameter_belongs_to_the_innermost_unit():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    owned = {"": ["0.weight", "0.bias"], "1.0": ["1.0.weight"]}
    assert named(module, [module, module[1], module[1][0]]) == owned
    assert named(module, [module[1]]) == {"1": ["1.0.weight"]}


def test_what_two_units_share_belongs_to_one_around_both_or_to_none():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    both = [module[0], module[1]]
    assert named(module, both) == {"0": ["0.bias"], "1": ["1.bias"]}
    assert named(module, [*both, module])[""] == ["0.weight"]
