"""`python -m snapshot`: the command, for environments without its script on the PATH."""

import sys

from snapshot.cli import main

if __name__ == "__main__":
    sys.exit(main())
