"""A build without a docstring gets that of its stub, else the first words of ours."""

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent, indent

from mgpu_tutorial.lab.teach.book import Library
from mgpu_tutorial.lab.teach.needs import first_line


def document(
    book: Library, folder: Path, ours_of: Callable[[str], Mapping | None]
) -> list[str]:
    """Give docstrings to builds that have none, and name them.

    Stubs are in the notebooks of a folder. `ours_of` gives the package's own versions of a
    chapter's builds by name, or None.
    """
    done = []
    for name, chapter in book.of("built").items():
        part = book.holder(name)
        node = ast.parse(part.text).body[0]
        is_open = getattr(node, "name", "") == name and not ast.get_docstring(node)
        if not is_open or node.body[0].lineno == node.lineno:
            continue
        if text := stub_of(name, chapter, folder) or first_words(
            (ours_of(chapter) or {}).get(name)
        ):
            lines, start = part.text.split("\n"), first_line(node.body[0]) - 1
            text = indent(text, " " * node.body[0].col_offset)
            is_class = isinstance(node, ast.ClassDef)
            while is_class and not lines[start - 1].strip():  # the blank line goes below
                start -= 1
            gap = [""] * (is_class and bool(lines[start].strip()))
            lines[start:start] = [text, *gap]
            part.text = "\n".join(lines)
            done.append(name)
    return done


def stub_of(name: str, chapter: str, folder: Path) -> str:
    """The docstring of what a notebook asks to be built, in its quotes; "" without one."""
    for path in folder.glob(f"[0-9]*_{chapter}.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if "exercise" not in cell["metadata"].get("tags", []) or "build(" not in text:
                continue
            try:
                body = ast.parse(text).body
            except SyntaxError:  # half typed, or with a magic
                continue
            for node in body:
                if getattr(node, "name", "") == name and ast.get_docstring(node):
                    return dedent(" " * 4 + ast.get_source_segment(text, node.body[0]))
    return ""


def first_words(ours: object) -> str:
    """The first paragraph of a docstring, in quotes: what follows tells what ours refuses."""
    first = " ".join((getattr(ours, "__doc__", "") or "").partition("\n\n")[0].split())
    return f'"""{first}"""' if first else ""
