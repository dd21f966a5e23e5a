"""Begin a chapter from the template in tools/chapter: `make new-chapter NAME=my_topic`.

Writes the notebook (run, its outputs stored), the module and the test, the row in the README
and the link from the notebook before. All of it passes `make test` at once, so that whatever
fails afterwards is what was changed. Nothing is written if the name cannot be used.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, writes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tools import store  # noqa: E402

TEMPLATE = Path(__file__).parent / "chapter"
LAST = "This is the last notebook for now."


def stem_of(name: str) -> str:
    """A name as that of a module. Raises ValueError for one that cannot be."""
    stem = re.sub(r"[\s-]+", "_", name.strip()).lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]+", stem):
        raise ValueError(f"NAME={name!r}: expected a topic such as NAME=tensor_parallel")
    for file in (f"mgpu_tutorial/{stem}.py", f"tests/test_{stem}.py"):
        if (ROOT / file).exists():
            raise ValueError(f"NAME={name!r}: {file} is there already, choose another name")
    return stem


def new_chapter(name: str) -> list[Path]:
    """Write all files of a chapter, and return them."""
    stem = stem_of(name)
    before = store.paths_of([])[-1]
    number = int(before.name[:2]) + 1
    title = stem.replace("_", " ").capitalize()
    notebook = before.parent / f"{number:02d}_{stem}.ipynb"

    def filled(file: str) -> str:
        text = (TEMPLATE / file).read_text(encoding="utf-8")
        text = text.replace("CHAPTER = 0", f"CHAPTER = {number}")
        text = text.replace("Chapter 00", f"Chapter {number:02d}")
        return text.replace("new_topic", stem).replace("New topic", title)

    module = ROOT / "mgpu_tutorial" / f"{stem}.py"
    test = ROOT / "tests" / f"test_{stem}.py"
    module.write_text(filled("module.py"), encoding="utf-8")
    test.write_text(filled("test.py"), encoding="utf-8")
    linked = f"[← {_headline(before)}]({before.name}) · [Contents](../README.md)"
    text = filled("notebook.py").replace("(navigation)", linked)
    notebook.write_text(writes(new_notebook(cells=list(cells(text)))), encoding="utf-8")
    ruff = [Path(sys.executable).parent / "ruff", "format", "--quiet"]
    subprocess.run([*ruff, module, test, notebook], cwd=ROOT, check=True)
    _lead_to(before, f"{number:02d} {title}", notebook.name)
    _list_in_readme(before.name, f"{number:02d} {title}", notebook.name)
    store.store(notebook)
    return [notebook, module, test]


def cells(text: str):
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
            metadata["jupyter"] = {"source_hidden": True}
        yield new_code_cell(source, metadata=metadata)


def _headline(path: Path) -> str:
    head = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
    return f"{path.name[:2]} {head[0].removeprefix('# ').split(':')[0].strip()}"


def _lead_to(path: Path, headline: str, file: str) -> None:
    """Link the new notebook from the head and the end of the one before."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    head, end = notebook["cells"][0]["source"], notebook["cells"][-1]["source"]
    head[2] = f"{head[2].rstrip()} · [{headline} →]({file})\n"
    if end[-1].startswith(LAST):
        end[-1] = f"[{headline}]({file}) goes on."
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _list_in_readme(before: str, headline: str, file: str) -> None:
    readme = ROOT / "README.md"
    lines = readme.read_text(encoding="utf-8").split("\n")
    last = next(i for i, line in enumerate(lines) if f"](notebooks/{before})" in line)
    row = f"| [{headline}](notebooks/{file}) | 20 min | say here what it teaches |"
    lines.insert(last + 1, row)
    readme.write_text("\n".join(lines), encoding="utf-8")


def main(words: list[str]) -> int:
    try:
        files = new_chapter(" ".join(words))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    print("\n".join(path.relative_to(ROOT).as_posix() for path in files))
    print("Write your chapter over the example, see CONTRIBUTING.md; then run make test.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
