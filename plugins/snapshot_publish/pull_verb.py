"""`snapshot pull`: bring a published version of weights into a local folder."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from snapshot.cli.arguments import add_json, add_storage, count, duration, options_of
from snapshot.cli.screen import ExitStatus, emit, printable
from snapshot.errors import CorruptSnapshotError, SnapshotNotFoundError, StorageError
from snapshot.events import Event, add_handler, log, remove_handler

if TYPE_CHECKING:
    from snapshot_publish.subscriber import Subscriber

DESCRIPTION = (
    "Bring a published version into a local folder, verified, as a folder in Hugging Face's layout. It is applied "
    "to the nearest local version, or downloaded. `current` in the folder is a link to the last pulled version."
)
EXAMPLES = [
    ("pull s3://bucket/policy /nvme/policy", "the newest usable version"),
    ("pull s3://bucket/policy /nvme/policy --version 12", "one version"),
    ("pull s3://bucket/policy /nvme/policy --follow", "each new version, until it is interrupted"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", metavar="URL", help="the folder of the versions")
    parser.add_argument("folder", metavar="FOLDER", help="the local folder")
    parser.add_argument("--version", type=_version, dest="number", metavar="N", help="a number, or latest (default)")
    parser.add_argument("--step", type=int, help="the newest usable version of a training step")
    parser.add_argument("--keep", type=count, default=2, metavar="N", help="local versions to keep (default: 2)")
    parser.add_argument("--follow", action="store_true", help="continue with each new version")
    parser.add_argument("--every", type=duration, default=2.0, metavar="TIME", help="pause of --follow (default: 2s)")
    parser.add_argument("--notify", action="append", default=[], metavar="URL", help="send a JSON message; repeatable")
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Pull, and print the folder."""
    if arguments.follow and (arguments.number is not None or arguments.step is not None):
        raise ValueError("--follow pulls the latest version: pass neither --version nor --step")
    from snapshot_publish.subscriber import Subscriber  # with torch, which the help does not need

    subscriber = Subscriber(
        arguments.url,
        arguments.folder,
        keep=arguments.keep,
        notify=arguments.notify,
        storage_options=options_of(arguments),
    )
    fallen = False

    def listen(event: Event) -> None:
        nonlocal fallen
        if event.name == "fell_back":
            fallen = True
            log.warning("fell back from %s: %s", event.path, event.fields["error"])

    add_handler(listen)
    try:
        if arguments.follow:
            _follow(subscriber, arguments)
        if arguments.step is not None:
            _show(subscriber.pull(arguments.step, version=arguments.number), arguments)
        else:
            _show(subscriber.pull(version=arguments.number), arguments)
    finally:
        remove_handler(listen)
    return ExitStatus.FOUND if fallen else ExitStatus.OK


def _follow(subscriber: Subscriber, arguments: argparse.Namespace) -> None:
    """Pull each new version until the process is interrupted. A store that is down is tried again."""
    last: Path | None = None
    while True:
        try:
            folder = subscriber.pull()
            if folder != last:
                _show(folder, arguments)
            last = folder
        except (StorageError, SnapshotNotFoundError, CorruptSnapshotError) as error:
            log.warning("%s", error)
        time.sleep(arguments.every)


def _show(folder: Path, arguments: argparse.Namespace) -> None:
    emit(arguments, {"folder": str(folder)}, [printable(str(folder))])


def _version(text: str) -> int | None:
    return None if text == "latest" else count(text)
