"""Which line of the learner's own code is this? Frames of libraries are folded."""

import linecache
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

LAB = str(Path(__file__).parents[1]) + os.sep
PACKAGE = str(Path(__file__).parents[2]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
NUMBERS = r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})"
PLACES = ("stdlib", "platstdlib", "purelib", "platlib")
LIBRARIES = (TORCH, *(str(Path(sysconfig.get_path(key))) + os.sep for key in PLACES))


class SourceLine(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}"

    @property
    def name(self) -> str:
        """The file as a reader knows it: no folders, and a cell is a cell."""
        if re.search(r"ipykernel_\d+|<ipython-input", self.file):
            return "cell"
        return os.path.basename(self.file)

    @property
    def text(self) -> str:
        """The source line itself, or an empty string where there is none."""
        linecache.checkcache(self.file)
        return linecache.getline(self.file, self.line).strip()


def is_own(file: str) -> bool:
    """True for a chapter module, a notebook cell, a script: not for a library or the lab."""
    if file.startswith(LAB) or file.startswith(("<frozen", "<string>")):
        return False
    return file.startswith(PACKAGE) or not file.startswith(LIBRARIES)


def _judges(file: str) -> bool:
    """True for a chapter's `builds.py`, which tries the reader's functions."""
    return file.startswith(PACKAGE) and file.endswith(os.sep + "builds.py")


def innermost(frames: list[SourceLine]) -> SourceLine | None:
    """The deepest own line of a stack that is ordered from the outside in.

    What a build puts around the reader's calls counts only where no other line is own.
    """
    own = [place for place in reversed(frames) if is_own(place.file)]
    return next((place for place in own if not _judges(place.file)), next(iter(own), None))


def of_frame(frame: FrameType | None) -> SourceLine | None:
    """The own line that a live frame is at."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(SourceLine(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return innermost(frames[::-1])


def of_function(function: Callable) -> SourceLine | None:
    """The own line at which a function begins, or what a partial calls."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    if code and is_own(code.co_filename):
        return SourceLine(code.co_filename, code.co_firstlineno, code.co_name)
    return None


def of_dump(text: str) -> SourceLine | None:
    """The own line of the main thread in a dump that faulthandler wrote."""
    return innermost(_main_thread(text)[::-1])


def waiting_call(text: str) -> str:
    """The function of torch.distributed in which that thread waits; empty outside of it."""
    frames = _main_thread(text)
    for frame in frames:
        if frame.file.endswith(os.path.join("torch", "distributed", "distributed_c10d.py")):
            return frame.function
        if is_own(frame.file):
            return "wait" if re.search(r"(?<!\bos)\.wait\(", frame.text) else ""
        if not frame.file.startswith((LAB, TORCH)):
            return ""  # in another library's wait: of threading, of subprocess
    return ""


def _main_thread(text: str) -> list[SourceLine]:
    """The frames of the thread that runs the worker, the innermost first."""
    for block in reversed(re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + text)):
        # the numbers that faulthandler writes for other than ASCII letters
        whole = re.sub(NUMBERS, lambda found: chr(int(found[found.lastindex], 16)), block)
        found = re.findall(r'  File "(.*)", line (\d+) in (.*)', whole)
        frames = [SourceLine(file, int(line), function) for file, line, function in found]
        if any(frame.function == "enter" and frame.file.startswith(LAB) for frame in frames):
            return frames
    return []
