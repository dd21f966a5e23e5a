"""Run one worker without a notebook, or list them all.

    python -m mgpu_tutorial                                               the list
    python -m mgpu_tutorial point_to_point.messages.blocking --ranks 2    on this machine
    torchrun --nproc-per-node 2 --local-addr 127.0.0.1 \\
        -m mgpu_tutorial point_to_point.messages.blocking                 by torchrun
    python -m mgpu_tutorial mine                                          what you have built
    python -m mgpu_tutorial challenges                                    your best scores
    python -m mgpu_tutorial prove 4 train.py --lr 0.1                     a script of your own

A worker's own arguments follow as `--name value`; a value is a Python literal or plain text.
"""

import argparse
import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from inspect import Parameter, cleandoc, isfunction, signature
from pathlib import Path
from typing import get_origin

from mgpu_tutorial import CHAPTERS, __version__
from mgpu_tutorial.instruments.prove import proof
from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.run import progress
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.run.rank import under_torchrun
from mgpu_tutorial.lab.teach import mine

OPTIONS = {"ranks", "device", "timeout"}  # of the launcher
APPARATUS = {"figures", "builds"}  # what draws and judges is no lesson
WORDS = (bool, int, float, str, type(None))  # what a word of the command line can be
LITERALS = (*WORDS, object, tuple, list, dict)  # and what Python makes of one


def workers_of(chapter: str) -> dict[str, Callable]:
    """The public functions (rank, world_size, …) of a lesson by their names on the line."""
    first = importlib.import_module(f"mgpu_tutorial.{chapter}")
    files = pkgutil.iter_modules(getattr(first, "__path__", []))
    names = [f"{first.__name__}.{file.name}" for file in files if file.name not in APPARATUS]
    return {
        f"{module.__name__.removeprefix('mgpu_tutorial.')}.{name}": function
        for module in [first, *map(importlib.import_module, names)]
        for name, function in vars(module).items()
        if isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and list(signature(function).parameters)[:2] == ["rank", "world_size"]
    }


def arguments_of(worker: Callable) -> list[Parameter]:
    """Those of a worker's own arguments that can be given as a word.

    One with a default must have such a word for it; tensors, functions and modules are left
    out, unless the worker cannot do without them: then it says so itself. So are any number
    of values, as of `*sizes`, because a word has one name and one value.
    """
    several = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    own = list(signature(worker).parameters.values())[2:]
    own = [each for each in own if each.kind not in several]
    return [
        each
        for each in own
        if each.default is Parameter.empty
        or isinstance(each.default, WORDS)
        or isinstance(each.default, tuple | list)
        and all(isinstance(part, WORDS) for part in each.default)
    ]


def require_words(name: str, own: list[Parameter], given: dict[str, object]) -> None:
    """ValueError for a worker that needs a function, or a tensor: no word is one."""
    for each in own:
        kind = each.annotation
        what = ""
        if Callable in (kind, get_origin(kind)):
            what = "function"
        elif isinstance(kind, type) and kind not in (*LITERALS, Parameter.empty):
            what = kind.__name__
        if each.default is Parameter.empty and what:
            raise ValueError(
                f"{name} needs a {what} as {each.name}, which a command line cannot give: "
                "call it by launch, in Python or in a notebook"
            )


def truth(text: str) -> bool:
    """True or False, as Python writes them; also yes, no, 1 and 0."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"True or False is expected, got {text!r}")
    return words[text.lower()]


def listing() -> str:
    """Every worker with the first line of its docstring, by chapter."""
    lines = []
    for chapter in CHAPTERS:
        workers = {f"    {name} ": worker for name, worker in workers_of(chapter).items()}
        named = {f"{chapter}:": sys.modules[f"mgpu_tutorial.{chapter}"]} | workers
        lines += [f"{name} {thing.__doc__.splitlines()[0]}" for name, thing in named.items()]
    return "\n".join(lines)


def find(name: str) -> Callable:
    """The worker of that name; raises ValueError, which says what there is instead."""
    chapter = name.partition(".")[0]
    workers = workers_of(chapter) if chapter in CHAPTERS else {}
    if name not in workers:
        raise ValueError(f"there is no {name!r}, but {', '.join(workers or CHAPTERS)}")
    return workers[name]


def value(text: str) -> object:
    """A Python literal or plain text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def enter_folder_of(file: Path) -> None:
    """Go where a file of the reader's is, among the folders in which one may work."""
    for folder in [f for f in (".", "student", "notebooks") if (Path(f) / file).exists()][:1]:
        os.chdir(folder)


def challenges(words: list[str]) -> int:
    """Problems, targets and own scores; of a folder the table of a class."""
    from mgpu_tutorial.challenges import score  # seldom asked for
    from mgpu_tutorial.challenges.builds import build

    try:
        if len(words) > 1:
            raise ValueError(f"give one folder, or none: got {' '.join(words)}")
        if not words:
            enter_folder_of(score.FILE)
        print(score.class_table(Path(words[0]), build) if words else score.listing(build))
    except ValueError as error:
        print(f"mgpu_tutorial: {error}", file=sys.stderr)
        return 2
    return 0


def ours_of(chapter: str) -> dict[str, Callable]:
    """The package's own versions of what a chapter builds, if it builds something."""
    try:
        return importlib.import_module(f"mgpu_tutorial.{chapter}.builds").build.ours
    except ModuleNotFoundError:
        return {}


def main(words: list[str]) -> int:
    if not words:
        print(listing())
        return 0
    if words[:1] == ["challenges"]:
        return challenges(words[1:])
    if words[:1] == ["prove"]:
        return proof.main(words[1:])
    if words == ["mine"]:
        enter_folder_of(mine.FILE)
        print("\n".join(filter(None, [mine.clean(ours_of), mine.listing()])))
        return 0
    parser = argparse.ArgumentParser(
        prog="mgpu_tutorial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("worker", help="as in the list; its own arguments come after it")
    parser.add_argument("--ranks", type=int, help="world size (2, or what its plan takes)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--timeout", type=float, help="seconds (30, or more with --minutes)")
    parser.add_argument("--version", action="version", version=__version__)
    try:
        own = []
        if not words[0].startswith("-"):
            worker = find(words[0])
            own, parser.description = arguments_of(worker), cleandoc(worker.__doc__ or "")
        for each in own:
            names = {f"--{each.name}", f"--{each.name.replace('_', '-')}"}
            kind = each.annotation if each.annotation in (int, float, str) else value
            if each.annotation is bool or isinstance(each.default, bool):
                kind = truth
            said = "needed" if each.default is Parameter.empty else f"({each.default!r})"
            said = said.replace("%", "%%")
            parser.add_argument(*names, dest=each.name, type=kind, help=said)
        given = vars(parser.parse_args(words))
        worker = find(given.pop("worker"))
        require_words(words[0], own, given)
        how = {name: given.pop(name) for name in given.keys() & OPTIONS}
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            usual = getattr(worker, "ranks_for", lambda **_: 2)(**given)
            if hasattr(worker, "timeout_for"):  # one that takes long by what is given
                how = {"timeout": worker.timeout_for(**given)} | how
            progress.to_terminal()
            print(launch(worker, how.pop("ranks", usual), **how, **given))
            return 0
    except LaunchError as error:
        if any(error.report.stdout):
            print(error.report)
        print(f"mgpu_tutorial: {error.args[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"mgpu_tutorial: {error or 'interrupted'}", file=sys.stderr)
        return 130  # as of a program that Ctrl-C ends
    except (TypeError, ValueError) as error:
        parser.error(error.args[0])
    if how:
        parser.error(f"--{min(how)} is for a launch without torchrun")
    under_torchrun(worker, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
