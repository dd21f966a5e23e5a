"""The whole collection for static hosting: `make site` writes build/site/.

What `make handouts` makes, in a folder of its own. Where the repository is on GitHub, each
page has links that open its notebook elsewhere; Colab and Kaggle open a copy whose first cell
installs what is missing, so that the notebooks themselves stay as they are.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import nbformat

from handouts.build import build
from handouts.notebook import ROOT, chosen
from handouts.web import doors

CUDA = "https://download.pytorch.org/whl/cu126"  # runs on the T4 and on older drivers
LINK = re.compile(r"\]\((?!https?:|#|attachment:)([^)\s#]+)")
INSTALL = """\
# Installs the package where it is missing: a few minutes, once for each machine.
import importlib.util

if importlib.util.find_spec("mgpu_tutorial") is None:
    %pip install --quiet {packages} --extra-index-url {index}"""


def repository(root: Path) -> str:
    """The owner and the name on GitHub, such as "me/course": its workflow's or `origin`."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    asked = subprocess.run(command, capture_output=True, encoding="utf-8")
    found = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?\s*$", asked.stdout)
    return os.environ.get("GITHUB_REPOSITORY") or (found[1] if found else "")


def assemble(
    out: Path, names: tuple = (), folder: Path = ROOT / "notebooks", github: str | None = None
) -> list[str]:
    """Make the site anew; returns a line about it."""
    github = repository(folder.parent) if github is None else github
    if out.exists():
        shutil.rmtree(out)
    build(out, names, folder, github)
    shutil.rmtree(out / ".work")
    (out / ".nojekyll").touch()  # GitHub serves the files as they are
    pages = sorted(out.glob("*.html"))
    if github:
        (out / "doors").mkdir()
        for path in chosen(folder, names):
            nbformat.write(with_install(path, github), out / "doors" / path.name)
    size = sum(file.stat().st_size for file in out.rglob("*.*")) / 1e6
    ways = f"opens in {', '.join(doors(github, ''))}" if github else "no origin on GitHub"
    return [f"{len(pages)} pages, {size:.0f} MB, {ways}"]


def with_install(path: Path, repository: str) -> nbformat.NotebookNode:
    """The copy of a notebook for Colab and Kaggle; its links are addresses."""

    def address(found: re.Match) -> str:
        if found[1].endswith(".ipynb"):
            return f"]({doors(repository, Path(found[1]).stem)['Colab']}"
        place = os.path.normpath(f"notebooks/{found[1]}")
        return f"](https://github.com/{repository}/blob/HEAD/{place}"

    made = nbformat.read(path, as_version=4)
    for each in made.cells:
        if each.cell_type == "markdown":
            each.source = LINK.sub(address, each.source)
    pins = (path.parent.parent / "constraints.txt").read_text(encoding="utf-8")
    torch = re.findall(r"^torch(?:vision)?==\S+", pins, re.MULTILINE)  # of the stored outputs
    packages = " ".join([*torch, f"git+https://github.com/{repository}"])
    source = INSTALL.format(packages=packages, index=CUDA)
    made.cells.insert(1, nbformat.v4.new_code_cell(source, id="install"))
    return made
