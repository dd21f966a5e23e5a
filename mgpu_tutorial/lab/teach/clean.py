"""Put the reader's library in order: imports, chapters, docstrings."""

import ast
import json
from itertools import dropwhile, takewhile
from textwrap import dedent, indent

from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.lab.teach.mine import Library, in_order, rank
from mgpu_tutorial.lab.teach.needs import NotKept, first_line, name_of, names_in


@mine.in_turn()
def clean() -> str:
    """Put the file in order, and say what was done: imports, chapters, docstrings.

    An import that nothing uses goes, chapters come in the order of the course, and a build
    without a docstring gets that of its stub. A file that cannot be imported stays.
    """
    try:
        mine.run(text := mine.written())
        book = Library(text)
        done = [sort_imports(book), sort_chapters(book), document(book)]
        if text and str(book) != text:
            mine.run(str(book))
            mine.write(str(book))
    except (Exception, SystemExit) as error:
        return f"{error}" if isinstance(error, NotKept) else mine.cannot(error)
    return "\n".join(filter(None, done))


def sort_imports(book: Library) -> str:
    """Sort the imports at the top, one line for each module, without what nothing uses."""
    rest = dropwhile(lambda part: not part.is_import, book.sections()[""])
    block = [*takewhile(lambda part: part.is_import, rest)]
    lines = [line for part in block[1:] for line in (*part.above, *part.text.split("\n"))]
    if not block or book.holder("__all__") or any("#" in line for line in lines):
        return ""
    used = set().union(*(names_in(part.text) for part in book.parts if not part.is_import))
    unused = set().union(*(part.names for part in block)) - used - {"annotations"}
    modules: dict[tuple, list[ast.alias]] = {}
    for node in ast.parse("\n".join(part.text for part in block)).body:
        for alias in node.names:
            home = (node.module, node.level) if isinstance(node, ast.ImportFrom) else (alias,)
            modules.setdefault(home, [])
            if name_of(alias) not in unused:
                modules[home].append(alias)
    for names in modules.values():
        names.sort(key=lambda alias: alias.name)
    nodes = [
        ast.ImportFrom(home[0], names, home[1]) if home[1:] else ast.Import(names)
        for home, names in modules.items()
        if names
    ]
    block[0].text = "\n".join(sorted(set(map(ast.unparse, nodes)), key=in_order))
    for part in block[1:]:
        book.parts.remove(part)
    return f"Not used, and gone: {', '.join(sorted(unused))}" if unused else ""


def sort_chapters(book: Library) -> str:
    """Put the chapters into the order of the course."""
    before, sections, tail = [*book.parts], book.sections(), book.parts[-1]
    parts = [part for chapter in sorted(sections, key=place) for part in sections[chapter]]
    book.parts = [*parts, tail]
    return "The chapters are in the order of the course." if book.parts != before else ""


def place(chapter: str) -> tuple[bool, int]:
    """Where a chapter's section stands; what is above all of them stays there."""
    return chapter != "", rank(chapter)


def document(book: Library) -> str:
    """Give a build without a docstring that of its stub in the notebook beside the file."""
    done = []
    for name, chapter in book.listed(2).items():
        part, text = book.holder(name), stub_of(name, chapter)
        node = ast.parse(part.text if part else "0").body[0]
        is_open = getattr(node, "name", "") == name and not ast.get_docstring(node)
        if text and is_open and node.body[0].lineno > node.lineno:
            lines, start = part.text.split("\n"), first_line(node.body[0]) - 1
            lines.insert(start, indent(text, " " * node.body[0].col_offset))
            part.text = "\n".join(lines)
            done.append(name)
    return f"A docstring as in the notebook: {', '.join(done)}" if done else ""


def stub_of(name: str, chapter: str) -> str:
    """The docstring of what a notebook asks to be built, in its quotes; "" without one."""
    for path in mine.FILE.resolve().parent.glob(f"[0-9]*_{chapter}.ipynb"):
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
