"""A conversion: open, check, select, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapshot.distributed.operation import Location, Operation
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.loading.mapping import map_document
from snapshot.loading.open import expect_files
from snapshot.manifest.document import Document
from snapshot.manifest.entries import AnyTensor
from snapshot.options import expect_positive
from snapshot.reports import ConvertReport
from snapshot.save.compression import usual_budget
from snapshot.transform.export import Export, Plan
from snapshot.transform.joint_call import expect_checksums, expect_common_place, open_sources
from snapshot.transform.select import selected_locations
from snapshot.transform.sources import CheckpointStager, reads_ranges
from snapshot.transform.to_snapshot import Selection, write_as_snapshot

FORMATS = ("snapshot", "safetensors", "torch", "dcp")


@dataclass(frozen=True)
class Output:
    """The destination of a conversion, and its format."""

    place: Location
    to: str
    shard_bytes: int
    overwrite: bool
    durable: bool

    def check(self, sources: Sequence[URL], choice: Selection) -> None:
        """Raise for invalid arguments."""
        if self.to not in FORMATS:
            raise ValueError(f"to must be one of {', '.join(map(repr, FORMATS))}, got {self.to!r}")
        expect_positive("shard_bytes", self.shard_bytes)
        if choice.compression is not None and self.to != "snapshot":
            raise ValueError(f"compression must be None for to={self.to!r}: no other library reads such files")
        if self.place.url in sources:
            raise ValueError(f"{self.place.url}: the destination is the source; convert to another path")

    def write(
        self,
        operation: Operation,
        source: Session,
        document: Document,
        choice: Selection,
        *,
        make_stager: Callable[..., CheckpointStager] = CheckpointStager,
        splits: Callable[[AnyTensor], bool] = reads_ranges,
    ) -> ConvertReport:
        """Write a checkpoint. Each rank writes a share. See `write_as_snapshot` for the functions."""
        expect_common_place(operation.exchange, self.place.url)
        if self.to != "snapshot":
            return self._export(operation, source, document, choice, make_stager)
        usual = usual_budget(choice.compression)
        return write_as_snapshot(
            source,
            document,
            choice,
            self.place.url,
            open_session=lambda place: Session(
                place, self.place.options, durable=self.durable, budget=operation.part(2), default_budget=usual
            ),
            meter=operation.meter,
            overwrite=self.overwrite,
            exchange=operation.exchange,
            make_stager=make_stager,
            splits=splits,
        )

    def arguments(self) -> dict[str, object]:
        """Return the arguments that must be the same on all ranks."""
        return {
            "destination": self.place.url,
            "to": self.to,
            "shard_bytes": self.shard_bytes,
            "overwrite": self.overwrite,
        }

    def _export(
        self,
        operation: Operation,
        source: Session,
        document: Document,
        choice: Selection,
        make_stager: Callable[..., CheckpointStager],
    ) -> ConvertReport:
        export, url, exchange = Export(source, document, choice), self.place.url, operation.exchange
        name: str | None = None
        if self.to == "torch" or (self.to == "safetensors" and url.location.endswith(".safetensors")):
            above, _, name = url.location.rpartition("/")
            if not name or (not above and url.scheme != "file"):
                raise ValueError(f"{url}: must be the name of a file")
            url = URL(url.scheme, above or "/", url.query)
        budget = operation.part(2) or source.budget.limit
        with Session(url, self.place.options, durable=self.durable, budget=budget) as target:
            plan: Plan
            if self.to == "torch":
                assert name is not None
                plan = export.torch_file(name)
            elif self.to == "safetensors":
                plan = export.safetensors(name, self.shard_bytes)
            else:
                lanes = exchange.agree(target.settings.lane_count(), sum, int, int)
                plan = export.dcp(lanes)
            return run(
                export.write(
                    plan,
                    target,
                    operation.meter,
                    overwrite=self.overwrite,
                    exchange=exchange,
                    make_stager=make_stager,
                )
            )


def convert_checkpoint(operation: Operation, origin: Location, output: Output, choice: Selection) -> ConvertReport:
    """Convert a checkpoint. Half of the memory is for reading it, and half for writing."""
    output.check([origin.url], choice)
    source = operation.open(origin, share=2)
    arguments = {"source": origin.url, **output.arguments(), **choice.arguments()}
    [found] = open_sources(operation.exchange, "convert", arguments, [source])
    document = map_document(source, found, choice.map)
    run(expect_files(source, document, selected_locations(document, choice.select, choice.exclude)))
    if choice.verify:
        expect_checksums(operation.exchange, source, document)
    report = output.write(operation, source, document, choice)
    return operation.done(report, "converted", bytes=report.nbytes)
