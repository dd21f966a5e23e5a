"""What the tools must do that compare a run with one process, and what is dual to what."""

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.lab.words import in_a_row
from mgpu_tutorial.tensor_parallel.layers import shard
from mgpu_tutorial.wrong_gradient import job, kinds, trials


def _numbered(model: nn.Module) -> nn.Module:
    """Every number of every parameter is another whole number."""
    begin = 0
    for parameter in model.parameters():
        count = parameter.numel()
        parameter.data = torch.arange(begin, begin + count).double().view_as(parameter)
        begin += count
    return model


def _whole(
    rank: int,
    world_size: int,
    whole: Callable,
    plan: str,
    lacking: str = "",
    on: Collection[int] = (),
    forgets: bool = False,
) -> object:
    """The gradients are the numbers of the parameters, and one is missing on some ranks."""
    mesh = job.mesh_of(plan, world_size)
    stage, first = job.stage_of(_numbered(job.new_model()), mesh)
    for name, parameter in stage.named_parameters():
        layer, rest = name.split(".", 1)
        if f"{int(layer) + first}.{rest}" != lacking or rank not in on:
            parameter.grad = parameter.detach().clone()
    try:
        return whole(stage, mesh, 0 if forgets else first)
    except ValueError as error:
        return f"ValueError: {error}"


def _compare(whole: Callable, plan: str) -> None:
    right = {name: p.detach() for name, p in _numbered(job.new_model()).named_parameters()}
    for rank, found in enumerate(launch(_whole, job.ranks_of(plan), whole, plan).results):
        where = f"{plan}, rank {rank}"
        assert isinstance(found, dict), f"{where}: expected a dict by name, got {found!r:.80}"
        if lost := [name for name in right if name not in found]:
            raise AssertionError(f"{where}: {lost[0]} is not among {list(found)[:3]} …")
        if more := [name for name in found if name not in right]:
            raise AssertionError(f"{where}: one process has no {more[0]}")
        for name, expected in right.items():
            expect(found[name], expected, f"{where}: {name}")


def joins_shards(whole: Callable) -> None:
    """put the shards of a tp group together along their `cut`, and leave copies alone"""
    for plan in ("tp=2", "tp=4"):
        _compare(whole, plan)


def names_stages(whole: Callable) -> None:
    """name a gradient as one process does, and give every rank those of all stages"""
    for plan in ("pp=2", "pp=4"):
        _compare(whole, plan)


def mixes(whole: Callable) -> None:
    """do both at once, next to other ranks with the same part"""
    _compare(whole, "dp=2,tp=2,pp=2")


def _over_dp(rank: int, world_size: int, whole: Callable) -> object:
    """As experts do: a parameter that is cut over the dp ranks, beside a copy."""
    mesh = job.mesh_of("dp=2,tp=2", world_size)
    stage = nn.Sequential(_numbered(nn.Linear(3, 4)))
    stage[0].weight = shard(stage[0].weight, 0, mesh["dp"].get_group())
    for parameter in stage.parameters():
        parameter.grad = parameter.detach().clone()
    return whole(stage, mesh, 5)


def asks_the_shard(whole: Callable) -> None:
    """join a shard over its own group, as for experts that are cut along dp"""
    right = {f"5.{n}": p.detach() for n, p in _numbered(nn.Linear(3, 4)).named_parameters()}
    for rank, found in enumerate(launch(_over_dp, 4, whole).results):
        where = f"dp=2,tp=2 with a weight cut along dp, rank {rank}"
        assert isinstance(found, dict), f"{where}: expected a dict by name, got {found!r:.80}"
        expect(sorted(found), sorted(right), f"{where}: names")
        for name, expected in right.items():
            expect(found[name], expected, f"{where}: {name}")


def refuses_none(whole: Callable) -> None:
    """raise a ValueError on all ranks where even one of them lacks a gradient"""
    cases = (
        ("tp=2,pp=2", "3.1.bias", (2, 3)),
        ("tp=2,pp=2", "2.mlp.up.weight", (3,)),
        ("dp=2,pp=2", "3.1.bias", (3,)),
    )
    for plan, lacking, on in cases:
        results = launch(_whole, 4, whole, plan, lacking, on).results
        for rank, said in enumerate(results):
            where = f"{lacking} on rank {' and '.join(map(str, on))}"
            what = f"without a gradient of {where}, rank {rank} returned {said!r:.60}"
            assert str(said).startswith("ValueError"), what


def refuses_one_name_twice(whole: Callable) -> None:
    """raise a ValueError on all ranks where two stages give one name, as without `first`"""
    results = launch(_whole, 2, whole, "pp=2", forgets=True).results
    for rank, said in enumerate(results):
        count = f"{len(said)} gradients" if isinstance(said, dict) else f"{said!r:.60}"
        what = f"two stages with first = 0, rank {rank} returned {count}"
        assert str(said).startswith("ValueError"), what


def _gradients_of(x: Tensor) -> dict[str, Tensor]:
    """Those of one process, for a batch of any dtype."""
    return trials.alone(x, job.batch_of()[1], random=True)


def _in_parts(x: Tensor) -> dict[str, Tensor]:
    """The same gradients, added up from four micro-batches: only rounding differs."""
    model, targets = job.new_model(random=True).to(x.dtype), job.batch_of()[1]
    tokens = (targets != job.NOTHING).sum()
    for part, classes in zip(x.split(2), targets.split(2), strict=True):
        scores = model(part).flatten(0, 1)
        (cross_entropy(scores, classes.flatten(), reduction="sum") / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


Case = tuple[torch.dtype, dict[str, float]]  # a dtype, and factors of gradients


def _say(
    rank: int, world_size: int, first_difference: Callable, cases: list[Case]
) -> list[object]:
    """What is said of gradients that are rounded differently, some of them times a factor."""
    said = []
    for dtype, by in cases:
        x = job.batch_of()[0].to(dtype)
        found = {name: g * by.get(name, 1.0) for name, g in _in_parts(x).items()}
        said.append(first_difference(found, _gradients_of, x))
    return said


def _said(first_difference: Callable, *cases: Case) -> list[object]:
    """The same, on a rank of one thread: on a busy machine many threads would only wait."""
    return launch(_say, 1, first_difference, list(cases)).results[0]


def passes_rounding(first_difference: Callable) -> None:
    """return None where only rounding differs, in float64, float32 and bfloat16"""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    every = _said(first_difference, *((dtype, {}) for dtype in dtypes))
    for dtype, said in zip(dtypes, every, strict=True):
        assert said is None, f"added up in four parts, in {dtype}: {said!r}, expected None"


def names_a_wrong_one(first_difference: Callable) -> None:
    """name a gradient that is twice too long, in each of these"""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    pairs = [(d, name) for d in dtypes for name in ("0.attention_norm.weight", "3.1.bias")]
    every = _said(first_difference, *((dtype, {name: 2.0}) for dtype, name in pairs))
    for (dtype, name), said in zip(pairs, every, strict=True):
        assert said == name, f"{name} twice too long, in {dtype}: {said!r}"


def takes_the_limit_from_the_dtype(first_difference: Callable) -> None:
    """name a gradient that is off by a thousandth, but not in bfloat16, which rounds more"""
    by, dtypes = {"1.mlp.up.weight": 1.001}, (torch.float32, torch.bfloat16)
    every = _said(first_difference, *((dtype, by) for dtype in dtypes))
    for dtype, said, expected in zip(dtypes, every, ("1.mlp.up.weight", None), strict=True):
        assert said == expected, f"off by 0.1% in {dtype}: {said!r}, expected {expected!r}"


def names_the_first(first_difference: Callable) -> None:
    """name the one that backward reaches first, the last in order, if several are off"""
    by = {"0.mlp.up.weight": 2.0, "2.mlp.up.weight": 2.0, "1.mlp.down.bias": 0.5}
    (said,) = _said(first_difference, (torch.float32, by))
    assert said == "2.mlp.up.weight", f"wrong are {', '.join(by)}: {said!r} is not the first"


def names_nan(first_difference: Callable) -> None:
    """name a gradient that is NaN"""
    (said,) = _said(first_difference, (torch.float32, {"1.mlp.up.bias": torch.nan}))
    assert said == "1.mlp.up.bias", f"1.mlp.up.bias is NaN: {said!r}"


def refuses_other_names(first_difference: Callable) -> None:
    """raise a ValueError where a gradient is missing, or is one too many"""
    x = _near_one(torch.float64)
    right = _uneven(x)
    cases = {
        "without 1.calm": {"0.rough": right["0.rough"]},
        "with 2.more": right | {"2.more": x},
    }
    for what, found in cases.items():
        try:
            said = first_difference(found, _uneven, x)
        except ValueError:
            continue
        raise AssertionError(f"{what}: returned {said!r}")


def _near_one(dtype: torch.dtype) -> Tensor:
    """Numbers a thousandth above 1."""
    return 1 + torch.linspace(0.0005, 0.0015, 16).to(dtype)


def _uneven(x: Tensor) -> dict[str, Tensor]:
    """Near 1 a unit in the last place moves the first a thousand times as far: it cancels."""
    return {"0.rough": x - 1, "1.calm": 2 * x}


def _off(dtype: torch.dtype, name: str, units: float) -> tuple[Tensor, dict[str, Tensor]]:
    """A batch, and its gradients, of which one is that many eps of its length too long."""
    x = _near_one(dtype)
    found = _uneven(x)
    found[name] = found[name] * (1 + units * torch.finfo(dtype).eps)
    return x, found


def measures_each_gradient(first_difference: Callable) -> None:
    """measure each gradient: one that cancels may be further off than one that doesn't"""
    for dtype in (torch.float64, torch.float32):
        for name, units, expected in (("0.rough", 1800, None), ("1.calm", 100, "1.calm")):
            x, found = _off(dtype, name, units)
            said = first_difference(found, _uneven, x)
            of = "x - 1, near x = 1" if name == "0.rough" else "2 x"
            what = f"{name} is {of}, and off by {units} eps, in {dtype}"
            assert said == expected, f"{what}: {said!r}, expected {expected!r}"
    x = 100 * _near_one(torch.float64)
    found = {"0.rough": (x - 100) * (1 + 1800 * torch.finfo(x.dtype).eps)}
    said = first_difference(found, lambda x: {"0.rough": x - 100}, x)
    what = "x - 100, off by 1800 eps for a batch a hundred times as large"
    assert said is None, f"{what}: {said!r}, expected None"


def bears_what_does_not_move(first_difference: Callable) -> None:
    """bear a unit in the last place where nothing moves, as behind a norm in float32"""

    def rounded(x: Tensor) -> dict[str, Tensor]:
        return {"0.weight": 3 * x.float().double()}

    x = _near_one(torch.float64)
    for units, expected in ((2, None), (1000, "0.weight")):
        found = {n: g * (1 + units * 2**-52) for n, g in rounded(x).items()}
        said = first_difference(found, rounded, x)
        what = f"0.weight is 3 x, rounded to float32, and off by {units} eps in float64"
        assert said == expected, f"{what}: {said!r}, expected {expected!r}"


def counts_times(first_difference: Callable) -> None:
    """let `times` decide how much further is too far, and leave x as it was"""
    for name, units, times, expected in (
        ("0.rough", 1800, 1.0, "0.rough"),
        ("1.calm", 100, 1000.0, None),
    ):
        x, found = _off(torch.float64, name, units)
        said = first_difference(found, _uneven, x, times)
        what = f"{name} is off by {units} eps, times={times:g}"
        assert said == expected, f"{what}: {said!r}, expected {expected!r}"
        assert torch.equal(x, _near_one(torch.float64)), "x is changed afterwards"


RIGHT = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.float64)
GROUPS = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}


def _expect_kind(kind: Callable, ranks: list[Tensor], expected: str, what: str) -> None:
    said = kind(ranks, RIGHT, 1e-6, GROUPS)
    assert said == expected, f"{what}: {said!r}, expected {expected!r}"


def names_a_missing_sum(kind: Callable) -> None:
    """name the group whose ranks' sum would be right, in each of its groups of ranks"""
    part = RIGHT.flip(0) / 3
    rest = RIGHT - part
    _expect_kind(kind, [part, rest, part, rest], "never summed over tp", "summands along tp")
    _expect_kind(kind, [part, part, rest, rest], "never summed over dp", "summands along dp")
    odd = [part, rest, part, part]
    _expect_kind(kind, odd, "neither", "ranks 0 and 1 add up to it, ranks 2 and 3 do not")
    near = [part + 1e-8, rest, part - 1e-8, rest]
    _expect_kind(kind, near, "never summed over tp", "summands along tp, rounded")


def counts_right_rows(kind: Callable) -> None:
    """count the rows that are right, within the limit, where only some are"""
    for wrong in ([2, 3], [0]):
        found = RIGHT + 1e-8
        found[wrong] *= 2
        expected = f"right in {4 - len(wrong)} of 4 rows"
        _expect_kind(kind, [found] * 4, expected, f"rows {in_a_row(map(str, wrong))} doubled")


def knows_no_other(kind: Callable) -> None:
    """say "neither" where no row is right and no sum is"""
    _expect_kind(kind, [3 * RIGHT] * 4, "neither", "three times as long on all ranks")


KINDS = "replicated", "partial", "varying", "invariant"


def _backward(rank: int, world_size: int) -> dict[str, tuple[float, list[float]]]:
    """Of a number of each kind what this rank gets backward, and what one process does.

    The loss is a sum over the ranks' own parts, or the same on all ranks.
    """
    group, ranks = dist.group.WORLD, range(world_size)
    number = {kind: torch.ones((), requires_grad=True) for kind in KINDS}
    weights = [2.0 + rank for rank in ranks]  # of each rank's own part of the loss
    for kind in ("replicated", "varying"):
        job.Sum.apply(weights[rank] * number[kind], group).backward()
    (5 * job.Sum.apply(number["partial"], group)).backward()
    (5 * number["invariant"]).backward()
    whole = {
        "replicated": [sum(weights)] * world_size,
        "partial": [5.0] * world_size,
        "varying": weights,  # each number has a gradient of its own
        "invariant": [5.0] * world_size,
    }
    return {kind: (number[kind].grad.item(), whole[kind]) for kind in KINDS}


def is_what_autograd_says(dual: Callable) -> None:
    """name what two and three ranks get as the gradient of a number of each kind"""
    for ranks in (2, 3):
        results = launch(_backward, ranks).results
        for kind in KINDS:
            got, whole = [own[kind][0] for own in results], results[0][kind][1]
            is_one = len(set(whole)) == 1
            fits = {
                "replicated": is_one and got == whole,
                "partial": is_one and sum(got) == whole[0],
                "varying": not is_one and got == whole,
                "invariant": is_one and got == whole,
            }
            said = dual(kind)
            assert said in fits, f"of {kind}: {said!r} is none of {', '.join(fits)}"
            seen, right = (
                in_a_row([f"{number:g}" for number in numbers])
                for numbers in (got, whole[:1] if is_one else whole)
            )
            what = f"a number that is {kind}: the ranks get {seen}, and one process {right}"
            assert fits[said], f"{what}. That is not {said}"


def is_its_own_inverse(dual: Callable) -> None:
    """give the kind back when it is asked for the dual of the dual"""
    for kind in KINDS:
        twice = dual(dual(kind))
        assert twice == kind, f"of {kind} the dual's dual is {twice!r}"


def refuses_other_words(dual: Callable) -> None:
    """raise a ValueError for any other word"""
    for word in ("sharded", ""):
        try:
            said = dual(word)
        except ValueError:
            continue
        raise AssertionError(f"of {word!r}: returned {said!r}")


ROWS = [passes_rounding, names_a_wrong_one, takes_the_limit_from_the_dtype]
ROWS += [measures_each_gradient, bears_what_does_not_move, counts_times]
ROWS += [names_the_first, names_nan, refuses_other_names]
build = Builder(
    "wrong_gradient",
    {
        trials.whole_gradients: [
            joins_shards,
            names_stages,
            mixes,
            asks_the_shard,
            refuses_none,
            refuses_one_name_twice,
        ],
        trials.first_difference: ROWS,
        trials.kind_on_ranks: [names_a_missing_sum, counts_right_rows, knows_no_other],
        kinds.dual: [is_what_autograd_says, is_its_own_inverse, refuses_other_words],
    },
)
