"""Choose the build of PyTorch for this machine: prints the index that has it, or nothing.

On Linux pip's own index has PyTorch with gigabytes of CUDA, which only an NVIDIA GPU needs.
Where there is none, the build for CPUs comes from PyTorch's index, if that answers: with uv's
`--torch-backend=auto` the set-up would fail where it does not. The argument cpu or cuda
chooses instead, TORCH_CPU_INDEX names a mirror, and what was chosen is said on stderr.
"""

import os
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ASK = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"


def succeeds(*command: str) -> bool:
    """Whether a program ends well, and within twenty seconds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_nvidia_gpu() -> bool:
    """Whether a driver shows a GPU: by its device file, or by nvidia-smi (as in WSL)."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or succeeds("nvidia-smi", "-L")


def choose(build: str, index: str) -> tuple[str, str]:
    """The index to add to pip's own, or "", and the line that says what is installed."""
    if build == "cuda" or (not build and (sys.platform != "linux" or has_nvidia_gpu())):
        return "", ""
    if succeeds(sys.executable, "-c", ASK, f"{index.rstrip('/')}/torch/"):
        other = "" if build else "; make TORCH_BUILD=cuda takes the one with CUDA"
        return index, f"PyTorch's build for CPUs is installed{other}."
    return "", (
        f"PyTorch's build for CPUs was wanted, but {index} does not answer. "
        "pip takes what its own sources offer: perhaps gigabytes for CUDA."
    )


if __name__ == "__main__":
    index, said = choose(sys.argv[1], os.environ.get("TORCH_CPU_INDEX", CPU_INDEX))
    print(said, file=sys.stderr, end="\n" if said else "")
    print(index)
