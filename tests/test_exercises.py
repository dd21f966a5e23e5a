"""Each exercise of the first notebooks takes right answers in any dress, and no wrong one."""

import ast
from pathlib import Path

import nbformat
import pytest

from tools.assignment import binds, needed, reads

ROOT = Path(__file__).parent.parent


# The chapter and the name that the reader fills in; answers, and what the verdict says.
EXERCISES = {
    ("processes_and_ranks", "visible"): {
        'visible = "3,2"': "correct",
        'visible = "3, 2"': "correct",
        'visible = "2,3"': "rank 0 of 2: its answer, 'local rank 0, cuda:0, is GPU 2',",
        'visible = "3,2,1"': "3 values, expected 2",
    },
    ("point_to_point", "ranks"): {
        "ranks = 7": "correct",
        "ranks = 6": "the token, 15.0, is off by 29 %",
        "ranks = 7.0": "world_size must be a whole number",
    },
    ("nonblocking", "arguments"): {
        'arguments = {"recv_after": 0.3, "write_after": 0.9}': "correct",
        "arguments = dict(recv_after=0.3, write_after=1)": "correct",
        'arguments = {"recv_after": 0.3, "write_after": 0}': "what arrived, 2.0, is",
        'arguments = {"recv_after": 0.3, "write_after": 100}': "rank 0 was at",
    },
    ("collectives", "bytes_sent"): {
        "bytes_sent = (5 - 1) / 5 * SIZE": "correct",
        "bytes_sent = 4 * SIZE // 5": "correct",
        "bytes_sent = (4 - 1) / 4 * SIZE": "off by 6.2 %",
        "bytes_sent = 2 * 4 / 5 * SIZE": "off by 100 %",
    },
    ("data_partitioning", "sizes"): {
        "sizes = [0.5, 0.25, 0.25]": "correct",
        "sizes = (1 / 2, 1 / 4, 1 / 4)": "correct",
        "sizes = [0.25, 0.25, 0.5]": "your answer[0], 25",
        "sizes = [0.5, 0.25]": "2 values, expected 3",
    },
    ("distributed_sgd", "lr"): {
        "lr, decay = 0.01 / 4, 0.4": "correct",
        "decay = 4 * 0.1; lr = torch.tensor(0.0025).item()": "correct",
        "lr, decay = 0.01, 0.1": "the distance, 0.",
        "lr, decay = 0.0025, 0.1": "the distance, ",
        "lr, decay = 0.0025 * 1.01, 0.4": "the distance, ",
    },
    ("data_parallel", "reduction"): {
        'reduction, divisor = "sum", 10': "correct",
        'reduction, divisor = "none", 10.0': "correct",
        "reduction, divisor = ..., ...": "nothing is filled in",
        'reduction, divisor = "mean", 4': "the loss, ",
        'reduction, divisor = "sum", 4': "the loss, ",
    },
    ("ddp_reducer", "options"): {
        "options = dict(bucket_cap_mb=2, gradient_as_bucket_view=True)": "correct",
        "options = {}": "'buckets': '1.0 + 5.0'",
        "options = {'bucket_cap_mb': 2}": "6324264",
        "options = dict(bucket_cap_mb=1, gradient_as_bucket_view=True)": "1.0 + 1.0",
        "options = {'gradient_as_bucket_view': True}": "1.0 + 5.0",
    },
}


def cells_of(chapter):
    (path,) = ROOT.glob(f"notebooks/*_{chapter}.ipynb")
    return nbformat.read(path, as_version=4).cells


def exercise_of(chapter, name):
    """The exercise that asks for a name: what it needs to have run, and its check."""
    earlier = []
    for cell in cells_of(chapter):
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
    raise AssertionError(f"{chapter} has no exercise that asks for {name}")


@pytest.mark.slow
@pytest.mark.parametrize(("chapter", "name"), EXERCISES)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, monkeypatch, chapter, name):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")
    first, asked = exercise_of(chapter, name)
    space = {"__name__": "__main__"}
    exec(compile(ast.Module(first, []), chapter, "exec"), space)
    for answer, says in EXERCISES[chapter, name].items():
        capsys.readouterr()
        text = "\n".join([answer, *map(ast.unparse, asked)])
        exec(compile(text, "exercise", "exec"), space)
        said = capsys.readouterr().out.strip()
        assert said.startswith("not yet: " if says != "correct" else says), (answer, said)
        assert says in said, (answer, said)


def test_every_exercise_of_these_notebooks_is_tried():
    """Those with a `check`; what is built has tests of its own."""
    for chapter in {chapter for chapter, _ in EXERCISES}:
        cells = cells_of(chapter)
        asked = [cell for cell in cells if "exercise" in cell.metadata.get("tags", [])]
        tried = sum(other == chapter for other, _ in EXERCISES)
        assert tried == sum("check(" in cell.source for cell in asked), chapter
