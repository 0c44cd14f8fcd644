"""A conversion: open, check, select, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from snapshot.distributed.operation import Operation
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL, Location
from snapshot.loading.mapping import map_document
from snapshot.loading.open import expect_files
from snapshot.manifest.document import Document
from snapshot.manifest.entries import AnyTensor
from snapshot.reports import ConvertReport
from snapshot.transform.export import Export, Plan
from snapshot.transform.joint_call import expect_checksums, expect_common_place, open_sources
from snapshot.transform.select import selected_locations
from snapshot.transform.sources import CheckpointStager, reads_ranges
from snapshot.transform.target import Target, suffix_of
from snapshot.transform.to_snapshot import Selection, write_as_snapshot


def expect_writable(target: Target, sources: Sequence[URL]) -> None:
    """Raise if the target's arguments do not fit each other, or if it is one of the sources."""
    url, form = target.place.url, target.format
    if target.compression is not None and form != "snapshot":
        raise ValueError(f"compression must be None for to={form!r}: no other library reads such files")
    if url in sources:
        raise ValueError(f"{url}: the destination is the source; convert to another path")


def write_checkpoint(
    operation: Operation,
    source: Session,
    document: Document,
    choice: Selection,
    target: Target,
    *,
    make_stager: Callable[..., CheckpointStager] = CheckpointStager,
    splits: Callable[[AnyTensor], bool] = reads_ranges,
) -> ConvertReport:
    """Write a checkpoint. Each rank writes a share. See `write_as_snapshot` for the functions."""
    url, exchange = target.place.url, operation.exchange
    expect_common_place(exchange, url)
    if target.format == "snapshot":
        return write_as_snapshot(source, document, choice, target, operation, make_stager=make_stager, splits=splits)
    export = Export(source, document, choice)
    name: str | None = None
    if target.format == "torch" or (target.format == "safetensors" and suffix_of(url) == ".safetensors"):
        above, _, name = url.location.rpartition("/")
        if not name or (not above and url.scheme != "file"):
            raise ValueError(f"{url}: must be the name of a file")
        url = URL(url.scheme, above or "/", url.query)
    with target.open(operation, url, default_budget=source.budget.limit) as made:
        plan: Plan
        if target.format == "torch":
            assert name is not None
            plan = export.torch_file(name)
        elif target.format == "safetensors":
            plan = export.safetensors(name, target.shard_bytes)
        else:
            lanes = exchange.agree(made.settings.lane_count(), sum, int, int)
            plan = export.dcp(lanes)
        overwrite = target.overwrite
        work = export.write(
            plan, made, operation.meter, overwrite=overwrite, exchange=exchange, make_stager=make_stager
        )
        return run(work)


def convert_checkpoint(operation: Operation, origin: Location, target: Target, choice: Selection) -> ConvertReport:
    """Convert a checkpoint. Half of the memory is for reading it, and half for writing."""
    expect_writable(target, [origin.url])
    source = operation.open(origin, share=2)
    arguments = {"source": origin.url, **target.agreed(), **choice.arguments()}
    [found] = open_sources(operation.exchange, "convert", arguments, [source])
    document = map_document(source, found, choice.map)
    run(expect_files(source, document, selected_locations(document, choice.select, choice.exclude)))
    if choice.verify:
        expect_checksums(operation.exchange, source, document)
    report = write_checkpoint(operation, source, document, choice, target)
    return operation.done(report, "converted", bytes=report.nbytes)
