"""Find a Chromium here, or say how to get one: python tests/browser/chromium.py."""

import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = (
    "No Chromium was found on this machine. One of these gets it:\n"
    "    apt install chromium                              (Debian, Ubuntu; as root)\n"
    "    .venv/bin/playwright install --with-deps chromium (downloads one)\n"
    "    CHROMIUM=/path/to/chrome make test-browser        (one that is there already)"
)


def find() -> str | None:
    """The path of a Chromium or Chrome, or None."""
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named)
    return next(filter(None, map(shutil.which, NAMES)), None) or _downloaded()


def _downloaded() -> str | None:
    """Playwright's own, where it is installed and has got one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        return shutil.which(playwright.chromium.executable_path)


if __name__ == "__main__":
    path = find()
    print(path or HOW)
    sys.exit(path is None)
