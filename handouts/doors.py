"""Ways to open a notebook elsewhere, where the repository is on GitHub.

Colab and Kaggle open a copy whose first cell installs what is missing, so that the notebooks
themselves stay as they are.
"""

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import quote

import nbformat

BRANCH = "gh-pages"  # where `make publish` puts the site, the copies with it
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


def doors(repository: str, stem: str) -> dict[str, str]:
    """The addresses that open a notebook elsewhere, by name."""
    copied = f"github/{repository}/blob/{BRANCH}/doors/{stem}.ipynb"
    source = quote(copied.replace("github/", "https://github.com/", 1), safe="")
    binder = f"https://mybinder.org/v2/gh/{repository}/HEAD?urlpath=lab/tree/notebooks/"
    found = {
        "Binder": f"{binder}{stem}.ipynb",
        "Colab": f"https://colab.research.google.com/{copied}",
        "Kaggle": f"https://www.kaggle.com/kernels/welcome?src={source}",
        "Codespaces": f"https://codespaces.new/{repository}",
    }
    return found if repository else {}


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
