"""What happens to a function that is handed to a new Python, as "spawn" does."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable


def spawn_alone(function: Callable) -> str:
    """Start `function` in a new process by "spawn"; returns the last line of its complaint.

    The child's stderr goes to a file: what a child prints to the kernel's own stderr
    may appear in a notebook, or in the terminal behind it, or nowhere. The complaint has
    no colours: PYTHON_COLORS=0 wins over FORCE_COLOR, which Jupyter sets in its kernels.
    """
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        colours = os.environ.get("PYTHON_COLORS", "")  # an empty one counts as none
        os.environ["PYTHON_COLORS"] = "0"
        try:
            child = multiprocessing.get_context("spawn").Process(target=function)
            child.start()
            child.join()
        finally:
            os.environ["PYTHON_COLORS"] = colours
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        lines = log.read().decode().splitlines() or ["no complaint"]
    return f"exit code {child.exitcode}, {lines[-1].split(' on <')[0]}"
