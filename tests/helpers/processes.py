"""Properties of other processes, read from /proc."""

import psutil


def command_line(process: psutil.Process) -> str:
    """The arguments of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended while we looked
        return ""
