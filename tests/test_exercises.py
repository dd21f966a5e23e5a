"""Each exercise of the first notebooks takes right answers in any dress, and no wrong one."""

import ast
from pathlib import Path

import nbformat
import pytest

from tools.assignment import binds, needed, reads

ROOT = Path(__file__).parent.parent


# The notebook, the name that the reader fills in, the right answers, and the wrong ones
# with what the verdict says of each.
EXERCISES = [
    (
        "00_processes_and_ranks",
        "visible",
        ['visible = "3,2"', 'visible = "3, 2"'],
        {
            'visible = "2,3"': "rank 0 of 2: the answer is 'local rank 0, cuda:0, is GPU 2'",
            'visible = "3,2,1"': "3 values, expected 2",
        },
    ),
    (
        "01_point_to_point",
        "ranks",
        ["ranks = 7"],
        {
            "ranks = 6": "the token is 15.0, off by 29 %",
            "ranks = 7.0": "world_size must be a whole number",
        },
    ),
    (
        "02_nonblocking",
        "arguments",
        [
            'arguments = {"recv_after": 0.3, "write_after": 0.9}',
            "arguments = dict(recv_after=0.3, write_after=1)",
        ],
        {
            'arguments = {"recv_after": 0.3, "write_after": 0}': "what arrived is 2.0",
            'arguments = {"recv_after": 0.3, "write_after": 100}': "rank 0 was at",
        },
    ),
    (
        "03_collectives",
        "bytes_sent",
        ["bytes_sent = (5 - 1) / 5 * SIZE", "bytes_sent = 4 * SIZE // 5"],
        {
            "bytes_sent = (4 - 1) / 4 * SIZE": "off by 6.2 %",
            "bytes_sent = 2 * 4 / 5 * SIZE": "off by 100 %",
        },
    ),
    (
        "04_data_partitioning",
        "sizes",
        ["sizes = [0.5, 0.25, 0.25]", "sizes = (1 / 2, 1 / 4, 1 / 4)"],
        {
            "sizes = [0.25, 0.25, 0.5]": "answer[0] is 25",
            "sizes = [0.5, 0.25]": "2 values, expected 3",
        },
    ),
    (
        "05_distributed_sgd",
        "lr",
        ["lr, decay = 0.01 / 4, 0.4", "decay = 4 * 0.1; lr = torch.tensor(0.0025).item()"],
        {
            "lr, decay = 0.01, 0.1": "the distance is 0.",
            "lr, decay = 0.0025, 0.1": "the distance is ",
            "lr, decay = 0.0025 * 1.01, 0.4": "the distance is ",
        },
    ),
]


def exercise_of(stem, name):
    """The exercise that asks for a name: what it needs to have run, and its check."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    earlier = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type != "code" or "solution" in tags:
            continue
        body = ast.parse(cell.source).body
        if "exercise" not in tags or not any(name in binds(part) for part in body):
            earlier += body
            continue
        asked = [part for part in body if name in reads(part)]
        own = [part for part in body if part not in asked and name not in binds(part)]
        assert len(body) == len(own) + len(asked) + 1 and asked, name
        names = set.union({"torch", "dist"}, *map(reads, body))
        names = names.difference(*map(binds, own))
        return [*needed(earlier, names), *own], asked
    raise AssertionError(f"{stem} has no exercise that asks for {name}")


def try_answers(capsys, stem, name, right, wrong, **given):
    """The exercise that asks for `name` takes the right answers and no wrong one."""
    first, asked = exercise_of(stem, name)
    space = {"__name__": "__main__"} | given
    exec(compile(ast.Module(first, []), stem, "exec"), space)
    for answer, reason in (dict.fromkeys(right) | wrong).items():
        capsys.readouterr()
        text = "\n".join([answer, *map(ast.unparse, asked)])
        exec(compile(text, "exercise", "exec"), space)
        said = capsys.readouterr().out.strip()
        if reason is None:
            assert said == "correct", answer
        else:
            assert said.startswith("not yet: ") and reason in said, (answer, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "name", "right", "wrong"), EXERCISES, ids=[name for _, name, *_ in EXERCISES]
)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, stem, name, right, wrong):
    try_answers(capsys, stem, name, right, wrong)


def test_every_exercise_of_these_notebooks_is_tried():
    """Those with a `check`; what is built has tests of its own."""
    for stem in {stem for stem, *_ in EXERCISES}:
        cells = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells
        asked = [cell for cell in cells if "exercise" in cell.metadata.get("tags", [])]
        tried = [len(wrong) for tried, _, _, wrong in EXERCISES if tried == stem]
        assert len(tried) == sum("check(" in cell.source for cell in asked), stem
        assert min(tried) >= 2, stem
