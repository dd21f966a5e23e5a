"""A text of one's own: train on it for some minutes, on any plan, then let it talk.

    python -m mgpu_tutorial language_model.own_text.train_on --text story.txt --plan dp=2

The checkpoint lies beside the text, `story.pt`, and so does what the model wrote on the way,
`story.lines.txt`. A second call goes on from there.
"""

import contextlib
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

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
AGES = {digit * 10**zeros for zeros in range(1, 7) for digit in (1, 2, 5)} - {10}


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


class Trained(NamedTuple):
    """What a run has done: the model's steps so far, and its first loss and its last."""

    steps: int
    first: float
    last: float


def train_on(
    rank: int,
    world_size: int,
    text: str,
    plan: str = "dp=2",
    minutes: float = 3.0,
    parts: SimpleNamespace = PARTS,
    experts: int = 0,
    prompt: str = "The ",
) -> Trained:
    """Train on a text file for some minutes, on from its checkpoint if there is one.

    Ten steps tell how many more there is time for. The checkpoint has the text's name, with
    .pt at its end, and is written every ten steps. After 20, 50, 100, 200, … steps the model
    goes on from `prompt`, and rank 0 adds the line to the file with .lines.txt at its end.
    With `experts` each block has so many instead of its MLP. Raises ValueError, on every
    rank, for what cannot be.
    """
    plan_of(plan, world_size)
    if not (isinstance(minutes, int | float) and 0 < minutes < 1e6):
        raise ValueError(f"minutes={minutes!r}: expected a number above 0")
    if not prompt:
        raise ValueError("prompt='': give the model one character or more to go on from")
    numbers, save = read_text(text), str(Path(text).with_suffix(".pt"))
    there = Path(save).exists()
    done = read_checkpoint(save)["step"] if there else 0

    def write_line(step: int) -> None:
        if rank == 0 and step + 1 in AGES:
            add_line(text, step + 1, prompt)

    how = {"save": save, "lr": 2e-3, "parts": parts, "text": numbers, "experts": experts}
    how["after_step"] = write_line
    start = time.monotonic()
    losses = train(rank, world_size, plan, done + 10, save if there else "", **how)
    while steps := steps_left(start, len(losses), minutes):
        until = done + len(losses) + steps
        with contextlib.redirect_stdout(None):  # what this rank holds has been said
            losses += train(rank, world_size, plan, until, save, **how)
    return Trained(done + len(losses), losses[0], losses[-1])


def steps_left(start: float, taken: int, minutes: float) -> int:
    """How many steps fit into half of the time that is left, the same on all ranks.

    Half, since a machine can slow down: then the next half has fewer steps. Below ten it is
    all that fit, and after these none.
    """
    spent = time.monotonic() - start
    fit = torch.tensor(int(max(60 * minutes - spent, 0) / spent * taken))
    dist.all_reduce(fit, dist.ReduceOp.MIN)  # the slowest rank decides
    return int(fit) // 2 if fit >= 20 else 0


def lines_beside(text: str) -> Path:
    """The file beside a text that holds what the model wrote on the way."""
    return Path(text).with_suffix(".lines.txt")


def add_line(text: str, step: int, prompt: str) -> None:
    """Let the model of this step go on from `prompt`, and note its line."""
    said = " ".join(talk(text, prompt, 60).split("\n"))
    with lines_beside(text).open("a", encoding="ascii") as file:
        file.write(f"{step:>6,}  {said}".rstrip() + "\n")


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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine many of these small products are far slower
    for _ in range(count):
        scores = whole.float()(written[None, -CONTEXT:])[0, -1]
        chances = (scores / warmth).softmax(-1)
        written = torch.cat([written, chances.multinomial(1, generator=generator)])
    torch.set_num_threads(threads)
    return decode(written)
