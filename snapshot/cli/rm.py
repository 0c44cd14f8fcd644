"""`snapshot rm`: remove snapshots by name, and leftovers of interrupted takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshot.cli.arguments import add_json, add_storage, options_of
from snapshot.cli.listing import SharedFiles, read_below
from snapshot.cli.locate import explain_missing, is_local_file, snapshots_below
from snapshot.cli.prune import add_careful, confirmed
from snapshot.cli.screen import Column, ExitStatus, ScreenTable, complain, emit, line
from snapshot.errors import SnapshotError, SnapshotExistsError, SnapshotNotFoundError, StorageError
from snapshot.formats.foreign import is_absence
from snapshot.io.loop import run as on_loop
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.loading.open import is_foreign
from snapshot.manifest.document import METADATA
from snapshot.runs.facts import PINNED
from snapshot.save import transaction
from snapshot.text import counted, size_text

DATA = (".safetensors", ".bin", ".stats")
"""Suffixes of data files."""


DESCRIPTION = (
    "Remove snapshots, and leftovers of interrupted takes in their folders; no other file. Checkpoints of other "
    "libraries are left alone. It shows what it would remove, and asks."
)
EXAMPLES = [
    ("rm run/step-100", "ask first"),
    ("rm run/step-100 run/step-200 --yes", "without asking, for scripts"),
    ("rm run/step-100 --dry-run", "show what would be removed"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("urls", nargs="+", metavar="URL", help="a snapshot, or the folder of an interrupted take")
    parser.add_argument("--pinned", action="store_true", help="also remove pinned snapshots")
    parser.add_argument("--bases", action="store_true", help="also remove snapshots that others need")
    add_careful(parser)
    add_json(parser, "print one line of JSON for each URL")
    add_storage(parser)


@dataclass
class _Removal:
    """Removal at one URL."""

    url: URL
    what: str
    """`snapshot` or `leftovers`."""
    files: int
    """Number of data files of a snapshot, as in every verb; the manifest is removed, too."""
    nbytes: int
    frees: int
    """Bytes that no other snapshot in the folder shares, once the targets before this one are removed."""
    error: str = ""
    """Why the removal failed."""

    def as_json(self, *, dry_run: bool) -> dict[str, Any]:
        removed = {"frees": self.frees, "removed": not (dry_run or self.error)}
        made = {"url": str(self.url), "what": self.what, "files": self.files, "bytes": self.nbytes, **removed}
        return made | ({"error": self.error} if self.error else {})


COLUMNS = [
    Column("what", lambda target: target.what),
    Column("files", lambda target: f"{target.files:,}", right=True),
    Column("size", lambda target: size_text(target.nbytes), right=True),
    Column("frees", lambda target: size_text(target.frees), right=True),
    Column("url", lambda target: str(target.url), shrinks=True),
]


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Show what would be removed, ask, and remove it. If one target cannot be removed, remove none."""
    options = options_of(arguments)
    targets = []
    for text in {str(URL.parse(text)).rstrip("/"): text for text in arguments.urls}.values():
        with explain_missing(text, options):
            targets.append(on_loop(_target(URL.parse(text), options, arguments)))
    needed = _find_shared(targets, options)
    if needed and not arguments.bases:
        raise SnapshotError(f"{needed[0]}; remove those first, or pass --bases")
    if not arguments.json:
        print(ScreenTable(COLUMNS).fill(targets))
    if not arguments.dry_run:
        what = str(targets[0].url) if len(targets) == 1 else f"these {len(targets)}"
        if not confirmed(arguments, f"remove {what}?"):
            return ExitStatus.FOUND
        for target in targets:
            _remove(target, options, arguments.older_than)
    for target in targets:
        if target.error and not arguments.json:
            complain(str(target.url), f"removal failed: {target.error}")
        else:
            emit(arguments, target.as_json(dry_run=arguments.dry_run), [] if arguments.dry_run else [_removed(target)])
    return ExitStatus.FOUND if any(target.error for target in targets) else ExitStatus.OK


async def _target(url: URL, options: Mapping[str, Any], arguments: argparse.Namespace) -> _Removal:
    """Return the target at a URL. Raise if it must not be removed."""
    async with Session(url, options) as session:
        storage = session.storage
        if not (storage.capabilities.list and storage.capabilities.delete):
            raise SnapshotError(f"{url}: this storage does not support removal")
        try:
            await storage.stat(METADATA)
        except StorageError as error:
            if not is_absence(storage, error):
                raise
            return await _leftovers(session, arguments.older_than)
        await transaction.expect_own_manifest(storage)
        if not arguments.pinned and PINNED in await storage.list(PINNED):
            raise SnapshotError(f"{url}: pinned by a manager; use --pinned to remove it")
        await _expect_quiet(session, arguments.older_than)
        files = [path for path in await transaction.list_save_files(storage) if path.endswith(DATA)]
        nbytes = await _size(session, files)
        return _Removal(url, "snapshot", len(files), nbytes, nbytes)


def _find_shared(targets: Sequence[_Removal], options: Mapping[str, Any]) -> list[str]:
    """Subtract from each snapshot's size the bytes that other snapshots in its folder keep.

    Return a line for each snapshot that others, which stay, are based on.
    """
    folders: dict[str, SharedFiles] = {}
    bases: list[tuple[_Removal, str, list[str]]] = []
    for target in targets:
        above, _, name = target.url.location.rstrip("/").rpartition("/")
        if target.what != "snapshot" or not above:
            continue
        try:
            if above not in folders:
                folder = URL(target.url.scheme, above, target.url.query)
                folders[above] = SharedFiles(read_below(folder, options, snapshots_below(folder, options)))
            bases.append((target, above, folders[above].dependents(name)))
            target.frees -= folders[above].remove(name).shared
        except (SnapshotError, KeyError):  # the folder cannot be listed, or the manifest cannot be read
            continue
    removed = {target.url.location.rstrip("/") for target in targets}
    staying = [(target, [each for each in names if f"{above}/{each}" not in removed]) for target, above, names in bases]
    return [f"{target.url}: has tensors that {', '.join(names)} left out" for target, names in staying if names]


async def _leftovers(session: Session, older_than: float) -> _Removal:
    """Return the leftovers of finished takes."""
    storage, url = session.storage, session.url
    if not is_local_file(url):
        files = await transaction.find_leftovers(storage, older_than)
        if files:
            nbytes = await _size(session, files)
            return _Removal(url, "leftovers", len(files), nbytes, nbytes)
        await _expect_quiet(session, older_than)
    if await is_foreign(session):
        raise SnapshotExistsError(f"{url}: written by another library, so it was not removed; remove it yourself")
    raise SnapshotNotFoundError(f"{url}: there is no snapshot")


async def _expect_quiet(session: Session, older_than: float) -> None:
    """Raise if a take may be running."""
    if await transaction.is_busy(session.storage, older_than):
        raise SnapshotError(
            f"{session.url}: a take is running here, or was interrupted recently; if you know that it has ended, "
            "pass --older-than 0"
        )


async def _size(session: Session, files: list[str]) -> int:
    return sum([(await session.storage.stat(path)).size for path in files])


def _remove(target: _Removal, options: Mapping[str, Any], older_than: float) -> None:
    from snapshot.snapshot import Snapshot

    try:
        if target.what == "snapshot":
            Snapshot(target.url.reveal(), storage_options=options).delete()
        with Session(target.url, options) as session:
            if target.what == "snapshot":
                on_loop(session.storage.delete([PINNED]))
            on_loop(transaction.delete_leftovers(session.storage, older_than))
    except (SnapshotError, OSError) as error:
        target.error = str(error)


def _removed(target: _Removal) -> str:
    freed = "" if target.frees == target.nbytes else f"; {size_text(target.frees)} are freed"
    return line(f"removed {target.url}: {counted(target.files, 'file')}, {size_text(target.nbytes)}{freed}")
