"""Put build/site/ on the branch gh-pages of the remote origin: `make publish`.

The branch has one commit, which each publication replaces; nothing else is touched. On GitHub
choose it once: Settings, Pages, Deploy from a branch, gh-pages.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BRANCH = "gh-pages"


def publish(root: Path, site: Path, remote: str = "origin") -> str:
    """Push the folder as the only commit of the branch; returns the commit."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=root, env=surroundings, capture_output=True, encoding="utf-8"
        )
        if done.returncode:
            raise SystemExit(f"git {words[0]}: {done.stderr.strip()}")
        return done.stdout.strip()

    with tempfile.TemporaryDirectory() as folder:
        surroundings = {**os.environ, "GIT_INDEX_FILE": str(Path(folder) / "index")}
        git("--work-tree", str(site), "add", "--all", ".")
        tree = git("write-tree")
        commit = git("commit-tree", tree, "-m", "The site")
        git("push", "--force", remote, f"{commit}:refs/heads/{BRANCH}")
    return commit


def main() -> int:
    site = ROOT / "build" / "site"
    if not (site / "index.html").exists():
        print("build/site/ is not there: make site", file=sys.stderr)
        return 1
    print(f"{publish(ROOT, site)[:10]} is the site now, on the branch {BRANCH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
