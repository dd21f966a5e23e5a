"""Ways to open a notebook elsewhere: its addresses, and copies that install the package.

The address of the repository is that of its remote `origin`, or GitHub's own variable in its
workflows; without either there are no doors. Colab and Kaggle open a copy whose first cell
installs what is missing, so that the notebooks themselves stay as they are.
"""

import copy
import os
import re
import subprocess
from pathlib import Path
from urllib.parse import quote

import nbformat

BRANCH = "gh-pages"  # where `make publish` puts the site, the copies with it
CUDA = "https://download.pytorch.org/whl/cu126"  # runs on the T4 and on older drivers
LINK = re.compile(r"\]\((?!https?:|#|attachment:)([^)\s]+)\)")
INSTALL = """\
# Installs the package where it is missing: a few minutes, once for each machine.
import importlib.util

if importlib.util.find_spec("mgpu_tutorial") is None:
    %pip install --quiet {packages} --extra-index-url {index}"""


def repository(root: Path) -> str:
    """The owner and the name on GitHub, such as "me/course", or nothing."""
    if named := os.environ.get("GITHUB_REPOSITORY"):
        return named
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    asked = subprocess.run(command, capture_output=True, encoding="utf-8")
    found = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?\s*$", asked.stdout)
    return found[1] if found else ""


def doors(repository: str, stem: str) -> dict[str, str]:
    """The addresses that open a notebook elsewhere, by name."""
    if not repository:
        return {}
    copied = f"{repository}/blob/{BRANCH}/doors/{stem}.ipynb"
    source = quote(f"https://github.com/{copied}", safe="")
    return {
        "Binder": f"https://mybinder.org/v2/gh/{repository}/HEAD"
        f"?urlpath=lab/tree/notebooks/{stem}.ipynb",
        "Colab": f"https://colab.research.google.com/github/{copied}",
        "Kaggle": f"https://www.kaggle.com/kernels/welcome?src={source}",
        "Codespaces": f"https://codespaces.new/{repository}",
    }


def packages(root: Path, repository: str) -> list[str]:
    """What the first cell installs: the PyTorch of the stored outputs, and the package."""
    pins = (root / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^torch(?:vision)?==\S+", pins, re.MULTILINE)
    return [*pinned, f"git+https://github.com/{repository}"]


def with_install(
    path: Path, repository: str, wanted: list[str], index: str = CUDA
) -> nbformat.NotebookNode:
    """A copy of a notebook that begins with the installation; its links are addresses."""
    made = copy.deepcopy(nbformat.read(path, as_version=4))
    source = INSTALL.format(packages=" ".join(wanted), index=index)
    cell = nbformat.v4.new_code_cell(source)
    cell.id = "install"
    made.cells.insert(1, cell)
    for each in made.cells:
        if each.cell_type == "markdown":
            each.source = LINK.sub(lambda found: _address(found[1], repository), each.source)
    return made


def _address(target: str, repository: str) -> str:
    """Another chapter opens the same way, a file of the repository on GitHub."""
    file, mark, anchor = target.partition("#")
    if file.endswith(".ipynb"):
        return f"]({doors(repository, Path(file).stem)['Colab']}{mark}{anchor})"
    place = os.path.normpath(os.path.join("notebooks", file))
    return f"](https://github.com/{repository}/blob/HEAD/{place}{mark}{anchor})"
