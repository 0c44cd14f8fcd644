"""Ranges that a verification reads: cut into stretches, and shared by ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from snapshot.distributed.exchange import Exchange
from snapshot.loading.requests import ReadRequest
from snapshot.loading.stored_ranges import TABLE, Place
from snapshot.tensors.digest import BLOCK
from snapshot.verbs.joint_call import share_runs
from snapshot.verbs.verify_journal import Key

FINEST = 4
"""Pieces per rank's share, if a range is cut."""
STRETCH = 64 << 20
"""Bytes that are verified between two journal lines: the maximum that is read again after an interruption."""


@dataclass
class Stretch:
    """Ranges that are verified between two journal lines."""

    plain: list[ReadRequest] = field(default_factory=list)
    """Headers and long tables, whose digest covers the bytes themselves."""
    requests: list[ReadRequest] = field(default_factory=list)
    sums: list[Place] = field(default_factory=list)
    """Other libraries' archives, which have checksums."""
    nbytes: int = 0

    def add(self, request: ReadRequest) -> None:
        """Add a range."""
        plain = request.stored.serializer == TABLE and (not request.name or request.end - request.begin > BLOCK)
        (self.plain if plain else self.requests).append(request)
        self.nbytes += request.end - request.begin

    def keys(self) -> list[Key]:
        """Return the journal keys of all ranges."""
        ranges = [("range", each.location, each.begin, each.end) for each in (*self.plain, *self.requests)]
        return [*ranges, *(("sum", *place) for place in self.sums)]


def share_of(exchange: Exchange, everything: Stretch) -> Stretch:
    """Return this rank's ranges: one run of the storage order. Only a range beyond a rank's fair share is cut."""
    requests = [*everything.plain, *everything.requests]
    longest = max(STRETCH, everything.nbytes // (FINEST * exchange.world) // BLOCK * BLOCK)
    cut = list(cut_requests(requests, longest))
    ranges = share_runs(exchange, cut, [each.end - each.begin for each in cut])
    sums = share_runs(exchange, everything.sums, [end - begin for _, begin, end in everything.sums])
    made = Stretch(sums=sums[exchange.rank])
    for request in ranges[exchange.rank]:
        made.add(request)
    made.nbytes += sum(end - begin for _, begin, end in made.sums)
    return made


def locations_of(stretch: Stretch) -> set[str]:
    """Return the files of a stretch."""
    return {each.location for each in (*stretch.plain, *stretch.requests)} | {place[0] for place in stretch.sums}


def cut_stretches(everything: Stretch, done: set[Key]) -> Iterator[Stretch]:
    """Yield the remaining ranges in stretches."""
    made = Stretch()
    for request in cut_requests((*everything.plain, *everything.requests)):
        if ("range", request.location, request.begin, request.end) in done:
            continue
        made.add(request)
        if made.nbytes >= STRETCH:
            yield made
            made = Stretch()
    for place in everything.sums:
        if ("sum", *place) not in done:
            made.sums.append(place)
            made.nbytes += place[2] - place[1]
            if made.nbytes >= STRETCH:
                yield made
                made = Stretch()
    yield made


def cut_requests(requests: Iterable[ReadRequest], length: int = 0) -> Iterator[ReadRequest]:
    """Yield requests in storage order. Long ones with block digests are split."""
    length = length or STRETCH
    for request in sorted(requests, key=lambda request: (request.location, request.begin)):
        if request.end - request.begin <= length or request.stored.blocks is None:
            yield request
            continue
        for begin in range(request.begin, request.end, length):
            end = min(begin + length, request.end)
            yield ReadRequest(request.name, request.stored, request.location, begin, end)
