"""What `dispatch` and `combine` must do, on real ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mgpu_tutorial.experts.layer import drawn
from mgpu_tutorial.experts.parallel import combine, dispatch
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

EXPERTS = 12
SHARES = {1: [6], 2: [5, 2], 3: [4, 0, 3], 4: [3, 1, 0, 1]}  # tokens of each rank


def _rows_of(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows and their experts; the row of place i on rank r begins with 100 r + i."""
    places = torch.arange(SHARES[world_size][rank])
    rows = drawn(rank, len(places), 3)
    rows[:, 0] = 100 * rank + places
    return rows, (7 * (places + 1) + 5 * rank) % EXPERTS


def _sends(rank: int, world_size: int, dispatch: Callable) -> tuple:
    """The rows that arrive here, in the order of their names, and their experts."""
    gone = dispatch(*_rows_of(rank, world_size), EXPERTS)
    if gone is None:
        return None, None
    arrived, which, _ = gone
    order = arrived[:, 0].argsort()
    return arrived.detach()[order], which[order]


def reaches_its_expert(dispatch: Callable) -> None:
    """bring each row, with the number of its expert, to the rank of that expert"""
    for world_size in SHARES:
        every = [_rows_of(rank, world_size) for rank in range(world_size)]
        rows, which = (torch.cat(parts) for parts in zip(*every, strict=True))
        own = EXPERTS // world_size
        found = launch(_sends, world_size, dispatch).results
        for rank, (arrived, numbers) in enumerate(found):
            mine, who = which // own == rank, f"on rank {rank} of {world_size}"
            expect(arrived, rows[mine], f"{who} the arriving rows, each begins with its name")
            what = "the numbers of their experts (are rows and numbers in the same order?)"
            expect(numbers, which[mine] % own, f"{who} {what}")


def _returns(
    rank: int, world_size: int, dispatch: Callable, combine: Callable, groups: Sequence = ()
) -> list:
    """Each token's two rows go to experts that answer a row times their number + 1.

    A token is its name and a 1, and its weights are 1 and 100, so the 1 comes back as a
    number whose digits tell both experts.
    """
    given = [dist.new_subgroups_by_enumeration(groups)[0]] if groups else []
    rank, ranks = dist.get_rank(*given), dist.get_world_size(*given)
    rows, which = _rows_of(rank, ranks)
    rows = torch.stack([rows[:, 0], torch.ones_like(rows[:, 0])], dim=1)
    weights = torch.tensor([[1.0, 100.0]], dtype=rows.dtype).repeat(len(rows), 1)
    inputs = x, weights = rows.requires_grad_(), weights.requires_grad_()
    chosen = torch.stack([which, (which + 5) % EXPERTS], dim=1)
    rows = x.repeat_interleave(2, dim=0)
    arrived, mine, way = dispatch(rows, chosen.flatten(), EXPERTS, *given)
    first = EXPERTS // ranks * rank
    output = combine(arrived * (first + mine + 1)[:, None], way, weights, *given)
    expected = x * (weights * (chosen + 1)).sum(dim=1, keepdim=True)
    wanted = torch.autograd.grad(expected.sum(), inputs)
    found = [None, None]
    if getattr(output, "requires_grad", False):
        found = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
    return [(chosen, x.detach()), (output, expected), *zip(found, wanted, strict=True)]


def _expect_returned(dispatch: Callable, combine: Callable, groups: Sequence = ()) -> None:
    """AssertionError unless output and gradients are those of a plain weighed sum."""
    for world_size in [4] if groups else SHARES:
        results = launch(_returns, world_size, dispatch, combine, groups).results
        for rank, (sent, output, *gradients) in enumerate(results):
            who = f"on rank {rank} of {world_size}" + " in groups of two" * bool(groups)
            _expect_tokens(*output, f"{who} the output", *sent)
            for name, (found, wanted) in zip(("tokens", "weights"), gradients, strict=True):
                assert found is not None, f"{who}: no gradient reaches the {name}"
                _expect_tokens(found, wanted, f"{who} the gradient of the {name}", *sent)


def _expect_tokens(
    found: torch.Tensor,
    wanted: torch.Tensor,
    what: str,
    chosen: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Compare token by token, so that the row names the first that is wrong."""
    if found is None or found.shape != wanted.shape:
        expect(found, wanted, what)
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        token, (a, b) = tokens[i].int().tolist(), chosen[i].tolist()
        how = (
            f"times {a + 1} from expert {a}, times {b + 1} from expert {b}, weights 1 and 100"
        )
        expect(one, other, f"{what} of token {i}, {token} ({how})", within=1e-9)


def lets_gradients_back(dispatch: Callable) -> None:
    """let the gradients of the rows come back, and bring them to the right row"""
    _expect_returned(dispatch, combine)


def _sends_what_it_can(
    rank: int, world_size: int, dispatch: Callable, experts: int, rows: int, *which: int
) -> str:
    try:
        return f"returned {dispatch(torch.ones(rows, 3), torch.tensor(which), experts)}"
    except ValueError:
        return "a ValueError"


def refuses(dispatch: Callable) -> None:
    """refuse, by a ValueError, rows without an expert, and experts that can't be there"""
    cases = {
        "five rows for three of 12 experts": (12, 5, 0, 1, 2),
        "an expert 12 of 12": (12, 1, 12),
        "an expert 2 of 3 on two ranks": (3, 1, 2),
    }
    for what, given in cases.items():
        for said in launch(_sends_what_it_can, 2, dispatch, *given).results:
            assert said == "a ValueError", f"{what}: {said}"


def comes_home(combine: Callable) -> None:
    """give each token the weighted sum of its own results, and gradients too"""
    _expect_returned(dispatch, combine)


GROUPS = [[0, 2], [1, 3]]


def goes_out_in_a_group(dispatch: Callable) -> None:
    """do that in a group of ranks too: 0 and 2 are one, 1 and 3 the other"""
    _expect_returned(dispatch, combine, GROUPS)


def comes_home_in_a_group(combine: Callable) -> None:
    """do that in a group of ranks too: 0 and 2 are one, 1 and 3 the other"""
    _expect_returned(dispatch, combine, GROUPS)


def _in_autocast(rank: int, world_size: int, combine: Callable) -> float:
    """How far the sums of 8 tokens, and their weights' gradient, are from float64 at most."""
    torch.manual_seed(rank)
    tokens, weights = torch.randn(8, 16), torch.randn(8, 2).requires_grad_()
    chosen = torch.arange(16).view(8, 2) % 4
    arrived, _, way = dispatch(tokens.repeat_interleave(2, dim=0), chosen.flatten(), 4)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        output = combine(arrived, way, weights)
    output.sum().backward()
    sums = tokens.double() * weights.detach().double().sum(1, keepdim=True)
    one = tokens.double().sum(1, keepdim=True).expand(8, 2)
    pairs = (output, sums), (weights.grad, one)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def bears_autocast(combine: Callable) -> None:
    """lose no digits of float32 in bfloat16 autocast, which rounds what a product takes"""
    off = max(launch(_in_autocast, 2, combine).results)
    assert off < 1e-5, f"on 2 ranks in bfloat16 autocast: off by {off:.2%}"


def sends_twice(dispatch: Callable) -> None:
    """send the counts and then the rows, and each of them once"""
    report = launch(_sends, 2, dispatch, trace=True)
    for rank in range(2):
        ops = [e.op for e in report.events if e.rank == rank and e.op != "barrier"]
        expect(ops, ["all_to_all_single"] * 2, f"the calls of rank {rank}")


TRIED = [reaches_its_expert, lets_gradients_back, sends_twice, refuses, goes_out_in_a_group]
HOME = [comes_home, comes_home_in_a_group, bears_autocast]
build = Builder("experts", {dispatch: TRIED, combine: HOME})
