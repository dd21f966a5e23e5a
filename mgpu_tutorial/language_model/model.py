"""The text, a transformer that guesses its next character, and its checkpoints."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mgpu_tutorial.experts.layer import Experts
from mgpu_tutorial.sharding.blocks import views_of
from mgpu_tutorial.shared.checkpoint import remove_drafts, save_whole
from mgpu_tutorial.tensor_parallel.block import Block, whole_of

BATCH = 16  # sequences of a step
MICRO_BATCHES = 2  # in how many parts a rank takes its own
CONTEXT, CHARACTERS = 64, 96  # in a sequence, and in the alphabet
WIDTH, HEADS, BLOCKS = 64, 8, 4
SHIPPED = Path(__file__).with_name("pretrained.pt")
AGES = Path(__file__).with_name("ages.json")  # what it wrote on the way there
TEXT = Path(__file__).with_name("pytorch_docs.txt")


@cache
def text() -> str:
    """The documentation of PyTorch's functions and tensors, 524,849 characters.

    The file holds what stands between triple quotes in `_torch_docs.py` and `_tensor_docs.py`
    of PyTorch 2.13.0, without characters outside ASCII. Its licence (BSD-3) lies beside it.
    It travels with the project, so that every PyTorch trains on the same text.
    """
    return TEXT.read_text("ascii")


def encode(words: str) -> Tensor:
    """A number for each character, ASCII less 31: from 1, a space, to 95; 0 is a new line."""
    if unknown := re.findall(r"[^\n -~]", words):
        raise ValueError(f"the model knows no {unknown[0]!r}: only printable ASCII and \\n")
    codes = torch.tensor(list(words.encode()), dtype=torch.long)
    return (codes - 31).clamp(min=0)


@cache
def encoded_text() -> Tensor:
    """The text as numbers, made once; who changed this tensor would change all batches."""
    return encode(text())


def decode(numbers: Tensor) -> str:
    """The characters of these numbers."""
    if unknown := numbers[(numbers < 0) | (numbers > 95)].tolist():
        raise ValueError(f"{unknown[0]} is no character: their numbers go from 0 to 95")
    return bytes((numbers + 31).tolist()).decode().replace("\x1f", "\n")


def batch_of(step: int, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (16, 64) characters, and those that follow them.

    It depends on the number of the step alone, so every plan trains on the same batches.
    The text's last character is never asked for: another range would draw other batches.
    `numbers` are a text of one's own, as `encode` gives it.
    """
    if step < 0:
        raise ValueError(f"there is no step {step}: the first is 0")
    numbers = encoded_text() if numbers is None else numbers
    if len(numbers) < CONTEXT + 2:
        raise ValueError(f"a text of {len(numbers)} characters: give {CONTEXT + 2} or more")
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(numbers) - CONTEXT - 1, (BATCH, 1), generator=generator)
    places = starts + torch.arange(CONTEXT)
    return numbers[places], numbers[places + 1]


class Embedding(nn.Module):
    """(batch, sequence) characters become (batch, sequence, width) vectors."""

    def __init__(self, characters: int, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.position = nn.Embedding(context, width)

    def forward(self, characters: Tensor, places: Tensor | None = None) -> Tensor:
        if places is None:
            places = torch.arange(characters.shape[1], device=characters.device)
        return self.character(characters) + self.position(places)


class Head(nn.Module):
    """Vectors become (batch, sequence, characters) scores of the next character."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))


class ExpertsMLP(Experts):
    """Experts in place of a block's MLP: two of them answer each character."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__(experts, 2, width, 4 * width)
        for weights in self.parameters():  # (..., inputs, outputs)
            bound = weights.shape[-2] ** -0.5  # as nn.Linear begins
            weights.data = torch.empty(weights.shape).uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


def new_model(experts: int = 0) -> nn.Sequential:
    """An embedding, four blocks, a head: 216,544 parameters, the same on every rank.

    With `experts` each block has so many instead of its MLP.
    """
    torch.manual_seed(0)
    blocks = [Block(WIDTH, HEADS) for _ in range(BLOCKS)]
    for block in blocks if experts else ():
        block.mlp = ExpertsMLP(WIDTH, experts)
    return nn.Sequential(
        Embedding(CHARACTERS, CONTEXT, WIDTH), *blocks, Head(CHARACTERS, WIDTH)
    )


def experts_of(model: nn.Sequential) -> int:
    """How many experts a whole model has in each block, 0 where it has an MLP."""
    mlp = model[1].mlp
    return mlp.experts if isinstance(mlp, Experts) else 0


def save_checkpoint(
    path: str, model: nn.Module, adam: torch.optim.Optimizer, mesh: DeviceMesh, step: int
) -> None:
    """Rank 0 writes parameters and moments of the whole model; all ranks call it."""
    stage, last = mesh["pp"].get_local_rank(), mesh["pp"].size() - 1
    blocks = len(model) - (stage == 0) - (stage == last)
    mine, skipped = {}, 1 + stage * blocks if stage else 0
    for name, p in model.named_parameters():
        if state := adam.state.get(p):  # with ZeRO 1 on its owner only
            layer, rest = name.split(".", 1)
            prefix = f"{int(layer) + skipped}."
            values = p, state["exp_avg"], state["exp_avg_sq"]
            if hasattr(block := model[int(layer)], "shapes"):  # a layer's shard, of ZeRO 3
                flats = [flat_of(part, block.group) for part in values]
                named = [views_of(flat, block.shapes) for flat in flats]
                for rest in block.shapes:
                    mine[prefix + rest] = [part[rest].cpu() for part in named]
            else:
                mine[prefix + rest] = [whole_of(part, p).cpu() for part in values]
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every)
    if every:
        tensors = {name: parts for held in every for name, parts in held.items()}
        updates = int(next(iter(adam.state.values()))["step"])
        save_whole(path, {"step": step, "updates": updates, "tensors": tensors})
    dist.barrier()


def flat_of(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shards of all ranks of a group, one behind the other."""
    every = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, shard.detach(), group=group)
    return torch.cat(every)


def load_checkpoint(path: str) -> tuple[int, int, list[nn.Sequential]]:
    """The step, Adam's updates, the whole model, and Adam's moments as two more models.

    The file has no moments if training began with it. ValueError, with the file's name, if it
    is no checkpoint, or one of another model.
    """
    state, models = read_checkpoint(path), []
    router = state["tensors"].get("1.mlp.router", [torch.empty(0, 0)])[0]
    experts = router.shape[-1] if router.dim() else 0
    for tensors in zip(*state["tensors"].values(), strict=True):  # parameters, each moment
        models.append(new_model(experts))
        named = dict(zip(state["tensors"], tensors, strict=True))
        try:
            models[-1].load_state_dict(named, assign=True)
        except RuntimeError as error:
            why = str(error).splitlines()[-1].strip()
            raise ValueError(f"{path} is of another model: {why}") from None
    return state["step"], state.get("updates", 0), models


def read_checkpoint(path: str) -> dict[str, Any]:
    """What is in the file; ValueError unless it is as `save_checkpoint` writes it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        step, updates, tensors = state["step"], state.get("updates", 0), state["tensors"]
        counts = {len(parts) for parts in tensors.values()}
        every = [tensor for parts in tensors.values() for tensor in parts]
    except FileNotFoundError:
        raise ValueError(f"resume={path!r}: there is no such file") from None
    except Exception as error:  # whatever another file makes the reader raise
        why = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
        raise ValueError(f"{path} holds no readable checkpoint ({why:.120})") from None
    why = ""
    if counts not in ({1}, {3}):
        why = "not each parameter has two moments, or none"
    elif not all(torch.is_tensor(t) and t.is_floating_point() for t in every):
        why = "not all of it is numbers with a point"
    elif not all(tensor.isfinite().all() for tensor in every):
        why = "some of its numbers are not finite"
    elif not (type(step) is type(updates) is int and min(step, updates) >= 0):
        why = f"its step is {step!r}, after {updates!r} updates"
    if why:
        raise ValueError(f"{path} is no checkpoint to go on from: {why}")
    return state


def resumed(path: str, experts: int) -> tuple[int, int, list[nn.Sequential]]:
    """What `load_checkpoint` gives; ValueError where its model has other experts."""
    begin, updates, wholes = load_checkpoint(path)
    if (there := experts_of(wholes[0])) != experts:
        raise ValueError(f"{path} has {there} experts in each block: give experts={there}")
    return begin, updates, wholes


def make_place(path: str) -> None:
    """ValueError now, and not after the first steps, where no file can be written.

    Rank 0 removes what a run that was killed in the middle of saving has left there.
    """
    folder = Path(path).resolve().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path).is_dir():
        raise ValueError(f"save={path!r}: no such file can be written in {folder}")
    if dist.get_rank() == 0:
        remove_drafts(path)
