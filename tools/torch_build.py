"""Choose the build of PyTorch for this machine: prints the index that has it, or nothing.

On Linux the package index offers PyTorch with NVIDIA's libraries for CUDA, several gigabytes
that only an NVIDIA GPU needs. Where there is none, the build for CPUs is taken from PyTorch's
own index. `TORCH_BUILD=cuda` or `TORCH_BUILD=cpu` on make's command line chooses instead, and
TORCH_CPU_INDEX names a mirror. What was chosen is said on stderr.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ASK = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"


def has_nvidia_gpu() -> bool:
    """Whether a driver shows a GPU: by its device file, or by nvidia-smi (as in WSL)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    program = shutil.which("nvidia-smi")
    try:
        return (
            bool(program)
            and not subprocess.run(
                [program, "-L"], capture_output=True, timeout=20
            ).returncode
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def answers(index: str, seconds: float = 8) -> bool:
    """Whether the index has a page for torch; looking up its address takes no longer, too."""
    ask = [sys.executable, "-c", ASK, f"{index.rstrip('/')}/torch/"]
    try:
        return not subprocess.run(ask, capture_output=True, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return False


def choose(build: str, index: str) -> tuple[str, str]:
    """The index to add to pip's own, or "", and the line that says what is installed."""
    if build == "cuda" or (not build and (sys.platform != "linux" or has_nvidia_gpu())):
        return "", ""
    why = "" if build else "No NVIDIA GPU here: "
    if answers(index):
        other = "" if build else " (make TORCH_BUILD=cuda takes the one with CUDA)"
        return index, f"{why}PyTorch's build for CPUs is installed{other}."
    return "", (
        f"{why}PyTorch's build for CPUs was wanted, but {index} does not answer. "
        "pip takes what its own sources offer: perhaps gigabytes for CUDA."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", choices=["", "cpu", "cuda"])
    build = parser.parse_args().build
    index, said = choose(build, os.environ.get("TORCH_CPU_INDEX", CPU_INDEX))
    if said:
        print(said, file=sys.stderr)
    if index:
        print(index)


if __name__ == "__main__":
    main()
