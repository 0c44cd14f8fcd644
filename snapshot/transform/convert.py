"""Conversion, by `convert_checkpoint`: a checkpoint written as a snapshot, or as files of another format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from snapshot.distributed.exchange import LEADER, Exchange
from snapshot.distributed.operation import Operation
from snapshot.formats import dcp_notice, hugging_face, registry
from snapshot.formats.hugging_face import ExtraFiles
from snapshot.formats.registry import SNAPSHOT
from snapshot.io.loop import run
from snapshot.io.url import URL, Location
from snapshot.loading.mapping import map_checkpoint
from snapshot.loading.open import Opened
from snapshot.manifest.document import METADATA
from snapshot.manifest.entries import AnyTensor
from snapshot.reports import ConvertReport
from snapshot.transform.call import (
    expect_checksums,
    expect_common_place,
    expect_selected,
    open_sources,
    select_entries,
)
from snapshot.transform.export import Export, ExportPlan, ExportRequest
from snapshot.transform.sources import CheckpointSource, reads_ranges
from snapshot.transform.target import (
    Selection,
    Target,
    expand_chosen_trees,
    suffix_of,
    write_as_snapshot,
)


def expect_writable(target: Target, sources: Sequence[URL]) -> None:
    """Raise if the target's arguments do not fit each other, or if it is one of the sources."""
    url, form = target.place.url, target.format
    if target.compression is not None and form != SNAPSHOT:
        raise ValueError(f"compression must be None for to={form!r}: no other library reads such files")
    written = registry.find_writer(form)
    if written.needs_options and target.format_options is None:
        raise ValueError(f"format_options must be {written.options.replace(':', '.')} for to={form!r}, got None")
    if target.files is not None and (form == SNAPSHOT or written.one_file or suffix_of(url) in written.suffixes):
        raise ValueError(f"files must be None for {url}, which is not a folder of another format")
    if url in sources:
        raise ValueError(f"{url}: the destination is the source; convert to another path")


FOUND_FIRST = (METADATA, dcp_notice.METADATA, hugging_face.INDEX, hugging_face.ALONE)
"""Files of the formats that are asked before those of other packages, whose checkpoint they would hide."""


def write_checkpoint(
    operation: Operation,
    opened: Opened,
    choice: Selection,
    target: Target,
    *,
    make_source: Callable[..., CheckpointSource] = CheckpointSource,
    splits: Callable[[AnyTensor], bool] = reads_ranges,
    prepared: Any = None,
) -> ConvertReport:
    """Write a checkpoint. Each rank writes a share. See `write_as_snapshot` for the functions.

    `prepared`: what the format has read before.
    """
    url, exchange = target.place.url, operation.exchange
    expect_common_place(exchange, url)
    if target.format == SNAPSHOT:
        return write_as_snapshot(opened, choice, target, operation, make_source=make_source, splits=splits)
    written = registry.find_writer(target.format)
    name: str | None = None
    if written.one_file or suffix_of(url) in written.suffixes:
        above, _, name = url.location.rpartition("/")
        if not name or (not above and url.scheme != "file"):
            raise ValueError(f"{url}: must be the name of a file")
        url = URL(url.scheme, above or "/", url.query)
    export = Export(opened, choice)
    with target.open(operation, url, default_budget=opened.budget.limit) as made:
        plan: ExportPlan = registry.resolve(written, written.plan)(
            export, ExportRequest(operation, opened, target, name, prepared, made)
        )
        if not registry.is_own(written):
            plan.expect_filled()
            if name is None:
                plan.others = (*plan.others, *FOUND_FIRST)
        if target.files is not None:
            add_files(plan, target, exchange)
        overwrite = target.overwrite
        work = export.write(
            plan, made, operation.meter, overwrite=overwrite, exchange=exchange, make_source=make_source
        )
        return run(work)


def add_files(plan: ExportPlan, target: Target, exchange: Exchange) -> None:
    """Add the files beside the weights. Rank 0 reads and writes them."""
    files = ExtraFiles(target.files).read() if exchange.rank == LEADER else {}
    names = exchange.agree(True, lambda _: list(files), bool, list[str])
    taken = {*plan.markers, *(name for name, _ in plan.files), *(name for name, _ in plan.last())}
    if twice := sorted(taken.intersection(names)):
        raise ValueError(f"files must not have {twice[0]!r}, which to={target.format!r} writes")
    index = plan.last
    plan.last = lambda: [*((name, files.get(name, b"")) for name in names), *index()]
    plan.markers = (*plan.markers, *names)


def convert_checkpoint(operation: Operation, origin: Location, target: Target, choice: Selection) -> ConvertReport:
    """Convert a checkpoint. Half of the memory is for reading it, and half for writing."""
    expect_writable(target, [origin.url])
    source = operation.open(origin, divisor=2)
    arguments = {"source": origin.url, **target.agreed(), **choice.arguments()}
    [found] = open_sources(operation.exchange, "convert", arguments, [source])
    expand_chosen_trees(found, choice)
    prepared, tensor_map = None, choice.map
    written = registry.find_writer(target.format)
    if written.prepare:
        prepared = registry.resolve(written, written.prepare)(operation, target)
        if tensor_map is None:
            tensor_map = registry.resolve(written, written.choose_map)(prepared, found.document.manifest)
    opened = map_checkpoint(found, tensor_map)
    document = opened.document
    expect_selected(opened, choice.select, choice.exclude)
    if choice.verify:
        expect_checksums(operation.exchange, opened, select_entries(document, choice.select, choice.exclude))
    report = write_checkpoint(operation, opened, choice, target, prepared=prepared)
    return operation.done(report, "converted", bytes=report.nbytes)
