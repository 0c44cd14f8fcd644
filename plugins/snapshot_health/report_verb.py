"""`snapshot report`: an HTML page about a snapshot: sizes, distribution over ranks, and the timeline."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from snapshot.cli.arguments import add_storage, assignment, options_of
from snapshot.cli.listing import (
    EntryTree,
    ListedItem,
    Total,
    base_url,
    bytes_in_base,
    common_value,
    folded,
    items,
    shape_text,
    shared_bytes,
    sharing,
    size_of,
)
from snapshot.cli.locate import find_metadata, suggest
from snapshot.cli.screen import ExitStatus, as_json, bar, printable, wrapped
from snapshot.io.system import store_file
from snapshot.io.url import URL
from snapshot.manifest.document import SnapshotMetadata
from snapshot.manifest.rank_view import MOST_RANKS
from snapshot.manifest.values import Entry
from snapshot.text import VERSION, counted, entries_text

# Timeline of one take from a trace: its spans, and the rank of each.

MOST_SPANS = 50_000
_FILE = re.compile(r"data/([0-9a-f]+)-([0-9]+)-")


@dataclass
class TimedSpan:
    """One operation of a process. Times are in microseconds."""

    name: str
    process: str
    row: str
    begin: float
    length: float
    fields: Mapping[str, Any]
    take: str = ""
    """Save id of the take that the span belongs to."""

    @property
    def end(self) -> float:
        return self.begin + self.length

    @property
    def file(self) -> re.Match[str] | None:
        """Match of the save id and the rank in the name of the written file."""
        return _FILE.match(str(self.fields.get("file", "")))


def events_in(path: Path) -> list[TimedSpan]:
    """Return the spans of a trace file; raise ValueError if it is not one."""
    found = [event for event in _decoded(path) if isinstance(event, dict) and event.get("ph") == "X"]
    try:
        made = [
            TimedSpan(
                str(event["name"]),
                str(event["pid"]),
                str(event["tid"]),
                float(event["ts"]),
                float(event["dur"]),
                dict(event.get("args", {})),
            )
            for event in found
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a timeline that SNAPSHOT_TRACE recorded: {error!r}") from None
    if not made:
        raise ValueError(f"{path}: has no timeline")
    return made


def timeline(spans: Sequence[TimedSpan], save_id: str) -> dict[str, Any]:
    """Return the data to draw: the spans of the take `save_id`, or all if the trace does not have that take."""
    takes = _attribute(spans)
    chosen = [span for span in spans if span.take == save_id] if save_id in takes else list(spans)
    ranks = {span.process: found[2] for span in spans if (found := span.file)}
    begin = min((span.begin for span in chosen), default=0.0)
    if len(chosen) > MOST_SPANS:
        chosen = sorted(chosen, key=lambda span: span.length, reverse=True)[:MOST_SPANS]
    several = save_id not in takes and len(takes) > 1

    def row(span: TimedSpan) -> str:
        rank = ranks.get(span.process)
        label = f"process {span.process}" if rank is None else f"rank {rank}"
        if rank is not None and len({process for process, each in ranks.items() if each == rank}) > 1:
            label += f", process {span.process}"  # a restarted rank, or one with a writer process
        return f"take {span.take}, {label}: {span.row}" if several else f"{label}: {span.row}"

    return {
        "spans": [
            [
                span.name,
                row(span),
                round((span.begin - begin) / 1000, 3),
                round(span.length / 1000, 3),
                ", ".join(f"{key} {value}" for key, value in span.fields.items())[:200],
            ]
            for span in sorted(chosen, key=lambda span: span.begin)
        ],
        "take": save_id if save_id in takes else "",
        "takes_left_out": len(takes) - 1 if save_id in takes else 0,
    }


def _attribute(spans: Iterable[TimedSpan]) -> set[str]:
    """Set the take of each span, and return the takes.

    A write names its file, and so its take. A process stages and digests before it writes, and commits afterwards.
    """
    by_process: dict[str, list[TimedSpan]] = {}
    for span in spans:
        by_process.setdefault(span.process, []).append(span)
    everywhere = _ends(spans)
    for held in by_process.values():
        ends = _ends(held) or everywhere  # for a process that passes its bytes to a writer
        for span in held:
            if found := span.file:
                span.take = found[1]
            elif ends and span.name == "commit":
                before = [(end, take) for take, end in ends.items() if end <= span.begin]
                span.take = max(before)[1] if before else min((end, take) for take, end in ends.items())[1]
            elif ends:
                after = [(end, take) for take, end in ends.items() if end >= span.begin]
                span.take = min(after)[1] if after else max((end, take) for take, end in ends.items())[1]
    return set(everywhere)


def _ends(spans: Iterable[TimedSpan]) -> dict[str, float]:
    """Return the end of the last write of each take."""
    ends: dict[str, float] = {}
    for span in spans:
        if found := span.file:
            ends[found[1]] = max(span.end, ends.get(found[1], span.end))
    return ends


def _decoded(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text.rstrip().rstrip(",").rstrip("]") + "]" if text.lstrip().startswith("[") else text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a timeline in Chrome's trace format: {error}") from None
    found = value.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(found, list):
        raise ValueError(f"{path}: not a timeline in Chrome's trace format")
    return found


# `snapshot report`

SMALLEST = 1 / 4000
"""Share of the parent below which parts are drawn together."""
WIDEST = 300
"""Maximum number of drawn parts of a node."""
MOST_ROWS = 5000
"""Maximum number of rows in the table of objects."""
_RANK = re.compile(r"data/[0-9a-f]+-([0-9]+)-[0-9]+\.")


DESCRIPTION = (
    "Draw a snapshot, or a checkpoint of another library, as one HTML page that needs no network: sizes by name, "
    "dtypes, bytes of each rank, files, digests, metadata; with --trace the take's timeline. Only the manifest "
    "is read."
)
EXAMPLES = [
    ("report run/step-100 -o report.html", "the page"),
    ("report run/step-100 -o report.html --verify", "with the result of a verification"),
    ("report run/step-100 -o report.html --trace t.json", "with the trace of SNAPSHOT_TRACE=t.json"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", metavar="URL", help="a snapshot")
    parser.add_argument("--output", metavar="FILE", help="the file to write; also -o FILE, if the name has no '='")
    parser.add_argument("--trace", metavar="FILE", help="a timeline that SNAPSHOT_TRACE recorded")
    parser.add_argument("--verify", action="store_true", help="read every byte, and include the result")
    add_storage(parser)
    action = next(each for each in parser._actions if "-o" in each.option_strings)
    action.type = _option_or_file
    action.metavar = "FILE|KEY=VALUE"
    action.help = "the file to write; or, with '=', a storage option"


def _option_or_file(text: str) -> Any:
    return assignment(text) if "=" in text else text


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Write the page."""
    targets = [each for each in arguments.o if isinstance(each, str)]
    arguments.o = [each for each in arguments.o if not isinstance(each, str)]
    targets += [arguments.output] if arguments.output else []
    if len(targets) != 1:
        raise ValueError("pass exactly one output file, such as -o report.html")
    events = events_in(Path(arguments.trace)) if arguments.trace else []
    url = URL.parse(arguments.url)
    options = suggest(url, options_of(arguments))
    metadata = find_metadata(arguments.url, options)
    told = picture(str(url), metadata, metadata.manifest)
    told |= timeline(events, told["save_id"])
    status = ExitStatus.OK
    if arguments.verify:
        from snapshot.snapshot import Snapshot

        with bar("verify") as shown:
            found = Snapshot(arguments.url, storage_options=options).verify(progress=shown)
        told["verified"] = {"ok": found.ok, "text": str(found).partition("\n")[0], "faults": list(found.faults[:200])}
        status = ExitStatus.OK if found else ExitStatus.FOUND
    store_file(targets[0], page(told).encode())
    print(wrapped(printable(f"{targets[0]}: {entries_text(told['objects'])} of {told['url']}")))
    return status


def page(told: dict[str, Any]) -> str:
    """Return the template with the data inserted. `<` is escaped, so that no name can end the script element."""
    template = (files("snapshot_health") / "report.html").read_text(encoding="utf-8")
    data = as_json(told).replace("<", "\\u003c")
    return template.replace("@DATA@", data, 1)


def picture(url: str, metadata: SnapshotMetadata, manifest: dict[str, Entry]) -> dict[str, Any]:
    """Return the data of the page."""
    found = list(items(manifest, metadata.world_size))
    dtypes: dict[str, Total] = {}
    for item in found:
        if item.nbytes:
            dtypes.setdefault(item.dtype or item.kind, Total()).add(item.nbytes)
    ranks: dict[int, int] = {}
    for name, size in metadata.files.items():
        if match := _RANK.match(name):
            ranks[int(match[1])] = ranks.get(int(match[1]), 0) + size
    # all, or those with files, since the number in a manifest may be wrong
    shown_ranks = range(metadata.world_size) if metadata.world_size <= MOST_RANKS else sorted(ranks)
    folds = folded(found)
    with_digest, without = _digests(manifest)
    ours = metadata.format.startswith("snapshot/")
    return {
        "url": url,
        "version": VERSION,
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "format": metadata.format,
        "created": f"{metadata.created:%Y-%m-%d %H:%M:%S} UTC" if ours else "",
        "save_id": metadata.save_id if ours else "",
        "world_size": metadata.world_size,
        "metadata": metadata.metadata,
        "objects": len(found),
        "bytes": size_of(found),
        "file_bytes": metadata.nbytes,
        "tree": _tree(found),
        "dtypes": [
            [name, total.nbytes, total.entries] for name, total in sorted(dtypes.items(), key=lambda x: -x[1].nbytes)
        ],
        "ranks": [[rank, ranks.get(rank, 0)] for rank in shown_ranks] if ranks else [],
        "shared_bytes": shared_bytes(metadata),
        "bytes_in_base": bytes_in_base(metadata),
        "base": base_url(metadata),
        "files": sorted(metadata.files.items())[:MOST_ROWS],
        "sharing": sharing(metadata),
        "digests": [with_digest, without],
        "rows": [
            [
                fold.name,
                len({item.path for item in fold.items}),
                fold.items[0].kind,
                fold.items[0].dtype,
                shape_text(fold.items[0].shape),
                fold.nbytes,
                fold.items[0].placed if len({item.rank for item in fold.items}) == 1 else "each rank its own",
                common_value(fold.items),
            ]
            for fold in folds[:MOST_ROWS]
        ],
        "rows_left": max(0, len(folds) - MOST_ROWS),
    }


def _digests(manifest: dict[str, Entry]) -> tuple[int, int]:
    """Return how many stored ranges have a digest, and how many do not."""
    counts = [0, 0]
    for entry in manifest.values():
        for each in entry.stored():
            counts[each.digest is None] += 1
    return counts[0], counts[1]


def _tree(found: Iterable[ListedItem]) -> dict[str, Any]:
    """Return the sizes by parts of names, with small parts joined, and chains without forks merged into one node."""
    root = EntryTree.of((item for item in found if item.nbytes), "/.")
    whole = size_of(root.items)
    made: dict[str, Any] = {}
    rest = [(root, made)]
    while rest:
        node, into = rest.pop()
        name, first = node.name, node.items[0] if node.items else None
        while len(node.children) == 1:
            (node,) = node.children.values()
            name += node.name
        into |= {"n": name, "b": size_of(node.items)}
        if first is not None and not node.children:
            into["t"] = f"{first.dtype or first.kind}{shape_text(first.shape)}"
        children = sorted(
            ((size_of(child.items), child) for child in node.children.values()), key=lambda each: -each[0]
        )
        kept = [child for nbytes, child in children[:WIDEST] if nbytes >= whole * SMALLEST]
        into["c"] = [{} for _ in kept]
        rest += zip(kept, into["c"], strict=True)
        if others := children[len(kept) :]:
            nbytes = sum(nbytes for nbytes, _ in others)
            into["c"].append({"n": counted(len(others), "other"), "b": nbytes, "c": []})
    return made
