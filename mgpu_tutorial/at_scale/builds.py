"""What the planner's loop must find, and what the best mix must be."""

from collections.abc import Callable
from itertools import product

from mgpu_tutorial.at_scale import mix, planner
from mgpu_tutorial.at_scale.mix import exposed_seconds
from mgpu_tutorial.lab.teach.build import Builder, expect


def agree(splits: Callable, *limits: int) -> None:
    """Compare with all combinations, in any order; the first that is wrong is named."""
    gpus, tensor, context, experts = limits
    sizes = [k for k in range(1, gpus + 1) if gpus % k == 0]
    wanted = [
        (tp, pp, cp, dp, ep)
        for tp, pp, cp, dp, ep in product(sizes, repeat=5)
        if tp * pp * cp * dp == gpus and tp <= tensor and cp <= context
        if dp % ep == 0 and experts % ep == 0
    ]
    call, found = f"splits{limits}", splits(*limits)
    assert found is not None, f"{call}: nothing was returned. Is a `return` missing?"
    found = [tuple(one) for one in found]
    for one in found:
        assert one in wanted, f"{call}: {one} is no plan: {fault(one, *limits)}"
    for one in wanted:
        assert one in found, f"{call}: {one} is missing"
    expect(len(found), len(wanted), f"{call}: the plans, each once")


def fault(mix: tuple, gpus: int, tensor: int, context: int, experts: int) -> str:
    """What is wrong with a mix that is no plan."""
    order = "the order is TP, PP, CP, DP, EP"
    if len(mix) != 5:
        return order
    tp, pp, cp, dp, ep = mix
    if tp * pp * cp * dp != gpus:
        return f"TP · PP · CP · DP is {tp * pp * cp * dp}, not {gpus}"
    for name, size, most in ("TP", tp, tensor), ("CP", cp, context):
        if size > most:
            return f"{name} is {size}, and at most {most} is allowed ({order})"
    return f"EP {ep} must divide DP {dp} and the {experts} experts"


def shares_out_a_few(splits: Callable) -> None:
    """find every mix of TP, PP and DP for 1 and 12 GPUs once, with CP and EP 1"""
    agree(splits, 1, 1, 1, 1)
    agree(splits, 12, 12, 1, 1)


def keeps_the_limits(splits: Callable) -> None:
    """share matrices over TP and sequences over CP, up to what is allowed"""
    agree(splits, 24, 2, 4, 1)
    agree(splits, 12, 4, 1, 1)  # TP 3 is allowed as well


def puts_experts_on_replicas(splits: Callable) -> None:
    """take EP from the ranks of DP, so that it divides DP and the experts"""
    agree(splits, 8, 2, 2, 8)
    agree(splits, 24, 1, 1, 4)


def least(best_mix: Callable, gather: float, summing: float, compute: float) -> None:
    """Compare TP with the best of a fine grid, and FSDP with the GPUs that are left."""
    grid = [1 + k / 1000 for k in range(200_000)]
    wanted = min(grid, key=lambda tp: exposed_seconds(tp, gather, summing, compute))
    seconds = f"{gather:g} s to gather, {summing:g} per rank of TP, {compute:g} to compute"
    for gpus in 512, 4096:
        fsdp, tp = best_mix(gpus, gather, summing, compute)
        expect(tp, wanted, f"TP for {seconds}", 2e-3)
        expect(fsdp, gpus / tp, f"FSDP on {gpus} GPUs with TP {tp:g}", 1e-6)


def leaves_alone_what_hides(best_mix: Callable) -> None:
    """take FSDP alone where all gathering hides anyway"""
    least(best_mix, 3, 1, 4)


def takes_as_much_as_hides(best_mix: Callable) -> None:
    """take as much TP as gathering needs to hide, where that is worth its messages"""
    least(best_mix, 12, 0.1, 4)
    least(best_mix, 20, 0.2, 4)


def stops_where_a_rank_costs_what_it_saves(best_mix: Callable) -> None:
    """stop before, where one more rank of TP would add more than it saves"""
    least(best_mix, 16, 1, 1)
    least(best_mix, 8, 2, 0.5)


TRIED = [shares_out_a_few, keeps_the_limits, puts_experts_on_replicas]
MIX = [
    leaves_alone_what_hides,
    takes_as_much_as_hides,
    stops_where_a_rank_costs_what_it_saves,
]
build = Builder("at_scale", {planner.splits: TRIED, mix.best_mix: MIX})
