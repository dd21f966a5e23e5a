"""Run one worker without a notebook, or list them all.

    python -m mgpu_tutorial                                      the list
    python -m mgpu_tutorial point_to_point.blocking --ranks 2    on this machine
    torchrun --nproc-per-node 2 -m mgpu_tutorial point_to_point.blocking

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
from types import ModuleType

import mgpu_tutorial
from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.run.rank import under_torchrun


def modules_of(chapter: str) -> list[ModuleType]:
    """The module of a chapter, or the package and then every file of its folder."""
    first = importlib.import_module(f"mgpu_tutorial.{chapter}")
    files = pkgutil.iter_modules(getattr(first, "__path__", []), f"{first.__name__}.")
    return [first, *(importlib.import_module(file.name) for file in files)]


def workers(module: ModuleType) -> dict[str, Callable]:
    """The public functions of a module that take (rank, world_size, …), in their order."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return {
        name: function
        for name, function in sorted(functions, key=lambda f: f[1].__code__.co_firstlineno)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and list(inspect.signature(function).parameters)[:2] == ["rank", "world_size"]
    }


def listing() -> str:
    """Every worker with the first line of its docstring, by chapter."""
    lines = []
    for chapter in mgpu_tutorial.CHAPTERS:
        lines.append(f"{chapter}: {_first_line(modules_of(chapter)[0])}")
        lines += [f"    {name}  {_first_line(f)}" for name, f in workers_of(chapter).items()]
    return "\n".join(lines)


def workers_of(chapter: str) -> dict[str, Callable]:
    """All workers of a chapter by the name that the command line takes."""
    return {
        f"{module.__name__.removeprefix('mgpu_tutorial.')}.{name}": worker
        for module in modules_of(chapter)
        for name, worker in workers(module).items()
    }


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def find(name: str) -> Callable:
    """The worker of that name, such as `point_to_point.blocking` or `ddp_reducer.hooks.…`.

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
    options = [
        name for name in ("ranks", "device", "timeout") if getattr(given, name) is not None
    ]
    if given.worker is None and (options or rest):
        parser.error("name a worker before its options; without any word comes the list")
    if "TORCHELASTIC_RUN_ID" in os.environ and options:
        parser.error(f"--{options[0]} is for a launch without torchrun, which decides on it")
    return given, rest


def _arguments(words: list[str], worker: Callable) -> dict[str, object]:
    """The worker's own arguments: name=value, --name=value or --name value."""
    values, left = {}, list(words)
    while left:
        word = left.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals and left:
            equals, text = "=", left.pop(0)
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
    if given.worker is None:
        print(listing())
        return 0
    try:
        worker = find(given.worker)
        arguments = _arguments(rest, worker)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            under_torchrun(worker, arguments)
        options = {"device": given.device, "timeout": given.timeout}
        options = {name: value for name, value in options.items() if value is not None}
        ranks = 2 if given.ranks is None else given.ranks
        print(launch(worker, ranks, **options, **arguments))
    except (LookupError, ValueError, TypeError, LaunchError) as error:
        if isinstance(error, LaunchError) and any(error.report.stdout):
            print(error.report)
        print(f"mgpu_tutorial: {error.args[0] if error.args else error}", file=sys.stderr)
        return 2 if isinstance(error, LookupError | ValueError | TypeError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
