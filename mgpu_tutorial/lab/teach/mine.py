"""The reader's own library: a readable file beside the notebooks, in the order of the course.

Below a line that names the chapter stands what its builds made, and what these borrow of the
package. A second pass replaces a function where it stands; what else is in the file stays.
"""

import ast
import builtins
import fcntl
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.lab.teach.needs import (
    MINE,
    OURS,
    STAND_INS,
    NotKept,
    Thing,
    chapter_of,
    first_line,
    locals_in,
    name_of,
    names_in,
    needs,
    renamed,
    root,
    with_quoted_types,
)
from mgpu_tutorial.lab.teach.source import file_of, source_of

__all__ = ["NotKept", "holds", "keep", "library", "listing", "names_in"]

FILE = Path(f"{MINE}.py")  # in the folder where a notebook's kernel works
PROOF = Path(__file__).parents[2] / "instruments" / "prove" / "proof.py"  # goes beside it
HEAD = (
    '"""What I have built, chapter by chapter; proof.py says whether a job of it is right."""'
)
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

    @property
    def is_import(self) -> bool:
        return self.text.startswith(("import ", "from "))


class Library:
    """The file as a list of its statements, which together are its text to the letter."""

    def __init__(self, text: str) -> None:
        lines, self.parts, end = text.split("\n"), [], 0
        for node in ast.parse(text, FILE.name).body:
            start = first_line(node) - 1
            if start >= end:
                own = "\n".join(lines[start : node.end_lineno])
                self.parts.append(Part(lines[end:start], own, root(node)))
            elif self.parts:  # two on one line
                self.parts[-1].names |= root(node)
            end = node.end_lineno
        self.parts.append(Part(lines[end:], "", set()))

    def __str__(self) -> str:
        rows = [line for part in self.parts for line in (*part.above, part.text)]
        return "\n".join(rows).rstrip("\n") + "\n"

    def sections(self) -> dict[str, list[Part]]:
        """The statements below each chapter's lines; those above the first are at ""."""
        found, chapter = {"": []}, ""
        for part in self.parts[:-1]:
            chapter = part.header[1] if part.header else chapter
            found.setdefault(chapter, []).append(part)
        return found

    def listed(self, group: int) -> dict[str, str]:
        """The builds (group 2) or what is borrowed (3), each with its chapter."""
        headers = [m for part in self.parts for m in map(HEADER.match, part.above) if m]
        return {name: m[1] for m in headers for name in (m[group] or "").split(", ") if name}

    def holder(self, name: str) -> Part | None:
        return next((part for part in self.parts if name in part.names), None)

    def home(self, part: Part) -> str:
        return next(chapter for chapter, parts in self.sections().items() if part in parts)

    def users(self, own: Part) -> list[Part]:
        """The other statements that use what a statement makes."""
        others = [part for part in self.parts if part is not own and part.text]
        return [part for part in others if own.names & names_in(part.text)]

    def put(self, thing: Thing, text: str, name: str, later: set[str]) -> None:
        """Write a statement over the one that makes its name, else where it is in time."""
        part = self.holder(name)
        if not part:
            at, above = self.place(thing, text, name, later)
            self.parts.insert(at, Part(above, text, {name}))
        elif thing.kind != "import":  # an import means the same
            if part.names != {name}:
                raise NotKept(f"{FILE.name} makes {name} together with others on one line")
            part.text = text

    def place(self, thing: Thing, text: str, name: str, later: set[str]) -> tuple[int, list]:
        """Where a new statement goes, and the lines above it."""
        section = self.sections().get(thing.chapter, [])
        if thing.kind == "import":
            imports = [i for i, part in enumerate(section) if part.is_import]
            after = [i for i in imports if in_order(section[i].text) > in_order(text)]
            if imports and after != imports:
                return after[0] if after else imports[-1] + 1, []
            if not imports:  # below the docstring
                return int(bool(section) and not section[0].names), [""]
            above, section[imports[0]].above = section[imports[0]].above, []
            return imports[0], above
        for part in section:  # a class is there before what is derived from it
            if later & part.names or name in names_in(part.text):
                at = self.parts.index(part)
                above, part.above = part.above, ["", ""]
                return at, above
        if section:
            return self.parts.index(section[-1]) + 1, ["", ""]
        starts = [(p.header[1], i) for i, p in enumerate(self.parts[:-1]) if p.header]
        after = [i for other, i in starts if rank(other) > rank(thing.chapter)]
        return [*after, len(self.parts) - 1][0], ["", "", f"# {thing.chapter}:"]

    def remove(self, part: Part) -> None:
        """Take a statement out; a line above it that names a chapter stays."""
        after = self.parts[self.parts.index(part) + 1]
        if any(line.strip() for line in part.above):
            after.above = part.above + [line for line in after.above if line.strip()]
        self.parts.remove(part)

    def note(self, chapter: str, built: list[str], borrowed: list[str]) -> None:
        """Name in the chapter's line what was built and what is borrowed."""
        listed = [
            [n for n, c in self.listed(group).items() if c == chapter] for group in (2, 3)
        ]
        own = [*dict.fromkeys(listed[0] + built)]
        lent = dict.fromkeys([n for n in listed[1] if self.holder(n)] + borrowed)
        words = [", ".join(own), ", ".join(n for n in lent if n not in own)]
        line = "; borrowed: ".join(words).removeprefix("; ").removesuffix("; borrowed: ")
        for part in self.parts:  # a file of an earlier version names a chapter several times
            for i in [i for i, each in enumerate(part.above) if HEADER.match(each)]:
                if HEADER.match(part.above[i])[1] == chapter:
                    part.above[i : i + 1] = [f"# {chapter}: {line}"] if line else []
                    line = ""


def rank(chapter: str) -> int:
    """Where a chapter stands in the course; what several share comes first."""
    return CHAPTERS.index(chapter) if chapter in CHAPTERS else -1


def in_order(line: str) -> tuple[bool, bool, str]:
    return not line.startswith("from __future__"), line.startswith("from "), line


def written() -> str:
    """The text of the file; "" where there is none yet."""
    if not FILE.exists():
        return ""
    return FILE.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")


def run(text: str) -> ModuleType:
    """The text as a module, whatever its name is at home."""
    module = ModuleType(MINE)
    module.__file__ = str(FILE.resolve())
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def write(text: str, target: Path | None = None) -> None:
    """Replace the file by a text that can be imported, whole or not at all."""
    target = (target or FILE).resolve()
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(text.encode())
        os.replace(draft, target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise NotKept(f"{target.name} could not be written ({error.strerror})") from error


def put_proof_beside() -> None:
    """Beside the file lies what proves a job; a file of the reader's own name stays."""
    place, ours = FILE.with_name(PROOF.name), PROOF.read_text("utf-8")
    there = place.read_text("utf-8", "replace") if place.exists() else ""
    if there != ours and there.partition("\n")[0] in ("", ours.partition("\n")[0]):
        write(ours, place)


def cannot(error: BaseException) -> str:
    """What is wrong with the file, in a sentence."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace and not isinstance(error, SyntaxError):
        if trace.tb_frame.f_code.co_filename == str(FILE.resolve()):
            line = trace.tb_lineno
        trace = trace.tb_next
    at = f", line {line}" if line else ""
    return f"{FILE.name}{at} cannot be imported ({type(error).__name__}: {error})."


def holds(thing: object) -> bool:
    """Whether it is a function or class that came from the reader's library.

    An object of such a class has its `__module__` too. No other thing is asked for anything.
    """
    is_made = issubclass(type(thing), type | FunctionType)
    return is_made and thing.__module__ == MINE and file_of(thing) == FILE.resolve()


def library(*ours: Callable) -> SimpleNamespace:
    """Each of these functions and classes as the reader has built it, else as it is.

    Prints which is whose. What the reader has built travels to the ranks by value. Raises
    ImportError, which names the line, where the file cannot be imported.
    """
    try:
        book = Library(written())
        own, built = run(at_home(book)), book.listed(2)
    except (Exception, SystemExit) as error:
        raise ImportError(f"{cannot(error)} Mend it, or move it away") from None
    mine = [t.__name__ for t in ours if t.__name__ in built and hasattr(own, t.__name__)]
    rest = [thing.__name__ for thing in ours if thing.__name__ not in mine]
    print(f"{FILE.name}: {', '.join(mine) or '-'}; the package: {', '.join(rest) or '-'}")
    found = {t.__name__: t for t in ours}
    return SimpleNamespace(**found | {name: getattr(own, name) for name in mine})


def at_home(book: Library) -> str:
    """The text, with unchanged copies from the package, which may ask whose a class is."""
    for name, chapter in book.listed(3).items():
        part, start = book.holder(name), f"{OURS}.{chapter}"
        for module in [m for m in sys.modules if part and f"{m}.".startswith(f"{start}.")]:
            thing = vars(sys.modules[module]).get(name)
            if getattr(thing, "__module__", "") == module and part.text in (
                STAND_INS.get(name),
                with_quoted_types(source_of(thing), vars(sys.modules[module])),
            ):
                rest = "\n" * part.text.count("\n")  # lines keep their numbers
                part.text = f"from {module} import {name}{rest}"
    return str(book)


@contextmanager
def in_turn() -> Iterator[None]:
    """Let a build that passes in another notebook at this moment wait for its turn."""
    try:
        folder = os.open(FILE.resolve().parent, os.O_RDONLY)
    except OSError:  # the folder is gone, which `write` says
        yield
        return
    try:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@in_turn()
def keep(
    chapter: str, functions: Sequence[Callable], ours: Mapping[str, Callable] | None = None
) -> list[str]:
    """Put functions and classes into the reader's library, with what they need.

    `ours` are the package's own versions of what the chapter builds. Raises NotKept, which
    says why, and leaves the file as it was. Returns what the reader should know besides.
    """
    try:
        text = written()
        run(text)
        book = Library(text or f"{HEAD}\n")
    except (Exception, SystemExit) as error:
        raise NotKept(f"{cannot(error)} Mend it, then build again") from error
    things, notes = needs(chapter, functions, book.listed(2), ours or {})
    try:
        add(book, things, ours or {})
        made = vars(run(str(book)))
        lost = {f.__name__ for f in functions if f"_make_{f.__name__}" not in made} - {*made}
        assert not lost, f"{lost} would be missing"
        str(book).encode()
    except NotKept:
        raise
    except (Exception, SystemExit) as error:
        why = f"with it {FILE.name} could not be imported ({type(error).__name__}: {error})"
        raise NotKept(why) from error
    write(str(book))
    put_proof_beside()
    return notes


def add(book: Library, things: Sequence[Thing], ours: Mapping[str, Callable]) -> None:
    """Write things into the file; a name that is taken there becomes one of the chapter."""
    names = {thing.key: thing.name for thing in things if thing.kind == "built"}
    for thing in things:
        if thing.kind == "built":
            make_room(book, thing, ours.get(thing.name))
    going = outdated(book, things)
    for thing in things:
        if thing.key not in names:
            names[thing.key] = free_name(book, thing, things, names, going)
    for n, thing in enumerate(things):
        later = {names[each.key] for each in things[n + 1 :] if each.kind != "import"}
        book.put(thing, rendered(thing, names), names[thing.key], later)
    late = [part for part in book.parts if part.text.startswith("def _make_")]
    if late and not book.holder("__getattr__"):
        book.parts.insert(len(book.sections()[""]), Part(["", ""], LATE, {"__getattr__"}))
    for home in {thing.chapter: None for thing in things if thing.kind != "import"}:
        listed = {"built": [], "borrowed": []}
        for thing in things:
            if thing.chapter == home and thing.kind in listed:
                listed[thing.kind].append(names[thing.key])
        book.note(home, **listed)


def rendered(thing: Thing, names: Mapping[tuple, str]) -> str:
    """The source of a thing, in which all are called as in the file."""
    called = {old: names.get(key, key[-1]) for old, key in thing.uses.items()}
    own = names.get(thing.key, thing.name)
    if thing.kind == "import":
        return imported_as(thing.text, {thing.name: own})
    return renamed(thing.text, called | {thing.name: own})


def imported_as(text: str, names: Mapping[str, str]) -> str:
    """An import that gives other names."""
    (node,) = ast.parse(text).body
    for alias in node.names:
        if (alias.asname or alias.name) in names:
            alias.asname = names[alias.asname or alias.name]
            alias.asname = None if alias.asname == alias.name else alias.asname
    return ast.unparse(node)


def make_room(book: Library, thing: Thing, ours: Callable | None) -> None:
    """A build's name is its own: what else has it in the file is called otherwise."""
    name, old = thing.name, book.holder(thing.name)
    built, borrowed = book.listed(2).get(name), book.listed(3).get(name)
    if not old or built == thing.chapter:
        return
    if built:
        raise NotKept(f"{FILE.name} has another {name}, which {built} built")
    if borrowed and ours and chapter_of(ours.__module__) == borrowed:  # by now it is made
        if borrowed != thing.chapter:
            book.remove(old)
        return
    new = next(n for n in names_for(name, book.home(old)) if not book.holder(n) and n != name)
    for part in book.users(old):
        part.text = renamed(part.text, {name: new})
    old.text = (imported_as if old.is_import else renamed)(old.text, {name: new})
    old.names = old.names - {name} | {new}


def names_for(name: str, chapter: str) -> Iterable[str]:
    """What a thing may be called, its own name first."""
    yield name
    yield f"{name}_{chapter or MINE}"
    yield from (f"{name}_{chapter or MINE}_{number}" for number in count(2))


def outdated(book: Library, things: Sequence[Thing]) -> set[str]:
    """The builds that are replaced, and what nothing else in their section uses."""
    going = {thing.name for thing in things if thing.kind == "built"}
    staying = {*book.listed(2), *book.listed(3)} - going
    for part in reversed(book.sections().get(things[-1].chapter, [])):
        users = set().union(*(user.names for user in book.users(part)))
        if users and users <= going and not part.names & staying:
            going |= part.names
    return going


def free_name(
    book: Library,
    thing: Thing,
    things: Sequence[Thing],
    names: Mapping[tuple, str],
    going: set[str],
) -> str:
    """The first name that is free, has the same text, or is used only by what is replaced."""
    callers = [
        (old, t.text) for t in things for old, key in t.uses.items() if key == thing.key
    ]
    for name in names_for(thing.name, thing.chapter):
        old, text = book.holder(name), rendered(thing, {**names, thing.key: name})
        hidden = any(name in locals_in(text) for called, text in callers if called != name)
        if hidden or name in names.values() or hasattr(builtins, name):
            continue
        if not old or old.text == text:
            return name
        if thing.kind == "import":
            if same_import(old.text, text, name):
                return name
        elif not old.is_import and book.home(old) == thing.chapter:
            users = set().union(*(user.names for user in book.users(old)))
            if name in book.listed(3) if thing.kind == "borrowed" else users <= going:
                return name


def same_import(old: str, new: str, name: str) -> bool:
    """Whether an import of the file, perhaps edited, makes the name as the new one does."""

    def meant(text: str) -> set:
        node = ast.parse(text).body[0]
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return set()
        home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        found = [a for a in node.names if name == name_of(a)]
        return {home + a.name if a.asname or home else name for a in found}

    return bool(meant(old) & meant(new))


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
    return "\n".join([*lines, f"It can be imported: from {MINE} import …"])
