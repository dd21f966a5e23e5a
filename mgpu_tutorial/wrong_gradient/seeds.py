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
    "eNqVVMtu2zAQ/JUFTxSiMPElhwLqpfdecpQFgxHXDmGKZEkqifv1WVKq5dYK0hiwLOzOPjgzdNuyvQuv"
    "Mqjdk+yP+YXVwN5qOEEDR/RJeOd5tbVr4dsN6D0MCE0DRsYEaCLC/YRuu/zNDyZfMMgD5hY0DbwMcsCE"
    "AbSFmCgjzqHIq2+rOO6hxNZr8h5eKD3Q63fYlB4tUzomIY3ZBVRjj/xcIQ5BqhoOwY0+T/s7AXcNHSo+"
    "t1um/JZ1IurfyCu2HOhxHMQlXwHTGCzkYo021fDTWVxJwM015oKn3uiyTu9Gm1AR1a2fNvrk6HsdiH3C"
    "6KgtQWw+bA2Pz7Rf1X25ZVfYm5qeqUiFigOmnXG9JE6lPdJ0kv4+D4i/RhkwEj6OA7/gas1fRZiIVvG3"
    "WYrcLbZkpVvYdNUaRjztjZNp88ArkRwFVTp5rFZKZ+ED9i98ofsMuymwZcEfzp/W1EwuSXMlZYnCHZQR"
    "mY1XF4zaFYv0Ka9KnqoWda9MOLctuGapYNc2yApZEqXYfxKghi3z9Ltckn8BH1h/lueP55dhMWEZBvSZ"
    "7ykvjqiL8HSXc8a6MJC0ebPLLD1dTPO/w//gPp5Stv50zLR39w7TIIc9"
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
