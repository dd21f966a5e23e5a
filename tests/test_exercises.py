"""Each exercise of the first notebooks takes right answers in any dress, and no wrong one."""

from pathlib import Path

import nbformat
import pytest

from tools.assignment import exercises

ROOT = Path(__file__).parent.parent


# By chapter: answers, and what the verdict says of each.
EXERCISES = {
    "processes_and_ranks": {
        'visible = "3,2"': "correct",
        'visible = "3, 2"': "correct",
        'visible = "2,3"': "rank 0 of 2: its answer, 'local rank 0, cuda:0, is GPU 2',",
        'visible = "3,2,1"': "3 values, expected 2",
    },
    "point_to_point": {
        "ranks = 7": "correct",
        "ranks = 6": "the token, 15.0, is off by 29%",
        "ranks = 7.0": "world_size must be a whole number",
    },
    "nonblocking": {
        'arguments = {"recv_after": 0.3, "write_after": 0.9}': "correct",
        "arguments = dict(recv_after=0.3, write_after=1)": "correct",
        'arguments = {"recv_after": 0.3, "write_after": 0}': "what arrived, 2.0, is",
    },
    "collectives": {
        "bytes_sent = (5 - 1) / 5 * SIZE": "correct",
        "bytes_sent = 4 * SIZE // 5": "correct",
        "bytes_sent = (4 - 1) / 4 * SIZE": "off by 6.2%",
        "bytes_sent = 2 * 4 / 5 * SIZE": "off by 100%",
    },
    "data_partitioning": {
        "sizes = [0.5, 0.25, 0.25]": "correct",
        "sizes = (1 / 2, 1 / 4, 1 / 4)": "correct",
        "sizes = [0.25, 0.25, 0.5]": "where the parts end[0], 25",
        "sizes = [0.5, 0.25]": "2 values, expected 3",
    },
    "distributed_sgd": {
        "lr, decay = 0.01 / 4, 0.4": "correct",
        "decay = 4 * 0.1; lr = torch.tensor(0.0025).item()": "correct",
        "lr, decay = 0.01, 0.1": "the distance, 0.",
        "lr, decay = 0.0025, 0.1": "the distance, ",
        "lr, decay = 0.0025 * 1.01, 0.4": "the distance, ",
    },
    "data_parallel": {
        'reduction, divisor = "sum", 10': "correct",
        'reduction, divisor = "none", 10.0': "correct",
        "reduction, divisor = ..., ...": "nothing is filled in",
        'reduction, divisor = "mean", 4': "the loss, ",
        'reduction, divisor = "sum", 4': "the loss, ",
    },
    "ddp_reducer": {
        "options = dict(bucket_cap_mb=2, gradient_as_bucket_view=True)": "correct",
        "options = {}": "'buckets': '1.0 + 5.0'",
        "options = {'bucket_cap_mb': 2}": "6324264",
        "options = dict(bucket_cap_mb=1, gradient_as_bucket_view=True)": "1.0 + 1.0",
        "options = {'gradient_as_bucket_view': True}": "1.0 + 5.0",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("chapter", EXERCISES)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, monkeypatch, chapter):
    """The one exercise of a chapter with a `check`; what is built has tests of its own."""
    monkeypatch.setenv("MGPU_DEVICE", "cpu")
    (path,) = ROOT.glob(f"notebooks/*_{chapter}.ipynb")
    setup, found = exercises(nbformat.read(path, 4))
    (asked,) = (each for each in found if "check(" in each.test)
    given = [cell.source for cell in asked.words if cell.cell_type == "code"]
    space = {"__name__": "__main__"}
    exec("\n".join([setup, *given, asked.stub]), space)
    for answer, says in EXERCISES[chapter].items():
        capsys.readouterr()
        exec(f"{answer}\n{asked.test}", space)
        said = capsys.readouterr().out.strip()
        assert said.startswith("not yet: " if says != "correct" else says), (answer, said)
        assert says in said, (answer, said)
