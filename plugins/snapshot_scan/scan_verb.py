"""`snapshot scan`: what a checkpoint of any format would run if it was opened."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from snapshot.cli.arguments import add_json, add_storage, options_of
from snapshot.cli.locate import is_local_file, read_metadata
from snapshot.cli.screen import Column, ExitStatus, ScreenTable, emit, line
from snapshot.errors import SnapshotError
from snapshot.io.loop import run as on_loop
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.io.url import URL
from snapshot.text import counted
from snapshot_scan.contents import HARMLESS, RULES, RUNS, UNEXAMINED, UNKNOWN, Examination, Finding, Region

DESCRIPTION = (
    "Show what a checkpoint of any format would run if it was opened: the functions that its pickles name and call, "
    "code of models, suspicious archives, and links out of the folder. Nothing is run. What could not be examined is "
    "named. The exit status is 0 only if nothing was found, and everything was examined."
)
EXAMPLES = [
    ("scan model.pt", "a file"),
    ("scan downloads/model", "all files of a folder, whatever their names"),
    ("scan run/step-100 --sarif scan.sarif", "also write a report for a code-scanning service"),
    ("scan model --allow 'megatron.core.*'", "accept names that you know"),
]
STYLES = {RUNS: "red", UNKNOWN: "yellow", UNEXAMINED: "yellow", HARMLESS: ""}
LEVELS = {RUNS: "error", UNKNOWN: "warning", UNEXAMINED: "warning"}
BLOCK = 16 << 10
"""Bytes that are read at once, and kept for a while, where a few bytes are needed."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", metavar="URL", help="a file or a folder")
    what = "classes and functions to accept, such as 'megatron.core.*', unless they are known to run code; repeatable"
    parser.add_argument("--allow", action="append", default=[], metavar="GLOB", help=what)
    parser.add_argument("--all", action="store_true", help="also show names that are known to be harmless")
    parser.add_argument("--sarif", metavar="FILE", help="also write the findings to this file, in SARIF 2.1.0")
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Scan the files at the URL."""
    url, options = URL.parse(arguments.url), options_of(arguments)
    found: dict[Finding, None] = {}
    kinds: Counter[str] = Counter()
    with Session(url, options) as session:
        storage, names = session.storage, list[str]()
        if storage.capabilities.list and not is_local_file(url):
            names = on_loop(storage.list())
        if not names:  # a single file; an error if nothing is there
            above, _, name = url.location.rpartition("/")
            storage, names = session.open_beside(URL(url.scheme, above, url.query)), [name]
            on_loop(storage.stat(name))
        for name in names:
            if url.scheme != "file" or not skip_link(storage.url.location, name, found):
                kinds[scan_file(storage, name, found, arguments.allow)] += 1
            if name.rpartition("/")[2] in (".snapshot_metadata", ".metadata"):
                scan_objects(storage, options, name, found, arguments.allow)
    order = list(STYLES)
    findings = sorted(found, key=lambda each: (order.index(each.verdict), each.file, each.member))
    serious = [each for each in findings if each.verdict != HARMLESS]
    if arguments.sarif:
        Path(arguments.sarif).write_text(json.dumps(as_sarif(url, serious), indent=1))
    table = ScreenTable([Column("verdict"), Column("what", shrinks=True), Column("file", shrinks=True, is_name=True)])
    for each in findings if arguments.all else serious:
        table.add(each.verdict, each.text, f"{each.file}:{each.member}".rstrip(":"), style=STYLES[each.verdict])
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in STYLES}
    bad = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count and verdict != HARMLESS)
    held = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    head = f"{url}: {counted(sum(kinds.values()), 'file')} ({held}): {bad or 'nothing runs code, all was examined'}"
    content = {"url": str(url), "ok": not serious, "files": sum(kinds.values()), "kinds": kinds, "verdicts": counts}
    content |= {"findings": [each._asdict() | {"verdict": each.verdict} for each in findings]}
    emit(arguments, content, [line(head, STYLES[RUNS] if bad else "green"), *([table] if table.rows else [])])
    return ExitStatus.FOUND if serious else ExitStatus.OK


def skip_link(root: str, name: str, found: dict[Finding, None]) -> bool:
    """Add a finding for a link out of the folder. Return True for a link to a folder, which is no file."""
    path, folder = os.path.join(root, name), os.path.realpath(root)
    if not os.path.islink(path):
        return False
    above, target = os.path.dirname(folder), os.path.realpath(path)
    # the files of a version in the cache of Hugging Face are links to its blobs
    shared = [os.path.join(os.path.dirname(above), "blobs")] if os.path.basename(above) == "snapshots" else []
    listed = f"{target}/".startswith(f"{folder}/")
    inside = listed or (os.path.isfile(target) and any(target.startswith(f"{each}/") for each in shared))
    if not inside:
        found[Finding(name, "", "link", f"a link to {target}, outside the folder")] = None
    return os.path.isdir(target)


def open_region(storage: Storage, name: str) -> Region:
    """Return a file as a region, of which small parts are read by blocks."""
    size = on_loop(storage.stat(name)).size

    def read(begin: int, count: int) -> bytes:
        held = bytearray(count)
        on_loop(storage.read_into(name, begin, [held]))
        return bytes(held)

    @lru_cache(16)
    def block(number: int) -> bytes:
        return read(number * BLOCK, min(BLOCK, size - number * BLOCK))

    def read_some(begin: int, count: int) -> bytes:
        first, last = begin // BLOCK, (begin + count - 1) // BLOCK
        if last - first > 3:
            return read(begin, count)
        return b"".join(map(block, range(first, last + 1)))[begin - first * BLOCK :][:count]

    return Region(read_some, size)


def scan_file(
    storage: Storage, name: str, found: dict[Finding, None], allow: Sequence[str], part: tuple[int, int] = (0, 1 << 62)
) -> str:
    """Examine a file, or a part of it, and add what was found. Return its kind."""
    examination, kind = Examination(name, allow), "unreadable"
    try:
        kind = examination.examine(open_region(storage, name).sub(part[0], part[1] - part[0]))
    except Exception as error:  # noqa: BLE001 - a hostile file must not end the scan, and is not harmless
        examination.report("", "unexamined", f"{type(error).__name__}: {error}")
    found |= examination.findings
    return kind


def scan_objects(
    storage: Storage, options: Mapping[str, Any], name: str, found: dict[Finding, None], allow: Sequence[str]
) -> None:
    """Examine the pickled objects that the metadata of a checkpoint locates in data files."""
    above = name.rpartition("/")[0]
    try:
        entries = read_metadata(storage.url.join(above), options).manifest
    except (SnapshotError, ValueError) as error:
        found[Finding(name, "", "unexamined", f"the manifest cannot be read: {error}")] = None
        return
    everything: list[Any] = [*entries.values()]
    for entry in everything:
        parts = [*(getattr(entry, "chunks", None) or ()), *(getattr(entry, "shards", None) or ())]
        everything += [getattr(part, "tensor", part) for part in parts]
        if getattr(entry, "serializer", None) == "torch_save":
            scan_file(storage, f"{above}/{entry.location}".lstrip("/"), found, allow, entry.byte_range or (0, 1 << 62))


def as_sarif(url: URL, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as a log in SARIF 2.1.0."""
    rules = [rule for rule in RULES if rule != "known"]

    def result(each: Finding) -> dict[str, Any]:
        place = {"artifactLocation": {"uri": quote(os.fsencode(each.file)), "uriBaseId": "ROOT"}}
        text = f"{each.verdict}: {each.text}" + (f" ({each.member})" if each.member else "")
        level = {"ruleId": each.rule, "ruleIndex": rules.index(each.rule), "level": LEVELS[each.verdict]}
        return level | {"message": {"text": text}, "locations": [{"physicalLocation": place}]}

    described = [{"id": rule, "shortDescription": {"text": RULES[rule][1]}} for rule in rules]
    log = {
        "tool": {"driver": {"name": "snapshot scan", "rules": described}},
        "originalUriBaseIds": {"ROOT": {"description": {"text": str(url)}}},
        "results": [result(each) for each in findings],
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [log]}
