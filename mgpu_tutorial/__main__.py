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
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable

import mgpu_tutorial
from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.run.rank import under_torchrun
from mgpu_tutorial.lab.teach import mine

OPTIONS = ("ranks", "device", "timeout")  # of the launcher


def workers_of(chapter: str) -> dict[str, Callable]:
    """The public functions (rank, world_size, …) of a chapter by their names on the line."""
    first = importlib.import_module(f"mgpu_tutorial.{chapter}")
    files = pkgutil.iter_modules(getattr(first, "__path__", []), f"{first.__name__}.")
    return {
        f"{module.__name__.removeprefix('mgpu_tutorial.')}.{name}": function
        for module in [first, *(importlib.import_module(file.name) for file in files)]
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and list(inspect.signature(function).parameters)[:2] == ["rank", "world_size"]
    }


def listing() -> str:
    """Every worker with the first line of its docstring, by chapter."""
    lines = []
    for chapter in mgpu_tutorial.CHAPTERS:
        workers = workers_of(chapter)
        lines.append(f"{chapter}: {_first_line(sys.modules[f'mgpu_tutorial.{chapter}'])}")
        lines += [f"    {name}  {_first_line(worker)}" for name, worker in workers.items()]
    return "\n".join(lines)


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def find(name: str) -> Callable:
    """The worker of that name, such as `point_to_point.messages.blocking`.

    Raises LookupError, which says what there is instead.
    """
    chapter, _, worker = name.partition(".")
    if chapter not in mgpu_tutorial.CHAPTERS:
        there = ", ".join(mgpu_tutorial.CHAPTERS)
        raise LookupError(f"no chapter {chapter!r}; there are: {there}")
    found = workers_of(chapter)
    if name not in found:
        there = ", ".join(known.removeprefix(f"{chapter}.") for known in found)
        raise LookupError(f"no worker {worker!r} in {chapter}; there are: {there}")
    return found[name]


def _parser(worker: Callable | None) -> argparse.ArgumentParser:
    """For the launcher's options and the worker's own arguments, by its signature."""
    parser = argparse.ArgumentParser(
        prog="mgpu_tutorial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        conflict_handler="resolve",  # the launcher's option of a name is meant
    )
    own = list(inspect.signature(worker).parameters.values())[2:] if worker else []
    for each in own:
        names = {f"--{each.name}", f"--{each.name.replace('_', '-')}"}
        kind = each.annotation if each.annotation in (int, float, str) else _value
        parser.add_argument(*names, dest=each.name, type=kind)
    parser.add_argument(
        "worker", help="chapter.worker or chapter.file.worker, as in the list"
    )
    parser.add_argument("--ranks", type=int, help="world size (2)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--timeout", type=float, help="seconds (30)")
    parser.add_argument("--version", action="version", version=mgpu_tutorial.__version__)
    return parser


def _value(text: str) -> object:
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
    try:
        worker = None if words[0].startswith("-") else find(words[0])
        parser = _parser(worker)
        if worker is None and words[0] not in ("-h", "--help", "--version"):
            parser.error("name a worker before its options")
        arguments = vars(parser.parse_args(words))
        del arguments["worker"]
        options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
        if "TORCHELASTIC_RUN_ID" in os.environ:
            if options:
                parser.error(f"--{min(options)} is for a launch without torchrun")
            under_torchrun(worker, arguments)
        usual = getattr(worker, "ranks_for", lambda **_: 2)(**arguments)
        print(launch(worker, options.pop("ranks", usual), **options, **arguments))
        return 0
    except LaunchError as error:
        if any(error.report.stdout):
            print(error.report)
        problem, code = error, 1
    except (LookupError, ValueError, TypeError) as error:
        problem, code = error, 2
    print(f"mgpu_tutorial: {problem.args[0]}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
