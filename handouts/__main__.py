"""python -m handouts [--site | --student | --slides] [03 …]: what `make` calls."""

import argparse
import sys
import time
from pathlib import Path

from handouts import build, site, slides, student
from handouts.convert import Unprintable
from handouts.notebook import ROOT

MAKE = {  # what makes each form, and where
    "handouts": (build.build, "build"),
    "site": (site.assemble, "build/site"),
    "student": (student.write, "student"),
    "slides": (slides.write, "build/slides"),
}


def main() -> None:
    """Make one of the forms, and say where it is."""
    parser = argparse.ArgumentParser(prog="handouts", description=build.__doc__)
    parser.add_argument("names", nargs="*", help="how the names of notebooks begin (all)")
    parser.add_argument("--out", type=Path, help="the folder")
    for form in MAKE:
        parser.add_argument(f"--{form}", dest="form", action="store_const", const=form)
    given = parser.parse_args()
    make, folder = MAKE[given.form or "handouts"]
    out, begin = given.out or ROOT / folder, time.perf_counter()
    try:
        print(*make(out, tuple(given.names)), sep="\n")
    except Unprintable as problem:
        sys.exit(str(problem))
    print(f"In {out}, after {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
