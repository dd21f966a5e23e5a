"""Install this project and its PyTorch into the environment that runs this: `make` calls it.

    python tools/install.py [cpu|cuda|""] [EXTRA,…]

On Linux pip's own index has PyTorch with gigabytes of CUDA, which only an NVIDIA GPU needs.
Where there is none, the build for CPUs comes from PyTorch's index, or from pip's own sources
if they offer one; the argument cpu or cuda chooses instead, and TORCH_CPU_INDEX names a
mirror. With uv, where that is installed (USE_UV=0: not), else with pip. What they say is in
`pip.log` beside the environment; every quarter of a minute a line tells where they are.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINS = Path(os.environ.get("CONSTRAINTS", ROOT / "constraints.txt"))
LOG = Path(sys.prefix) / "pip.log"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ASK = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"
PATIENCE = 15  # seconds between two signs of life


def succeeds(*command: str) -> bool:
    """Whether a program ends well, and within twenty seconds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_nvidia_gpu() -> bool:
    """Whether a driver shows a GPU: by its device file, or by nvidia-smi (as in WSL)."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or succeeds("nvidia-smi", "-L")


def pip_offers(version: str) -> bool:
    """Whether pip's own sources have this version of PyTorch."""
    ask = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        said = subprocess.run(ask, capture_output=True, encoding="utf-8", timeout=60).stdout
    except subprocess.TimeoutExpired:
        return False
    return version in re.split(r"[,\s]+", said)


def choose(build: str, index: str, pinned: str) -> tuple[list[str], str]:
    """What to ask for first, and the line that says so; nothing where any build will do."""
    if build == "cuda" or (not build and (sys.platform != "linux" or has_nvidia_gpu())):
        return [], ""
    other = "" if build else "; make TORCH_BUILD=cuda takes the one with CUDA"
    if succeeds(sys.executable, "-c", ASK, f"{index.rstrip('/')}/torch/"):
        asked = ["--extra-index-url", index, "torch", "torchvision"]
        return asked, f"PyTorch's build for CPUs is installed{other}."
    if pip_offers(f"{pinned}+cpu"):
        asked = [f"torch=={pinned}+cpu", "torchvision"]
        return asked, f"PyTorch's build for CPUs is installed, from pip's own sources{other}."
    return [], (
        f"PyTorch's build for CPUs was wanted, but {index} does not answer, and pip's own "
        f"sources have no torch=={pinned}+cpu. pip takes the one with CUDA: gigabytes."
    )


def run(command: list[str]) -> int:
    """Run an installer into the log; say every quarter of a minute where it is."""
    begun = time.monotonic()
    with LOG.open("w", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        installer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            while True:
                try:
                    return installer.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - begun
                    print(f"  {seconds:4.0f} s: {last_line()[:70]}", flush=True)
        finally:
            installer.kill()  # nothing, where it has ended


def last_line() -> str:
    """What the installer is at."""
    lines = LOG.read_text("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def why_it_failed() -> str:
    """The last line of the log that names an error."""
    lines = LOG.read_text("utf-8", errors="replace").splitlines()
    named = [line for line in lines if re.match(r"\s*(ERROR|error|×)", line)]
    return (named or [last_line()])[-1].strip()


def install(*what: str) -> None:
    """By uv if it is there and succeeds, else by pip. Ends the program where neither does."""
    uv = shutil.which("uv") if os.environ.get("USE_UV") != "0" else None
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    ways = [[*pip, "--no-compile", "--progress-bar", "off", "--retries", "2"]]
    if uv:  # it does not read pip's settings, so pip may find what uv does not
        best = ["--index-strategy", "unsafe-best-match"]
        ways.insert(0, [uv, "pip", "install", "--python", sys.executable, *best])
    for way in ways:
        if run([*way, "-c", str(PINS), *what]) == 0:
            return
    sys.exit(
        "make: the packages could not be installed (network?): "
        f"{why_it_failed()[:300]} All of it: {LOG}"
    )


if __name__ == "__main__":
    build, extras = [*sys.argv[1:], "", ""][:2]
    pinned = re.search(r"^torch==(.+)$", PINS.read_text("utf-8"), re.M)[1].strip()
    first, said = choose(build, os.environ.get("TORCH_CPU_INDEX", CPU_INDEX), pinned)
    if said:
        print(said, flush=True)
    if first:
        install(*first)
    install("-e", f"{ROOT}[{extras}]" if extras else str(ROOT))
