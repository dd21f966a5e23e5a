"""The exercises of the notebook on DDP in practice take right answers and no wrong one."""

import ast

import pytest

from tests.test_exercises import exercise_of, judged
from tests.thorough import thorough


def accuracy(*lines):
    head = """
def accuracy(rank, world_size):
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    mine = slice(0, 100) if rank == 0 else slice(100, 1000)
    right = model(data.images[mine]).argmax(dim=1) == data.labels[mine]
"""
    return head + "\n".join(f"    {line}" for line in lines)


SUMS = [
    "counts = torch.tensor([float(right.sum()), float(len(right))])",
    "dist.all_reduce(counts)",
]
EXERCISES = {  # what the reader fills in: right answers, and wrong ones with their verdict
    "micro": (
        ["micro = 4"],
        {"micro = 3": "the answer is 3", "micro = 6": "the answer is 6"},
    ),
    "accuracy": (
        [
            accuracy(*SUMS, "return (counts[0] / counts[1]).item()"),
            accuracy(
                "n = right.sum().float()", "dist.all_reduce(n)", "return n.item() / 1000"
            ),
        ],
        {
            accuracy(
                "mean = right.float().mean()",
                "dist.all_reduce(mean)",
                "return mean.item() / 2",
            ): "answer[0]",
            accuracy("return right.float().mean().item()"): "answer[0]",
        },
    ),
}


@thorough
@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, name):
    needed, asked = exercise_of("09_ddp_in_practice", name)
    space = {"__name__": "__main__"}
    exec(compile(ast.Module(needed, []), name, "exec"), space)
    right, wrong = EXERCISES[name]
    for answer in right:
        assert judged(space, capsys, answer, asked) == "correct", answer
    for answer, reason in wrong.items():
        said = judged(space, capsys, answer, asked)
        assert said.startswith("not yet: ") and reason in said, (answer, said)
