"""Each public name of the package serves a notebook, a page, a command or a benchmark.

Names are followed from there through imports and attributes; a class brings its methods, and
tests reach nothing. What a notebook's text offers in code, such as `tags`, counts as used.
"""

import ast
import json
import re
from pathlib import Path

import mgpu_tutorial

ROOT = Path(__file__).parent.parent
OUTSIDE = ("benchmarks/**/*.py", "tools/**/*.py", "handouts/**/*.py", "*.md", "docs/*.md")
FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
COMMAND = re.compile(r"-m mgpu_tutorial[ .]([a-z_.]+)")


# `from mgpu_tutorial import prove` is an import of where it lives.
FRONT = {
    f"mgpu_tutorial.{name}": f"mgpu_tutorial.{home}.{name}"
    for name, home in mgpu_tutorial.HOMES.items()
}


class Source:
    """A piece of Python: its top-level statements by what they define, and its imports."""

    def __init__(self, text: str) -> None:
        self.parts: dict[str, list[ast.AST]] = {"": []}
        self.imports: dict[str, str] = {}
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.split(".")[0]
                    self.imports[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    self.imports[alias.asname or alias.name] = FRONT.get(name, name)
        for node in tree.body:
            for name in _defined(node) or [""]:
                self.parts.setdefault(name, []).append(node)


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    names = [name for target in targets for name in ast.walk(target)]
    is_constant = isinstance(node, ast.Assign | ast.AnnAssign)
    return [name.id for name in names if is_constant and isinstance(name, ast.Name)]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    _module(p): Source(p.read_text("utf-8")) for p in ROOT.glob("mgpu_tutorial/**/*.py")
}


class Reached:
    """Pairs (module, name) that something reaches; "" is what a module does when imported."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()

    def follow(self, dotted: str) -> None:
        """Reach what stands behind `package.module.name.attribute`, re-exports included."""
        module, words = "", dotted.split(".")
        while words and f"{module}.{words[0]}".lstrip(".") in MODULES:
            module = f"{module}.{words.pop(0)}".lstrip(".")
            self.reach(module, "")
        if module and words and words[0] in MODULES[module].parts:
            self.reach(module, words[0])
        elif module and words and words[0] in MODULES[module].imports:
            self.follow(".".join([MODULES[module].imports[words[0]], *words[1:]]))

    def reach(self, module: str, name: str) -> None:
        if (module, name) not in self.names:
            self.names.add((module, name))
            for node in MODULES[module].parts[name]:
                self.read(node, MODULES[module], module)

    def read(self, tree: ast.AST, source: Source, module: str = "") -> None:
        """Reach what this code names, also in a text such as "mgpu_tutorial.at_scale"."""
        for node in ast.walk(tree):
            dotted = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            first, _, rest = dotted.partition(".")
            if module and first in source.parts:
                self.reach(module, first)
            elif first in source.imports:
                self.follow(f"{source.imports[first]}.{rest}".rstrip("."))
            elif isinstance(node, ast.Constant) and node.value in MODULES:
                self.follow(node.value)

    def read_text(self, text: str) -> None:
        """Reach what a program, or a part of one, names."""
        self.read(ast.parse(text), Source(text))

    def read_commands(self, text: str) -> None:
        """Reach the workers and modules that `python -m mgpu_tutorial …` names in a text."""
        for name in COMMAND.findall(text):
            self.follow(f"mgpu_tutorial.{name}.__main__")
            self.follow(f"mgpu_tutorial.{name}")


def _reached() -> set[tuple[str, str]]:
    reached = Reached()
    reached.follow("mgpu_tutorial.__main__")
    for path in (path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        text = path.read_text("utf-8")
        reached.read_commands(text)
        for code in [text] if path.suffix == ".py" else FENCE.findall(text):
            reached.read_text(code)
    for path in ROOT.glob("notebooks/*.ipynb"):
        chapter = f"mgpu_tutorial.{path.stem[3:]}"
        cells = json.loads(path.read_text("utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        reached.read_text("\n".join(re.sub(r"(?m)^%", "#", cell) for cell in code))
        reached.read_commands("\n".join(code + prose))
        code = re.findall(r"(?s)```.*?```|`[^`]+`", "\n".join(prose))  # a fence is one piece
        offered = set(re.findall(r"\w+", " ".join(code)))
        for module in MODULES:
            if f"{module}.".startswith(f"{chapter}."):
                for name in offered & set(MODULES[module].parts):
                    reached.reach(module, name)
    return reached.names


def test_nothing_public_is_there_for_tests_alone():
    every = {(module, name) for module, source in MODULES.items() for name in source.parts}
    public = {(module, name) for module, name in every if name and not name.startswith("_")}
    public -= {("mgpu_tutorial", "HOMES")}  # what the front door looks things up in
    assert sorted(public - _reached()) == []
