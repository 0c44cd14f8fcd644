"""The hosts of a job: their names, addresses and ranks, and the hosts that keep replicas of others."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import msgspec

ADDRESS = "SNAPSHOT_PEER_ADDRESS"
"""Environment variable: the address of this host in the job's network, on which it offers files to other hosts."""


class Host(msgspec.Struct, array_like=True):
    """A host of the job."""

    key: str
    """Identifies its near folder."""
    name: str
    ranks: list[int]
    address: str = ""
    """`address:port` of its uploader; empty if it offers nothing."""


def hosts_of(ranks: Sequence[tuple[str, str]]) -> list[Host]:
    """Return the hosts, in the order of their lowest ranks. `ranks`: key and name of the host of each rank.

    >>> [host.ranks for host in hosts_of([("a", "x"), ("b", "y"), ("a", "x")])]
    [[0, 2], [1]]
    """
    found: dict[str, Host] = {}
    for rank, (key, name) in enumerate(ranks):
        found.setdefault(key, Host(key, name, [])).ranks.append(rank)
    return list(found.values())


def partners(index: int, count: int, replicas: int) -> list[int]:
    """Return the hosts whose files host `index` of `count` keeps, too.

    Hosts that are far apart in the order of ranks form a clique, so that neighbours, which often fail together, are in
    different ones. Each host keeps the files of the `replicas` hosts before it in its clique.

    >>> [partners(index, 4, 1) for index in range(4)]
    [[2], [3], [0], [1]]
    >>> [partners(index, 3, 1) for index in range(3)]
    [[2], [0], [1]]
    """
    cliques = max(1, count // (replicas + 1))
    clique = [each for each in range(count) if each % cliques == index % cliques]
    at = clique.index(index)
    return [clique[at - back] for back in range(1, min(replicas, len(clique) - 1) + 1)]


def job_address() -> str:
    """Return this host's address in the job's network: the one that reaches the job's first host."""
    given = os.environ.get(ADDRESS)
    if given:
        if given in ("0.0.0.0", "::", ""):  # noqa: S104 - refused
            raise ValueError(f"{ADDRESS} must be one address of this host, got {given!r}, which means all of them")
        return given
    master = os.environ.get("MASTER_ADDR", "")
    if ":" in master:
        raise OSError(f"the job's network has IPv6 addresses ({master}); set {ADDRESS} to an IPv4 address of this host")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((master or "127.0.0.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
