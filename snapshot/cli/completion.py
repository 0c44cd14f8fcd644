"""`snapshot completion`: script for completion of the command's words in a shell."""

from __future__ import annotations

import argparse

from snapshot.cli.screen import ExitStatus
from snapshot.errors import MissingExtraError

SHELLS = ("bash", "zsh", "tcsh", "fish")
FILES = {"URL", "ROOT", "A", "B", "SRC", "DST", "FROM", "TO", "FILE", "FILE|KEY=VALUE"}
"""Metavars of arguments that are, or may be, file names."""


DESCRIPTION = "Print a script that completes verbs, options and file names in a shell."
EXAMPLES = [
    ("completion bash > ~/.local/share/bash-completion/completions/snapshot", "for bash"),
    ('completion zsh > "${fpath[1]}/_snapshot"', "for zsh"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("shell", choices=SHELLS, help="name of the shell")


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Print the script."""
    try:
        import shtab  # an extra, since this runs once on a machine
    except ImportError as error:
        raise MissingExtraError(f"{error}; completion needs the extra 'cli'") from error
    from snapshot.cli import parser  # circular import

    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(
            f"this version of shtab supports only {', '.join(shtab.SUPPORTED_SHELLS)}, got {arguments.shell}"
        )
    whole = parser()
    (verbs,) = (each for each in whole._actions if isinstance(each, argparse._SubParsersAction))
    for each in verbs.choices.values():
        for action in each._actions:
            if action.metavar in FILES:
                action.complete = shtab.FILE  # the attribute that shtab reads
    print(shtab.complete(whole, shell=arguments.shell))
    return ExitStatus.OK
