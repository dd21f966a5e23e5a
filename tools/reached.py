"""What a change reaches: the tests and the notebooks that `make check` runs without a NAME.

    python -m tools.reached                       of what is not on main, or not committed
    python -m tools.reached mgpu_tutorial/x.py    of these files

A file reaches what imports it, directly or not, and what names it: a test that reads a page
or a folder, a module that reads a file beside it, a notebook that runs a command. What tools
and their tests, handouts and benchmarks read of the whole tree is their material: that does
not count. (pytest-testmon sees the process of a test, but neither its ranks nor the kernel of
a notebook; grimp knows the imports of a package, and no notebook.)
"""

import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from mgpu_tutorial import CHAPTERS, HOMES

ROOT = Path(__file__).parent.parent
PACKAGE = "mgpu_tutorial"
ROOMS = (PACKAGE, "tests", "tools", "handouts", "benchmarks", "docs", "notebooks")
MAIN = f"{PACKAGE}/__main__.py"
BY_IMPORT = (f"{PACKAGE}/", "tools/", "tests/tools/", "handouts/", "benchmarks/")
ALL = ("pyproject.toml", "constraints.txt", "conftest.py")  # everything is run with these
TEXTS = "notebooks", "reached", "security", "shown", "texts", "tools/test_mutants"
ALWAYS = {f"tests/{'' if '/' in name else 'test_'}{name}.py" for name in TEXTS}  # read all
FENCE = re.compile(r"^```python\n.*?^```", re.M | re.S)
COMMAND = re.compile(rf"-m {PACKAGE}[ .]([a-z_.]+)")


def git(*words: str) -> list[str]:
    """The lines that git prints; none where it refuses."""
    said = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.splitlines() if said.returncode == 0 else []


def base() -> str:
    """Where this branch left main; without a main, the last commit."""
    for name in ("origin/HEAD", "origin/main", "main"):
        if found := git("merge-base", "HEAD", name):
            return found[0]
    return "HEAD"


def differing() -> list[str]:
    """The files in git that are not as on main, or not there any more."""
    return git("diff", "--name-only", "--no-renames", base())


def changed() -> list[str]:
    """What differs from main or is new; a notebook not where only its prose differs."""
    new = git("ls-files", "--others", "--exclude-standard")
    return [path for path in {*differing(), *new} if not is_prose(path)]


def is_prose(path: str) -> bool:
    """Whether a notebook has the code and the outputs that it has on main."""
    before = path.endswith(".ipynb") and "\n".join(git("show", f"{base()}:{path}"))
    return bool(before) and code_of(before) == code_of(read(path))


def code_of(notebook: str) -> list:
    """What of a notebook is run, shown or compared, with the code in its text."""
    cells = json.loads(notebook)["cells"]
    texts = (FENCE.findall("".join(cell["source"])) for cell in cells)
    return [
        cell if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    ]


def read(path: str) -> str:
    """The text of a file; of one that is gone, no cells."""
    return (ROOT / path).read_text("utf-8") if (ROOT / path).exists() else '{"cells": []}'


class Graph:
    """Which file uses which, each by its path from the root."""

    def __init__(self) -> None:
        listed = git("ls-files", "--cached", "--others", "--exclude-standard")
        self.files = {*listed, *differing()}  # what is gone may still be imported
        self.users: dict[str, set[str]] = {}
        for user in sorted(self.files):
            for used in self.used_by(user):
                self.users.setdefault(used, set()).add(user)

    def used_by(self, path: str) -> Iterator[str]:
        """What a module, a test or a notebook imports, names or is run with."""
        if path.startswith("tests/"):
            yield from (f"{folder}/conftest.py" for folder in Path(path).parents)
        if path.endswith(".py"):
            yield from self.named_in(read(path), path)
        elif path.endswith(".ipynb"):
            for cell in json.loads(read(path))["cells"]:
                text = "".join(cell["source"])
                yield from self.run_by(text)
                if cell["cell_type"] == "code":
                    yield from self.named_in(re.sub(r"(?m)^[%!]", "#", text), path)

    def named_in(self, text: str, path: str) -> Iterator[str]:
        """What a source imports, and what the texts in it name; docstrings do not count."""
        waiting: list[ast.AST] = [ast.parse(text)]
        if path == MAIN:  # imports what its command names, and that is in `run_by`
            waiting = [node for node in waiting[0].body if not hasattr(node, "body")]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self.imported_by(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                pass  # a docstring
            elif isinstance(node, ast.Assign) and written(node.value) in CHAPTERS:
                yield from self.module(f"{PACKAGE}.{written(node.value)}")
            elif pattern := written(node):
                yield from self.run_by(pattern)
                yield from self.meant_by(pattern, path)
            else:
                waiting += ast.iter_child_nodes(node)

    def imported_by(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        for alias in node.names:
            name = alias.name
            if isinstance(node, ast.ImportFrom):
                home = HOMES.get(name, name) if node.module == PACKAGE else name
                name = f"{node.module}.{home}"
            yield from self.module(name)

    def module(self, dotted: str) -> Iterator[str]:
        """The files that run when `package.module.name` is imported, packages first."""
        parts = dotted.split(".")
        for end in range(1, len(parts) + 1):
            name = "/".join(parts[:end])
            yield from self.files & {f"{name}.py", f"{name}/__init__.py"}

    def run_by(self, text: str) -> Iterator[str]:
        """What `python -m mgpu_tutorial point_to_point.messages.blocking` runs."""
        for name in COMMAND.findall(text):
            yield MAIN
            yield from self.module(f"{PACKAGE}.{name}")

    def meant_by(self, pattern: str, path: str) -> Iterator[str]:
        """The files that a text names: a neighbour's, a module's, or one by its path."""
        yield from self.files & {f"{Path(path).parent}/{pattern}"}
        if re.fullmatch(r"(mgpu_tutorial|\*)(\.[\w*]+)*\.\w+", pattern):
            yield from self.like(f"{pattern.replace('.', '/')}.py")
            yield from self.module(pattern)
        if path.startswith(BY_IMPORT):
            return
        if "/" in pattern and pattern.split("/")[0] in ROOMS or pattern in ROOMS[1:]:
            yield from self.like(pattern) or self.like(f"{pattern}/*")
        yield from self.files & {pattern}
        if path.startswith("tests/") and pattern in CHAPTERS:
            yield from self.module(f"{PACKAGE}.{pattern}")

    def like(self, pattern: str) -> list[str]:
        return fnmatch.filter(self.files, pattern)

    def reached(self, files: Collection[str]) -> dict[str, str]:
        """These files and all that use them, directly or not, each with what it uses."""
        found = dict.fromkeys(files, "changed")
        waiting = [*files]
        while waiting:
            used = waiting.pop(0)
            if used in files or not used.endswith(".ipynb"):  # else its text is as it was
                new = self.users.get(used, set()) - found.keys()
                found |= dict.fromkeys(sorted(new), used)
                waiting += sorted(new)
        return found


def written(node: ast.AST) -> str:
    """A text, a path or a glob, with * where the source has a variable; "" if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) or "*" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts = written(node.left), written(node.right)
        return "/".join(filter(None, parts)) if parts[1] else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        parts = written(node.func.value), written(node.args[0])
        if node.func.attr in ("glob", "rglob"):
            return "/".join(filter(None, parts))
    return ""


@cache
def graph() -> Graph:
    return Graph()


def to_run(files: Collection[str]) -> dict[str, str]:
    """What pytest is given, and why: the tests and notebooks that these files reach."""
    if not git("rev-parse", "HEAD"):
        return dict.fromkeys(["notebooks", "tests"], "no git here, which knows what changed")
    if set(ALL).intersection(files):
        return dict.fromkeys(["notebooks", "tests"], "everything runs with what changed")
    why = dict.fromkeys(ALWAYS, "reads every text") | graph().reached(files)
    there = sorted(path for path in why if (ROOT / path).exists())
    kinds = r"notebooks/\d\d_\w+\.ipynb", r"tests/(?!browser/).*test_\w+\.py"
    return {path: why[path] for kind in kinds for path in there if re.fullmatch(kind, path)}


if __name__ == "__main__":
    chosen = to_run(sys.argv[1:] or changed())
    for path, why in chosen.items():
        print(f"{path}  <- {why}", file=sys.stderr)
    print(*chosen)
