"""Eight hidden faults of the job, packed so that nobody reads one by accident; the judge.

To change them: `json.loads(zlib.decompress(base64.b64decode(PACKED)))` is a list of
lists of what `Hidden` holds, and the way back is
`base64.b64encode(zlib.compress(json.dumps(faults).encode()))`.
"""

import base64
import inspect
import json
import zlib
from pathlib import Path
from typing import NamedTuple

from mgpu_tutorial.lab.teach.checks import CORRECT, NOT_YET, verdict
from mgpu_tutorial.lab.teach.verdict import Verdict
from mgpu_tutorial.wrong_gradient import job

PACKED = (
    "eJydVE1zmzAQ/Ss7nGBCSHzpoTPupfdecsSMR0FrW2OQFGmJ4/76rgTGaS03cTgYrH379fat6jrb"
    "GHcQTq6fRbsPH1kJ2VsJR1jCHi1V1ti8WOnU8f0C1AZ6hOUSOuEJsPMIjyO6ziJOWIta5nnwLYqs"
    "CQajEawzLXofwtJBtQi0Q3BC7z2IzugtSHvdZm3WxEjiFZ3YYkByH2CFEz0SOlAaPLGlmo98XnxP"
    "4nIL8SztEzq0lVQ9f/6ARYxRZ1J5bq3r1g7l0GI+e1RbJ2QJW2eGWP/fBnhYMl1+V68yaVdZU3n1"
    "G/M0K62xCv/Pz8jB09BX74fnkAanIeRTqKmEXxw5YYC7S0x9UcmYo+2UHYsaNKFkEdR27OgD6jbK"
    "sS4Yo7zSDNGBrBKedlxs0dwcsonsj0FnKilSuUVad6YVPBNmibOzKB9DAv8yCIee8X7o83CijevD"
    "39FQ+RdHeVEpwj4xixLEJigl8H+iIT0ROk0ktVJRMT6swtukkeha8/bcw6IpUpjqedMZQYtvXB0Z"
    "PpR0tFgkXCdFOmxf8/NQZ9jdKcNxVsoMu2Un5737aewxJToyJLoLxcVTeIBYY5jTwbhOrqP4Wwq9"
    "8rYUZxFerNcUNuKWZ48bKp9ncxphEJlmXcUbYNRQCavM8vt8T/wLuLL9k5BOa/91Bc38esIIA36m"
    "Oy6P21BG0fMNGyyTjkPM91b+NZ6mO/szuOtZYrsfpvl6w/ESa/4ArDskvg=="
)


class Hidden(NamedTuple):
    """A line of the job, in a function, and what stands there instead.

    `also` are lines next to it that are as good an answer, `tests` those that tell.
    """

    function: str
    right: str
    wrong: str
    also: list[str]
    tests: list[str]


def hidden(name: str) -> Hidden:
    """The fault "seed 1" to "seed 8"; ValueError for another name."""
    faults = [Hidden(*each) for each in json.loads(zlib.decompress(base64.b64decode(PACKED)))]
    known = {f"seed {i}": fault for i, fault in enumerate(faults, 1)}
    if name not in known:
        raise ValueError(f"fault {name!r}: expected one of FAULTS, or seed 1 to seed 8")
    return known[name]


def answer(number: int) -> list:
    """The function and the line of a hidden fault, for an assignment's solution."""
    fault = hidden(f"seed {number}")
    return [fault.function, line_of(fault.right)]


def judge(number: int, finding: object) -> None:
    """Say whether a finding [function, line] names a hidden fault, and which tests tell."""
    from IPython.display import display

    display(judged(number, finding))


def require(number: int, finding: object) -> None:
    """As `judge`, for a grader: AssertionError unless the finding is right."""
    said = judged(number, finding)
    assert said.is_right, said


judge.require = require


def judged(number: int, finding: object) -> Verdict:
    """The verdict on a finding [function, line]."""
    fault = hidden(f"seed {number}")
    lines = [line_of(text) for text in (fault.right, *fault.also)]
    given = finding[1] if isinstance(finding, list | tuple) and len(finding) == 2 else None
    expected = [fault.function, given if given in lines else lines[0]]
    if isinstance(given, int) and isinstance(finding[0], str):
        named = finding[0].strip().removeprefix("job.").removesuffix("()")
        if named in fault.function.split("."):  # "Sum" says as much as "Sum.backward"
            named = fault.function
        finding = [named, given]
    said = verdict(finding, expected)
    if said.is_right:
        wrong = "; ".join(line.strip() for line in fault.wrong.strip().split("\n"))
        tests = ", ".join(fault.tests)
        return Verdict(CORRECT, True, f"it is now {wrong}. What tells: {tests}")
    if isinstance(given, int) and finding[0] == fault.function:  # and not how far off
        return Verdict(NOT_YET, False, "the function is right, the line is not")
    if isinstance(given, int):
        return Verdict(NOT_YET, False, "the fault is in another function")
    return said


def line_of(text: str) -> int:
    """The number of the line of the job in which a text begins."""
    before = Path(inspect.getsourcefile(job)).read_text("utf-8").partition(text)[0]
    return before.count("\n") + 1
