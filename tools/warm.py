"""A Python that has imported what tests need, and forks a pytest for each order: for mutants.

Importing takes longer than most tests. It imports nothing of this package itself, which may
have changed since the last order. An order is a line of JSON, [output file, words…]; the
answers are two lines, the pytest's process and its exit code.
"""

import json
import os
import sys

HEAVY = (
    *("matplotlib.figure", "nbformat", "numpy", "pytest", "sympy", "torch", "torch._dynamo"),
    *("torch.distributed.pipelining", "torch.nn.parallel.distributed"),
)


def main() -> int:
    """Serve orders until there are no more; in a fork, the exit code of pytest."""
    import importlib

    for name in HEAVY:
        importlib.import_module(name)
    for line in sys.stdin:
        file, *words = json.loads(line)
        if not (process := os.fork()):
            return run(file, words)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return 0


def run(file: str, words: list[str]) -> int:
    """Be a pytest as the shell starts one, with a session of its own and output in a file."""
    import pytest

    os.setsid()
    for name, flags, descriptors in (
        (os.devnull, os.O_RDONLY, (0,)),
        (file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, (1, 2)),
    ):
        opened = os.open(name, flags, 0o600)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
    sys.argv = ["pytest", *words]
    return int(pytest.main(words))


if __name__ == "__main__":
    sys.exit(main())
