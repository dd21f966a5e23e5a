"""python -m handouts: see build.py."""

import sys

from handouts.build import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
