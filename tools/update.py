"""Run all notebooks again and list which outputs changed, and where: `make update`.

With `make update TORCH=2.14.0`, or TORCH=newest, that PyTorch is first written to all files
that name one, and installed. Listed is what the validation compares: no photographs. At the
end stands what a person has to look at: sentences that name a version, and links that lead
into PyTorch's sources.
"""

import re
import subprocess
import sys
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parent.parent
TEXTS = (
    *("constraints.txt", "environment.yml", "pyproject.toml", "*.md", "docs/*.md"),
    *("mgpu_tutorial/**/*.py", "notebooks/*.ipynb"),
)
NAMED = re.compile(
    r"PyTorch 2\.\d+\b[^|\n]{0,70}|pytorch/(?:pytorch|torchtitan)/blob/[^)\s]+"
)


def pin(root: Path, torch: str) -> list[str]:
    """Write a version of PyTorch, and the torchvision that belongs to it, into all files.

    Returns the files that changed. Raises ValueError for what is no version.
    """
    found = re.fullmatch(r"2\.(\d+)\.(\d+)", torch)
    if not found:
        raise ValueError(f"TORCH={torch!r}: a version such as 2.14.0 is expected")
    minor, vision = f"2.{found[1]}", f"0.{int(found[1]) + 15}"
    rules = {
        r"^torch==.*$": f"torch=={torch}",
        r"^torchvision==.*$": f"torchvision=={vision}.{found[2]}",
        r"^  - pytorch=.*$": f"  - pytorch={minor}",
        r"pytorch=2\.\d+=": f"pytorch={minor}=",
        r'"torch>=([\d.]+),<2\.\d+"': rf'"torch>=\1,<2.{int(found[1]) + 1}"',
        r"^  - torchvision=.*$": f"  - torchvision={vision}",
        r"docs\.pytorch\.org/docs/2\.\d+/": f"docs.pytorch.org/docs/{minor}/",
    }
    changed = []
    for path in (path for pattern in TEXTS for path in sorted(root.glob(pattern))):
        before = after = path.read_text("utf-8")
        for pattern, new in rules.items():
            after = re.sub(pattern, new, after, flags=re.M)
        if after != before:
            path.write_text(after, "utf-8")
            changed.append(path.relative_to(root).as_posix())
    return changed


def to_look_at(root: Path) -> list[str]:
    """Sentences that say what one version of PyTorch does, and links into sources."""
    texts = (path for pattern in TEXTS[3:] for path in sorted(root.glob(pattern)))
    return [
        f"{path.relative_to(root)}: {found}"
        for path in texts
        if path.name != "CHANGELOG.md"
        for found in NAMED.findall(path.read_text("utf-8"))
    ]


def compared(notebook: dict) -> dict:
    """The notebook without free outputs and photographs, and of a drawing a number only."""
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            cell.outputs = []
        for data in (output.get("data", {}) for output in cell.outputs):
            data.pop("image/png", None)
            for mime, text in data.items():
                if mime == "image/svg+xml" or "image/svg+xml;base64," in text:
                    data[mime] = f"(drawing {crc32(text.encode()):x})"
    return notebook


def run_again() -> int:
    """Store all notebooks, and print what nbdime says of their outputs."""
    import nbformat
    from nbdime import diff_notebooks
    from nbdime.prettyprint import PrettyPrintConfig, pretty_print_notebook_diff

    failed = 0
    for path in sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb")):
        before = compared(nbformat.read(path, as_version=4))
        store = [sys.executable, "-m", "tools.store", path.name]
        failed += subprocess.run(store, cwd=ROOT).returncode
        if found := diff_notebooks(before, compared(nbformat.read(path, as_version=4))):
            shown = PrettyPrintConfig(out=sys.stdout, use_color=False)
            pretty_print_notebook_diff(f"old {path.name}", path.name, before, found, shown)
    print("These name a version or a place in sources. Are they still true?")
    print(*to_look_at(ROOT), sep="\n")
    print(f"{failed} notebooks failed. Read what changed above; make test checks the rest.")
    return int(failed > 0)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(run_again())
    torch = sys.argv[1]
    if torch == "newest":  # that pip's index offers
        ask = [sys.executable, "-m", "pip", "index", "versions", "torch"]
        said = subprocess.run(ask, capture_output=True, encoding="utf-8").stdout
        torch = said.removeprefix("torch (").partition(")")[0]
    try:
        print(*(f"{name}: PyTorch {torch}" for name in pin(ROOT, torch)), sep="\n")
    except ValueError as problem:
        sys.exit(str(problem))
