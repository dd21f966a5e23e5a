"""Run one worker without a notebook, or list them all.

    python -m mgpu_tutorial                                               the list
    python -m mgpu_tutorial point_to_point.messages.blocking --ranks 2    on this machine
    torchrun --nproc-per-node 2 -m mgpu_tutorial point_to_point.messages.blocking
    python -m mgpu_tutorial mine                                          what you have built

A worker's own arguments follow as `--name value`; a value is a Python literal or plain text.
"""

import argparse
import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from inspect import isfunction, signature

from mgpu_tutorial import CHAPTERS, __version__
from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.run.rank import under_torchrun
from mgpu_tutorial.lab.teach import mine

OPTIONS = {"ranks", "device", "timeout"}  # of the launcher


def workers_of(chapter: str) -> dict[str, Callable]:
    """The public functions (rank, world_size, …) of a chapter by their names on the line."""
    first = importlib.import_module(f"mgpu_tutorial.{chapter}")
    files = pkgutil.iter_modules(getattr(first, "__path__", []), f"{first.__name__}.")
    return {
        f"{module.__name__.removeprefix('mgpu_tutorial.')}.{name}": function
        for module in [first, *(importlib.import_module(file.name) for file in files)]
        for name, function in vars(module).items()
        if isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and list(signature(function).parameters)[:2] == ["rank", "world_size"]
    }


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


def main(words: list[str]) -> int:
    if not words:
        print(listing())
        return 0
    if words == ["mine"]:
        if os.path.isdir("notebooks"):
            os.chdir("notebooks")
        print(mine.listing())
        return 0
    parser = argparse.ArgumentParser(
        prog="mgpu_tutorial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("worker", help="as in the list; its own arguments come after it")
    parser.add_argument("--ranks", type=int, help="world size (2)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--timeout", type=float, help="seconds (30)")
    parser.add_argument("--version", action="version", version=__version__)
    try:
        own = []
        if not words[0].startswith("-"):
            own = list(signature(find(words[0])).parameters.values())[2:]
        for each in own:
            names = {f"--{each.name}", f"--{each.name.replace('_', '-')}"}
            kind = each.annotation if each.annotation in (int, float, str) else value
            parser.add_argument(*names, dest=each.name, type=kind)
        given = vars(parser.parse_args(words))
        worker = find(given.pop("worker"))
        how = {name: given.pop(name) for name in given.keys() & OPTIONS}
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            usual = getattr(worker, "ranks_for", lambda **_: 2)(**given)
            print(launch(worker, how.pop("ranks", usual), **how, **given))
            return 0
    except LaunchError as error:
        if any(error.report.stdout):
            print(error.report)
        print(f"mgpu_tutorial: {error.args[0]}", file=sys.stderr)
        return 1
    except (TypeError, ValueError) as error:
        parser.error(error.args[0])
    if how:
        parser.error(f"--{min(how)} is for a launch without torchrun")
    under_torchrun(worker, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
