"""What the reader's library says at its head, and under which subject each part stands."""

import re
from textwrap import wrap

from mgpu_tutorial import CHAPTERS

WIDTH = 88
TORCH = "2.13"  # the lowest that pyproject.toml promises
HEAD = f'''"""Training on several GPUs: what I built in the notebooks of mgpu_tutorial.

Needs torch {TORCH} or newer, and nothing else. Put this file beside a script, and import
what `__all__` lists. proof.py, which lies beside it, says whether a job is right.

The lines below a section's title say in which notebook its parts were built, and what
they borrow. That is the course's: Copyright (c) 2026 The mgpu_tutorial authors, under
the MIT License, which stands at the end.
"""'''
EARLIER = (
    '"""What I have built, chapter by chapter; proof.py says whether a job of it is right."""'
)
LICENCE = wrap(
    "What is borrowed, and what a notebook gave around a build, is under the MIT License: "
    "Copyright (c) 2026 The mgpu_tutorial authors. Permission is hereby granted, free of "
    "charge, to any person obtaining a copy of this software and associated documentation "
    'files (the "Software"), to deal in the Software without restriction, including without '
    "limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, "
    "and/or sell copies of the Software, and to permit persons to whom the Software is "
    "furnished to do so, subject to the following conditions: The above copyright notice and "
    "this permission notice shall be included in all copies or substantial portions of the "
    'Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR '
    "IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A "
    "PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT "
    "HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF "
    "CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR "
    "THE USE OR OTHER DEALINGS IN THE SOFTWARE.",
    WIDTH,
    initial_indent="# ",
    subsequent_indent="# ",
)

COURSE = "Course only"  # what a job elsewhere has no use for
MORE = "More"
SUBJECTS = {  # a chapter's builds, or one of them by its name
    "Data": ["data_partitioning", "survival.samples_of"],
    "Losses": [
        "distributed_sgd.shared_loss",
        "tensor_parallel_in_practice.parallel_cross_entropy",
    ],
    "Data parallel": [
        "distributed_sgd",
        "data_parallel",
        "ddp_buckets",
        "ddp_reducer",
        "ddp_in_practice",
    ],
    "Mixed precision": ["mixed_precision"],
    "Sharding": ["sharding", "fully_shard"],
    "Tensor parallel": ["tensor_parallel", "tensor_parallel_in_practice"],
    "Sequence parallel": ["long_sequences"],
    "Experts": ["experts"],
    "Pipeline": ["pipelines", "language_model.cut_model"],
    "Checkpoints": ["survival"],
    "Checks": ["distributed_sgd.kind_of", "when_it_breaks", "wrong_gradient"],
    "Messages and collectives": ["point_to_point", "nonblocking", "collectives"],
    "Planning": ["the_machine", "step_time", "at_scale"],
    MORE: [],
    COURSE: [
        "processes_and_ranks",  # prints
        "the_machine.replay_step",  # needs the course's tape and machine
        "comparison",  # its step
        "model_parallel",  # its queues, and torchvision
        "language_model",  # its job and plan
        "challenges",  # puzzles
    ],
}
HOMES = {each: subject for subject, found in SUBJECTS.items() for each in found}


def subject_of(chapter: str, name: str) -> str:
    """The section in which something stands that was built in a chapter."""
    return HOMES.get(f"{chapter}.{name}") or HOMES.get(chapter, MORE)


def titled(subject: str) -> list[str]:
    """The lines above a section."""
    lines = [f"# ---- {subject} ".ljust(WIDTH, "-")]
    if subject == COURSE:
        lines.append("# Parts of the notebooks' own jobs. They are not in `__all__`.")
    return lines


OURS = {*LICENCE, *(line for subject in SUBJECTS for line in titled(subject))}


def head_for(docstring: str) -> str:
    """The head for one of ours, perhaps of another torch; the reader's own stays."""
    plain = [re.sub(r"\d+", "", text) for text in (docstring, HEAD, EARLIER)]
    return HEAD if plain[0] in plain[1:] else docstring


def rank(chapter: str) -> int:
    """Where a chapter stands in the course; what several share comes first."""
    return CHAPTERS.index(chapter) if chapter in CHAPTERS else -1


def numbered(chapter: str) -> str:
    """A chapter as its notebook is called."""
    return f"{rank(chapter):02}_{chapter}" if chapter in CHAPTERS else chapter
