"""Begin a chapter from the template in tools/chapter: `make new-chapter NAME=my_topic`.

With AFTER=point_to_point it comes after that chapter, and all later ones get the next number;
without, it is the last. Writes the notebook (run, its outputs stored), the module, the test
and its mistakes to seed, the place in the order of chapters, the row in the README and the
links from the two neighbours. All of it passes `make test` at once, so that whatever fails
afterwards is what was changed. Nothing is written if the name cannot be used.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, writes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tools import store  # noqa: E402

TEMPLATE = Path(__file__).parent / "chapter"
LAST = "This is the last notebook for now."
TEXTS = ("*.md", "notebooks/*.ipynb", "benchmarks/*.md", "tests/**/*.py", "handouts/*.py")
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]*?)(\d\d_\w+)\.ipynb")


def stem_of(name: str) -> str:
    """The name of a module. Raises ValueError for one that cannot be, or is taken."""
    stem = name.strip()
    if not re.fullmatch(r"[a-z][a-z0-9_]+", stem):
        raise ValueError(f"NAME={name!r}: expected a topic such as NAME=tensor_parallel")
    places = (f"mgpu_tutorial/{stem}", f"tests/{stem}", f"tests/test_{stem}")
    for place in (f"{start}{ending}" for start in places for ending in ("", ".py")):
        if (ROOT / place).exists():
            raise ValueError(f"NAME={name!r}: {place} is there already, choose another name")
    return stem


def neighbours(after: str) -> tuple[Path, Path | None]:
    """The notebook of the chapter `after` (the last one if empty), and the one behind it."""
    notebooks = store.paths_of([])
    stems = [path.stem[3:] for path in notebooks]
    if after and after not in stems:
        raise ValueError(f"AFTER={after!r}: no such chapter; there are {', '.join(stems)}")
    place = stems.index(after) if after else len(stems) - 1
    return notebooks[place], (notebooks[place + 1 : place + 2] or [None])[0]


def new_chapter(name: str, after: str = "") -> list[Path]:
    """Write all files of a chapter, and return them."""
    stem = stem_of(name)
    before, behind = neighbours(after)
    if behind:
        behind = renumber(store.paths_of([])[store.paths_of([]).index(behind) :])
    title = stem.replace("_", " ").capitalize()
    notebook = before.parent / f"{int(before.name[:2]) + 1:02d}_{stem}.ipynb"

    def filled(file: str) -> str:
        text = (TEMPLATE / file).read_text(encoding="utf-8")
        return text.replace("new_topic", stem).replace("New topic", title)

    module = ROOT / "mgpu_tutorial" / f"{stem}.py"
    test = ROOT / "tests" / f"test_{stem}.py"
    module.write_text(filled("module.py"), encoding="utf-8")
    test.write_text(filled("test.py"), encoding="utf-8")
    mutants = ROOT / "tools" / "mutants" / f"{stem}.toml"
    mutants.write_text(filled("mutants.toml"), encoding="utf-8")
    text = filled("notebook.py").replace("(before)", f"[{before.name[:2]}]({before.name})")
    way = [f"[← {_headline(before)}]({before.name})", "[Contents](../README.md)"]
    if behind:
        way.append(f"[{_headline(behind)} →]({behind.name})")
        text = text.replace(LAST, f"[{_headline(behind)}]({behind.name}) goes on.")
    text = text.replace("(navigation)", " · ".join(way))
    notebook.write_text(writes(new_notebook(cells=list(cells(text)))), encoding="utf-8")
    ruff = [Path(sys.executable).parent / "ruff", "format", "--quiet"]
    subprocess.run([*ruff, module, test, notebook], cwd=ROOT, check=True)
    headline = f"{notebook.name[:2]} {title}"
    _lead_to(before, headline, notebook.name, is_last=behind is None)
    if behind:
        _lead_back(behind, headline, notebook.name)
    _order(before.stem[3:], stem)
    _list_in_readme(before.name, headline, notebook.name)
    store.store(notebook)
    return [notebook, module, test, mutants]


def renumber(notebooks: list[Path]) -> Path:
    """Give each notebook the next number, in its name and wherever it is named.

    Returns the first one's new path. A link's text is changed where it begins with the
    number, or has it after an arrow.
    """
    new = {path.stem: f"{int(path.name[:2]) + 1:02d}{path.stem[2:]}" for path in notebooks}

    def linked(link: re.Match) -> str:
        text, folder, stem = link.groups()
        if stem in new:
            text = re.sub(rf"\b{stem[:2]}\b", new[stem][:2], text, count=1)
        return f"[{text}]({folder}{new.get(stem, stem)}.ipynb"

    for path in (path for pattern in TEXTS for path in sorted(ROOT.glob(pattern))):
        old = path.read_text(encoding="utf-8")
        text = LINK.sub(linked, old)
        for stem in sorted(new, reverse=True):  # else a name would be changed twice
            text = re.sub(rf"(?<![\w(/]){stem}\b", new[stem], text)
        if text != old:
            path.write_text(text, encoding="utf-8")
    for path in reversed(notebooks):
        path.rename(path.with_stem(new[path.stem]))
    return notebooks[0].with_stem(new[notebooks[0].stem])


def cells(text: str) -> Iterator[dict]:
    """The cells of a notebook that is written as a program: `# %%` begins each."""
    for part in re.split(r"^# %%", text, flags=re.M)[1:]:
        head, _, source = part.partition("\n")
        source = source.strip()
        if "[markdown]" in head:
            yield new_markdown_cell(re.sub(r"^# ?", "", source, flags=re.M))
            continue
        metadata = {}
        if tags := re.search(r"tags=(\[.*?\])", head):
            metadata["tags"] = json.loads(tags[1])
        if caption := re.search(r'caption="(.*)"', head):
            metadata["handout"] = {"caption": caption[1]}
        if "solution" in metadata.get("tags", []):
            metadata["jupyter"] = {"source_hidden": True, "outputs_hidden": True}
            source = source.removeprefix("# ")  # of a magic, which is no Python
        yield new_code_cell(source, metadata=metadata)


def _headline(path: Path) -> str:
    head = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
    return f"{path.name[:2]} {head[0].removeprefix('# ').split(':')[0].strip()}"


def _lead_to(path: Path, headline: str, file: str, is_last: bool) -> None:
    """Link the new notebook from the head and the end of the one before."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    head, end = notebook["cells"][0]["source"], notebook["cells"][-1]["source"]
    way = head[2].rstrip() if is_last else head[2].rpartition(" · ")[0]
    head[2] = f"{way} · [{headline} →]({file})\n"
    if is_last and end[-1].startswith(LAST):
        end[-1] = f"[{headline}]({file}) goes on."
    else:
        end[-1] = f"{end[-1].rstrip()} Before that comes [{headline}]({file})."
    _write(notebook, path)


def _lead_back(path: Path, headline: str, file: str) -> None:
    """Link the new notebook from the head of the one behind it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    head = notebook["cells"][0]["source"]
    head[2] = f"[← {headline}]({file}) · {head[2].partition(' · ')[2]}"
    _write(notebook, path)


def _write(notebook: dict, path: Path) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _order(before: str, stem: str) -> None:
    """Write the chapter into the package's list of chapters."""
    package = ROOT / "mgpu_tutorial" / "__init__.py"
    text = package.read_text(encoding="utf-8")
    line = f'    "{before}",\n'
    package.write_text(text.replace(line, f'{line}    "{stem}",\n'), encoding="utf-8")


def _list_in_readme(before: str, headline: str, file: str) -> None:
    readme = ROOT / "README.md"
    lines = readme.read_text(encoding="utf-8").split("\n")
    last = next(i for i, line in enumerate(lines) if f"](notebooks/{before})" in line)
    row = f"| [{headline}](notebooks/{file}) | 20 min | say here what it teaches |"
    lines.insert(last + 1, row)
    readme.write_text("\n".join(lines), encoding="utf-8")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of the chapter, such as tensor_parallel")
    parser.add_argument("--after", default="", help="the chapter before it (the last one)")
    given = parser.parse_args(words)
    try:
        files = new_chapter(given.name, given.after)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    print("\n".join(path.relative_to(ROOT).as_posix() for path in files))
    print("Write your chapter over the example, see CONTRIBUTING.md; then run make test.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
