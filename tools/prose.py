"""A mirror of how the notebooks read: `python tools/prose.py`, a row for each of them.

Words, mean length of a sentence in words, share of sentences of six words or fewer,
predictions, names of the package that are launched and never shown in this notebook or an
earlier one, places to change something, and the minutes of an attentive first reader.
Nothing is passed or failed here: CONTRIBUTING.md says what the figures should be.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
# Need not be shown: what only measures or collects, and the data and models of all chapters.
APPARATUS = re.compile(r"measurements|experiments|comparison|shared|cost_model|drawings")
LISTINGS = ("show_source", "show_changes")
SHORT = 6
WORDS_PER_MINUTE, LINES_PER_MINUTE, MINUTES_PER_EXERCISE, MINUTES_PER_PREDICTION = (
    150,
    10,
    6,
    0.5,
)

Name = tuple[str, str]  # of a module, of what is in it


class Measures(NamedTuple):
    """What is measured of one notebook."""

    name: str
    words: int
    sentence: float
    short: float
    predictions: int
    launched: int
    hidden: list[str]
    changes: int
    minutes: float


def prose_of(cells: list) -> str:
    """The running text: no code, formula, table or heading, and links as their text."""
    paragraphs = []
    for cell in cells:
        if cell.cell_type != "markdown":
            continue
        text = re.sub(r"```.*?```|\$\$.*?\$\$", " ", cell.source, flags=re.DOTALL)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("|", "#", "[←", "[Contents"))]
        paragraphs.append(" ".join(re.sub(r"^([-*>]|\d+\.)\s+", "", line) for line in lines))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(paragraphs))
    return re.sub(r"[*_`]", "", text)


def lengths_of(text: str) -> list[int]:
    """The words of each sentence; a colon before a capital letter ends one too."""
    parts = re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9“\"(])|\n", text)
    return [count for part in parts if (count := len(re.findall(r"[\w’'\-]+", part)))]


def programs(cells: list) -> Iterator[ast.Module]:
    """The code cells that a reader sees, as syntax trees; a solution is folded."""
    for cell in cells:
        if cell.cell_type == "code" and "solution" not in cell.metadata.get("tags", []):
            try:
                yield ast.parse(cell.source)
            except SyntaxError:
                continue


def imports_of(cells: list) -> dict[str, str]:
    """What each name of the package outside `lab` stands for, by the name in the notebook."""
    names = {}
    for node in (node for program in programs(cells) for node in ast.walk(program)):
        module = getattr(node, "module", None) or ""
        if module.startswith("mgpu_tutorial") and ".lab" not in module:
            names |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
    return names


def names_in(tree: ast.AST, imported: dict[str, str]) -> set[Name]:
    """The package's names that a piece of code mentions, constants left out."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in imported and not node.attr.isupper():
                names.add((imported[node.value.id], node.attr))
        elif isinstance(node, ast.Name) and node.id in imported:
            module, _, name = imported[node.id].rpartition(".")
            if module != "mgpu_tutorial" and not is_module(imported[node.id]):
                names.add((module, name))
    return names


def is_module(dotted: str) -> bool:
    """Whether this is a file or a folder of the package, and no name inside one."""
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def shown_in(cells: list, imported: dict[str, str]) -> set[Name]:
    """What the notebook's listings show."""
    shown = set()
    for node in (node for program in programs(cells) for node in ast.walk(program)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in LISTINGS:
            shown |= {name for value in node.args for name in names_in(value, imported)}
    return shown


def launched_in(cells: list, imported: dict[str, str]) -> set[Name]:
    """What its code calls or hands over, apart from apparatus."""
    used = set()
    for program in programs(cells):
        used |= names_in(program, imported)
    return {name for name in used if not APPARATUS.search(name[0])}


def words_in(text: str) -> int:
    """Words that are read: the address of a link is none."""
    return len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", text)))


def minutes_of(cells: list) -> float:
    """Words, lines in cells and listings, predictions and exercises, each at its pace."""
    markdown = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = [cell for cell in cells if cell.cell_type == "code"]
    lines = sum(bool(line.strip()) for cell in code for line in cell.source.splitlines())
    outputs = [
        out.get("data", {}).get("text/markdown", "") for c in code for out in c.outputs
    ]
    lines += sum(text.count("\n") for text in outputs if "```" in text)
    exercises = sum("exercise" in cell.metadata.get("tags", []) for cell in code)
    return (
        words_in(markdown) / WORDS_PER_MINUTE
        + lines / LINES_PER_MINUTE
        + markdown.count("**Predict") * MINUTES_PER_PREDICTION
        + exercises * MINUTES_PER_EXERCISE
    )


def measures(folder: Path) -> Iterator[Measures]:
    """One row for each notebook of a folder, in their order."""
    shown_so_far: set[Name] = set()
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        imported = imports_of(cells)
        shown_so_far |= shown_in(cells, imported)
        launched = launched_in(cells, imported)
        lengths = lengths_of(prose_of(cells))
        markdown = [cell.source for cell in cells if cell.cell_type == "markdown"]
        yield Measures(
            name=path.stem,
            words=sum(words_in(text) for text in markdown),
            sentence=sum(lengths) / max(1, len(lengths)),
            short=sum(length <= SHORT for length in lengths) / max(1, len(lengths)),
            predictions=sum(text.count("**Predict") for text in markdown),
            launched=len(launched),
            hidden=sorted(name for module, name in launched - shown_so_far),
            changes=sum(
                "**Change" in cell.source or "edit(" in cell.source for cell in cells
            ),
            minutes=minutes_of(cells),
        )


HEADS = (
    f"{'notebook':24}",
    *("words", " sentence", " short", "predict", " never shown", "changes", "minutes"),
)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=NOTEBOOKS)
    parser.add_argument("--names", action="store_true", help="list what is never shown")
    given = parser.parse_args(words)
    print(" ".join(HEADS))
    for row in measures(given.folder):
        never = f"{len(row.hidden)} of {row.launched}"
        print(
            f"{row.name:24} {row.words:5} {row.sentence:9.1f} {row.short:6.0%}"
            f" {row.predictions:7} {never:>12} {row.changes:7} {row.minutes:7.0f}"
        )
        if given.names and row.hidden:
            print(" " * 25 + ", ".join(row.hidden))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
