"""Eight hidden faults of the job, packed so that nobody reads one by accident.

To change them: `json.loads(zlib.decompress(base64.b64decode(PACKED)))` is a list of
lists of what `Hidden` holds, and the way back is
`base64.b64encode(zlib.compress(json.dumps(faults).encode()))`.
"""

import base64
import json
import zlib
from typing import NamedTuple

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
