"""Open JupyterLab on the contents page: `make lab`.

Further arguments are JupyterLab's own, such as --no-browser or --port=8890. Its settings are
those in jupyterlab_settings: texts open as pages, nothing asks for news, and a listing is
written as large as the code of a cell.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "tools" / "jupyterlab_settings"
# What the notebooks are, in which order, how long each takes: of the copies for a reader.
START = "student/README.md" if (ROOT / "student" / "README.md").exists() else "README.md"


def arguments(words: list[str]) -> list[str]:
    """JupyterLab's, which listens on this machine only, unless told."""
    flags = [
        f"--ServerApp.root_dir={ROOT}",
        f"--LabApp.default_url=/lab/tree/{START}",
        f"--LabApp.app_settings_dir={SETTINGS}",
        "--LabApp.custom_css=True",
        f"--ServerApp.tornado_settings=static_custom_path={SETTINGS}",
    ]
    if not any(word.startswith("--ServerApp.ip=") for word in words):
        flags.append("--ServerApp.ip=127.0.0.1")  # a container names another
    if hasattr(os, "getuid") and os.getuid() == 0:
        flags.append("--allow-root")
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not display and sys.platform not in ("darwin", "win32"):  # no window can open
        flags.append("--no-browser")
    return [sys.executable, "-m", "jupyterlab", *flags, *words]


if __name__ == "__main__":
    os.execv(sys.executable, arguments(sys.argv[1:]))
