"""Digests of whole tensors, without writing them: to prove that ranks have equal values."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial

from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.plan.layout import Extent, FilePlan
from snapshot.save.staging import Stager
from snapshot.state.leaves import Leaf

SHORT = 4 << 20
"""Bytes that are digested in less time than other threads need to begin."""


def digest_leaves(session: Session, leaves: Sequence[Leaf]) -> list[str]:
    """Return a digest of all bytes of each leaf. Threads compute them, or the accelerators that hold the leaves."""
    lanes = session.settings.lane_count() if sum(leaf.nbytes for leaf in leaves) > SHORT else 1
    files = _deal_leaves(leaves, lanes)
    stager = Stager(leaves, copies=False)
    digests = [""] * len(leaves)

    def digest(file: FilePlan) -> None:
        found = stager.digest_file(file, session.budget)
        assert found is not None
        for extent, each in zip(file.extents, found.digests, strict=True):
            digests[extent.leaf] = each

    with stager.digesting(files, session.budget):
        if len(files) > 1:
            run(gather_limited(files, partial(in_thread, digest), lanes))
        else:
            digest(files[0])
    stager.forget()
    return digests


def _deal_leaves(leaves: Sequence[Leaf], lanes: int) -> list[FilePlan]:
    """Distribute leaves over threads. A file that is never written describes the share of each."""
    lightest = [(0, lane) for lane in range(lanes)]
    extents: list[list[Extent]] = [[] for _ in range(lanes)]
    for number in sorted(range(len(leaves)), key=lambda each: -leaves[each].nbytes):
        load, lane = lightest[0]
        end = load + leaves[number].nbytes
        extents[lane].append(Extent(number, load, end))
        heapq.heapreplace(lightest, (end, lane))
    return [FilePlan(b"", tuple(each), each[-1].end if each else 0) for each in extents]
