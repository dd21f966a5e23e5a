"""Run all notebooks again and list which outputs changed, and where: `make update`.

With `make update TORCH=2.14.0`, or TORCH=newest, that PyTorch is written to constraints.txt,
environment.yml and the addresses of its documentation first, and installed. What changed is
what a learner would see change: everything that the validation compares, and not times or
photographs.
"""

import argparse
import copy
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = ("text/plain", "text/html", "text/markdown", "text/latex", "image/svg+xml")
IMAGE = re.compile(r"data:image/[\w+]+;base64,[\w+/=\s]+")
LINES = 12  # of a difference


def newest() -> str:
    """The newest release of PyTorch that pip's index offers."""
    ask = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(ask, capture_output=True, encoding="utf-8").stdout
    found = re.match(r"torch \(([\d.]+)", said)
    if not found:
        raise ValueError("pip's index does not say which PyTorch is the newest")
    return found[1]


def pin(root: Path, torch: str) -> list[str]:
    """Write a version of PyTorch, and the torchvision that belongs to it, into all files.

    Returns the files that changed. Raises ValueError for what is no version.
    """
    found = re.fullmatch(r"2\.(\d+)\.(\d+)", torch)
    if not found:
        raise ValueError(f"TORCH={torch!r}: a version such as 2.14.0 is expected")
    pins = (root / "constraints.txt").read_text(encoding="utf-8")
    old = re.search(r"^torch==(\d+\.\d+)", pins, re.M)[1]
    vision = f"0.{int(found[1]) + 15}"
    rules = [
        (r"^torch==.*$", f"torch=={torch}"),
        (r"^torchvision==.*$", f"torchvision=={vision}.{found[2]}"),
        (r"^  - pytorch=.*$", f"  - pytorch=2.{found[1]}"),
        (r"^  - torchvision=.*$", f"  - torchvision={vision}"),
        (
            rf"docs\.pytorch\.org/docs/{re.escape(old)}/",
            f"docs.pytorch.org/docs/2.{found[1]}/",
        ),
    ]
    changed = []
    for path in _texts(root):
        before = path.read_text(encoding="utf-8")
        after = before
        for pattern, new in rules:
            after = re.sub(pattern, new, after, flags=re.M)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path.relative_to(root).as_posix())
    return changed


def _texts(root: Path) -> Iterator[Path]:
    yield from (root / name for name in ("constraints.txt", "environment.yml", "README.md"))
    for folder, ending in (("mgpu_tutorial", "py"), ("notebooks", "ipynb")):
        yield from sorted((root / folder).rglob(f"*.{ending}"))


def differences(before: dict, after: dict) -> Iterator[tuple[int, str]]:
    """For each cell whose outputs changed its number, from 1, and the lines that did.

    Takes the same notebook twice, with the outputs of two runs.
    """
    pairs = zip(before.cells, after.cells, strict=True)
    for number, (old, new) in enumerate(pairs, 1):
        if "nbval-ignore-output" in new.metadata.get("tags", []) or new.cell_type != "code":
            continue
        lines = [_seen(cell.outputs) for cell in (old, new)]
        if lines[0] != lines[1]:
            found = list(difflib.unified_diff(*lines, lineterm="", n=0))[2:]
            changed = [line for line in found if not line.startswith("@@")]
            more = len(changed) - LINES
            rest = [f"… and {more} more lines"] if more > 0 else []
            yield number, "\n".join(changed[:LINES] + rest)


def _seen(outputs: list) -> list[str]:
    """What outputs show, as lines; of a drawing only that it is this one."""
    texts = []
    for output in outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type == "error":
            texts.append(f"{output.ename}: {output.evalue}")
        else:
            texts += [output.data[mime] for mime in SHOWN if mime in output.data]
    drawn = [IMAGE.sub(lambda found: f"(drawing {hash(found[0]):x})", text) for text in texts]
    return "\n".join(drawn).splitlines()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", help="only write this version of PyTorch into the files")
    parser.add_argument("names", nargs="*", help="of notebooks (all)")
    given = parser.parse_args(words)
    if given.torch:
        try:
            torch = newest() if given.torch == "newest" else given.torch
            print("\n".join(f"{name}: PyTorch {torch}" for name in pin(ROOT, torch)))
        except ValueError as problem:
            print(problem, file=sys.stderr)
            return 2
        return 0
    return _run_again(given.names)


def _run_again(names: list[str]) -> int:
    import nbformat

    sys.path.insert(0, str(ROOT))
    from tools.store import paths_of

    changed = failed = 0
    for path in paths_of(names):
        before = nbformat.read(path, as_version=4)
        done = subprocess.run([sys.executable, ROOT / "tools" / "store.py", path.name])
        failed += done.returncode != 0
        after = nbformat.read(path, as_version=4)
        for number, lines in differences(copy.deepcopy(before), after):
            changed += 1
            print(f"\nnotebooks/{path.name}, cell {number}\n{lines}", flush=True)
    print(f"\n{changed} outputs changed, {failed} notebooks failed.", end=" ")
    print("Read them with git diff; make test checks the rest." if changed else "")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
