"""Begin a chapter from the template in tools/chapter: `make new-chapter NAME=my_topic`.

With AFTER=point_to_point it comes after that chapter, and all later ones get the next number;
without, it is the last. Writes the notebook (run, its outputs stored), the module, the test
and its mistakes to seed, the place in the order of chapters, the row in the README and the
links from the two neighbours. All of it passes `make test` at once, so that whatever fails
afterwards is what was changed. Nothing is written if the name cannot be used.
"""

import json
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, writes

from tools import store

ROOT = Path(__file__).parent.parent
TEXTS = ("*.md", "*/*.md", "notebooks/*.ipynb", "tests/**/*.py", "handouts/*.py")
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]*?)(\d\d_\w+)\.ipynb")


def stem_of(name: str) -> str:
    """The name of a module. Raises ValueError for one that cannot be, or is taken."""
    stem = name.strip()
    if not re.fullmatch(r"[a-z][a-z0-9_]+", stem) or keyword.iskeyword(stem):
        raise ValueError(f"NAME={name!r}: expected a topic such as NAME=tensor_parallel")
    for place in ("mgpu_tutorial/{}", "mgpu_tutorial/{}.py", "tests/{}", "tests/test_{}.py"):
        if (ROOT / place.format(stem)).exists():
            raise ValueError(f"NAME={name!r} is there already, choose another name")
    return stem


def new_chapter(name: str, after: str = "") -> list[Path]:
    """Write all files of a chapter, and return them."""
    stem, notebooks = stem_of(name), store.paths()
    stems = [path.stem[3:] for path in notebooks]
    if after and after not in stems:
        raise ValueError(f"AFTER={after!r}: no such chapter; there are {', '.join(stems)}")
    place = stems.index(after) + 1 if after else len(stems)
    before = notebooks[place - 1]
    title = stem.replace("_", " ").capitalize()
    headline, book = f"{place:02d} {title}", f"{place:02d}_{stem}.ipynb"
    files = {
        "notebook.py": ROOT / "notebooks" / book,
        "module.py": ROOT / "mgpu_tutorial" / f"{stem}.py",
        "test.py": ROOT / "tests" / f"test_{stem}.py",
        "mutants.toml": ROOT / "tools" / "mutants" / f"{stem}.toml",
    }
    link = f"[{before.name[:2]}]({before.name})"
    texts = {}
    for template, path in files.items():
        text = (ROOT / "tools" / "chapter" / template).read_text("utf-8")
        for old, new in ("new_topic", stem), ("New topic", title), ("(before)", link):
            text = text.replace(old, new)
        if template == "notebook.py":
            text = writes(new_notebook(cells=list(cells(text))))
        texts[path] = text
    # From here on files change: what can be refused has been.
    renumber(notebooks[place:])
    written = list(files.values())
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    ruff = [Path(sys.executable).parent / "ruff", "format", "--quiet", *written[:3]]
    subprocess.run(ruff, cwd=ROOT, check=True)
    insert(ROOT / "mgpu_tutorial" / "__init__.py", f'"{before.stem[3:]}",', f'    "{stem}",')
    row = f"| [{headline}](notebooks/{book}) | 30 | say here what it teaches |"
    insert(ROOT / "README.md", f"](notebooks/{before.name}) |", row)  # in the table
    lead_on(before, f" Next comes [{headline}]({book}).")
    store.store(files["notebook.py"])
    return written


def insert(path: Path, after: str, line: str) -> None:
    """Write a line into a file after the first that has this text."""
    lines = path.read_text("utf-8").split("\n")
    place = next(i for i, text in enumerate(lines) if after in text)
    path.write_text("\n".join([*lines[: place + 1], line, *lines[place + 1 :]]), "utf-8")


def renumber(notebooks: list[Path]) -> None:
    """Give each notebook the next number, in its name and wherever it is named.

    A link's text is changed where it begins with the number, or has it after an arrow.
    """
    if not notebooks:  # the new chapter is the last
        return
    new = {path.stem: f"{int(path.name[:2]) + 1:02d}{path.stem[2:]}" for path in notebooks}
    # All at once, so that no name is changed twice.
    named = re.compile(rf"(?<![\w(/])({'|'.join(new)})\b")

    def linked(link: re.Match) -> str:
        text, folder, stem = link.groups()
        if stem in new:
            text = re.sub(rf"\b{stem[:2]}\b", new[stem][:2], text, count=1)
        return f"[{text}]({folder}{new.get(stem, stem)}.ipynb"

    for path in (path for pattern in TEXTS for path in ROOT.glob(pattern)):
        text = LINK.sub(linked, path.read_text("utf-8"))
        path.write_text(named.sub(lambda found: new[found[0]], text), "utf-8")
    for path in reversed(notebooks):
        path.rename(path.with_stem(new[path.stem]))


def cells(text: str) -> Iterator[dict]:
    """The cells of a notebook written as a program: `# %%` and metadata begin each."""
    for part in re.split(r"^# %% ?", text, flags=re.M)[1:]:
        head, _, source = part.partition("\n")
        if head == "markdown":
            yield new_markdown_cell(re.sub(r"^# ?", "", source.strip(), flags=re.M))
        else:
            yield new_code_cell(source.strip(), metadata=json.loads(head or "{}"))


def lead_on(before: Path, sentence: str) -> None:
    """Link each notebook to its neighbours, and end that one with a sentence."""
    paths = store.paths()
    books = [json.loads(path.read_text("utf-8")) for path in paths]
    titles = [book["cells"][0]["source"][0][2:].split(":")[0].strip() for book in books]
    heads = [f"{path.name[:2]} {title}" for path, title in zip(paths, titles, strict=True)]
    for i, (path, book) in enumerate(zip(paths, books, strict=True)):
        way = [f"[← {heads[i - 1]}]({paths[i - 1].name})"] if i else []
        way += ["[Contents](../README.md)"]
        way += [f"[{heads[i + 1]} →]({paths[i + 1].name})"] if path != paths[-1] else []
        book["cells"][0]["source"][2] = " · ".join(way) + "\n"
        if path == before:
            book["cells"][-1]["source"][-1] += sentence
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    try:
        print(*new_chapter(*sys.argv[1:]), sep="\n")
    except ValueError as problem:
        sys.exit(str(problem))
    print("Write your chapter over the example, see CONTRIBUTING.md. `make check NAME=…`")
    print("while you write, `make quick` for what others quote, and `make test` at the end.")
