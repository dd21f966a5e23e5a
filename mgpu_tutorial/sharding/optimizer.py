"""ZeRO 1: every rank has all parameters and all gradients, and steps its share of them.

Only the optimizer's state is shared out, which for Adam is half of all that training keeps
(https://arxiv.org/abs/1910.02054, section 5.1).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PARCEL = 2**20  # bytes: below that a call costs more than copying


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which each rank runs its share; then the ranks tell each other.

    Wraps any class of `torch.optim`: `ShardedOptimizer(model.parameters(), Adam, lr=1e-3)`.
    Every rank must pass the same parameters in the same order. Before `step` the gradients
    must be averaged, by anybody, or by `average_gradients`, which sends less. Groups of
    parameters, and schedulers, work as usual.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        **kwargs: Any,
    ) -> None:
        if not (
            isinstance(optimizer_class, type)
            and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            raise TypeError(
                f"optimizer_class must be a class of torch.optim, got {optimizer_class!r}"
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        super().__init__(params, kwargs)
        self.every = [p for group in self.param_groups for p in group["params"]]
        self.owner = share_out(self.every, self.world_size)
        # a group of which this rank owns nothing stays, so that the groups' order is the same
        mine = [{**group, "params": self._own(group)} for group in self.param_groups]
        self.inner = optimizer_class(mine, **kwargs)
        self.state = self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name, value in inner.items():
                outer.setdefault(name, value)  # the class's own defaults, for schedulers

    def _own(self, group: dict[str, Any]) -> list[nn.Parameter]:
        return [p for p in group["params"] if self.owner[p] == self.rank]

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.every if p.requires_grad]

    @torch.no_grad()
    def average_gradients(self) -> None:
        """The mean of each gradient goes to its owner; what the others keep means nothing.

        Half the bytes of an all_reduce, which would also send the mean back to everybody.
        """
        for parameter in self._trained():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= self.world_size
        parcels = [Parcel(owner, [p.grad for p in some]) for owner, some in self._parcels()]
        works = [dist.reduce(p.flat, p.owner, async_op=True) for p in parcels]
        for parcel, work in zip(parcels, works, strict=True):
            work.wait()
            parcel.unpack()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Each rank steps the parameters that it owns, and sends them to all others."""
        loss = self._loss_of(closure)
        self._hand_on_settings()  # a scheduler has changed ours
        self.inner.step()
        parcels = [Parcel(owner, [p.data for p in some]) for owner, some in self._parcels()]
        works = [dist.broadcast(p.flat, p.owner, async_op=True) for p in parcels]
        for parcel, work in zip(parcels, works, strict=True):
            work.wait()
            parcel.unpack()
        return loss

    def _parcels(self) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """The trained parameters that go in one call, and their owner: alike on all ranks."""
        filling: dict[tuple, list[nn.Parameter]] = {}
        for parameter in self._trained():
            kind = self.owner[parameter], parameter.dtype, parameter.device
            parcel = filling.setdefault(kind, [])
            parcel.append(parameter)
            if sum(p.numel() * p.element_size() for p in parcel) >= PARCEL:
                yield kind[0], filling.pop(kind)
        for (owner, *_), parcel in filling.items():
            yield owner, parcel

    def _loss_of(self, closure: Callable[[], float] | None) -> float | None:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _hand_on_settings(self) -> None:
        """The inner optimizer gets what the groups of this one say now."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({k: v for k, v in outer.items() if k != "params"})

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer of one process would return; all ranks call it, all get it."""
        number = {p: i for i, p in enumerate(self.every)}
        mine = {number[p]: state for p, state in self.inner.state.items()}
        parts: list = [None] * self.world_size
        dist.all_gather_object(parts, mine)
        groups = [
            {**group, "params": [number[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        state = {i: part[i] for part in parts for i in part}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each rank takes its share of a whole state, whatever number of ranks wrote it.

        Raises ValueError where the state is of other parameters.
        """
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        ours = [len(group["params"]) for group in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f"the state is of groups of {theirs} parameters, ours have {ours}"
            )
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = dict(zip(self.every, numbers, strict=True))
        inner = [p for group in self.inner.param_groups for p in group["params"]]
        share = {
            i: state_dict["state"][own[p]]
            for i, p in enumerate(inner)
            if own[p] in state_dict["state"]
        }
        groups = self.inner.state_dict()["param_groups"]
        for mine, outer, given in zip(
            groups, self.param_groups, state_dict["param_groups"], strict=True
        ):
            settings = {k: v for k, v in given.items() if k != "params"}
            mine.update(settings)
            outer.update(settings)
        self.inner.load_state_dict({"state": share, "param_groups": groups})
        self.state = self.inner.state


class Parcel:
    """Tensors with one owner, side by side in `flat`, so that one call sends them all."""

    def __init__(self, owner: int, tensors: list[torch.Tensor]) -> None:
        self.owner, self.tensors = owner, tensors
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        self.flat = tensors[0] if alone else torch.cat([t.flatten() for t in tensors])

    def unpack(self) -> None:
        """Write what has arrived into the tensors."""
        if self.flat is self.tensors[0]:
            return
        parts = self.flat.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def share_out(parameters: list[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """Give each parameter to a rank, the largest first, always to whoever has least.

    Every rank comes to the same answer, so nobody has to tell it.
    """
    held = [0] * ranks
    owner = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = held.index(min(held))
        owner[parameter] = least
        held[least] += parameter.numel()
    return owner
