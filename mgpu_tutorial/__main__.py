"""Run one worker without a notebook, or list them all.

    python -m mgpu_tutorial                                               the list
    python -m mgpu_tutorial point_to_point.messages.blocking --ranks 2    on this machine
    torchrun --nproc-per-node 2 -m mgpu_tutorial point_to_point.messages.blocking
    python -m mgpu_tutorial mine                                          what you have built

A worker's own arguments follow as `--name value` or name=value; a value is a Python literal
or plain text.
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


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's options, and what is left: the worker's arguments."""
    parser = argparse.ArgumentParser(
        prog="mgpu_tutorial",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "worker", nargs="?", help="chapter.worker or chapter.file.worker, as in the list"
    )
    parser.add_argument("--ranks", type=int, help="world size (2)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--timeout", type=float, help="seconds (30)")
    parser.add_argument("--version", action="version", version=mgpu_tutorial.__version__)
    given, rest = parser.parse_known_args(words)
    if given.worker is None and words:
        parser.error("name a worker before its options; without any word comes the list")
    options = [
        name for name in ("ranks", "device", "timeout") if getattr(given, name) is not None
    ]
    if "TORCHELASTIC_RUN_ID" in os.environ and options:
        parser.error(f"--{options[0]} is for a launch without torchrun, which decides on it")
    return given, rest


def _arguments(words: list[str], worker: Callable) -> dict[str, object]:
    """The worker's own arguments: name=value, --name=value or --name value."""
    values, left = {}, iter(words)
    for word in left:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals:
            text = next(left, None)
            equals = text is not None
        name = name.replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"{word!r} is not name=value or --name value")
        if name in ("worker", "rank", "world_size"):
            raise ValueError(f"{name} is no argument to set: see --ranks, and the first word")
        values[name] = _value(name, text, worker)
    return values


def _value(name: str, text: str, worker: Callable) -> object:
    """A Python literal or plain text; ValueError where the worker wants a number instead."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    parameter = inspect.signature(worker).parameters.get(name)
    wanted = parameter.annotation if parameter else None
    kinds = {int: int, float: int | float}  # by annotation, what may be given
    if wanted in kinds and not isinstance(value, kinds[wanted]):
        raise ValueError(f"--{name} takes a number of type {wanted.__name__}, got {text!r}")
    return value


def main(words: list[str]) -> int:
    given, rest = _parse(words)
    if given.worker == "mine" and os.path.isdir("notebooks"):
        os.chdir("notebooks")
    if given.worker in (None, "mine"):
        print(mine.listing() if given.worker else listing())
        return 0
    try:
        worker = find(given.worker)
        arguments = _arguments(rest, worker)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            under_torchrun(worker, arguments)
        options = {"device": given.device, "timeout": given.timeout}
        options = {name: value for name, value in options.items() if value is not None}
        usual = getattr(worker, "ranks_for", lambda **_: 2)(**arguments)
        ranks = usual if given.ranks is None else given.ranks
        print(launch(worker, ranks, **options, **arguments))
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
