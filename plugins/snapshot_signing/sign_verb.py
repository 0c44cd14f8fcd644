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
OWN, OMS = "snapshot", "oms"
"""Formats of signatures: this library's, and OpenSSF Model Signing."""
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
    parser.add_argument(
        "--format",
        choices=(OWN, OMS),
        help="oms: OpenSSF Model Signing, by an ECDSA key; snapshot: this library's own, by an Ed25519 key; by default "
        "what goes with the key",
    )
    add_memory(parser)
    add_json(parser, "print one line of JSON for each snapshot")
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Sign each snapshot, or create a key."""
    if arguments.new_key:
        if arguments.urls:
            raise ValueError("--new-key must not have a URL: sign with --key afterwards")
        private, public = create_keys(arguments.new_key, ecdsa=arguments.format == OMS)
        print(printable(f"{private}: the private key, for its owner only"))
        print(printable(f"{public}: the public key, for readers"))
        return ExitStatus.OK
    if not arguments.urls:
        raise ValueError("--key must have a URL to sign")
    key = arguments.key
    if arguments.format:
        key, where = read_key(key, "key")
        if is_ecdsa(key) != (arguments.format == OMS):
            wanted, got = ("Ed25519", "ECDSA") if is_ecdsa(key) else ("ECDSA", "Ed25519")
            raise ValueError(
                f"{where}: must be an {wanted} key for --format {arguments.format}, got an {got} key, which goes with "
                f"--format {OWN if arguments.format == OMS else OMS}"
            )
    from snapshot.snapshot import Snapshot  # with torch, which the help does not need

    options = options_of(arguments)
    for url in arguments.urls:
        with explain_missing(url, options), bar("sign") as show:
            report = Snapshot(url, storage_options=options).sign(
                key, memory_budget_bytes=arguments.memory, progress=show
            )
        emit_report(arguments, url, report)
    return ExitStatus.OK
