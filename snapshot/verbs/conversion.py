"""A conversion: open, check, select, write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapshot.events import emit
from snapshot.loading.checksums import expect_archive_checksums
from snapshot.loading.open import expect_files, open_document
from snapshot.loading.stored_ranges import stored_in
from snapshot.manifest.document import Document
from snapshot.options import expect_positive
from snapshot.progress import Meter
from snapshot.reports import ConvertReport
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.url import URL
from snapshot.verbs.export import Export, Plan
from snapshot.verbs.select import selected_locations
from snapshot.verbs.to_snapshot import Selection, write_as_snapshot

FORMATS = ("snapshot", "safetensors", "torch", "dcp")


def convert_checkpoint(
    origin: URL,
    options: Mapping[str, Any] | None,
    url: URL,
    target_options: Mapping[str, Any] | None,
    *,
    to: str,
    choice: Selection,
    meter: Meter,
    shard_bytes: int,
    overwrite: bool,
    durable: bool,
    budget: int | None,
) -> ConvertReport:
    """Convert the checkpoint at `origin` to one at `url`."""
    if to not in FORMATS:
        raise ValueError(f"to must be one of {', '.join(map(repr, FORMATS))}, got {to!r}")
    expect_positive("memory_budget_bytes", budget)
    expect_positive("shard_bytes", shard_bytes)
    if url == origin:
        raise ValueError(f"{url}: the destination is the source; convert to another path")
    began = time.perf_counter()
    half = None if budget is None else max(1, budget // 2)
    source = Session(origin, options, budget=half)
    try:
        document = run(open_document(source))
        run(expect_files(source, document, selected_locations(document, choice.select, choice.exclude)))
        if choice.verify:
            expect_archive_checksums(source, stored_in(document.manifest), document.files)
        if to == "snapshot":
            report = write_as_snapshot(
                source,
                document,
                choice,
                url,
                open_session=lambda place: Session(place, target_options, durable=durable, budget=half),
                meter=meter,
                overwrite=overwrite,
            )
        else:
            report = _export(
                source,
                document,
                choice,
                url,
                options=target_options,
                to=to,
                meter=meter,
                shard_bytes=shard_bytes,
                overwrite=overwrite,
                durable=durable,
            )
    except BaseException as error:
        emit("failed", "convert", str(url), error=error)
        raise
    finally:
        run(source.close())
        meter.close()
    report = replace(report, seconds=time.perf_counter() - began)
    emit("converted", "convert", str(url), bytes=report.nbytes, seconds=round(report.seconds, 3))
    return report


def _export(
    source: Session,
    document: Document,
    choice: Selection,
    url: URL,
    *,
    options: Mapping[str, Any] | None,
    to: str,
    meter: Meter,
    shard_bytes: int,
    overwrite: bool,
    durable: bool,
) -> ConvertReport:
    export = Export(source, document, choice)
    name: str | None = None
    if to == "torch" or (to == "safetensors" and url.location.endswith(".safetensors")):
        above, _, name = url.location.rpartition("/")
        if not name or (not above and url.scheme != "file"):
            raise ValueError(f"{url}: must be the name of a file")
        url = URL(url.scheme, above or "/", url.query)
    target = Session(url, options, durable=durable, budget=source.budget.limit)
    try:
        plan: Plan
        if to == "torch":
            assert name is not None
            plan = export.torch_file(name)
        elif to == "safetensors":
            plan = export.safetensors(name, shard_bytes)
        else:
            plan = export.dcp(target.settings.lane_count())
        return run(export.write(plan, target, meter, overwrite=overwrite))
    finally:
        run(target.close())
