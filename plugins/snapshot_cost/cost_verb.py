"""`snapshot cost`: the bytes and objects of a run, its requests in a month, and what they cost."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from snapshot.cli.arguments import add_json, add_storage, duration, options_of
from snapshot.cli.screen import Column, ExitStatus, ScreenTable, complain, emit, line
from snapshot.errors import SnapshotNotFoundError
from snapshot.io.loop import run as on_loop
from snapshot.io.url import URL, read_options
from snapshot.manager.retention import physical_sizes
from snapshot.manager.root import Root
from snapshot.manifest.document import ManifestHead
from snapshot.text import counted, duration_text, size_text

DESCRIPTION = (
    "Show how many bytes and objects the steps in a folder have, each physical file once, and how many requests a "
    "month of saving makes on an object store. With --prices, also show what they cost: no prices are built in."
)
EXAMPLES = [
    ("cost s3://bucket/run", "bytes, objects and requests"),
    ("cost s3://bucket/run --prices prices.yaml", "also the money"),
    ("cost run --every 30m", "if a step was saved every 30 minutes"),
]
MONTH = 730 * 3600
"""Seconds of a month, as clouds count it."""
PART = 16 << 20
"""Bytes of a part, by default: a larger file is sent in parts."""
PRICES = ("gib_month", "put", "get")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("root", metavar="ROOT", help="the folder of the steps")
    parser.add_argument(
        "--every", type=duration, metavar="TIME", help="time between two takes (default: the median of the steps there)"
    )
    parser.add_argument(
        "--prices",
        metavar="FILE",
        help="a YAML or JSON file: gib_month, put and get (per 1,000 requests), and currency",
    )
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Show what the run at the URL costs."""
    prices = None if arguments.prices is None else read_prices(arguments.prices)
    if arguments.every == 0:
        raise ValueError("--every must be above 0, got 0")
    url = URL.parse(arguments.root)
    root = Root(url, options_of(arguments))
    stats = on_loop(root.folders()).committed
    found = on_loop(root.heads(stats))
    heads = {step: head for step, head in found.items() if isinstance(head, ManifestHead)}
    if not heads:
        raise SnapshotNotFoundError(f"{url}: there are no steps here")
    sizes = physical_sizes(heads, stats)
    nbytes = sum({file: size for each in sizes.values() for file, size in each.items()}.values())
    times = sorted(datetime.fromisoformat(head.created).timestamp() for head in heads.values())
    gaps = [later - earlier for earlier, later in pairwise(times)]
    every = arguments.every or (median(gaps) if gaps else 0.0)
    takes = MONTH / every if every else 0.0
    asked = {kind: round(count * takes) for kind, count in count_requests(heads[max(heads)]).items()}
    content: dict[str, Any] = {
        "url": str(url),
        "steps": len(heads),
        "bytes": nbytes,
        "objects": sum(len(head.sizes()) + 1 for head in heads.values()),
        "every_seconds": every or None,
        "takes_a_month": round(takes),
        "requests_a_month": asked,
    }
    rows = [["storage", size_text(nbytes)], *([kind.upper(), f"{count:,}"] for kind, count in asked.items())]
    columns = [Column(""), Column("a month", right=True)]
    if prices is not None:
        # a LIST costs as much as a PUT
        per = {"storage": nbytes / 2**30 * prices["gib_month"]}
        per |= {kind: count / 1000 * prices["get" if kind == "get" else "put"] for kind, count in asked.items()}
        per["total"] = sum(per.values())
        content |= {"currency": prices["currency"], "cost_a_month": per}
        rows = [[*row, f"{each:,.4f}"] for row, each in zip([*rows, ["total", ""]], per.values(), strict=True)]
        columns.append(Column(prices["currency"], right=True))
    pace = f"a take every {duration_text(every)}" if every else "no pace: pass --every"
    head = f"{counted(len(heads), 'step')}, {size_text(nbytes)} in {counted(content['objects'], 'object')}, {pace}"
    emit(arguments, content, [line(f"{url}: {head}"), ScreenTable(columns, rows)])
    for step in found.keys() - heads.keys():
        complain(f"step-{step}", f"not counted: {found[step]}")
    return ExitStatus.FOUND if found.keys() - heads.keys() else ExitStatus.OK


def count_requests(head: ManifestHead) -> dict[str, int]:
    """Return the requests of a manager's take on an object store, as docs/guides/performance.md has them."""
    parts = [math.ceil(size / PART) for size in head.sizes().values()]
    sent = sum(1 if count <= 1 else count + 2 for count in parts)
    others = head.world_size - 1  # each sends a part of the manifest, which the first rank reads
    return {"put": 2 + sent + others, "list": 1, "get": 2 + others}


def read_prices(name: str) -> Mapping[str, Any]:
    """Return the prices in a file. Raise ValueError, naming the file and the key, if one is missing or invalid."""
    prices = read_options(name)
    unknown = sorted(prices.keys() - {*PRICES, "currency"})
    if unknown:
        raise ValueError(f"{name}: keys must be {', '.join(PRICES)} and currency, got {unknown[0]!r}")
    for key in PRICES:
        value = prices.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name}: {key} must be a number of at least 0, got {value!r}")
    if not isinstance(prices.get("currency"), str) or not prices["currency"]:
        raise ValueError(f"{name}: currency must be a text such as USD, got {prices.get('currency')!r}")
    return prices
