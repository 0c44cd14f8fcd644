"""`snapshot completion`: what a shell needs to complete the command's words."""

from __future__ import annotations

import argparse

from snapshot.cli.arguments import Verbs, verb
from snapshot.cli.status import ExitStatus
from snapshot.errors import MissingExtraError

SHELLS = ("bash", "zsh", "tcsh", "fish")
FILES = {"URL", "ROOT", "A", "B", "SRC", "DST", "FROM", "TO", "FILE", "FILE|KEY=VALUE"}
"""What stands for the name of a file, or may."""


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "completion",
        "Print a script that completes verbs, options and file names in a shell.",
        [
            ("completion bash > ~/.local/share/bash-completion/completions/snapshot", "for bash"),
            ('completion zsh > "${fpath[1]}/_snapshot"', "for zsh"),
        ],
        run,
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Print the script."""
    try:
        import shtab  # an extra: it is run once on a machine
    except ImportError as error:
        raise MissingExtraError(f"{error}; pip install 'snapshot-torch[cli]' brings what completion needs") from error
    from snapshot.cli import parser  # which imports this module

    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(f"this version of shtab knows {', '.join(shtab.SUPPORTED_SHELLS)} only")
    whole = parser()
    (verbs,) = (each for each in whole._actions if isinstance(each, argparse._SubParsersAction))
    for each in verbs.choices.values():
        for action in each._actions:
            if action.metavar in FILES:
                action.complete = shtab.FILE  # where shtab looks for it
    print(shtab.complete(whole, shell=arguments.shell))
    return ExitStatus.OK
