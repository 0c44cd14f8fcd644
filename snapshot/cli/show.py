"""`snapshot show`: one object of a snapshot: its description, its statistics, and some of its values."""

from __future__ import annotations

import argparse
import pprint
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snapshot.cli.arguments import add_json, add_pickle, add_storage, options_of
from snapshot.cli.listing import base_url, describe_findings, is_in_base, items, shape_text, shorten
from snapshot.cli.locate import find_metadata, suggest
from snapshot.cli.screen import ExitStatus, emit, line, mute_torch_warnings, paint, printable, repr_text, width
from snapshot.io.url import URL
from snapshot.manifest.containers import inflate_entries
from snapshot.manifest.document import check_tree
from snapshot.manifest.rank_view import resolve_path
from snapshot.manifest.values import Entry
from snapshot.save.findings import noted_findings, suspicions
from snapshot.text import counted, size_text

if TYPE_CHECKING:
    from snapshot.snapshot import Snapshot

SHOWN = 64
"""Maximum number of lines about the contents of a container."""
LONGEST = 10_000
"""Maximum length of a value in characters."""


DESCRIPTION = (
    "Show one object of a snapshot, or of a checkpoint of another library: description, statistics "
    "and first values of a tensor; the value of anything else. Only the object's byte ranges are read, in parts."
)
EXAMPLES = [
    ("show run/step-100 model/head.weight", "a tensor"),
    ("show run/step-100 model/head.weight --box 0:2,:8 --no-stats", "only a part of it"),
    ("show run/step-100 progress/step", "a number"),
    ("show run/step-100 1/rng/torch", "the object of rank 1 with this name"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", metavar="URL", help="a snapshot")
    parser.add_argument("path", metavar="PATH", help="the object's name, as `snapshot ls --flat` shows it")
    parser.add_argument("--rank", type=int, metavar="N", help="the object of this rank")
    parser.add_argument("--box", type=_box, metavar="BOX", help="the part whose values are shown: 0:4,:8 or 3,...")
    parser.add_argument("--no-stats", action="store_true", help="do not read the whole tensor for its statistics")
    add_pickle(parser)
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Show the object."""
    with mute_torch_warnings():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> ExitStatus:
    options = options_of(arguments)
    snapshot = find_metadata(arguments.url, options)
    manifest, world_size = snapshot.manifest, snapshot.world_size
    name = arguments.path.strip("/")
    if arguments.rank is not None:
        name = f"{arguments.rank}/{name}"
    path = resolve_path(manifest, world_size, name, str(URL.parse(arguments.url)))
    entry = manifest[path]
    told = _described(path, entry, manifest, world_size)
    if entry.is_container:
        if arguments.box is not None:
            raise ValueError(f"{path}: a container has no box; show an object in it")
        lines = _container(path, entry, manifest, told)
    elif is_in_base(snapshot, entry):
        told["base"] = base_url(snapshot)
        files = sorted({snapshot._document.files[each.location].name for each in entry.stored()} - {""})
        lines = [f"left out of this snapshot; show it in {', '.join(files) or 'the base'}"]
    elif entry.tensors():
        from snapshot.cli.tensor_values import show_tensor

        lines = show_tensor(_opened(arguments, options), path, entry, told, arguments)
    else:
        if arguments.box is not None:
            raise ValueError(f"{path}: only a tensor has a box")
        if entry.is_value:
            text = shorten(entry.describe()[1], LONGEST)
        else:
            text = repr_text(_opened(arguments, options).read_object(path))
        told["value"] = text
        lines = [text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"]
    metadata = snapshot.metadata
    found = {"suspect": [*suspicions(metadata)], "findings": [*noted_findings(metadata)]}
    value = told | {name: texts for name, texts in found.items() if texts}
    emit(arguments, value, [*_screen(told, lines), *describe_findings(metadata)])
    return ExitStatus.OK


HIDDEN = ("path", "names", "value", "values", "statistics", "dtype", "shape")
"""Properties that the lines below the description show, or that `type` has."""


def _screen(told: Mapping[str, Any], lines: Sequence[str]) -> Iterator[str]:
    yield paint(printable(told["path"]), "bold")
    for name, value in told.items():
        if name not in HIDDEN:
            yield line(f"  {name:<10} {size_text(value) if name == 'bytes' else value}", indent=" " * 13)
    for text in lines:
        yield "\n".join(map(printable, text.split("\n")))


def _opened(arguments: argparse.Namespace, options: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot, to read an object's bytes with torch."""
    from snapshot.snapshot import Snapshot

    options = suggest(URL.parse(arguments.url), options)
    return Snapshot(arguments.url, storage_options=options, allow_pickle=arguments.allow_pickle)


def _container(path: str, entry: Entry, manifest: Mapping[str, Entry], told: dict[str, Any]) -> list[str]:
    """Return the lines for a container: all of its contents, if they are stored in the manifest."""
    below = {name: held for name, held in manifest.items() if name.startswith(f"{path}/")}
    if len(below) <= SHOWN and all(held.is_value or held.is_container for held in below.values()):
        tree = {path: entry, **below}
        check_tree(path, tree)
        told["value"] = pprint.pformat(inflate_entries(tree, path), width=min(100, width() or 100), sort_dicts=False)
        return [told["value"]]
    told["names"] = entry.components()
    lines = [f"  {name}" for name in told["names"][:SHOWN]]
    if entry.width > SHOWN:
        lines.append(f"  ... and {entry.width - SHOWN:,} more: snapshot ls URL '{path.partition('/')[2]}'")
    return lines


def _described(path: str, entry: Entry, manifest: Mapping[str, Entry], world_size: int) -> dict[str, Any]:
    """Return the manifest's description of an object."""
    if entry.width:
        return {"path": path, "kind": entry.type, "entries": entry.width}
    item = next(items({path: entry}, world_size))
    told: dict[str, Any] = {"path": path, "kind": item.kind}
    if item.shape is not None:
        told |= {"dtype": item.dtype, "shape": item.shape, "type": f"{item.dtype}{shape_text(item.shape)}"}
    told["bytes"] = item.nbytes
    if item.placed:
        told["ranks"] = item.placed
    pieces = entry.stored() if entry.is_tensor else []
    if len(pieces) == 1:
        told["file"] = f"{pieces[0].location}[{pieces[0].byte_range[0]}:{pieces[0].byte_range[1]}]"
        told["digest"] = pieces[0].digest or "none"
    elif pieces:
        files = {stored.location for stored in pieces}
        told["file"] = f"{counted(len(pieces), 'piece')} in {counted(len(files), 'file')}"
    if item.value and not entry.is_value:
        told["note"] = item.value
    return told


# Boxes

Box = list[slice | int]


def _box(text: str) -> Box:
    """Return the box for a text as between brackets.

    >>> _box("0:4,:8,3")
    [slice(0, 4, None), slice(None, 8, None), 3]
    """
    made: Box = []
    for part in text.strip("[]").replace("...", "").split(","):
        part = part.strip()  # noqa: PLW2901 - stripped
        found = re.fullmatch(r"(-?\d*)(:?)(-?\d*)", part)
        if found is None or part == "-":
            raise argparse.ArgumentTypeError(f"invalid box {text!r} (expected e.g. 0:4,:8)")
        if not part:
            continue
        first, colon, last = found.groups()
        try:
            made.append(slice(int(first) if first else None, int(last) if last else None) if colon else int(first))
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid box {text!r} (expected e.g. 0:4,:8)") from None
    return made
