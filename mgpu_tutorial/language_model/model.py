"""The text, and a transformer that guesses its next character."""

import functools
import re
from pathlib import Path

import torch
from torch import nn

from mgpu_tutorial.tensor_parallel.block import Block

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 8, 4  # as in `new_model`
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # 96 characters


@functools.cache
def text() -> str:
    """The documentation of PyTorch's functions and tensors, out of the installed files.

    Its license is BSD-3 (https://github.com/pytorch/pytorch/blob/v2.13.0/LICENSE). Raises
    FileNotFoundError where this PyTorch has no such files.
    """
    parts = []
    for name in ("_torch_docs.py", "_tensor_docs.py"):
        file = Path(torch.__file__).with_name(name)
        if not file.exists():
            raise FileNotFoundError(
                f"the text to learn from is missing: {file.name} of torch"
            )
        parts += file.read_text("utf-8").split('"""')[1::2]  # between the quotes
    return re.sub(r"[^\n -~]", "", "\n".join(parts))


def encode(words: str) -> torch.Tensor:
    """A number for each character, from 0 to 95."""
    return torch.tensor([ALPHABET.index(character) for character in words])


def decode(numbers: torch.Tensor) -> str:
    """The characters of these numbers."""
    return "".join(ALPHABET[number] for number in numbers.tolist())


@functools.cache
def encoded_text() -> torch.Tensor:
    """The whole text as numbers."""
    place = torch.zeros(128, dtype=torch.int64)
    place[[ord(character) for character in ALPHABET]] = torch.arange(len(ALPHABET))
    return place[torch.frombuffer(bytearray(text(), "ascii"), dtype=torch.uint8).long()]


def batch_of(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
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

    def forward(
        self, characters: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        if places is None:
            places = torch.arange(characters.shape[1], device=characters.device)
        return self.character(characters) + self.position(places)


class Head(nn.Module):
    """Vectors become (batch, sequence, characters) scores of the next character."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(x))


def new_model() -> nn.Sequential:
    """An embedding, four blocks, a head: 216,544 parameters, the same on every rank."""
    torch.manual_seed(0)
    embedding = Embedding(characters=96, context=64, width=64)
    blocks = [Block(width=64, heads=8) for _ in range(4)]
    return nn.Sequential(embedding, *blocks, Head(characters=96, width=64))
