"""A notebook's kernel that has lost one of its ports is started once more.

Jupyter chooses free ports, and the kernel opens them a second later. In between the ranks of
a notebook beside it can take one of them for themselves.
"""

import nbval.kernel

start_once = nbval.kernel.start_new_kernel


def start_new_kernel(**options: object) -> tuple:
    """Start a kernel as nbval does, and once more where it ended before it answered."""
    try:
        return start_once(**options)
    except RuntimeError:
        return start_once(**options)


nbval.kernel.start_new_kernel = start_new_kernel
