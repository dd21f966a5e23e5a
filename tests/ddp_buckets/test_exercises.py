"""The exercises take right answers only, and the planted bug shows where it should."""

import ast

import pytest
import torch

from mgpu_tutorial.ddp_buckets import exercises
from mgpu_tutorial.ddp_buckets.experiments import run_each_setting, train_replicas
from mgpu_tutorial.ddp_buckets.wrappers import WRAPPERS, BucketedDDP
from mgpu_tutorial.lab import launch
from tests.test_exercises import exercise_of, judged
from tests.thorough import thorough


def test_the_planted_bug_shows_only_with_a_tied_weight():
    ways = {w.__name__: {"wrapper": w} for w in (*WRAPPERS, exercises.PlantedDDP)}
    for found in launch(run_each_setting, 2, exercises.check_tied_gradients, ways).results:
        assert not found.pop("PlantedDDP") and all(found.values())
    both = {w: {"wrapper": w, "steps": 3} for w in (exercises.PlantedDDP, BucketedDDP)}
    for found in launch(run_each_setting, 2, train_replicas, both).results:
        torch.testing.assert_close(found[exercises.PlantedDDP], found[BucketedDDP])


def mended(parameters):
    return f"""
class Mended(exercises.PlantedDDP):
    def _attach(self):
        for parameter in {parameters}:
            parameter.register_post_accumulate_grad_hook(self._ready)
"""


EXERCISES = {  # what the reader fills in: right answers, and wrong ones with their verdict
    "bucket_cap_mb": (
        ["bucket_cap_mb = 1.0", "bucket_cap_mb = 1"],
        {
            "bucket_cap_mb = 0.25": "the answer is 0.25",
            "bucket_cap_mb = 4.0": "the answer is 4.0",
        },
    ),
    "Mended": (
        [mended("self.trained"), mended("self.module.parameters()")],
        {
            mended("2 * self.trained"): "answer[0] is False",
            "class Mended(exercises.PlantedDDP): ...": "answer[0] is False",
        },
    ),
}


TIMED = {"bucket_cap_mb"}  # the notebook measures what it asks for
NAMES = [
    pytest.param(name, marks=pytest.mark.timing) if name in TIMED else name
    for name in EXERCISES
]


@thorough
@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, name):
    needed, asked = exercise_of("07_ddp_buckets", name)
    space = {"__name__": "__main__"}
    exec(compile(ast.Module(needed, []), name, "exec"), space)
    right, wrong = EXERCISES[name]
    for answer in right:
        assert judged(space, capsys, answer, asked) == "correct", answer
    for answer, reason in wrong.items():
        said = judged(space, capsys, answer, asked)
        assert said.startswith("not yet: ") and reason in said, (answer, said)
