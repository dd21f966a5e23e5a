"""What passes a build is kept in a file: that function and no other, whole or not at all."""

import errno
import os
import re
import sys
import threading
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.utils.capture import capture_output

from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.lab.teach.build import Builder


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    return mine.FILE


def give(name):
    """A function of the package that the reader builds."""

    def ours():
        return 42

    ours.__name__ = name
    return ours


def gives_42(function):
    """give 42."""
    assert function() == 42


CHAPTERS = {"point_to_point": ["swap", "join"], "nonblocking": ["wait", "start"]}
BUILDS = {
    chapter: Builder(chapter, {give(name): [gives_42] for name in names})
    for chapter, names in CHAPTERS.items()
}
HOME = {name: chapter for chapter, names in CHAPTERS.items() for name in names}


def said(build, *functions):
    with capture_output() as shown:
        build(*functions)
    return shown.stdout.strip()


def kept(name):
    with capture_output():
        return getattr(mine.library(BUILDS[HOME[name]].ours[name]), name)


HELPERS = {
    "a function": ("def {h}():\n    return {v}\n", "{h}()"),
    "a value": ("{h} = {v}\n", "{h}"),
    "a list": ("{h} = [{v}]\n", "{h}[0]"),
    "a class": ("class {h}:\n    n = {v}\n", "{h}.n"),
    "a tuple with names": (
        "from typing import NamedTuple\nclass {h}(NamedTuple):\n    n: int = {v}\n",
        "{h}().n",
    ),
    "an import": ("from math import floor as {h}\n", "{h}({v}.5)"),
    "another import": ("from math import ceil as {h}\n", "{h}({v} - 0.5)"),
    "infinity": ("from math import inf as {h}\n", "min({h}, {v})"),
    "two names": ("def {h}(n={v}):\n    return n\n", "{h}()"),
}


def source(name, helper, kind, value):
    made, used = (text.format(h=helper, v=value) for text in HELPERS[kind])
    return f"{made}\n\ndef {name}():\n    return {used} + {42 - value}\n"


passes = st.tuples(
    st.sampled_from(list(HOME)),
    st.sampled_from(["swap", "wait", "help_me", "N"]),
    st.sampled_from(list(HELPERS)),
    st.integers(0, 3),
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(passes, min_size=2, max_size=4))
def test_what_library_returns_passes_the_build_again(cell, file, steps):
    file.unlink(missing_ok=True)
    done = set()
    for name, helper, kind, value in steps:
        if HOME.get(helper) == HOME[name]:  # the build of that name is lent
            helper = "help_me"
        made = cell(source(name, helper, kind, value))
        heard = said(BUILDS[HOME[name]], made[-1])
        assert f"from mine import {name}" in heard, heard
        done.add(name)
        for each in done:
            gives_42(kept(each))


@pytest.mark.parametrize(
    ("head", "used", "says"),
    [
        ("import torch\nG = torch.Generator()\n", "G.initial_seed() * 0 + 42", "G of your"),
        ("from collections import Counter\nX = Counter([42])\n", "max(X)", "X of your"),
        ("f = lambda: 42; g = 1\n", "f()", "f of your notebook cannot"),
        (
            "import functools\ndef f():\n    return 42\nf = functools.cache(f)\n",
            "f()",
            "f of",
        ),
        (
            "def g(n):\n    def f():\n        return n\n    return f\nf = g(42)\n",
            "f()",
            "f of",
        ),
    ],
)
def test_what_cannot_be_written_is_named_and_nothing_is_kept(cell, file, head, used, says):
    *_, swap = cell(f"{head}def swap():\n    return {used}\n")
    heard = said(BUILDS["point_to_point"], swap)
    assert heard.startswith("correct: swap") and f"stays as it was: {says}" in heard
    assert not file.exists()


@pytest.mark.parametrize(
    ("imports", "line", "used"),
    [
        (
            "from typing import Optional, TypeAlias\nimport torch.distributed as dist",
            "Group: TypeAlias = Optional[dist.ProcessGroup]",
            "cast(Group, 42)",
        ),
        (
            "import torch.distributed as dist",
            "Group = dist.ProcessGroup | None",
            "Group and 42",
        ),
        ("import logging", "log = logging.getLogger(__name__)", "log.debug('here') or 42"),
        ("from functools import partial", "at = partial(max, 42, key=abs)", "at(1)"),
        ("import torch.distributed as dist", "AVG = dist.ReduceOp.AVG", "AVG and 42"),
        ("import enum\nclass E(enum.IntEnum):\n    A = 42", "X = E.A", "int(X)"),
        ("import os", "MIB = 1 << 20", "MIB // 2**20 * 42"),
    ],
)
def test_an_alias_a_logger_and_a_partial_are_kept_as_they_stand_in_the_cell(
    cell, file, imports, line, used
):
    head = f"from typing import cast\n{imports}\n"
    cell(f"{head}{line}  # with a remark\n")
    *_, swap = cell(f"def swap():\n    return {used}\n")
    assert "from mine import swap" in said(BUILDS["point_to_point"], swap)
    assert f"\n{line}\n" in file.read_text()
    gives_42(kept("swap"))


def test_of_two_statements_of_a_name_the_one_that_made_its_value_is_kept(cell, file):
    cell("from functools import partial\nat = partial(max, 42)\n")
    cell("at = partial(max, 43)\n")
    cell("at = partial(max, 42)\n")
    *_, swap = cell("def swap():\n    return at(1)\n")
    said(BUILDS["point_to_point"], swap)
    assert "at = partial(max, 42)" in file.read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"def f(:\n", "mine.py, line 1 cannot be imported (SyntaxError"),
        (b"\n1 / 0\n", "mine.py, line 2 cannot be imported (ZeroDivisionError"),
        ("# grüße\n".encode("latin-1"), "cannot be imported (UnicodeDecodeError"),
        (b"raise SystemExit(3)\n", "cannot be imported (SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_stays_and_the_verdict_is_there(
    cell, file, text, says
):
    file.write_bytes(text)
    heard = said(BUILDS["point_to_point"], *cell("def swap():\n    return 42\n"))
    assert heard.startswith("correct: swap") and says in heard
    assert file.read_bytes() == text
    assert says in mine.listing()
    with pytest.raises(ImportError, match=re.escape(says)):
        mine.library()


def test_a_full_disk_leaves_the_old_file(cell, file, monkeypatch):
    build = BUILDS["point_to_point"]
    said(build, *cell("def swap():\n    return 42\n"))
    old = file.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    heard = said(build, *cell("def join():\n    return 42\n"))
    assert "join is right, but mine.py stays as it was" in heard and "No space left" in heard
    assert file.read_bytes() == old and sorted(os.listdir(file.parent)) == [
        "mine.py",
        "proof.py",
    ]


def test_beside_the_file_lies_the_proof_unless_the_name_is_taken(cell, file):
    build, proof = BUILDS["point_to_point"], file.with_name("proof.py")
    for text in None, "old = 1\n", f"{mine.PROOF.read_text().splitlines()[0]}\nold = 1\n":
        if text:
            proof.write_text(text)
        said(build, *cell("def swap():\n    return 42\n"))
        is_own = text == "old = 1\n"
        assert proof.read_text() == (text if is_own else mine.PROOF.read_text())


def test_two_notebooks_write_one_after_the_other(cell, file):
    (swap,) = cell("def swap():\n    return 42\n")
    other = threading.Thread(target=mine.keep, args=("point_to_point", [swap]))
    with mine.in_turn():
        other.start()
        other.join(0.5)
        assert other.is_alive() and not file.exists()
    other.join()
    gives_42(kept("swap"))


EDITED = '''"""My own."""

from torch import (
    nn,
    optim,  # soon
)

# Note: these are mine
def my_helper(x):  # please stay
    """x

# Note: at the margin
    """
    return x


# built in 01_point_to_point: swap


# as on the board
def swap():
    # my own words
    return my_helper(41) + 1


NOTES = [nn, optim]
# the end
'''


def test_what_a_reader_wrote_by_hand_stays(cell, file):
    file.write_text(EDITED)
    said(BUILDS["nonblocking"], *cell("import os\ndef wait():\n    return 42 if os else 0\n"))
    text = file.read_text()
    left = iter(text.split("\n"))
    assert all(line in left for line in EDITED.rstrip().split("\n")), text
    gives_42(kept("swap")), gives_42(kept("wait"))


def test_one_of_several_is_replaced_alone(cell, file):
    build = BUILDS["point_to_point"]
    both = "def swap():\n    return 42\n\n\ndef join():\n    return swap()\n"
    said(build, *cell(both))
    said(build, *cell("def swap():\n    new = 42\n    return new\n"))
    text = file.read_text()
    assert text.count("def swap") == 1 and "new = 42" in text and text.count("# built") == 1
    gives_42(kept("join"))


def test_what_came_from_the_library_passes_and_stays_there(cell, file):
    build = BUILDS["point_to_point"]
    said(build, *cell("def join():\n    return 41\ndef swap():\n    return join() + 1\n")[1:])
    text = file.read_text()
    with capture_output():
        own = mine.library(*build.ours.values())
    heard = said(build, own.swap)
    assert heard.splitlines()[-1] == "swap is from mine.py, and stays there."
    assert "Tried with our" not in heard and file.read_text() == text


def test_an_object_of_a_class_of_the_library_is_no_thing_of_it(cell, file):
    swap = "class swap:\n    def __call__(self):\n        return 42\n"
    (made,) = cell(swap)
    mine.keep("point_to_point", [made])
    with capture_output():
        own = mine.library(BUILDS["point_to_point"].ours["swap"])
    assert mine.holds(own.swap) and not mine.holds(own.swap())
    (wait,) = cell("def wait():\n    return 42\n")
    wait.__globals__["model"] = own.swap()
    assert said(BUILDS["nonblocking"], wait).startswith("correct: wait")


def test_what_came_from_the_library_is_called_by_a_later_build_as_what_it_is(cell, file):
    said(BUILDS["point_to_point"], *cell("def swap():\n    return 42\n"))
    with capture_output():
        own = mine.library(BUILDS["point_to_point"].ours["swap"])
    *_, wait = cell("def wait():\n    return own.swap()\n")
    wait.__globals__["own"] = own
    said(BUILDS["nonblocking"], wait)
    assert "def wait():\n    return swap()\n" in file.read_text()


def test_a_helper_named_as_a_function_of_python_hides_it_from_no_other(cell, file):
    said(
        BUILDS["point_to_point"],
        *cell("def abs():\n    return 42\ndef swap():\n    return abs()\n")[1:],
    )
    cell("del abs\n")
    said(BUILDS["nonblocking"], *cell("def wait():\n    return abs(-42)\n"))
    gives_42(kept("swap")), gives_42(kept("wait"))


def test_a_name_that_means_something_else_inside_is_not_taken(cell, file):
    head = "from mgpu_tutorial.shared import checkpoint\n"
    body = "    load = 42\n    return load if checkpoint.load else 0\n"
    said(BUILDS["point_to_point"], *cell(f"{head}def swap():\n{body}"))
    assert "return load if _load else 0" in file.read_text()
    assert "import mgpu_tutorial" not in file.read_text()
    gives_42(kept("swap"))


def test_of_classes_without_functions_the_one_that_passed_is_kept(cell, file):
    cell("class P:\n    def of_another_cell(self):\n        return 41\n")
    *_, wait = cell(
        "from collections import namedtuple\nP = namedtuple('P', 'n')\n"
        "def wait():\n    return P(42).n\n"
    )
    assert "P of your notebook cannot be written" in said(BUILDS["nonblocking"], wait)
    *_, swap = cell("class P:\n    n = 42\ndef swap():\n    return P.n\n")
    right = swap.__globals__["P"]
    cell("class P:\n    n = 40\n")
    swap.__globals__["P"] = right  # as a cell does that is run again
    said(BUILDS["point_to_point"], swap)
    gives_42(kept("swap"))


def test_the_list_says_whether_the_file_can_be_imported(cell, file):
    said(BUILDS["point_to_point"], *cell("def swap():\n    return 42\n"))
    assert (
        mine.listing()
        == "Messages and collectives  swap\nIt can be imported: from mine import …"
    )


def test_a_comment_right_above_a_function_is_kept_and_no_solution_s_first_line(cell, file):
    swap = "# Solution (click to open)\n# see our wiki\ndef swap():\n    return 42\n"
    said(BUILDS["point_to_point"], *cell(f"# of the cell\n\n{swap}"))
    said(BUILDS["point_to_point"], *cell(swap))  # once
    above = file.read_text().partition("\ndef swap")[0].split("\n")
    assert above[-3:] == ["", "", "# see our wiki"]


def test_a_module_that_is_not_in_the_file_is_named(cell, file, monkeypatch):
    beside = types.ModuleType("beside")
    exec("def g():\n    return 42\ng.__module__ = 'beside'", vars(beside))
    monkeypatch.setitem(sys.modules, "beside", beside)
    heard = said(
        BUILDS["point_to_point"], *cell("from beside import g\ndef swap():\n    return g()\n")
    )
    assert "\ng comes from beside, which is not in the file" in heard
    assert file.read_text().count("import g") == 1


ANSWERS = {
    "first": "def twice(n):\n    return 2 * n\n\n\ndef swap():\n    return twice(21)\n",
    "second": "def swap():\n    return 42\n",
}


def test_a_helper_that_nothing_uses_any_more_goes_and_is_named(cell, file):
    said(BUILDS["point_to_point"], cell(ANSWERS["first"])[1])
    assert "# helpers of 01_point_to_point: twice\n" in file.read_text()
    heard = said(BUILDS["point_to_point"], *cell(ANSWERS["second"]))
    assert heard.endswith("Not used any more, and gone: twice.")
    assert "twice" not in file.read_text()


def test_what_the_reader_wrote_stays_though_nothing_uses_it(cell, file):
    said(BUILDS["point_to_point"], *cell(ANSWERS["second"]))
    own = "\n\ndef twice(n):\n    return 2 * n\n"
    file.write_text(file.read_text().replace("\n\ndef swap", f"{own}\n\ndef swap"))
    for answer in ANSWERS.values():  # the same helper as the reader's
        said(BUILDS["point_to_point"], cell(answer)[-1])
    assert own in file.read_text()


def test_two_chapters_share_a_constant_whatever_stands_beside_it(cell, file):
    said(BUILDS["point_to_point"], *cell("N = 41  # that\ndef swap():\n    return N + 1\n"))
    said(BUILDS["nonblocking"], *cell("N = 41\ndef wait():\n    return N + 1\n"))
    assert file.read_text().count("N = 41") == 1
    gives_42(kept("swap")), gives_42(kept("wait"))


def test_a_cached_helper_is_kept(cell, file):
    head = "import functools\n@functools.lru_cache\ndef world():\n    return 42\n"
    *_, swap = cell(f"{head}def swap():\n    return world()\n")
    said(BUILDS["point_to_point"], swap)
    gives_42(kept("swap"))


def test_a_function_with_one_for_each_type_is_refused_by_name(cell, file):
    head = "import functools\n@functools.singledispatch\ndef size(x):\n    return 42\n"
    *_, swap = cell(f"{head}def swap():\n    return size(1)\n")
    assert "size of your notebook has a function for each type" in said(
        BUILDS["point_to_point"], swap
    )
    assert not file.exists()


def test_what_is_slow_to_import_is_imported_where_it_is_used(cell, file):
    head = "from torch.distributed.fsdp import fully_shard\n"
    said(
        BUILDS["point_to_point"], *cell(f"{head}def swap():\n    return fully_shard and 42\n")
    )
    assert f"\ndef swap():\n    {head}\n    return" in file.read_text()


def test_a_slow_type_is_imported_at_the_top(cell, file):
    head = "from torch.distributed.fsdp import FSDPModule\n"
    said(
        BUILDS["point_to_point"],
        *cell(f"{head}def swap(m: FSDPModule = 1):\n    return 42\n"),
    )
    assert f"\n{head}" in file.read_text()


def test_a_class_that_is_made_late_can_be_used_by_no_other(cell, file):
    head = "import numpy as np\nclass A(np.ndarray):\n    n = 42\n"
    *_, swap = cell(f"{head}def swap():\n    return A.n\n")
    assert "swap uses A, which needs more than torch" in said(BUILDS["point_to_point"], swap)
    assert not file.exists()
