"""The imports of the reader's library in the order of PEP 8 and isort."""

import ast
import sys
from collections.abc import Sequence

from mgpu_tutorial.lab.teach.subjects import WIDTH


def import_lines(texts: Sequence[str]) -> list[str]:
    """Imports by origin and name, one line for each module.

    One that has a comment, or shares its line, stays as it is.
    """
    rows: dict[tuple, list[str]] = {}
    modules: dict[tuple[int, str | None], set[str]] = {}
    for text in texts:
        nodes = ast.parse(text).body
        if "#" in text or len(nodes) > 1:
            rows.setdefault(_place(nodes[0]), []).append(text)
            continue
        for alias in nodes[0].names:
            if isinstance(nodes[0], ast.Import):
                one = ast.Import([alias])
            elif alias.asname:
                one = ast.ImportFrom(nodes[0].module, [alias], nodes[0].level)
            else:
                modules.setdefault((nodes[0].level, nodes[0].module), set()).add(alias.name)
                continue
            rows[_place(one)] = [ast.unparse(one)]
    for (level, module), names in modules.items():
        aliases = [ast.alias(name) for name in sorted(names, key=_of_its_kind)]
        node = ast.ImportFrom(module, aliases, level)
        rows.setdefault(_place(node), []).append(_in_width(ast.unparse(node)))
    lines, last = [], None
    for place in sorted(rows):
        lines += [""] if last not in (None, place[0]) else []
        lines += rows[place]
        last = place[0]
    return lines


def _place(node: ast.Import | ast.ImportFrom) -> tuple:
    """Python's own before others, `import` before `from`, each by name."""
    first = node.names[0]
    is_from = isinstance(node, ast.ImportFrom)
    module = "." * node.level + (node.module or "") if is_from else first.name
    top = module.partition(".")[0]
    origins = top == "__future__", top in sys.stdlib_module_names, top != "", True
    return (
        origins.index(True),
        is_from,
        module.lower(),
        _of_its_kind(first.name),
        first.asname or "",
    )


def _of_its_kind(name: str) -> tuple[int, str]:
    """Constants before classes, and these before all others."""
    is_constant = len(name) > 1 and name.isupper()
    return 0 if is_constant else 1 if name[:1].isupper() else 2, name.lower()


def _in_width(line: str) -> str:
    """A long import in brackets, a name on each line."""
    start, _, names = line.partition(" import ")
    if len(line) <= WIDTH:
        return line
    rows = [f"    {name}," for name in names.split(", ")]
    return "\n".join([f"{start} import (", *rows, ")"])
