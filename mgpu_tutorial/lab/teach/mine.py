"""The reader's own library: a readable file beside the notebooks, by subject.

What a build brings is written over what it brought before, with all that it needs. What else
is in the file stays.
"""

import ast
import builtins
import fcntl
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

from mgpu_tutorial.lab.teach.book import Library
from mgpu_tutorial.lab.teach.docstrings import document
from mgpu_tutorial.lab.teach.earlier import renew
from mgpu_tutorial.lab.teach.needs import (
    MINE,
    OURS,
    STAND_INS,
    NotKept,
    Thing,
    chapter_of,
    locals_in,
    name_of,
    names_in,
    needs,
    renamed,
)
from mgpu_tutorial.lab.teach.source import file_of, source_of
from mgpu_tutorial.lab.words import in_a_row

__all__ = ["NotKept", "holds", "keep", "library", "listing", "names_in"]

FILE = Path(f"{MINE}.py")  # in the folder where a notebook's kernel works
PROOF = Path(__file__).parents[2] / "instruments" / "prove" / "proof.py"  # goes beside it


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
        text = written()
        built, own = Library(text).of("built"), run(at_home(text))
    except (Exception, SystemExit) as error:
        raise ImportError(f"{cannot(error)} Mend it, or move it away") from None
    mine = [t.__name__ for t in ours if t.__name__ in built and hasattr(own, t.__name__)]
    rest = [thing.__name__ for thing in ours if thing.__name__ not in mine]
    print(f"{FILE.name}: {', '.join(mine) or '-'}; the package: {', '.join(rest) or '-'}")
    found = {t.__name__: t for t in ours}
    return SimpleNamespace(**found | {name: getattr(own, name) for name in mine})


def at_home(text: str) -> str:
    """The text, with unchanged copies from the package, which may ask whose a class is."""
    book, lines = Library(text), text.split("\n")
    for name, chapter in book.of("borrowed").items():
        part, start = book.holder(name), f"{OURS}.{chapter}"
        for module in [m for m in sys.modules if f"{m}.".startswith(f"{start}.")]:
            thing = vars(sys.modules[module]).get(name)
            if getattr(thing, "__module__", "") == module and is_copy(part.text, thing):
                end = part.start + part.text.count("\n") + 1  # other lines keep their numbers
                rest = [""] * (end - part.start - 1)
                lines[part.start : end] = [f"from {module} import {name}", *rest]
    return "\n".join(lines)


def is_copy(text: str, thing: object) -> bool:
    """Whether a text is that of a thing of the package, whatever types it names."""
    name = thing.__name__
    return text == STAND_INS.get(name) or untyped(text) == untyped(source_of(thing))


def untyped(text: str) -> str:
    """What a text does, without types and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for each in {"annotation", "returns"} & {*vars(node)}:
            setattr(node, each, None)
    return ast.dump(tree)


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
        book = Library(text)
    except (Exception, SystemExit) as error:
        raise NotKept(f"{cannot(error)} Mend it, then build again") from error
    things, notes = needs(chapter, functions, book.of("built"), ours or {})
    try:
        gone = add(book, things, ours or {})
        text = str(book)
        made = vars(run(text))
        lost = {f.__name__ for f in functions if f"_make_{f.__name__}" not in made} - {*made}
        assert not lost, f"{lost} would be missing"
        text.encode()
    except NotKept:
        raise
    except (Exception, SystemExit) as error:
        why = f"with it {FILE.name} could not be imported ({type(error).__name__}: {error})"
        raise NotKept(why) from error
    write(text)
    put_proof_beside()
    return [*notes, *gone]


def add(
    book: Library, things: Sequence[Thing], ours: Mapping[str, Callable]
) -> Iterable[str]:
    """Write things into the file; a name that is taken there becomes a different one.

    Returns a sentence on what nothing uses any more.
    """
    used, names = book.used(), {t.key: t.name for t in things if t.kind == "built"}
    for thing in things:
        if thing.kind == "built":
            make_room(book, thing, ours.get(thing.name))
    going = outdated(book, things)
    for thing in things:
        if thing.key not in names:
            names[thing.key] = free_name(book, thing, things, names, going)
    for thing in things:
        name, text = names[thing.key], rendered(thing, names)
        book.put(thing.kind, thing.chapter, name, text, thing.above)
    for part in filter(lambda part: part.is_late, book.parts):
        for user in book.users(part):
            (late,), (name, *_) = part.names, user.names or ["a line"]
            raise NotKept(
                f"{name} uses {late}, which needs more than torch and Python to be made at "
                f"all: make {late} inside of {name}"
            )
    document(book, FILE.resolve().parent, {things[-1].chapter: ours}.get)
    gone = book.prune()
    book.drop_imports(used - book.used())
    return [unused(gone)] if gone else []


def unused(names: Sequence[str]) -> str:
    return f"Not used any more, and gone: {in_a_row(names)}."


@in_turn()
def clean(ours_of: Callable[[str], Mapping | None] = {}.get) -> str:
    """Put the file in order, and say what was done.

    What is neither used nor written by hand goes, and so does an import that nothing uses; a
    build without a docstring gets that of its stub, or of `ours_of(chapter)`. A file that
    cannot be imported stays.
    """
    try:
        run(text := written())
        book, done = Library(text), []
        if gone := book.prune():
            done.append(unused(gone))
        renew(book)
        used = book.used() | {*book.also, "annotations"}
        every = set().union(*(part.names for part in book.imports))
        if gone := book.drop_imports(every - used):
            done.append(f"Imported for nothing, and gone: {in_a_row(gone)}.")
        if named := document(book, FILE.resolve().parent, ours_of):
            done.append(f"Docstrings as in the course, for {in_a_row(named)}.")
        if text and (new := str(book)) != text:
            run(new)
            write(new)
            done.append(f"{FILE.name} is in order, by subject.")
    except (Exception, SystemExit) as error:
        return f"{error}" if isinstance(error, NotKept) else cannot(error)
    return "\n".join(done)


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
    built, borrowed = book.of("built").get(name), book.of("borrowed").get(name)
    if not old or built == thing.chapter:
        return
    if built:
        raise NotKept(f"{FILE.name} has another {name}, which {built} built")
    if borrowed and ours and chapter_of(ours.__module__) == borrowed:  # by now it is made
        return
    new = next(n for n in names_for(name) if not book.holder(n) and n != name)
    for part in book.users(old):
        part.text = renamed(part.text, {name: new})
    old.text = (imported_as if old.is_import else renamed)(old.text, {name: new})
    old.names = old.names - {name} | {new}
    if name in book.made:
        book.made[new] = book.made.pop(name)


def names_for(name: str) -> Iterable[str]:
    """What a thing may be called, its own name first."""
    yield name
    plain = name.strip("_")
    yield f"_{plain}"
    yield from (f"_{plain}_{number}" for number in count(2))


def outdated(book: Library, things: Sequence[Thing]) -> set[str]:
    """The builds that are replaced, and what nothing but these uses."""
    going = {thing.name for thing in things if thing.kind == "built"}
    staying = book.of("built").keys() - going
    for part in reversed(book.parts):
        users = set().union(*(user.names for user in book.users(part)))
        is_own = book.home(part) == things[-1].chapter
        if is_own and users and users <= going and not part.names & staying:
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
    for name in names_for(thing.name):
        old, text = book.holder(name), rendered(thing, {**names, thing.key: name})
        hidden = any(name in locals_in(text) for called, text in callers if called != name)
        if hidden or name in names.values() or hasattr(builtins, name):
            continue
        if not old or same_code(old.text, text):
            return name
        if thing.kind == "import":
            if same_import(old.text, text, name):
                return name
        elif not old.is_import and book.home(old) == thing.chapter:
            users = set().union(*(user.names for user in book.users(old)))
            if name in book.of("borrowed") if thing.kind == "borrowed" else users <= going:
                return name


def same_code(one: str, other: str) -> bool:
    """Whether two texts differ in comments and spaces only."""
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


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
        run(text := written())
        sections = Library(text).sections()
    except (Exception, SystemExit) as error:
        return cannot(error)
    built = Library(text).of("built")
    rows = {
        subject: [name for part in parts for name in sorted(part.names & built.keys())]
        for subject, parts in sections.items()
    }
    rows = {subject: names for subject, names in rows.items() if names}
    wide = max(map(len, rows), default=0)
    lines = [f"{subject:{wide}}  {', '.join(names)}" for subject, names in rows.items()]
    return "\n".join([*lines, f"It can be imported: from {MINE} import …"])
