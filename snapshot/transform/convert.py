"""A conversion: open, check, select, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snapshot.distributed.exchange import Exchange
from snapshot.events import emit
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.loading.mapping import map_document
from snapshot.loading.open import expect_files
from snapshot.manifest.document import Document
from snapshot.manifest.entries import AnyTensor
from snapshot.options import expect_positive
from snapshot.progress import Meter
from snapshot.reports import ConvertReport
from snapshot.save.compression import usual_budget
from snapshot.signing.seal import Seal
from snapshot.transform.export import Export, Plan
from snapshot.transform.joint_call import expect_checksums, expect_common_place, open_sources
from snapshot.transform.select import selected_locations
from snapshot.transform.sources import CheckpointStager, reads_ranges
from snapshot.transform.to_snapshot import Selection, write_as_snapshot

FORMATS = ("snapshot", "safetensors", "torch", "dcp")


@dataclass(frozen=True)
class Output:
    """The destination of a conversion, and its format."""

    url: URL
    options: Mapping[str, Any] | None
    to: str
    shard_bytes: int
    overwrite: bool
    durable: bool
    budget: int | None
    """Host memory for writing."""

    def check(self, sources: Sequence[URL], choice: Selection) -> None:
        """Raise for invalid arguments."""
        if self.to not in FORMATS:
            raise ValueError(f"to must be one of {', '.join(map(repr, FORMATS))}, got {self.to!r}")
        expect_positive("shard_bytes", self.shard_bytes)
        if choice.compression is not None and self.to != "snapshot":
            raise ValueError(f"compression must be None for to={self.to!r}: no other library reads such files")
        if self.url in sources:
            raise ValueError(f"{self.url}: the destination is the source; convert to another path")

    def write(
        self,
        source: Session,
        document: Document,
        choice: Selection,
        meter: Meter,
        *,
        exchange: Exchange,
        make_stager: Callable[..., CheckpointStager] = CheckpointStager,
        splits: Callable[[AnyTensor], bool] = reads_ranges,
    ) -> ConvertReport:
        """Write a checkpoint. Each rank writes a share. See `write_as_snapshot` for the functions."""
        expect_common_place(exchange, self.url)
        if self.to != "snapshot":
            return self._export(source, document, choice, meter, exchange=exchange, make_stager=make_stager)
        return write_as_snapshot(
            source,
            document,
            choice,
            self.url,
            open_session=lambda place: Session(
                place,
                self.options,
                durable=self.durable,
                budget=self.budget,
                default_budget=usual_budget(choice.compression),
            ),
            meter=meter,
            overwrite=self.overwrite,
            exchange=exchange,
            make_stager=make_stager,
            splits=splits,
        )

    def arguments(self) -> dict[str, object]:
        """Return the arguments that must be the same on all ranks."""
        return {
            "destination": self.url,
            "to": self.to,
            "shard_bytes": self.shard_bytes,
            "overwrite": self.overwrite,
        }

    def _export(
        self,
        source: Session,
        document: Document,
        choice: Selection,
        meter: Meter,
        *,
        exchange: Exchange,
        make_stager: Callable[..., CheckpointStager],
    ) -> ConvertReport:
        export, url = Export(source, document, choice), self.url
        name: str | None = None
        if self.to == "torch" or (self.to == "safetensors" and url.location.endswith(".safetensors")):
            above, _, name = url.location.rpartition("/")
            if not name or (not above and url.scheme != "file"):
                raise ValueError(f"{url}: must be the name of a file")
            url = URL(url.scheme, above or "/", url.query)
        target = Session(url, self.options, durable=self.durable, budget=self.budget or source.budget.limit)
        try:
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
                export.write(plan, target, meter, overwrite=self.overwrite, exchange=exchange, make_stager=make_stager)
            )
        finally:
            run(target.close())


def convert_checkpoint(
    origin: URL,
    options: Mapping[str, Any] | None,
    url: URL,
    target_options: Mapping[str, Any] | None,
    *,
    seal: Seal | None = None,
    to: str,
    choice: Selection,
    meter: Meter,
    shard_bytes: int,
    overwrite: bool,
    durable: bool,
    budget: int | None,
    exchange: Exchange,
) -> ConvertReport:
    """Convert the checkpoint at `origin` to one at `url`. The ranks of `exchange` share the work."""
    output = Output(
        url, target_options, to, shard_bytes, overwrite, durable, None if budget is None else max(1, budget // 2)
    )
    expect_positive("memory_budget_bytes", budget)
    output.check([origin], choice)
    began = time.perf_counter()
    source = Session(origin, options, budget=output.budget, seal=seal)
    try:
        arguments = {"source": origin, **output.arguments(), **choice.arguments()}
        [found] = open_sources(exchange, "convert", arguments, [source])
        document = map_document(source, found, choice.map)
        run(expect_files(source, document, selected_locations(document, choice.select, choice.exclude)))
        if choice.verify:
            expect_checksums(exchange, source, document)
        report = output.write(source, document, choice, meter, exchange=exchange)
    except BaseException as error:
        emit("failed", "convert", str(url), error=error)
        raise
    finally:
        run(source.close())
        meter.close()
    report = replace(report, seconds=time.perf_counter() - began)
    emit("converted", "convert", str(url), bytes=report.nbytes, seconds=round(report.seconds, 3))
    return report
