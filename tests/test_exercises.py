"""Each exercise of the first notebooks takes right answers in any dress, and no wrong one."""

import ast
from pathlib import Path

import nbformat
import pytest

from tools.assignment import binds, needed, reads

ROOT = Path(__file__).parent.parent


# The notebook and the name that the reader fills in; answers, and what the verdict says.
EXERCISES = {
    ("00_processes_and_ranks", "visible"): {
        'visible = "3,2"': "correct",
        'visible = "3, 2"': "correct",
        'visible = "2,3"': "rank 0 of 2: the answer is 'local rank 0, cuda:0, is GPU 2'",
        'visible = "3,2,1"': "3 values, expected 2",
    },
    ("01_point_to_point", "ranks"): {
        "ranks = 7": "correct",
        "ranks = 6": "the token is 15.0, off by 29 %",
        "ranks = 7.0": "world_size must be a whole number",
    },
    ("02_nonblocking", "arguments"): {
        'arguments = {"recv_after": 0.3, "write_after": 0.9}': "correct",
        "arguments = dict(recv_after=0.3, write_after=1)": "correct",
        'arguments = {"recv_after": 0.3, "write_after": 0}': "what arrived is 2.0",
        'arguments = {"recv_after": 0.3, "write_after": 100}': "rank 0 was at",
    },
    ("03_collectives", "bytes_sent"): {
        "bytes_sent = (5 - 1) / 5 * SIZE": "correct",
        "bytes_sent = 4 * SIZE // 5": "correct",
        "bytes_sent = (4 - 1) / 4 * SIZE": "off by 6.2 %",
        "bytes_sent = 2 * 4 / 5 * SIZE": "off by 100 %",
    },
    ("04_data_partitioning", "sizes"): {
        "sizes = [0.5, 0.25, 0.25]": "correct",
        "sizes = (1 / 2, 1 / 4, 1 / 4)": "correct",
        "sizes = [0.25, 0.25, 0.5]": "answer[0] is 25",
        "sizes = [0.5, 0.25]": "2 values, expected 3",
    },
    ("05_distributed_sgd", "lr"): {
        "lr, decay = 0.01 / 4, 0.4": "correct",
        "decay = 4 * 0.1; lr = torch.tensor(0.0025).item()": "correct",
        "lr, decay = 0.01, 0.1": "the distance is 0.",
        "lr, decay = 0.0025, 0.1": "the distance is ",
        "lr, decay = 0.0025 * 1.01, 0.4": "the distance is ",
    },
    ("06_data_parallel", "reduction"): {
        'reduction, divisor = "sum", 10': "correct",
        'reduction, divisor = "none", 10.0': "correct",
        "reduction, divisor = ..., ...": "nothing is filled in",
        'reduction, divisor = "mean", 4': "the loss is",
        'reduction, divisor = "sum", 4': "the loss is",
    },
    ("08_ddp_reducer", "options"): {
        "options = dict(bucket_cap_mb=2, gradient_as_bucket_view=True)": "correct",
        "options = {}": "'buckets': '1.0 + 5.0'",
        "options = {'bucket_cap_mb': 2}": "6324264",
        "options = dict(bucket_cap_mb=1, gradient_as_bucket_view=True)": "1.0 + 1.0",
        "options = {'gradient_as_bucket_view': True}": "1.0 + 5.0",
    },
}


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


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "name"), EXERCISES)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, monkeypatch, stem, name):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")
    first, asked = exercise_of(stem, name)
    space = {"__name__": "__main__"}
    exec(compile(ast.Module(first, []), stem, "exec"), space)
    for answer, says in EXERCISES[stem, name].items():
        capsys.readouterr()
        text = "\n".join([answer, *map(ast.unparse, asked)])
        exec(compile(text, "exercise", "exec"), space)
        said = capsys.readouterr().out.strip()
        assert said.startswith("not yet: " if says != "correct" else says), (answer, said)
        assert says in said, (answer, said)


def test_every_exercise_of_these_notebooks_is_tried():
    """Those with a `check`; what is built has tests of its own."""
    for stem in {stem for stem, _ in EXERCISES}:
        cells = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells
        asked = [cell for cell in cells if "exercise" in cell.metadata.get("tags", [])]
        tried = sum(other == stem for other, _ in EXERCISES)
        assert tried == sum("check(" in cell.source for cell in asked), stem
