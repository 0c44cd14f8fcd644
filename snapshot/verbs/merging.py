"""A merge: open all checkpoints, match their tensors, and write their mix in the form of the first one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError
from snapshot.events import emit, log
from snapshot.loading.open import expect_files
from snapshot.manifest.document import Document
from snapshot.manifest.entries import AnyTensor
from snapshot.manifest.validate import find_locations
from snapshot.options import expect_positive
from snapshot.progress import Meter
from snapshot.reports import ConvertReport
from snapshot.runtime.budget import MemoryBudget, Pool
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.signing.seal import Seal
from snapshot.text import counted, listed
from snapshot.url import URL
from snapshot.verbs.checkpoint_source import reads_ranges
from snapshot.verbs.conversion import Output
from snapshot.verbs.diff_bytes import Side, compare_pairs
from snapshot.verbs.joint_call import expect_checksums, open_sources
from snapshot.verbs.merge_plan import MergePlan, plan_merge
from snapshot.verbs.merge_source import MergeStager
from snapshot.verbs.mixing import Mix
from snapshot.verbs.select import selected_locations
from snapshot.verbs.to_snapshot import Selection

OTHERS = ("equal", "first")
_NEARLY = 1e-6


def merge_checkpoints(
    origins: Sequence[tuple[URL, Mapping[str, Any] | None]],
    output: Output,
    *,
    mix: Mix,
    choice: Selection,
    others: str,
    meter: Meter,
    budget: int | None,
    exchange: Exchange,
    seal: Seal | None = None,
) -> ConvertReport:
    """Write the mix of several checkpoints. The ranks of `exchange` share the work."""
    if others not in OTHERS:
        raise ValueError(f"others must be one of {', '.join(map(repr, OTHERS))}, got {others!r}")
    expect_positive("memory_budget_bytes", budget)
    output.check([url for url, _ in origins], choice)
    for url, _ in origins:
        if url.scheme == output.url.scheme and output.url.location.startswith(f"{url.location.rstrip('/')}/"):
            raise ValueError(f"{output.url}: the destination is inside the source {url}; merge to another path")
    began = time.perf_counter()
    quarter = None if budget is None else max(1, budget // 4)
    pools: list[Pool] = []

    def shared(limit: int) -> Pool:
        if not pools:
            pools.append(Pool(limit))
        return pools[0]

    sessions: list[Session] = []
    try:
        for url, options in origins:
            sessions.append(Session(url, options, budget=quarter, pool=shared, seal=seal))
        arguments = {
            "sources": [url for url, _ in origins],
            **output.arguments(),
            **choice.arguments(),
            "others": others,
            "mix": repr(mix),
        }
        documents = open_sources(exchange, "merge", arguments, sessions)
        sides = [Side(session, document) for session, document in zip(sessions, documents, strict=True)]
        plan = plan_merge(sides, choice)
        _expect_readable(sides, plan, choice, exchange)
        scratch = MemoryBudget(quarter or sessions[0].budget.total)
        changed = _compare(sides, plan, others, scratch, exchange)
        if abs(math.fsum(mix.factors) - 1) > _NEARLY and mix.keep == mix.divisor == 1:
            log.warning(
                "%s: the weights add up to %g, not 1; they are used as given", output.url, math.fsum(mix.factors)
            )

        def make_stager(session: Session, document: Document, *leaves: Any, **options: Any) -> MergeStager:
            return MergeStager(*leaves, sides=sides, plan=plan, mix=mix, scratch=scratch, **options)

        def splits(entry: AnyTensor) -> bool:
            group = plan.group(entry)
            return all(reads_ranges(each) for each in (group.entries if group is not None else [entry]))

        report = output.write(
            sides[0].session,
            sides[0].document,
            choice,
            meter,
            exchange=exchange,
            make_stager=make_stager,
            splits=splits,
        )
    except BaseException as error:
        emit("failed", "merge", str(output.url), error=error)
        raise
    finally:
        for session in sessions:
            run(session.close())
        meter.close()
    report = replace(report, seconds=time.perf_counter() - began, changed=(*report.changed, *changed))
    emit("merged", "merge", str(output.url), bytes=report.nbytes, seconds=round(report.seconds, 3))
    return report


def _expect_readable(sides: Sequence[Side], plan: MergePlan, choice: Selection, exchange: Exchange) -> None:
    """Raise unless all needed files exist, and match the checksums of other libraries' archives."""
    first = sides[0].document
    needed = [selected_locations(first, choice.select, choice.exclude)]
    for number in range(1, len(sides)):
        entries = {group.name: group.entries[number] for group in plan.groups.values()}
        entries |= {pair.name: pair.b for pair in (*plan.equal[number - 1], *plan.tied[number - 1])}
        needed.append(find_locations(entries, sides[number].document.files))
    for side, locations in zip(sides, needed, strict=True):
        run(expect_files(side.session, side.document, locations))
        if choice.verify:
            expect_checksums(exchange, side.session, side.document)


def _compare(
    sides: Sequence[Side], plan: MergePlan, others: str, memory: MemoryBudget, exchange: Exchange
) -> tuple[str, ...]:
    """Compare the tensors that must be equal. Return a line for each that is taken from the first checkpoint."""
    differing: dict[str, list[str]] = {}
    torn: list[str] = []
    for number, side in enumerate(sides[1:]):
        equal, tied = plan.equal[number], plan.tied[number]
        if equal:
            run(compare_pairs(sides[0], side, equal, memory, Meter("compare", None), exchange=exchange))
        if tied:
            run(compare_pairs(side, side, tied, memory, Meter("compare", None), exchange=exchange))
        for pair in equal:
            if pair.differs:
                differing.setdefault(pair.name, []).append(str(side.session.url))
        torn += [
            f"{pair.name}: are one tensor in the first source, but differ in {side.session.url}"
            for pair in tied
            if pair.differs
        ]
    lines = [f"{name}: differs in {', '.join(where)}" for name, where in differing.items()]
    if others == "first" and not torn:
        return tuple(f"{line}; the first source's values are kept" for line in lines)
    if lines or torn:
        misfits = [*lines, *torn]
        error = RestoreError(
            f"{sides[0].session.url}: {counted(len(misfits), 'tensor')} cannot be averaged and must be equal in all "
            f"sources:{listed(misfits)}",
            misfits,
        )
        if lines and not torn:
            error.cure = "pass others='first' to keep the first source's values, or exclude them"
        raise error
    return ()
