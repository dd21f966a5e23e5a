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
from collections.abc import Callable, Iterator
from types import ModuleType

import mgpu_tutorial
from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.errors import LaunchError
from mgpu_tutorial.lab.rank import under_torchrun


def chapters() -> Iterator[ModuleType]:
    """The chapter modules, in the order of their notebooks (each says its number)."""
    names = [m.name for m in pkgutil.iter_modules(mgpu_tutorial.__path__) if not m.ispkg]
    modules = [
        importlib.import_module(f"mgpu_tutorial.{n}") for n in names if n != "__main__"
    ]
    return iter(
        sorted((m for m in modules if hasattr(m, "CHAPTER")), key=lambda m: m.CHAPTER)
    )


def workers(module: ModuleType) -> dict[str, Callable]:
    """The public functions of a chapter that take (rank, world_size, …)."""
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
    for module in chapters():
        stem = module.__name__.rpartition(".")[2]
        lines.append(f"{module.CHAPTER:02d} {stem}: {_first_line(module)}")
        lines += [f"    {stem}.{n}  {_first_line(f)}" for n, f in workers(module).items()]
    return "\n".join(lines)


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def find(name: str) -> Callable:
    """The worker called `stem.worker`; LookupError says what there is instead."""
    stem, _, worker = name.partition(".")
    modules = {m.__name__.rpartition(".")[2]: m for m in chapters()}
    if stem not in modules:
        raise LookupError(f"no chapter {stem!r}; there are: {', '.join(modules)}")
    found = workers(modules[stem])
    if worker not in found:
        raise LookupError(f"no worker {worker!r} in {stem}; there are: {', '.join(found)}")
    return found[worker]


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="mgpu_tutorial",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "worker", nargs="?", help="stem.worker, such as point_to_point.blocking"
    )
    parser.add_argument("--ranks", type=int, default=2, help="world size (2)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds (30)")
    return parser.parse_known_args(words)


def _arguments(words: list[str]) -> dict[str, object]:
    values, left = {}, list(words)
    while left:
        word = left.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals and left:
            equals, text = "=", left.pop(0)
        if not equals or not name.replace("-", "_").isidentifier():
            raise ValueError(f"{word!r} is not name=value or --name value")
        try:
            values[name.replace("-", "_")] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name.replace("-", "_")] = text
    return values


def main(words: list[str]) -> int:
    given, rest = _parse(words)
    if given.worker is None:
        print(listing())
        return 0
    try:
        worker, arguments = find(given.worker), _arguments(rest)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            under_torchrun(worker, arguments)
        print(
            launch(
                worker, given.ranks, device=given.device, timeout=given.timeout, **arguments
            )
        )
    except (LookupError, ValueError, TypeError, LaunchError) as error:
        if isinstance(error, LaunchError) and any(error.report.stdout):
            print(error.report)
        print(f"mgpu_tutorial: {error.args[0] if error.args else error}", file=sys.stderr)
        return 2 if isinstance(error, LookupError | ValueError | TypeError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
