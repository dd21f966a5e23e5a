"""A folded solution that judges no answer but its own: a cell below `# Solution (…)`."""

import html

from mgpu_tutorial.lab.teach.verdict import MARK

UNKEPT = "Not kept in mine.py: it is ours. Type it into a cell of yours to keep it."

running = False  # True inside a solution: what it builds is not the reader's own


def register() -> None:
    """Make the line known to the notebook, where there is one."""
    from IPython import get_ipython

    if shell := get_ipython():
        shell.register_magic_function(solution, "cell")
        shell.input_transformers_cleanup.append(_as_magic)


def _as_magic(lines: list[str]) -> list[str]:
    begins = lines and lines[0].startswith("# Solution (")
    return ["%%solution\n", *lines[1:]] if begins else lines


def solution(line: str, cell: str) -> None:
    """Run the cell, keep none of its names, and fold what it shows.

    Running all cells runs solutions that nobody opened: they must not replace the reader's.
    """
    from IPython import get_ipython
    from IPython.display import display
    from IPython.utils.capture import capture_output

    global running
    shell = get_ipython()
    before = dict(shell.user_ns)
    running = True
    try:
        with capture_output() as shown:
            ended = shell.run_cell(cell, store_history=False)
    finally:
        running = False
    for name in shell.user_ns.keys() - before.keys():
        del shell.user_ns[name]
    shell.user_ns.update(before)
    # a progress bar, which a slow launch shows meanwhile, has no text
    outputs = [output.data for output in shown.outputs if output.data.get("text/plain")]
    texts = [data["text/plain"] for data in outputs]
    pages = [data.get("text/html") or html.escape(data["text/plain"]) for data in outputs]
    pages += [f"<p>{UNKEPT}</p>"] if "build(" in cell else []
    folded = f"<details><summary>What the solution shows</summary>{''.join(pages)}</details>"
    plain = "\n".join([shown.stdout.strip(), *texts]).strip()
    display({"text/plain": plain, "text/html": MARK + folded + "</div>"}, raw=True)
    ended.raise_error()
