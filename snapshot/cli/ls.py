"""`snapshot ls`: list the contents of a snapshot, or the snapshots in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from snapshot.cli.arguments import add_json, add_storage, count, options_of
from snapshot.cli.listing import (
    EntryTree,
    ListedItem,
    SharedFiles,
    by_key,
    bytes_in_base,
    common_value,
    describe_findings,
    describe_sharing,
    folded,
    heaviest,
    items,
    read_below,
    shape_text,
    shared_bytes,
    size_of,
)
from snapshot.cli.locate import explain_missing, newest_first, read_metadata, snapshots_below, suggest
from snapshot.cli.screen import Column, ExitStatus, ScreenTable, emit, line, paint, printable, width, wrapped
from snapshot.errors import SnapshotError, SnapshotNotFoundError
from snapshot.io.loop import run as on_loop
from snapshot.io.url import URL
from snapshot.manager.policies import time_text
from snapshot.manager.step_metadata import EXPIRES, NOTE, WRITER, noted_expiry
from snapshot.manifest.document import SnapshotMetadata
from snapshot.plan.names import matcher
from snapshot.runs.timeline import KEY
from snapshot.save.findings import ENVIRONMENT, NOTED, noted_findings, suspicions
from snapshot.save.findings import KEY as GUARDS
from snapshot.text import counted, entries_text, size_text

# Steps of a run with near folders: where each of them is, as this host sees it.


def list_tiers(arguments: argparse.Namespace, options: Mapping[str, Any] | None) -> ExitStatus:
    """Print a line for each step that is near or far."""
    from snapshot.manager.root import Root
    from snapshot.manager.steps import find_kind

    url, near = URL.parse(arguments.url), arguments.near
    root = Root(url, options)
    heads = on_loop(root.heads(on_loop(root.folders()).committed))
    rows, states = find_kind("--near").list_steps(near, url, heads, on_loop(root.line()))
    size = Column("size", lambda row: size_text(row["bytes"]) if row["bytes"] else "", right=True)
    table = ScreenTable([Column("step", right=True), size, Column("near"), Column("far")]).fill(rows)
    words = {word for row in rows for word in row["far"].split(", ")}
    meanings = (wrapped(f"{state}: {meaning}") for state, meaning in states.items() if state in words)
    title = printable(f"{url}, with near steps in {near}")
    emit(arguments, {"url": str(url), "near": near, "steps": rows}, [title, table, *meanings])
    return ExitStatus.OK


# `snapshot ls`

FOLDED = 40
"""Maximum number of lines for one key, unless all are requested."""
BAR = 20


DESCRIPTION = (
    "List the contents of a snapshot or of a checkpoint of another library, or the snapshots in a folder. Only the "
    "manifest is read. Objects whose names differ only in numbers share one line."
)
EXAMPLES = [
    ("ls run", "the snapshots in a folder"),
    ("ls run/step-100", "the contents of one"),
    ("ls run/step-100 'model/**'", "a part of it"),
    ("ls run/step-100 --flat | grep bias", "a line for each object"),
    ("ls run/step-100 --du --depth 3", "sizes by name"),
    ("ls run --du", "the bytes that each snapshot of a folder has alone, and shares with others"),
    ("ls s3://bucket/run --near /nvme/run", "where each step is, as this host sees it"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "url", nargs="?", default=".", metavar="URL", help="a snapshot or a folder (default: the current one)"
    )
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="only matching objects, such as 'model/**'")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--flat", action="store_true", help="a line for each object, with its full name")
    shape.add_argument("--tree", action="store_true", help="all objects, as a tree")
    shape.add_argument("--du", action="store_true", help="sizes by name, largest first; of a folder: sizes by snapshot")
    parser.add_argument("--depth", type=count, metavar="N", help="number of name parts in --du and --tree")
    parser.add_argument("--near", metavar="FOLDER", help="the near folder of this host: show where each step is")
    parser.add_argument("--all", action="store_true", help=f"show more than {FOLDED} lines for a key")
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """List the snapshot or folder at the URL."""
    url = URL.parse(arguments.url)
    options = suggest(url, options_of(arguments))
    if arguments.near is not None:
        return list_tiers(arguments, options)
    try:
        metadata = read_metadata(url, options)
    except SnapshotNotFoundError:
        with explain_missing(arguments.url, options):
            return _list_folder(arguments, options)
    found = _selected(list(items(metadata.manifest, metadata.world_size)), arguments.globs)
    name = str(url)
    content = {"url": name, **summary(metadata, found), "items": [item.as_json() for item in found]}
    if arguments.flat:
        shown: list[object] = [_table((_row(item.name, [item]) for item in found), metadata.world_size)]
    else:
        shown = [*_head(name, metadata, found), _contents(arguments, metadata.world_size, found)]
    emit(arguments, content, shown)
    return ExitStatus.OK


def _selected(found: list[ListedItem], globs: Sequence[str]) -> list[ListedItem]:
    if not globs:
        return found
    if missing := [glob for glob in globs if not any(_matches(glob, found))]:
        raise ValueError(f"the glob {missing[0]!r} matches nothing in the snapshot")
    matching = [_matches(glob, found) for glob in globs]
    return [item for item, *matches in zip(found, *matching, strict=True) if any(matches)]


def _matches(glob: str, found: Sequence[ListedItem]) -> list[bool]:
    """Return for each item if a glob matches its name, with its rank or without."""
    wanted = matcher([glob])
    rank, _, below = glob.partition("/")
    if not (below and rank.isascii() and rank.isdecimal()):
        return [wanted(item.path) for item in found]
    of_rank = matcher([below])
    return [wanted(item.path) or ((item.shared or str(item.rank) == rank) and of_rank(item.path)) for item in found]


def summary(metadata: SnapshotMetadata, found: Sequence[ListedItem]) -> dict[str, Any]:
    """Return a summary of a snapshot, for programs."""
    return {
        "format": metadata.format,
        "version": metadata.version,
        "save_id": metadata.save_id,
        "world_size": metadata.world_size,
        "created": metadata.created.isoformat(),
        "metadata": metadata.metadata,
        "entries": len(found),
        "bytes": sum(item.nbytes for item in found),
        "files": len(metadata.files),
        "file_bytes": metadata.nbytes,
        "shared_bytes": shared_bytes(metadata),
        "bytes_in_base": bytes_in_base(metadata),
        "keys": {key: {"entries": len(held), "bytes": size_of(held)} for key, held in by_key(found).items()},
    }


def _head(name: str, metadata: SnapshotMetadata, found: Sequence[ListedItem]) -> Iterator[str]:
    held = f"{counted(len(metadata.files), 'file')} of {size_text(metadata.nbytes)}"
    parts = [entries_text(len(found)), f"{size_text(size_of(found))} in {held}"]
    parts += ["compressed"] if metadata.compressed else []
    parts += describe_sharing(metadata)
    if metadata.world_size > 1:
        parts.append(f"{metadata.world_size} ranks")
    if metadata.format.startswith("snapshot/"):
        parts.append(f"taken {metadata.created:%Y-%m-%d %H:%M:%S} UTC by snapshot {metadata.version}")
    else:
        parts.append(f"written by {metadata.format}".rstrip())
    name = printable(name)
    yield paint(name, "bold") + line(f"{name}: {', '.join(parts)}").removeprefix(name)
    yield from describe_findings(metadata.metadata)
    user = {key: each for key, each in metadata.metadata.items() if key not in (GUARDS, NOTED)}
    if (end := noted_expiry(metadata.metadata)) is not None:
        yield line(f"expires {time_text(end)}")
    if text := _noted(user):
        yield line(f"metadata: {text if len(text) <= 500 else text[:500] + '...'}")


# Forms of a listing

Row = dict[str, str]
"""Texts by the name of their column. A row without a kind is a heading."""


def _contents(arguments: argparse.Namespace, world_size: int, found: Sequence[ListedItem]) -> ScreenTable:
    if arguments.du:
        return _sizes_by_name(found, arguments.depth or 2)
    if arguments.tree:
        return _table(_tree(found, arguments.depth), world_size)
    return _table(_folded(found, len(found) if arguments.all else FOLDED), world_size)


def _table(rows: Iterable[Row], world_size: int) -> ScreenTable:
    columns = [
        Column("name", shrinks=True, is_name=True),
        Column("kind", style="cyan", optional=2),
        Column("dtype", style="cyan"),
        Column("shape"),
        Column("size", right=True),
        Column("ranks", style="dim", optional=2),
        Column("value", shrinks=True, optional=1, style="dim"),
    ]
    shown = [column for column in columns if world_size > 1 or column.name != "ranks"]
    return ScreenTable(shown).fill(rows, lambda row: "bold" if "size" in row and "kind" not in row else "")


def _row(name: str, held: Sequence[ListedItem]) -> Row:
    """Return the row for objects of one form."""
    first, nbytes = held[0], size_of(held)
    times = len({item.path for item in held})
    ranks = len({item.rank for item in held})
    return {
        "name": name,
        "kind": first.kind,
        "dtype": first.dtype,
        "shape": shape_text(first.shape),
        "size": size_text(nbytes) if nbytes else "",
        "ranks": f"{ranks} ranks, one each" if ranks > 1 else first.placed,
        "value": ", ".join(filter(None, (f"x {times:,}" if times > 1 else "", common_value(held)))),
    }


def _heading(name: str, held: Sequence[ListedItem]) -> Row:
    return {"name": name, "size": size_text(size_of(held)), "value": entries_text(len(held))}


def _folded(found: Sequence[ListedItem], most: int) -> Iterator[Row]:
    """Yield each key with its total and its contents; similar objects share one line."""
    for key, held in by_key(found).items():
        folds = folded(held)
        if key:
            yield _heading(f"{key}/", held)
        shown = folds if len(folds) <= most + 1 else folds[:most]
        for fold in shown:
            yield _row(f"  {fold.name}" if key else fold.name, fold.items)
        if rest := [item for fold in folds[len(shown) :] for item in fold.items]:
            yield {"name": f"  ... {len(rest):,} more, {size_text(size_of(rest))}: --all, --flat or a glob"}


def _tree(found: Sequence[ListedItem], depth: int | None) -> Iterator[Row]:
    """Yield all objects below their containers."""
    for level, node in EntryTree.of(found, "/").walk():
        if depth is not None and level >= depth:
            continue
        name = "  " * level + node.name
        if node.children:
            yield _heading(name, node.items)
        else:
            yield from (_row(name, [item]) for item in node.items)


def _sizes_by_name(found: Sequence[ListedItem], depth: int) -> ScreenTable:
    """Return sizes by name, with a bar for each share."""
    whole = size_of(found)
    table = ScreenTable(
        [
            Column("size", right=True),
            Column("share", right=True),
            Column("", style="blue", optional=1),
            Column("entries", right=True, optional=1),
            Column("name", shrinks=True, is_name=True),
        ]
    )
    for name, total in heaviest(found, depth):
        share = total.nbytes / whole if whole else 0.0
        table.add(size_text(total.nbytes), f"{share:.1%}", "#" * round(share * BAR), f"{total.entries:,}", name)
    return table


# A folder of snapshots


def _list_folder(arguments: argparse.Namespace, options: Mapping[str, Any]) -> ExitStatus:
    """List the snapshots of a folder, such as a manager's root."""
    url = URL.parse(arguments.url)
    try:
        names = snapshots_below(url, options)
    except SnapshotError as error:  # the missing snapshot matters more than a storage that cannot list
        raise SnapshotNotFoundError(f"{url}: there is no snapshot here ({error})") from error
    if not names:
        raise SnapshotNotFoundError(f"{url}: there is no snapshot here")
    names.sort(key=newest_first)
    wanted = matcher(arguments.globs or ["**"])
    if not arguments.du:
        names = [name for name in names if wanted(name)]

    snapshots = read_below(url, options, names)
    shared = SharedFiles(snapshots) if arguments.du else None
    found = {name: each for name, each in snapshots.items() if wanted(name)}
    listed = [_as_json(name, each, shared) for name, each in found.items()]
    content: dict[str, Any] = {"url": str(url), "snapshots": listed}
    if shared is None:
        emit(arguments, content, [_steps(found)])
    else:
        apparent, physical = shared.apparent(), shared.physical()
        total = f"all snapshots of the folder: {size_text(apparent)} in {size_text(physical)} of storage"
        sizes = {"bytes": apparent, "physical_bytes": physical}
        emit(arguments, content | sizes, [_sizes(found, shared), total])
    return ExitStatus.FOUND if any(isinstance(each, SnapshotError) for each in found.values()) else ExitStatus.OK


Found = Mapping[str, SnapshotMetadata | SnapshotError]
"""The snapshots of a folder, or the errors of reading them."""


def _as_json(name: str, held: SnapshotMetadata | SnapshotError, shared: SharedFiles | None) -> dict[str, Any]:
    if isinstance(held, SnapshotError):
        return {"name": name, "problem": str(held)}
    sizes = shared.sizes(name) if shared else None
    return {
        "name": name,
        "format": held.format,
        "created": held.created.isoformat(),
        "entries": held.entries,
        "bytes": held.nbytes,
        "world_size": held.world_size,
        "metadata": held.metadata,
        "suspect": list(suspicions(held.metadata)),
        "findings": list(noted_findings(held.metadata)),
    } | ({"own_bytes": sizes.own, "shared_bytes": sizes.shared} if sizes else {})


def _sizes(found: Found, shared: SharedFiles) -> ScreenTable:
    """Return the sizes of each snapshot."""
    column = Column("name", shrinks=True, is_name=True, style="bold")
    table = ScreenTable([column, *(Column(each, right=True) for each in ("size", "only here", "shared"))])
    for name, each in found.items():
        if isinstance(each, SnapshotError):
            table.add(name, "cannot be read", "", "", style="red")
        else:
            sizes = shared.sizes(name)
            table.add(name, *map(size_text, (sizes.nbytes, sizes.own, sizes.shared)))
    return table


def _steps(found: Found) -> ScreenTable:
    read = {name: each for name, each in found.items() if not isinstance(each, SnapshotError)}
    ends = {name: end for name, each in read.items() if (end := noted_expiry(each.metadata)) is not None}
    table = ScreenTable(
        [
            Column("name", shrinks=True, is_name=True, style="bold"),
            Column("taken (UTC)"),
            *([Column("expires (UTC)")] if ends else []),
            Column("size", right=True),
            Column("entries", right=True, optional=1),
            Column("ranks", right=True, optional=1),
            Column("metadata", shrinks=True, optional=1, style="dim"),
        ]
    )
    for name, held in found.items():
        if isinstance(held, SnapshotError):
            table.add(name, "cannot be read", *([""] if ends else []), "", "", "", str(held), style="red")
            continue
        taken = f"{held.created:%Y-%m-%d %H:%M}" if held.format.startswith("snapshot/") else held.format
        noted = _noted(held.metadata)
        noted = noted[:500] if width() is None else noted
        until = [time_text(ends[name]).removesuffix(" UTC") if name in ends else ""] if ends else []
        table.add(name, taken, *until, size_text(held.nbytes), f"{held.entries:,}", str(held.world_size), noted)
    return table


def _noted(metadata: Mapping[str, Any]) -> str:
    """Return the metadata as a text."""
    values = _flat(metadata)
    return ", ".join(f"{key} {f'{value:.6g}' if isinstance(value, float) else value}" for key, value in values)


def _flat(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the metadata, with nested mappings flattened. Leave out what is noted about jobs and environments."""
    for key, value in metadata.items():
        if key in (KEY, ENVIRONMENT):
            continue
        if key == GUARDS:
            yield "suspect:", "; ".join(suspicions(metadata))
            continue
        if key == NOTED:
            yield "found:", "; ".join(noted_findings(metadata))
            continue
        if key == NOTE and isinstance(value, Mapping):
            yield from _flat({name: each for name, each in value.items() if name not in (WRITER, EXPIRES)})
        elif isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value
