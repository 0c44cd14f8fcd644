"""`snapshot sign`: sign a snapshot, or create a key for it."""

from __future__ import annotations

import argparse

from snapshot.cli.arguments import add_json, add_memory, add_storage, options_of
from snapshot.cli.locate import explain_missing
from snapshot.cli.screen import ExitStatus, bar, emit_report, printable
from snapshot_signing.keys import create_keys

DESCRIPTION = (
    "Sign snapshots with an Ed25519 key. Every byte is read once, compared with its digest, and hashed with "
    "SHA-256. `snapshot verify --key` then proves that the owner of the key signed each byte. A damaged snapshot "
    "is not signed."
)
EXAMPLES = [
    ("sign --new-key signing.pem", "create signing.pem and signing.pem.pub"),
    ("sign run/step-100 --key signing.pem", "sign a snapshot"),
    ("verify run/step-100 --key signing.pem.pub", "verify it, with the public key"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("urls", nargs="*", metavar="URL", help="a snapshot")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--key", metavar="FILE", help="the private key, in PEM")
    either.add_argument("--new-key", metavar="FILE", help="create a private key here, and its public key as FILE.pub")
    add_memory(parser)
    add_json(parser, "print one line of JSON for each snapshot")
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Sign each snapshot, or create a key."""
    if arguments.new_key:
        if arguments.urls:
            raise ValueError("--new-key must not have a URL: sign with --key afterwards")
        private, public = create_keys(arguments.new_key)
        print(printable(f"{private}: the private key, for its owner only"))
        print(printable(f"{public}: the public key, for readers"))
        return ExitStatus.OK
    if not arguments.urls:
        raise ValueError("--key must have a URL to sign")
    from snapshot.snapshot import Snapshot  # with torch, which the help does not need

    options = options_of(arguments)
    for url in arguments.urls:
        with explain_missing(url, options), bar("sign") as show:
            report = Snapshot(url, storage_options=options).sign(
                arguments.key, memory_budget_bytes=arguments.memory, progress=show
            )
        emit_report(arguments, url, report)
    return ExitStatus.OK
