"""A JupyterLab on a fresh copy of the repository, and a browser that looks at it."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from handouts import slides, student

sys.path.insert(0, str(Path(__file__).parent))
import chromium

ROOT = Path(__file__).parent.parent.parent
TOKEN = "only-for-this-test"
KEPT = ["notebooks", "mgpu_tutorial", "benchmarks", "tools", "docs"]
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The address of a JupyterLab that has never seen these notebooks."""
    home = tmp_path_factory.mktemp("lab")
    copy = home / "clone"
    copy.mkdir()
    for name in KEPT:
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in ROOT.glob("*.md"):
        shutil.copyfile(path, copy / path.name)
    slides.write(copy / "build" / "slides", ("03",), copy / "notebooks")
    student.write(copy / "student", ("00",), copy / "notebooks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    own = {f"JUPYTER_{name}": str(home / name) for name in names}
    own |= {f"JUPYTERLAB_{n}_DIR": str(home / n.lower()) for n in ("SETTINGS", "WORKSPACES")}
    own |= {"IPYTHONDIR": str(home), "PYTHONPATH": str(copy), "MGPU_DEVICE": "cpu"}
    tracker = home / "settings" / "@jupyterlab" / "notebook-extension"
    tracker.mkdir(parents=True)  # all cells are on the page, not only those in sight
    (tracker / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    command = [sys.executable, copy / "tools" / "open_jupyterlab.py", "--no-browser"]
    command += [f"--ServerApp.port={port}", f"--IdentityProvider.token={TOKEN}"]
    server = subprocess.Popen(
        [*command, "--expose-app-in-browser"],
        env={**os.environ, **own, "JUPYTER_PREFER_ENV_PATH": "1"},
        stdout=(home / "log").open("w"),
        stderr=subprocess.STDOUT,
    )
    address = f"http://127.0.0.1:{port}"
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert server.poll() is None, (home / "log").read_text(encoding="utf-8")
        time.sleep(0.2)
    yield address
    server.terminate()
    server.wait(30)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = chromium.find()
    if path is None:
        pytest.exit(chromium.HOW, returncode=1)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]  # as root, in a container
        window = playwright.chromium.launch(executable_path=path, args=flags)
        yield window
        window.close()


class Lab:
    """A page of JupyterLab with what its console said."""

    def __init__(self, browser, address: str) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(60_000)
        self.address, self.said = address, []
        self.page.on("console", lambda m: m.type == "error" and self.said.append(m.text))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))

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

    def notebook(self, stem: str) -> None:
        """Open a notebook, with `look` in its page."""
        self.open(f"/lab/tree/notebooks/{stem}.ipynb")
        self.page.evaluate(
            """async () => {
                const panel = jupyterapp.shell.currentWidget;
                await panel.context.ready;
                await panel.sessionContext.ready;
            }"""
        )
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        self.page.evaluate(LOOK)


@pytest.fixture(scope="module")
def opened(browser, lab):
    window = Lab(browser, lab)
    yield window
    window.page.close()
