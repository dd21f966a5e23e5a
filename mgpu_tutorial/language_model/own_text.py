"""A text of one's own: train on it for some minutes, on any plan, then let it talk.

    python -m mgpu_tutorial language_model.own_text.train_on --text story.txt --plan dp=2

The checkpoint lies beside the text, `story.pt`. A second call goes on from there.
"""

import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.language_model import PARTS, train
from mgpu_tutorial.language_model.model import (
    CONTEXT,
    decode,
    encode,
    load_checkpoint,
    read_checkpoint,
)
from mgpu_tutorial.language_model.plan import plan_of

PLAIN = str.maketrans("‘’‚“”„«»–—−\u2026\t", '\'\'\'"""""---. ')
LEAST = 1000  # characters, with which sixteen sequences of a step are not all the same


def plain(words: str) -> str:
    """Without accents and typographic marks, as the model reads a text and a prompt."""
    words = unicodedata.normalize("NFKD", words.replace("\r\n", "\n").translate(PLAIN))
    return "".join(letter for letter in words if not unicodedata.combining(letter))


def ascii_of(words: str) -> str:
    """The same text with a ? for each character that the model doesn't know."""
    return "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in words)


def read_text(path: str) -> Tensor:
    """A file as numbers; accents go, and what has no ASCII beside it becomes a ?.

    Raises ValueError for a file that is not there, is no text, is too short, or is mostly in
    other characters, of which the model knows none.
    """
    try:
        words = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"text={path!r}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"text={path!r} is no UTF-8: save it as plain text first") from None
    words = plain(words)
    known = ascii_of(words)
    changed = sum(a != b for a, b in zip(known, words, strict=True))
    if len(known) < LEAST or 10 * changed > len(known):
        raise ValueError(
            f"text={path!r} has {len(known):,} characters, of which the model does not know "
            f"{changed:,}: give at least {LEAST:,}, nine of ten in ASCII"
        )
    return encode(known)


def train_on(
    rank: int,
    world_size: int,
    text: str,
    plan: str = "dp=2",
    minutes: float = 3.0,
    parts: SimpleNamespace = PARTS,
    experts: int = 0,
) -> list[float]:
    """Train on a file for some minutes, on from its checkpoint if there is one; the losses.

    Ten steps tell how many more there is time for. The checkpoint has the text's name, with
    .pt at its end, and is written every ten steps. With `experts` each block has so many
    instead of its MLP. Raises ValueError, on every rank, for what cannot be.
    """
    plan_of(plan, world_size)
    if not (isinstance(minutes, int | float) and 0 < minutes < 1e6):
        raise ValueError(f"minutes={minutes!r}: expected a number above 0")
    numbers, save = read_text(text), str(Path(text).with_suffix(".pt"))
    there = Path(save).exists()
    done = read_checkpoint(save)["step"] if there else 0
    how = {"save": save, "lr": 2e-3, "parts": parts, "text": numbers, "experts": experts}
    start = time.monotonic()
    losses = train(rank, world_size, plan, done + 10, save if there else "", **how)
    # the slowest rank decides, so that all take the same steps
    each = (time.monotonic() - start) / 10
    more = torch.tensor(int(max(60 * minutes - 10 * each, 0) / each))
    dist.all_reduce(more, dist.ReduceOp.MIN)
    if more > 0:
        losses += train(rank, world_size, plan, done + 10 + int(more), save, **how)
    return losses


# for the command line
train_on.ranks_for = lambda plan="dp=2", **_: plan_of(plan).ranks
train_on.timeout_for = lambda minutes=3.0, **_: 60 * max(minutes, 0) + 100


@torch.no_grad()
def talk(text: str, prompt: str, count: int = 200, warmth: float = 0.7, seed: int = 0) -> str:
    """Go on from `prompt`, by `count` characters that are drawn as the model expects them.

    The checkpoint is that of the text. At `warmth` near 0 it takes the likeliest.
    """
    if not (prompt and count >= 0 and warmth > 0):
        given = f"{len(prompt)} characters to go on from, {count} to write, warmth={warmth}"
        raise ValueError(f"{given}: expected one or more, none or more, and above 0")
    _, _, (whole, *_) = load_checkpoint(str(Path(text).with_suffix(".pt")))
    generator, written = torch.Generator().manual_seed(seed), encode(ascii_of(plain(prompt)))
    for _ in range(count):
        scores = whole.float()(written[None, -CONTEXT:])[0, -1]
        chances = (scores / warmth).softmax(-1)
        written = torch.cat([written, chances.multinomial(1, generator=generator)])
    return decode(written)
