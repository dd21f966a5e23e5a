"""The reader's own library: a readable file beside the notebooks, in the order of the course.

Below a line that names the chapter stands what its builds made, and what these borrow of the
package. A second pass replaces a function where it stands; what else is in the file stays.
"""

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.lab.teach.needs import (
    OURS,
    NotKept,
    Thing,
    chapter_of,
    names_in,
    needs,
    renamed,
    root,
    without_types,
)
from mgpu_tutorial.lab.teach.source import source_of

__all__ = ["NotKept", "keep", "library", "listing", "names_in"]

FILE = Path("mine.py")  # in the folder where a notebook's kernel works
HEAD = '"""What I have built, chapter by chapter."""'
HEADER = re.compile(r"# (\w+):(?: (\w+(?:, \w+)*))?(?:;? ?borrowed: (\w+(?:, \w+)*))?$")
LATE = '''def __getattr__(name):
    """Make what needs more than torch and Python when it is asked for."""
    if f"_make_{name}" not in globals():
        raise AttributeError(f"there is no {name} in this file")
    globals()[name] = made = globals()[f"_make_{name}"]()
    return made'''


class Part:
    """A statement of the file, and the lines above it, which may name a chapter."""

    def __init__(self, above: list[str], text: str, names: set[str]) -> None:
        self.above, self.text, self.names = above, text, names

    @property
    def header(self) -> re.Match | None:
        return next(filter(None, map(HEADER.match, reversed(self.above))), None)


class Library:
    """The file as a list of its statements, which together are its text to the letter."""

    def __init__(self, text: str) -> None:
        lines, self.parts, end = text.split("\n"), [], 0
        for node in ast.parse(text, FILE.name).body:
            first = min(
                [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
            )
            own = "\n".join(lines[first - 1 : node.end_lineno])
            if first > end:
                self.parts.append(Part(lines[end : first - 1], own, root(node)))
            elif self.parts:  # two on one line
                self.parts[-1].names |= root(node)
            end = node.end_lineno
        self.parts.append(Part(lines[end:], "", set()))

    def __str__(self) -> str:
        rows = [line for part in self.parts for line in (*part.above, part.text)]
        return "\n".join(rows).rstrip("\n") + "\n"

    def sections(self) -> dict[str, list[Part]]:
        """The parts below each chapter's lines; those above the first are at ""."""
        found, chapter = {"": []}, ""
        for part in self.parts:
            chapter = part.header[1] if part.header else chapter
            found.setdefault(chapter, []).append(part)
        return found

    def listed(self, group: int) -> dict[str, str]:
        """The builds (group 2) or what is borrowed (3), each with its chapter."""
        headers = [m for part in self.parts for m in map(HEADER.match, part.above) if m]
        return {name: m[1] for m in headers for name in (m[group] or "").split(", ") if name}

    def holder(self, name: str) -> Part | None:
        return next((part for part in self.parts if name in part.names), None)

    def users(self, name: str) -> list[Part]:
        """The statements that use a name, but for the one that makes it."""
        own = self.holder(name)
        return [p for p in self.parts if p is not own and p.text and name in names_in(p.text)]

    def put(self, thing: Thing, text: str, name: str, later: set[str]) -> None:
        """Write a statement over the one that makes its name, else where it is in time."""
        if part := self.holder(name):
            if part.names == {name} and not part.text.startswith(("import ", "from ")):
                part.text = text
                return
            if not part.text.startswith(("import ", "from ")):
                raise NotKept(f"{FILE.name} makes {name} together with others on one line")
            self.drop(part, name)
        if thing.kind == "import":
            top = self.sections()[""]
            imports = [i for i, part in enumerate(top) if is_import(part)]
            later_ones = [i for i in imports if order_of(top[i].text) > order_of(text)]
            if later_ones and later_ones[0] == imports[0]:  # it becomes the first
                above, top[imports[0]].above = top[imports[0]].above, []
                self.parts.insert(imports[0], Part(above, text, {name}))
            elif imports:
                self.parts.insert(
                    (later_ones or [imports[-1] + 1])[0], Part([], text, {name})
                )
            else:  # below the docstring
                self.parts.insert(
                    len(top[:1]) if top and top[0].text else 0, Part([""], text, {name})
                )
            return
        at, above = self.place(thing, name, later)
        self.parts.insert(at, Part(above, text, {name}))

    def drop(self, part: Part, name: str) -> None:
        """Take one name out of an import."""
        (node,) = ast.parse(part.text).body
        node.names = [a for a in node.names if (a.asname or a.name.partition(".")[0]) != name]
        part.names -= {name}
        if node.names:
            part.text = ast.unparse(node)
        else:
            self.remove(part)

    def remove(self, part: Part) -> None:
        """Take a statement out; what stands above it may name a chapter and stays."""
        after = self.parts[self.parts.index(part) + 1]
        if any(line.strip() for line in part.above) or is_import(part):
            after.above = part.above + [line for line in after.above if line.strip()]
        self.parts.remove(part)

    def place(self, thing: Thing, name: str, later: set[str]) -> tuple[int, list[str]]:
        """Where a new statement of a chapter goes, and the lines above it."""
        section = self.sections().get(thing.chapter, [])
        section = [part for part in section if part.text]
        for part in section:  # a class is there before what is derived from it
            if later & part.names or name in names_in(part.text):
                at = self.parts.index(part)
                above, part.above = part.above, ["", ""]
                return at, above
        if section:
            return self.parts.index(section[-1]) + 1, ["", ""]
        above = ["", "", f"# {thing.chapter}:"]
        rank = self.rank(thing.chapter, thing.kind == "borrowed")
        borrowed_only = set(self.listed(3).values()) - set(self.listed(2).values())
        for at, part in enumerate(self.parts):
            if part.header and part.text:
                other = part.header[1]
                if self.rank(other, other in borrowed_only) > rank:
                    return at, above
        return len(self.parts) - 1, above

    @staticmethod
    def rank(chapter: str, borrowed: bool) -> int:
        """The number of a chapter; what several chapters use comes first."""
        if chapter in CHAPTERS:
            return CHAPTERS.index(chapter)
        return -1 if borrowed else len(CHAPTERS)

    def note(self, chapter: str, built: list[str], borrowed: list[str]) -> None:
        """Name in the chapter's line what was built and what is borrowed."""
        places = [
            (part, i)
            for part in self.parts
            for i, line in enumerate(part.above)
            if (found := HEADER.match(line)) and found[1] == chapter
        ]
        own = [n for n, c in self.listed(2).items() if c == chapter]
        lent = [n for n, c in self.listed(3).items() if c == chapter and self.holder(n)]
        own += [n for n in built if n not in own]
        lent = [n for n in dict.fromkeys([*lent, *borrowed]) if n not in own]
        for part, i in reversed(places[1:]):  # a file of an earlier version had several
            del part.above[i]
        if places:
            words = ", ".join(own) + (f"; borrowed: {', '.join(lent)}" if lent else "")
            places[0][0].above[places[0][1]] = f"# {chapter}: {words.removeprefix('; ')}"


def is_ours(part: Part) -> bool:
    """An import of this package, as earlier versions wrote it."""
    return is_import(part) and bool(re.match(rf"(from|import) {OURS}\b", part.text))


def order_of(line: str) -> tuple[bool, str]:
    return line.startswith("from "), line


def is_import(part: Part) -> bool:
    return part.text.startswith(("import ", "from "))


def written() -> str:
    """The text of the file; "" where there is none yet."""
    return (
        FILE.read_bytes().decode("utf-8-sig").replace("\r\n", "\n") if FILE.exists() else ""
    )


def run(text: str) -> ModuleType:
    """The text as a module, whatever its name is at home."""
    module = ModuleType("mine")
    exec(compile(text, str(FILE.resolve()), "exec"), vars(module))
    return module


def listing() -> str:
    """What is in the reader's library, by chapter, and whether it can be imported."""
    if not FILE.exists():
        return f"No {FILE} here yet: what passes a build in a notebook goes there."
    try:
        built = Library(written()).listed(2)
        run(written())
    except (Exception, SystemExit) as error:
        return cannot(error)
    chapters = dict.fromkeys(built.values())
    wide = max(map(len, chapters), default=0)
    rows = {c: ", ".join(n for n, home in built.items() if home == c) for c in chapters}
    lines = [f"{chapter:{wide}}  {names}" for chapter, names in rows.items()]
    return "\n".join([*lines, "It can be imported: from mine import …"])


def cannot(error: BaseException) -> str:
    """What is wrong with the file, in a sentence."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace and not isinstance(error, SyntaxError):
        if trace.tb_frame.f_code.co_filename == str(FILE.resolve()):
            line = trace.tb_lineno
        trace = trace.tb_next
    at = f", line {line}" if line else ""
    return f"{FILE.name}{at} cannot be imported ({type(error).__name__}: {error})."


def library(*ours: Callable) -> SimpleNamespace:
    """Each of these functions and classes as the reader has built it, else as it is.

    Prints which is whose. What the reader has built travels to the ranks by value.
    """
    text = written()
    book = Library(text)
    own, built = run(at_home(book)), book.listed(2)
    mine = [t.__name__ for t in ours if t.__name__ in built and hasattr(own, t.__name__)]
    rest = [thing.__name__ for thing in ours if thing.__name__ not in mine]
    print(f"{FILE.name}: {', '.join(mine) or '-'}; the package: {', '.join(rest) or '-'}")
    found = {t.__name__: t for t in ours}
    return SimpleNamespace(**found | {name: getattr(own, name) for name in mine})


def at_home(book: Library) -> str:
    """The text, with unchanged copies from the package, which may ask whose a class is."""
    for name, chapter in book.listed(3).items():
        part, start = book.holder(name), f"{OURS}.{chapter}"
        for module in [m for m in sys.modules if f"{m}.".startswith(f"{start}.")]:
            thing = vars(sys.modules[module]).get(name)
            is_there = part and getattr(thing, "__module__", "") == module
            if is_there and without_types(source_of(thing)) == part.text:
                rest = "\n" * part.text.count("\n")  # lines keep their numbers
                part.text = f"from {module} import {name}{rest}"
    return str(book)


def keep(
    chapter: str, functions: Sequence[Callable], ours: Mapping[str, Callable] | None = None
) -> list[str]:
    """Put functions and classes into the reader's library, with what they need.

    `ours` are the package's own versions of what the chapter builds. Raises NotKept, which
    says why, and leaves the file as it was. Returns what the reader should know besides.
    """
    try:
        text = written()
        if text:
            run(text)
        book = Library(text or f"{HEAD}\n")
    except (Exception, SystemExit) as error:
        raise NotKept(f"{cannot(error)} Mend it, then build again") from error
    things, notes = needs(chapter, functions, book.listed(2), ours or {})
    try:
        add(book, things, ours or {})
        new = str(book)
        made = vars(run(new))
        lost = [
            f.__name__ for f in functions if not {f.__name__, f"_make_{f.__name__}"} & {*made}
        ]
        assert not lost, f"{lost} would be missing"
        encoded = new.encode()
    except NotKept:
        raise
    except (Exception, SystemExit) as error:
        why = f"with it {FILE.name} could not be imported ({type(error).__name__}: {error})"
        raise NotKept(why) from error
    target = FILE.resolve()
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(encoded)
        os.replace(draft, target)  # whole or not at all
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise NotKept(f"{FILE.name} could not be written ({error.strerror})") from error
    return notes


def add(book: Library, things: list[Thing], ours: Mapping[str, Callable]) -> None:
    """Write things into the file; a name that is taken there becomes one of the chapter."""
    built = {thing.name for thing in things if thing.kind == "built"}
    finals: dict[tuple, str] = {}
    for thing in things:
        if thing.kind == "built":
            finals[thing.key] = thing.name
    replaced = set(built)
    for thing in reversed(things):  # who uses a thing comes after it
        if thing.kind == "built":
            make_room(book, thing, ours.get(thing.name))
    for n, thing in enumerate(things):
        if thing.key not in finals:
            finals[thing.key] = free_name(book, thing, finals, replaced)
        name = finals[thing.key]
        text = rendered(thing, finals, name)
        replaced.add(name)
        later = {finals.get(t.key, t.name) for t in things[n + 1 :] if t.kind != "import"}
        old = book.holder(name)
        same = old and thing.kind == "import" and same_import(old.text, text, name)
        if not old or (old.text != text and not same):
            book.put(thing, text, name, later)
    for thing in things:  # those that use each other in a circle
        part, name = book.holder(finals[thing.key]), finals[thing.key]
        text = rendered(thing, finals, name)
        if part and part.names == {name} and not is_import(part):
            part.text = text
    late = any(part.text.startswith("def _make_") for part in book.parts)
    if late and not book.holder("__getattr__"):
        at = len([part for part in book.sections()[""] if part.text])
        book.parts.insert(at, Part(["", ""], LATE, {"__getattr__"}))
    for home in dict.fromkeys([*(t.chapter for t in things if t.kind != "import")]):
        lent = [finals[t.key] for t in things if t.kind == "borrowed" and t.chapter == home]
        book.note(
            home, [t.name for t in things if t.kind == "built" and t.chapter == home], lent
        )


def rendered(thing: Thing, finals: dict, name: str) -> str:
    """The source of a thing, in which all are called as in the file."""
    known = {
        key: finals.get(key, key[1] if key[0] == "built" else None)
        for key in thing.uses.values()
    }
    changed = {old: known[key] for old, key in thing.uses.items() if known[key]}
    changed[thing.name] = name
    return renamed(thing.text, {old: new for old, new in changed.items() if old != new})


def make_room(book: Library, thing: Thing, ours: Callable | None) -> None:
    """A build's name is its own: what else has it in the file is called otherwise."""
    old, name = book.holder(thing.name), thing.name
    built, borrowed = book.listed(2).get(name), book.listed(3).get(name)
    if not old or is_ours(old) or old.text == thing.text or built == thing.chapter:
        return
    if built:
        raise NotKept(f"{FILE.name} has another {name}, which {built} built")
    if borrowed and ours and chapter_of(ours.__module__) == borrowed:  # by now it is made
        if borrowed != thing.chapter:
            book.remove(old)
        return
    chapter = next(c for c, parts in book.sections().items() if old in parts)
    new = next(new for new in names_for(name, chapter) if not book.holder(new))
    for part in (old, *book.users(name)):
        part.text = renamed(part.text, {name: new})
    old.names = old.names - {name} | {new}


def names_for(name: str, chapter: str) -> Iterator[str]:
    """What a thing may be called, its own name first."""
    yield name
    yield f"{name}_{chapter or 'mine'}"
    for number in range(2, 1000):
        yield f"{name}_{chapter or 'mine'}_{number}"


def free_name(book: Library, thing: Thing, finals: dict, replaced: set[str]) -> str:
    """The first name that is free, has the same text, or is used only by what is replaced."""
    built, borrowed = book.listed(2), book.listed(3)
    for name in names_for(thing.name, thing.chapter):
        old = book.holder(name)
        if not old:
            if name in finals.values():
                continue
            return name
        if old.text == rendered(thing, finals, name):
            return name
        if thing.kind == "import" and same_import(old.text, thing.text, name):
            return name
        if is_ours(old):
            return name
        if name in built or name in finals.values() or is_import(old):
            continue
        home = next(c for c, parts in book.sections().items() if old in parts)
        if home != thing.chapter or (name in borrowed) != (thing.kind == "borrowed"):
            continue
        if thing.kind == "borrowed":  # of an earlier version of the package
            return name
        if all(user.names <= replaced for user in book.users(name)):
            return name
    raise NotKept(f"{thing.name} has too many namesakes in {FILE.name}")


def same_import(old: str, new: str, name: str) -> bool:
    """Whether an import of the file, perhaps edited, makes the name as the new one does."""

    def meant(text: str) -> set:
        node = ast.parse(text).body[0]
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return set()
        home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        found = [a for a in node.names if name == (a.asname or a.name.partition(".")[0])]
        return {home + a.name if a.asname or home else name for a in found}

    return bool(meant(old) & meant(new))
