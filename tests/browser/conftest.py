"""A JupyterLab on a fresh copy of the repository, and a browser that looks at it."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from handouts import slides

sys.path.insert(0, str(Path(__file__).parent))
import chromium

ROOT = Path(__file__).parent.parent.parent
SCREENS = ROOT / "build" / "screens"
TOKEN = "only-for-this-test"
KEPT = ["notebooks", "mgpu_tutorial", "benchmarks", "tools", "docs", "README.md"]
KEPT += ["CONTRIBUTING.md"]


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The address of a JupyterLab that has never seen these notebooks."""
    home = tmp_path_factory.mktemp("lab")
    copy = home / "clone"
    copy.mkdir()
    for name in KEPT:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, copy / name)
    slides.write(copy / "build" / "slides", ("03",), copy / "notebooks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {
        name: str(home / name.lower())
        for name in (
            *("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"),
            *("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR"),
        )
    }
    tracker = home / "jupyterlab_settings_dir" / "@jupyterlab" / "notebook-extension"
    tracker.mkdir(parents=True)  # all cells are on the page, not only those in sight
    (tracker / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    settings = {"PYTHONPATH": str(copy), "MGPU_DEVICE": "cpu", "JUPYTER_PREFER_ENV_PATH": "1"}
    log = open(home / "log", "w")  # noqa: SIM115
    server = subprocess.Popen(
        [
            *(sys.executable, copy / "tools" / "open_jupyterlab.py", "--no-browser"),
            *(f"--ServerApp.port={port}", f"--IdentityProvider.token={TOKEN}"),
            "--expose-app-in-browser",
        ],
        env={**os.environ, **own, **settings},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    address = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 60
    while not _answers(f"{address}/api/status?token={TOKEN}"):
        assert server.poll() is None and time.monotonic() < end, (home / "log").read_text(
            encoding="utf-8"
        )
        time.sleep(0.2)
    yield address
    server.terminate()
    server.wait(30)
    log.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = chromium.find()
    if path is None:
        pytest.exit(chromium.HOW, returncode=1)
    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield window
        window.close()


class Lab:
    """A page of JupyterLab with what its console said."""

    def __init__(self, browser, address: str) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(60_000)
        self.address, self.said = address, []
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))

    def _listen(self, message) -> None:
        if message.type == "error":
            self.said.append(f"{message.text} ({message.location['url']})")

    def open(self, path: str) -> None:
        """Open an address of JupyterLab in a fresh workspace and wait until it is there."""
        self.page.goto(f"{self.address}{path}?reset&token={TOKEN}")
        self.page.wait_for_function("window.jupyterapp !== undefined")
        self.page.evaluate("async () => { await jupyterapp.restored }")
        self.page.wait_for_function("jupyterapp.shell.currentWidget?.context !== undefined")

    def run(self, command: str, **arguments):
        """Execute one of JupyterLab's commands and wait for its end."""
        return self.page.evaluate(
            "async ([name, given]) => { await jupyterapp.commands.execute(name, given) }",
            [command, arguments],
        )

    def picture(self, name: str) -> None:
        """Write what is seen to build/screens."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENS / f"{name}.png")

    def whole_notebook(self, name: str, width: int = 1280) -> None:
        """Write pictures of the whole notebook, in parts if it is very long."""
        before = self.page.viewport_size
        tall = self.page.evaluate(
            "() => document.querySelector('.jp-WindowedPanel-outer').scrollHeight"
        )
        height = min(tall + 200, 12_000)
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_timeout(800)
        for part, top in enumerate(range(0, tall, height - 200)):
            panel = self.page.locator(".jp-WindowedPanel-outer")
            panel.evaluate("(panel, top) => { panel.scrollTop = top }", top)
            self.page.wait_for_timeout(200)
            self.picture(f"{name}-{part + 1}" if tall > height else name)
        self.page.set_viewport_size(before)
        self.page.wait_for_timeout(300)


@pytest.fixture(scope="module")
def opened(browser, lab):
    window = Lab(browser, lab)
    yield window
    window.page.close()
