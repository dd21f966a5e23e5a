"""The text of the reader's library as a list of its statements, and in order by subject.

Lines of ours are read, taken out, and written anew: the head, `__all__`, a section's title
and what stands below it, the licence. All other lines are the reader's, and stay.
"""

import ast
import re
from collections.abc import Iterable, Sequence
from textwrap import wrap

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.lab.teach import subjects
from mgpu_tutorial.lab.teach.imports import import_lines
from mgpu_tutorial.lab.teach.needs import (
    NotKept,
    called_at_import,
    first_line,
    name_of,
    names_at_import,
    names_in,
    root,
)
from mgpu_tutorial.lab.teach.subjects import WIDTH

KINDS = {"built": "built in", "helper": "helpers of", "borrowed": "borrowed from"}
NAMES = r"(\w+(?:, \w+)*)"
HEADER = re.compile(rf"# ({'|'.join(KINDS.values())}) (?:\d\d_)?(\w+): {NAMES}$")
EARLIER = re.compile(  # what earlier versions wrote above a chapter's part of the file
    rf"# ({'|'.join([*CHAPTERS, 'shared', 'instruments', 'lab'])}):"
    rf"(?: {NAMES})?(?:;? ?borrowed: {NAMES})?$"
)
LATE = '''def __getattr__(name):
    """Make what needs more than torch and Python when it is asked for."""
    if f"_make_{name}" not in globals():
        raise AttributeError(f"there is no {name} in this file")
    globals()[name] = made = globals()[f"_make_{name}"]()
    return made'''


class Part:
    """A statement, the reader's lines above it, and how many lines of the file are above."""

    def __init__(self, above: list[str], text: str, names: set[str], start: int = -1) -> None:
        self.above, self.text, self.names, self.start = above, text, names, start

    @property
    def is_import(self) -> bool:
        return self.text.startswith(("import ", "from "))

    @property
    def is_late(self) -> bool:
        """Whether it is made when it is asked for, because it needs more than torch."""
        return self.text.startswith("def _make_")

    @property
    def is_line(self) -> bool:
        """Whether it needs no room around it, as a constant."""
        is_long = "\n" in self.text or self.text.startswith(("def ", "class "))
        return not is_long and not any(self.above)


class Library:
    """The imports at the top and the other statements; `str` has them in order.

    `made` is the kind and the chapter of what came by a build, by name. `homes` is the
    chapter above any other name in a file of an earlier version, which listed no helpers.
    """

    def __init__(self, text: str) -> None:
        self.imports: list[Part] = []
        self.parts: list[Part] = []
        self.made: dict[str, tuple[str, str]] = {}
        self.homes: dict[str, str] = {}
        self.head, self.also, self.chapter = [], [], ""
        lines, tree, end, part = text.split("\n"), ast.parse(text), 0, None
        for node in tree.body:
            start = first_line(node) - 1
            if start < end and part:  # two on one line
                part.names |= root(node)
            else:
                own = "\n".join(lines[start : node.end_lineno])
                part = Part(self.read(lines[end:start]), own, root(node), start)
                is_docstring = node is tree.body[0] and ast.get_docstring(tree) is not None
                self.take(part, is_docstring)
            end = node.end_lineno
        self.tail = self.read(lines[end:])
        self.made = {name: of for name, of in self.made.items() if self.holder(name)}

    def read(self, lines: list[str]) -> list[str]:
        """The reader's lines; ours say what the statements below them are."""
        own = []
        for line in lines:
            if found := HEADER.match(line):
                kind = next(kind for kind, words in KINDS.items() if words == found[1])
                self.made |= dict.fromkeys(found[3].split(", "), (kind, found[2]))
            elif found := EARLIER.match(line):
                self.chapter = found[1]
                for kind, names in ("built", found[2]), ("borrowed", found[3]):
                    of = dict.fromkeys((names or "").split(", "), (kind, found[1]))
                    self.made |= {
                        n: new for n, new in of.items() if n not in self.of("built")
                    }
            elif line not in subjects.OURS:
                own.append(line)
        return own

    def take(self, part: Part, is_docstring: bool) -> None:
        """Add a statement of the file, unless it is ours and is written anew."""
        if is_docstring:
            self.head = [*part.above, subjects.head_for(part.text)]
        elif part.is_import and not self.parts:
            self.imports.append(part)
        elif part.names == {"__all__"} and (names := _plain_names(part.text)):
            self.also = names
        elif part.text != LATE:
            self.parts.append(part)
            self.homes |= dict.fromkeys(part.names, self.chapter)

    def of(self, kind: str) -> dict[str, str]:
        """What was built, say, each with its chapter."""
        return {name: home for name, (its, home) in self.made.items() if its == kind}

    def kind(self, part: Part) -> str:
        return next((self.made[name][0] for name in part.names & self.made.keys()), "by hand")

    def home(self, part: Part) -> str:
        """The chapter of a statement; "" for one that is the reader's own."""
        homes = self.homes | {name: home for name, (_, home) in self.made.items()}
        return next((homes[name] for name in part.names & homes.keys()), "")

    def holder(self, name: str) -> Part | None:
        return next((p for p in [*self.imports, *self.parts] if name in p.names), None)

    def users(self, own: Part) -> list[Part]:
        """The other statements that use what a statement makes."""
        return [p for p in self.parts if p is not own and own.names & names_in(p.text)]

    def used(self) -> set[str]:
        """All names that a statement uses."""
        return set().union(*(names_in(part.text) for part in self.parts))

    def reached(self, names: Iterable[str]) -> set[Part]:
        """The statements that make these names, and all that these use in turn."""
        found, waiting = set(), {*names}
        while more := {part for part in self.parts if part.names & waiting} - found:
            found |= more
            waiting = set().union(*(names_in(part.text) for part in more))
        return found

    def put(
        self, kind: str, chapter: str, name: str, text: str, above: Sequence[str]
    ) -> None:
        """Write a statement over the one that makes its name, else at the end."""
        part = self.holder(name)
        if kind == "import":  # one that is there means the same
            self.imports += [] if part else [Part([], text, {name})]
            return
        if part and part.names != {name}:
            raise NotKept(f"the file makes {name} together with others on one line")
        if not part:
            self.parts.append(part := Part([], text, {name}))
        elif name not in self.made and kind != "built":  # the same, by the reader's hand
            return
        part.text = text
        part.above += [line for line in above if line not in part.above]
        if kind == "built" or name not in self.of("built"):  # a build may use an earlier one
            self.made[name] = kind, chapter

    def prune(self) -> list[str]:
        """Take out, and name, the helpers and borrowed things that nothing uses any more."""
        lent = [part for part in self.parts if self.kind(part) in ("helper", "borrowed")]
        names = set().union(*(part.names for part in self.parts if part not in lent))
        reached = self.reached({*names, *self.also})
        gone = [part for part in lent if part not in reached]
        self.parts = [part for part in self.parts if part not in gone]
        return [name for part in gone for name in sorted(part.names)]

    def drop_imports(self, unused: set[str]) -> list[str]:
        """Take out, and name, imports; one with a comment, or sharing its line, stays."""
        gone = []
        for part in [*self.imports]:
            node, *others = ast.parse(part.text).body
            if not part.names & unused or others or "#" in part.text or any(part.above):
                continue
            gone += part.names & unused
            node.names = [alias for alias in node.names if name_of(alias) not in unused]
            part.text, part.names = ast.unparse(node), part.names - unused
            self.imports = [each for each in self.imports if each.names]
        return sorted(gone)

    def needed_first(self, part: Part) -> set[Part]:
        """The statements that must have run before this one can."""
        first = {each for each in self.parts if each.names & names_at_import(part.text)}
        return (first | self.reached(called_at_import(part.text))) - {part}

    def sections(self) -> dict[str, list[Part]]:
        """The statements by subject; what is above all sections is at "".

        A build stands in its subject, below the builds of earlier chapters, and above it
        what it is the first to need. What is written by hand stays below the statement that
        it was below.
        """
        found: dict[str, list[Part]] = {"": [], **{name: [] for name in subjects.SUBJECTS}}
        needed = {part: self.needed_first(part) for part in self.parts}
        lent = {part for part in self.parts if self.kind(part) in ("helper", "borrowed")}
        by_hand = {}  # and what must be above
        for before, part in zip([None, *self.parts], self.parts, strict=False):
            if self.kind(part) == "by hand":
                by_hand[part] = needed[part] | {before} - {None}
            else:
                needed[part] |= {each for each in lent if each.names & names_in(part.text)}
        begun, done = set(), set()

        def place(part: Part, subject: str) -> None:
            if part in begun:
                return
            begun.add(part)
            for each in [each for each in self.parts if each in needed[part]]:
                place(each, subject)
            found[subject].append(part)
            done.add(part)
            for each in [each for each, above in by_hand.items() if above <= done]:
                place(each, subject)

        if self.parts and self.parts[0] in by_hand:
            place(self.parts[0], "")
        built = [part for part in self.parts if self.kind(part) == "built"]
        built.sort(key=lambda part: subjects.rank(self.home(part)))
        for subject in subjects.SUBJECTS:
            for part in built:
                if subject == subjects.subject_of(self.home(part), *part.names):
                    place(part, subject)
        for part in self.parts:
            place(part, subjects.COURSE)
        return found

    def __str__(self) -> str:
        sections, before = self.sections(), None
        imports = ["\n".join([*_stripped(p.above), p.text]) for p in self.imports]
        lines = [*(self.head or [subjects.HEAD] * bool(self.made)), ""]
        lines += [*import_lines(imports), "", *self.all_lines(sections)]
        for subject, parts in sections.items():
            if subject and parts:
                lines += ["", "", *subjects.titled(subject), *self.header_lines(parts)]
                before = None
            for part in parts:
                if part.is_late and LATE not in lines:
                    lines += ["", "", LATE]
                lines += [*self.room(part, before), part.text]
                before = part
        lines = "\n".join([*lines, *self.tail]).strip("\n").split("\n")
        lines += ["", "", *subjects.LICENCE] if self.made else []
        return "\n".join(lines) + "\n"

    def room(self, part: Part, before: Part | None) -> list[str]:
        """What stands above a statement: blank lines, then its comments."""
        if self.kind(part) == "by hand" and (before or part.above):
            return part.above
        if part.is_line and (not before or before.is_line):
            return [""] * (not before)
        return ["", "", *_stripped(part.above)]

    def header_lines(self, parts: list[Part]) -> list[str]:
        """In which notebook a section's parts were built, and from where they borrow."""
        found: dict[tuple[str, str], list[str]] = {}
        for part in parts:
            for name in sorted(part.names & self.made.keys()):
                found.setdefault(self.made[name], []).append(name)
        lines, kinds = [], [*KINDS]
        for kind, home in sorted(
            found, key=lambda of: (kinds.index(of[0]), subjects.rank(of[1]), of[1])
        ):
            start = f"# {KINDS[kind]} {subjects.numbered(home)}: "
            rows = wrap(", ".join(found[kind, home]), WIDTH - len(start))
            lines += [start + row.rstrip(",") for row in rows]
        return lines

    def all_lines(self, sections: dict[str, list[Part]]) -> list[str]:
        """`__all__`: what was built, but for the course's own, and what the reader adds."""
        built = self.of("built")
        found = [
            name
            for subject, parts in sections.items()
            for part in parts
            for name in sorted(part.names & built.keys())
            if subject != subjects.COURSE and not part.is_late and not name.startswith("_")
        ]
        found += [name for name in self.also if name not in built and self.holder(name)]
        if not found or self.holder("__all__"):  # which is the reader's
            return []
        words = ", ".join(f'"{name}"' for name in found)
        if len(words) < WIDTH - len("__all__ = []"):
            return [f"__all__ = [{words}]"]
        return ["__all__ = [", *(f"    {row}" for row in wrap(words, WIDTH - 4)), "]"]


def _stripped(lines: list[str]) -> list[str]:
    """The lines from the first that says something."""
    return lines[next((i for i, line in enumerate(lines) if line), len(lines)) :]


def _plain_names(text: str) -> list[str]:
    """The names in a list; [] for what is no plain list."""
    (node,) = ast.parse(text).body
    values = getattr(getattr(node, "value", None), "elts", [])
    names = [getattr(value, "value", None) for value in values]
    return names if all(isinstance(name, str) for name in names) else []
