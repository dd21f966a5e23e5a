"""Which flags of chapter 24 does a newer program no longer take? `python -m tools.flags`.

    git clone https://github.com/pytorch/torchtitan /tmp/torchtitan
    python -m tools.flags torchtitan /tmp/torchtitan
    git clone https://github.com/NVIDIA/Megatron-LM /tmp/megatron
    python -m tools.flags megatron /tmp/megatron

Reads the checkout's Python files and runs none of them, so it needs neither program's
requirements. It names each flag that `at_scale.commands` can print and the checkout no longer
knows, and ends with 1 if there is one. It can't see what a name means, nor which values it
takes.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from mgpu_tutorial.at_scale import commands, planner
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import Model

SHAPE = {"kv_heads": 2, "ffn": 3072, "gated": True, "tied": False}
DENSE = Model(14, 1024, 8, 4096, 32_000, **SHAPE)
EXPERTS = DENSE._replace(experts=8, active=2)


def flags(program: str) -> list[str]:
    """The name of every flag that the chapter's command can print, without its value."""
    command, found = getattr(commands, program), set()
    unusual = ({}, {"sequence_parallel": False}, {"flash": False}, {"overlap": False})
    for (model, context), change in product(((DENSE, 2), (EXPERTS, 1)), unusual):
        for plan in planner.plans(model, CLUSTERS["H100"], 16, 112, context):
            if program == "torchtitan" and min(plan.tp, plan.ep) > 1:
                continue  # it has no such plan
            for word in command(model, plan._replace(**change), 112).words:
                found.add(word.replace("=", " ").split()[0])
    return sorted(found)


def trees(checkout: Path) -> Iterator[ast.AST]:
    """The parsed Python files of a checkout, but for those that don't parse."""
    for file in sorted(checkout.rglob("*.py")):
        try:
            yield ast.parse(file.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue


def fields(checkout: Path) -> dict[str, set[str]]:
    """The annotated fields of each class, by the class's name in small letters.

    A class named `Config` counts as the one that it stands in.
    """
    found: dict[str, set[str]] = defaultdict(set)

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef):
                continue
            name = outer if child.name == "Config" else child.name
            named = [one.target for one in child.body if isinstance(one, ast.AnnAssign)]
            found[name.lower()] |= {one.id for one in named if isinstance(one, ast.Name)}
            visit(child, name)

    for tree in trees(checkout):
        visit(tree, "")
    return found


def spelled(checkout: Path) -> set[str]:
    """Every text of the checkout that begins like a flag: what argparse is given."""
    texts = set()
    for tree in trees(checkout):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and str(node.value).startswith("--"):
                texts.add(node.value)
    return texts


def gone_from_torchtitan(checkout: Path) -> dict[str, list[str]]:
    """The flags whose section has no such field any more, with the fields that it has."""
    known, gone = fields(checkout), {}
    for flag in flags("torchtitan"):
        section, _, field = flag.removeprefix("--").partition(".")
        field = field.removeprefix("no-").replace("-", "_")
        name = section.replace("_", "")
        has = known[name] | known[f"{name}config"]
        if field not in has:
            gone[flag] = sorted(has)
    return gone


def gone_from_megatron(checkout: Path) -> dict[str, list[str]]:
    """The flags that are neither spelled in the checkout nor a field of one of its classes.

    A part of Megatron's arguments is made from the fields of its configurations.
    """
    texts, known, gone = spelled(checkout), set().union(*fields(checkout).values()), {}
    for flag in flags("megatron"):
        field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if flag not in texts and field not in known:
            gone[flag] = []
    return gone


GONE = {"torchtitan": gone_from_torchtitan, "megatron": gone_from_megatron}


def main(words: list[str] | None = None) -> int:
    """Print what is gone; 1 where something is, 2 where nothing of the program was found."""
    parser = argparse.ArgumentParser("tools.flags", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("program", choices=GONE)
    parser.add_argument("checkout", type=Path, help="a clone of the program, at any commit")
    given = parser.parse_args(words)
    all_flags = flags(given.program)
    gone = GONE[given.program](given.checkout)
    if len(gone) == len(all_flags):
        print(f"{given.checkout} knows none of the flags: is it {given.program}?")
        return 2
    for flag, fields_now in gone.items():
        now = f"; its section has {', '.join(fields_now)}" if fields_now else ""
        print(f"gone: {flag}{now}")
    print(f"{len(gone)} of {len(all_flags)} flags of {given.program} are gone.")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
