"""Exit status of the command: in one place, since scripts depend on it."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit status of every verb."""

    OK = 0
    FOUND = 1
    """The command ran, and found a difference or a fault."""
    FAILED = 2
    """The command could not run."""
