"""The exercises of the Reducer's notebook take right answers and no wrong one."""

import ast

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.test_exercises import exercise_of, judged
from tests.thorough import thorough


def counting(step, result="state['bytes']"):
    return f"""
def count_bytes(rank, world_size):
    def hook(state, bucket):
        {step}
        return default_hooks.allreduce_hook(None, bucket)

    state = {{"bytes": 0}}
    model = DistributedDataParallel(experiments.Tower())
    model.register_comm_hook(state, hook)
    model(torch.ones(2, 64)).sum().backward()
    return {result}
"""


VIEW = "'gradient_as_bucket_view': True"
EXERCISES = {  # what the reader fills in: right answers, and wrong ones with their verdict
    "options": (
        [
            f"options = {{'bucket_cap_mb': 2, {VIEW}}}",
            f"options = dict(**{{{VIEW}}}, bucket_cap_mb=2)",
        ],
        {
            "options = {'bucket_cap_mb': 2}": "6324264",
            f"options = {{'bucket_cap_mb': 1, {VIEW}}}": "1.0 + 1.0",
            f"options = {{{VIEW}}}": "1.0 + 5.0",
        },
    ),
    "count_bytes": (
        [
            counting("state['bytes'] += bucket.buffer().nbytes"),
            counting("state['bytes'] += 4 * bucket.buffer().numel()"),
        ],
        {
            counting("state['bytes'] += bucket.buffer().numel()"): "answer[0]",
            counting("pass"): "answer[0] is 0",
        },
    ),
}


@thorough
@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, name):
    needed, asked = exercise_of("08_ddp_reducer", name)
    space = {"__name__": "__main__", "default_hooks": default_hooks}
    exec(compile(ast.Module(needed, []), name, "exec"), space)
    right, wrong = EXERCISES[name]
    for answer in right:
        assert judged(space, capsys, answer, asked) == "correct", answer
    for answer, reason in wrong.items():
        said = judged(space, capsys, answer, asked)
        assert said.startswith("not yet: ") and reason in said, (answer, said)
