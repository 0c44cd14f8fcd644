"""`snapshot sign`: sign a snapshot, or create a key for it."""

from __future__ import annotations

import argparse

from snapshot.cli.arguments import add_json, add_memory, add_storage, options_of
from snapshot.cli.locate import explain_missing
from snapshot.cli.screen import ExitStatus, bar, emit_report, printable
from snapshot_signing.bundle import is_ecdsa
from snapshot_signing.keys import create_keys, read_key

DESCRIPTION = (
    "Sign snapshots with an Ed25519 key, or for other tools with an ECDSA key. Every byte is read, compared with its "
    "digest, and hashed with SHA-256. `snapshot verify --key` then proves that the owner of the key signed each byte. "
    "A damaged snapshot is not signed."
)
KINDS = {"snapshot": "Ed25519", "oms": "ECDSA"}
"""Formats of signatures, this library's and OpenSSF Model Signing's -> the keys that they go with."""
EXAMPLES = [
    ("sign --new-key signing.pem", "create signing.pem and signing.pem.pub"),
    ("sign run/step-100 --key signing.pem", "sign a snapshot"),
    ("verify run/step-100 --key signing.pem.pub", "verify it, with the public key"),
    ("sign --format oms --new-key ecdsa.pem", "create an ECDSA key, whose signatures other tools verify, too"),
    ("sign run/step-100 --format oms --key ecdsa.pem", "sign all files of a folder: write model.sig"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("urls", nargs="*", metavar="URL", help="a snapshot")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--key", metavar="FILE", help="the private key, in PEM")
    either.add_argument("--new-key", metavar="FILE", help="create a private key here, and its public key as FILE.pub")
    text = "oms: for other tools, by an ECDSA key; snapshot: by an Ed25519 key; by default what goes with the key"
    parser.add_argument("--format", choices=KINDS, help=text)
    add_memory(parser)
    add_json(parser, "print one line of JSON for each snapshot")
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Sign each snapshot, or create a key."""
    if arguments.new_key:
        if arguments.urls:
            raise ValueError("--new-key must not have a URL: sign with --key afterwards")
        private, public = create_keys(arguments.new_key, ecdsa=arguments.format == "oms")
        print(printable(f"{private}: the private key, for its owner only"))
        print(printable(f"{public}: the public key, for readers"))
        return ExitStatus.OK
    if not arguments.urls:
        raise ValueError("--key must have a URL to sign")
    if arguments.format and is_ecdsa(read_key(arguments.key, "key")[0]) != (arguments.format == "oms"):
        [other] = KINDS.keys() - {arguments.format}
        wrong = f"an {KINDS[arguments.format]} key for --format {arguments.format}, got an {KINDS[other]} key"
        raise ValueError(f"key: {arguments.key}: must be {wrong}, which goes with --format {other}")
    from snapshot.snapshot import Snapshot  # with torch, which the help does not need

    options = options_of(arguments)
    for url in arguments.urls:
        with explain_missing(url, options), bar("sign") as show:
            report = Snapshot(url, storage_options=options).sign(
                arguments.key, memory_budget_bytes=arguments.memory, progress=show
            )
        emit_report(arguments, url, report)
    return ExitStatus.OK
