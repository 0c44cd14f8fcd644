"""`python -m snapshot`: the command, where its script is not on the PATH."""

import sys

from snapshot.cli import main

if __name__ == "__main__":
    sys.exit(main())
