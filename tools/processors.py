"""Run the tests and the notebooks as three x86 processors: `make test-processors`.

The libraries under PyTorch choose their kernels by what the processor can do, and each
choice rounds in another order. Environment variables take abilities away, so this machine
can play an older one. With names (files of tests, notebooks) only those run. A failure
does not stop the others; the exit code tells at the end.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tools import check  # noqa: E402

PROCESSORS = {
    "this processor": {},
    "a processor with AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "a processor with SSE4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
TESTS = [*check.PYTEST, *check.TWO]
NOTEBOOKS = [*TESTS, *check.NBVAL]
SEEN = "import torch; print(torch.backends.cpu.get_cpu_capability())"


def runs_of(names: list[str]) -> list[list[str]]:
    """The arguments of one pytest for the tests and one for the notebooks among `names`."""
    names = names or ["tests", "notebooks"]
    books = [n for n in names if n == "notebooks" or n.endswith(".ipynb")]
    tests = [n for n in names if n not in books]
    return [[*TESTS, *tests]] * bool(tests) + [[*NOTEBOOKS, *books]] * bool(books)


def main(names: list[str]) -> int:
    """Run everything as every processor; returns 1 where anything failed."""
    failed = []
    for processor, variables in PROCESSORS.items():
        environment = os.environ | variables
        play = [sys.executable, "-c", SEEN]
        seen = subprocess.check_output(play, env=environment, text=True).strip()
        print(f"\nAs {processor} (PyTorch takes {seen})", flush=True)
        for words in runs_of(names):
            done = subprocess.run(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
            if done.returncode:
                failed.append(f"{processor}: {' '.join(words[3:])}")
    print(
        "\n" + "\n".join(f"failed as {line}" for line in failed) if failed else "\nno failure"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
