"""What stands otherwise in a file of an earlier version: absent types, slow imports."""

import ast
import builtins

from mgpu_tutorial.lab.teach.book import Library
from mgpu_tutorial.lab.teach.needs import (
    in_bodies,
    inside,
    is_slow,
    name_of,
    names_in,
    names_of_types,
    without_types,
)


def renew(book: Library) -> None:
    """Write what is borrowed as it would be written now; the reader's own stays."""
    for part in book.parts:
        if book.kind(part) == "borrowed":
            names = names_of_types(part.text)
            absent = [n for n in names if not (book.holder(n) or hasattr(builtins, n))]
            part.text = without_types(part.text, absent)
    for part in [*book.imports]:
        node, *others = ast.parse(part.text).body
        if isinstance(node, ast.ImportFrom) and node.module and not others:
            for alias in node.names if is_slow(node.module) else ():
                move(book, f"from {node.module} import {ast.unparse(alias)}", name_of(alias))


def move(book: Library, line: str, name: str) -> None:
    """An import into the functions that use it, if no other statement does."""
    users = [part for part in book.parts if name in names_in(part.text)]
    can_move = all(in_bodies(part.text, name) for part in users)
    if users and can_move and book.drop_imports({name}):
        for part in users:
            part.text = inside(part.text, name, line)
