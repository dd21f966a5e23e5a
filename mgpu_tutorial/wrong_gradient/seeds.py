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
    "eNqdVE1vozAQ/SsjTqBS2lz2sFL20vteeiQocvGEWAHbaw9N01/fsSGku5DtB1IImnmejzdvXJbJzrij"
    "cHL7JOpD+EhySF5yOMEaDmipsMam2UYvmW9XoHbQIazX0ApPgK1HuB/QZcW/xGgE60yN3ocIdFQ1Au0R"
    "nNAHD6I1ugFpr/usTaoYSTyjEw0GJJcMVjjRIaEDpcETe4rJ5NPs5yIutRBty2dCM7aQquPPX7CKMcpE"
    "Kk+FaNutQ9nXmE4nisYJmUPjTB/r/9sBd2tmxu/LTSLtJqkKr14xzZIlVmpjFf6fn4GDx74r3s/JIfVO"
    "Q8inUFMOvznyggNu5pj5fIYcdavsUFSvCSXPu7RDRx9Qt1OOJcAY5ZVmiA5k5fC452Kz6sshq8j+EHSi"
    "kiKVDdK2NbXgmTBLnJ31dx8S+D+9cOgZ7/sunXGdg9gFJQR+z20uM05nxpe2IyrCo5bpy6iBeLTkRbiF"
    "VZUtYYqnXWsErX6kWUGGjZJOFrOFo6PiHNbP6WVoE+wmwj6/W9P+PBh7WhIPGRLtTDnRCncQawl8H41r"
    "5TaKuKbQE6s+u4hptiZj2IhbX058ofJpBudRBbFo1kfc5EELOWwSy/+Xff8XcGWLR6Wc1/f7Spn49YQR"
    "BvyMd1UaVZ1H8fKlGDzauI7lGWK+9/LbeBqv2c/grmeJ7X6Y5vsNx8uoegNlIAvo"
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


def judge(number: int, finding: object) -> None:
    """Say whether a finding [function, line] names a hidden fault, and which tests tell."""
    from IPython.display import display

    fault = hidden(f"seed {number}")
    lines = [line_of(text) for text in (fault.right, *fault.also)]
    given = finding[1] if isinstance(finding, list | tuple) and len(finding) == 2 else None
    expected = [fault.function, given if given in lines else lines[0]]
    if given is not None and finding[0] in (fault.function, *fault.function.split(".")):
        finding = [fault.function, given]  # "Sum" says as much as "Sum.backward"
    said = verdict(finding, expected)
    if said.is_right:
        wrong = " ".join(fault.wrong.split())
        said = Verdict(
            CORRECT, True, f"it is now {wrong}. What tells: {', '.join(fault.tests)}"
        )
    elif isinstance(given, int) and finding[0] == fault.function:  # and not how far off
        said = Verdict(NOT_YET, False, "the function is right, the line is not")
    display(said)


def line_of(text: str) -> int:
    """The number of the line of the job in which a text begins."""
    before = Path(inspect.getsourcefile(job)).read_text("utf-8").partition(text)[0]
    return before.count("\n") + 1
