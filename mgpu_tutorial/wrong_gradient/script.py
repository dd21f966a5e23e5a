"""The first step of a training script of your own, compared with another run of it.

    torchrun --nproc-per-node 1 -m mgpu_tutorial.wrong_gradient.script one.pt train.py …
    torchrun --nproc-per-node 4 -m mgpu_tutorial.wrong_gradient.script one.pt train.py …

What comes after train.py is for the script. Give it the same seed and the same global batch
in both runs. The first run writes one.pt, the second compares with it, and both end at their
first step. Gradients are those before a `clip_grad_…` of torch.nn.utils, and random numbers
are added to all parameters.
"""

import runpy
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mgpu_tutorial.shared.parameters import fingerprint

NOISE = 0.02  # is added to all parameters: where they are 0 or 1, faults do not show


class _FirstStep:
    """What a script computes until its first optimizer step, which ends the script."""

    def __init__(self, file: Path) -> None:
        self.file, self.names, self.before = file, {}, {}
        register_module_forward_pre_hook(lambda module, inputs: self.meet(module))
        register_optimizer_step_pre_hook(lambda optimizer, *given: self.end(optimizer))
        self.unclipped = {}
        for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
            keeping = self.keeping(getattr(nn.utils, name))
            for home in (nn.utils, clip_grad):  # scripts import from either
                setattr(home, name, keeping)

    def keeping(self, clip: Callable) -> Callable:
        """The same function, which keeps the gradients as they were before it."""

        @wraps(clip)
        def clips(parameters, *given, **more):
            each = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            for p in each:
                if p.grad is not None and p not in self.unclipped:
                    self.unclipped[p] = p.grad.detach().clone()
            return clip(each, *given, **more)

        return clips

    def meet(self, module: nn.Module) -> None:
        """Name and disturb the parameters of a module when it is first called."""
        for name, p in module.named_parameters():
            if p in self.names:
                continue
            self.names[p] = name.removeprefix("module.")  # of DDP
            if isinstance(p, DTensor):
                raise SystemExit(
                    f"{self.names[p]} is sharded (a DTensor), and whole parameters are "
                    "compared: check the script on plain DDP"
                )
            generator = torch.Generator().manual_seed(len(self.names))
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.data += NOISE * noise.to(p.device, p.dtype)
            self.before[p] = p.detach().clone()

    def end(self, optimizer: Optimizer) -> None:
        """Compare what this rank has with the other ranks' and with the file; then stop."""
        steps = [p for group in optimizer.param_groups for p in group["params"]]
        if missing := [p for p in steps if p.grad is None or p not in self.names]:
            name = self.names.get(missing[0], f"a parameter of shape {[*missing[0].shape]}")
            raise SystemExit(
                f"{name} is in the optimizer, but has no gradient at the first step, or "
                "is in no module that was called: leave it out of the optimizer"
            )
        found = {self.names[p]: self.unclipped.get(p, p.grad).cpu() for p in steps}
        before = {self.names[p]: self.before[p].cpu() for p in steps}
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        differ = _that_differ(found, ranks)
        starts = _that_differ(before, ranks)
        said, wrong = [f"{ranks} ranks, {len(found)} gradients"], bool(differ)
        if starts:
            said, wrong = [f"the ranks begin with different parameters: {starts[0]}"], True
        else:
            said.append(
                f"copies: {len(differ)} differ{''.join(f', {d}' for d in differ[:1])}"
            )
            there = [self.file.exists()]  # as rank 0 sees it, before it writes
            if ranks > 1:
                dist.broadcast_object_list(there, src=0)
            if not there[0]:
                said.append(f"written to {self.file}: run it again on more ranks")
                if ranks == 1 or dist.get_rank() == 0:
                    torch.save({"before": before, "gradients": found}, self.file)
            else:
                other = torch.load(self.file)
                line, off = _compared(found, before, other["gradients"], other["before"])
                said, wrong = [*said, f"{self.file}: {line}"], wrong or off
        if ranks == 1 or dist.get_rank() == 0:
            print(*said, sep="\n", flush=True)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        sys.exit(int(wrong))


def _that_differ(tensors: dict[str, Tensor], ranks: int) -> list[str]:
    """The names of tensors that do not have the same bits on all ranks."""
    mine = {n: fingerprint(nn.ParameterList([nn.Parameter(t)])) for n, t in tensors.items()}
    everyone = [mine]
    if ranks > 1:
        everyone = [None] * ranks
        dist.all_gather_object(everyone, mine)
    return [name for name in mine if any(bits.get(name) != mine[name] for bits in everyone)]


def _compared(
    found: dict[str, Tensor],
    before: dict[str, Tensor],
    right: dict[str, Tensor],
    started: dict[str, Tensor],
) -> tuple[str, bool]:
    """A sentence on the first gradient on the way backward that is off; whether one is."""
    if found.keys() != right.keys():
        lost = sorted(found.keys() ^ right.keys())[0]
        return f"{lost} is in one of the two runs only", True
    if moved := [name for name in right if not torch.equal(before[name], started[name])]:
        return f"{moved[0]} begins with other values: seed both runs alike", True
    off = []
    for name in reversed(right):
        one, other = found[name].double().flatten(), right[name].double().flatten()
        limit = torch.finfo(right[name].dtype).eps ** 0.5  # half of the digits
        if not (one - other).norm() <= limit * other.norm():
            factor = (one @ other / (other @ other)).item()
            exact = (one - factor * other).norm() <= limit * one.norm()
            far = (100 * (one - other).norm() / other.norm()).item()
            how = f"{factor:.2f} times as long" if exact else f"off by {far:.2g}%"
            off.append(f"{name} is {how}")
    if not off:
        return "no gradient is off by more than rounding", False
    same = "; were the samples of the global batch the same?" if "off by" in off[0] else ""
    return f"{len(off)} of {len(right)} are off. The first backward: {off[0]}{same}", True


def main(words: list[str]) -> None:
    """Run a script until its first step; the words are the file, the script and its own."""
    if len(words) < 2 or not Path(words[1]).is_file():
        raise SystemExit("expected a file to compare with, and a script: one.pt train.py …")
    _FirstStep(Path(words[0]))
    sys.argv = words[1:]
    sys.path.insert(0, str(Path(words[1]).parent))
    runpy.run_path(words[1], run_name="__main__")
    raise SystemExit(
        f"{words[1]} ended before a step of a torch optimizer: nothing is checked"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
