"""A solution that runs with all other cells leaves no verdict and no name behind."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from mgpu_tutorial.lab.teach import solution


def run(shell, source):
    """The outputs of a cell."""
    with capture_output() as shown:
        shell.run_cell(source).raise_error()
    return shown.outputs


def test_it_keeps_no_name_and_folds_its_verdict(monkeypatch):
    shell = InteractiveShell.instance()
    try:
        solution.register()
        run(shell, "from mgpu_tutorial.lab import check\nanswer = 1")
        bar = "from IPython.display import display\ndisplay({'text/html': 'bar'}, raw=True)"
        source = f"answer, other = 2, 3\n{bar}\ncheck(answer, 2)"
        (shown,) = run(shell, f"# Solution (click to open)\n{source}")
        assert shown.data["text/plain"] == "correct"
        assert shown.data["text/html"].index("<details>") < shown.data["text/html"].index("✓")
        assert "bar" not in shown.data["text/html"]
        assert shell.user_ns["answer"] == 1 and "other" not in shell.user_ns
        shown = run(shell, "check(answer, 2)")
        assert shown[0].data["text/plain"].startswith("not yet")
    finally:
        InteractiveShell.clear_instance()


def test_a_built_solution_says_that_it_is_not_kept():
    shell = InteractiveShell.instance()
    try:
        solution.register()
        (shown,) = run(shell, "# Solution (click to open)\nbuild = print\nbuild(1)")
        assert "it is ours. Type it into a cell of yours" in shown.data["text/html"]
    finally:
        InteractiveShell.clear_instance()


RAISING = {
    "an error": "1 / 0",
    "an import": "import no_such_module",
    "an assert": "other = 1\nassert not other",
}


@pytest.mark.parametrize("source", RAISING.values(), ids=RAISING)
def test_a_solution_that_raises_ends_its_cell_with_the_error_and_is_over(source):
    shell = InteractiveShell.instance()
    try:
        solution.register()
        with capture_output():
            ended = shell.run_cell(f"# Solution (click to open)\n{source}")
        assert isinstance(ended.error_in_exec, Exception)
        assert solution.running is False and "other" not in shell.user_ns
    finally:
        InteractiveShell.clear_instance()
