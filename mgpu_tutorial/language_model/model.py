"""The text, and a transformer that guesses its next character."""

import functools
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from mgpu_tutorial.tensor_parallel.block import Block

CONTEXT, WIDTH, BLOCKS = 64, 64, 4  # as in `new_model`
BATCH, MICRO_BATCHES = 16, 2
SHARED = {  # by the dimension of a plan
    "dp": (BATCH // MICRO_BATCHES, "sequences of a micro-batch"),
    "tp": (8, "heads"),
    "pp": (BLOCKS, "blocks"),
    "cp": (CONTEXT // 2, "pairs of characters"),
}
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # 96 characters


@functools.cache
def text() -> str:
    """The documentation of PyTorch's functions and tensors, out of the installed files.

    Its license is BSD-3 (https://github.com/pytorch/pytorch/blob/v2.13.0/LICENSE).
    """
    files = map(Path(torch.__file__).with_name, ("_torch_docs.py", "_tensor_docs.py"))
    quoted = [part for file in files for part in file.read_text("utf-8").split('"""')[1::2]]
    return re.sub(r"[^\n -~]", "", "\n".join(quoted))


def encode(words: str) -> Tensor:
    """A number for each character, its place in the alphabet: ASCII less 31, 0 a new line."""
    codes = torch.frombuffer(bytearray(words, "ascii"), dtype=torch.uint8)
    return (codes.long() - 31).clamp(min=0)


def decode(numbers: Tensor) -> str:
    """The characters of these numbers."""
    return "".join(ALPHABET[number] for number in numbers.tolist())


@functools.cache
def encoded_text() -> Tensor:
    """The whole text as numbers."""
    return encode(text())


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (size, 64) characters, and those that follow them.

    It depends on the number of the step alone, so every plan trains on the same batches.
    """
    generator = torch.Generator().manual_seed(step)
    numbers = encoded_text()
    starts = torch.randint(len(numbers) - CONTEXT - 1, (size, 1), generator=generator)
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


def new_model() -> nn.Sequential:
    """An embedding, four blocks, a head: 216,544 parameters, the same on every rank."""
    torch.manual_seed(0)
    embedding = Embedding(characters=96, context=64, width=64)
    blocks = [Block(width=64, heads=8) for _ in range(4)]
    return nn.Sequential(embedding, *blocks, Head(characters=96, width=64))
