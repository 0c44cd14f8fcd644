"""The call of a verb on checkpoints: its selection, and the agreement of several ranks on it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec
import torch

from snapshot.distributed.exchange import LEADER, Exchange, expect_same_verb
from snapshot.errors import RestoreError, SnapshotError, StorageError, UnsafeObjectError
from snapshot.formats.foreign import ForeignDocument, ForeignStorage
from snapshot.formats.pickled_objects import INLINE, TRUST, is_refused
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.io.session import Session, signer_of
from snapshot.io.storage import Storage
from snapshot.io.url import PER_HOST, URL
from snapshot.loading.archive_checksums import expect_sound_archives, find_archives, group_by_archive
from snapshot.loading.open import Opened, expect_conditions, expect_files, open_checkpoint
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document, check_tensor, find_locations
from snapshot.manifest.entries import is_leaf, stored_in
from snapshot.manifest.paths import add_parents
from snapshot.manifest.rank_view import RankView, make_rank_view, rename_entries, suggest_names
from snapshot.manifest.values import Entry
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.layout import PartitionItem, partition_items
from snapshot.plan.names import Rename, compile_rename, find_unmatched, matcher
from snapshot.tensors.digest import digest_range
from snapshot.text import listed


def chosen_of_ranks(
    manifest: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str], rename: Rename | None
) -> dict[str, Any]:
    """Return the selected entries of a manifest under their new names.

    Entries that several ranks share are listed under one of them, and the containers of all ranks name them.
    """
    union: dict[str, Any] = {}
    ranks: dict[str, dict[str, Any]] = {}
    for path, entry in manifest.items():
        number, _, logical = path.partition("/")
        ranks.setdefault(number, {})[logical] = entry
        union.setdefault(logical, entry)
    change = change_of(rename, union)
    made: dict[str, Any] = {}
    for number, own in ranks.items():
        seen = dict(own)
        rest = list(own)
        while rest:
            path = rest.pop()
            entry = seen[path]
            for name in entry.components():
                below = f"{path}/{name}"
                if below not in seen and below in union:
                    seen[below] = union[below]
                    rest.append(below)
        kept = _select_paths(seen, select, exclude)
        known = {change(path): path in own for path in kept}
        for path, entry in _rename_paths(kept, change).items():
            if known.get(path, True):  # its own, or a container that a new name implies
                made[f"{number}/{path}"] = entry
    return made


def choose_entries(
    entries: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str], rename: Rename | None
) -> dict[str, Any]:
    """Return the selected entries of one view under their new names."""
    return _rename_paths(_select_paths(entries, select, exclude), change_of(rename, entries))


def change_of(rename: Rename | None, known: Mapping[str, Any]) -> Callable[[str], str]:
    """Return the renaming function. Raise if a name does not exist."""
    if rename is None:
        return str
    change, unmatched_names = compile_rename(rename, known)
    if unmatched_names:
        lines = [f"{name} is not in the checkpoint; {suggest_names(name, known)}" for name in unmatched_names]
        raise RestoreError(f"rename does not fit:{listed(lines)}", lines)
    return change


def _select_paths(entries: Mapping[str, Any], select: Sequence[str], exclude: Sequence[str]) -> dict[str, Any]:
    if not (select or exclude):
        return dict(entries)
    included, excluded = matcher(select or ["**"]), matcher(exclude)
    leaves = {path for path, entry in entries.items() if is_leaf(entry) and included(path) and not excluded(path)}
    return _with_containers(entries, leaves)


def expect_something(entries: Mapping[str, Any]) -> None:
    """Raise if nothing is selected."""
    if not entries:
        raise RestoreError("the selection is empty")


def _rename_paths(entries: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    if change is str:
        return entries
    for path in entries:
        name = change(path)
        if not name or "" in name.split("/"):
            raise RestoreError(f"{path}: rename must give it a valid path, got {name!r}", [path])
    made = rename_entries(entries, change)
    held = Counter(path.rpartition("/")[0] for path in made)
    for path, entry in made.items():
        above = path.rpartition("/")[0]
        if above and not made[above].is_container:
            raise RestoreError(f"{path}: rename moves it below {above}, which is not a container", [path])
        whole = all(f"{path}/{name}" in made for name in entry.components())
        if entry.is_container and not (whole and held[path] == entry.width):
            raise RestoreError(f"{path}: rename must not add or remove elements of a sequence", [path])
    return made


def _with_containers(entries: Mapping[str, Any], leaves: set[str]) -> dict[str, Any]:
    """Return leaves with their containers, without the containers' other contents."""
    needed = leaves | add_parents(leaves)
    kept = {}
    for path, entry in entries.items():
        if path not in needed:
            continue
        kept[path] = entry
        if entry.width:
            gone = [f"{path}/{name}" not in needed for name in entry.components()]
            if any(gone) and not entry.is_keyed:
                raise RestoreError(f"{path}: a sequence can only be selected whole or not at all", [path])
            kept[path] = entry.without_children(gone)
    return kept


def expect_matches(document: Document, select: Sequence[str], exclude: Sequence[str]) -> None:
    """Raise if a glob matches nothing."""
    paths = [path.partition("/")[2] for path in document.manifest]
    missing = find_unmatched([*select, *exclude], paths) if select or exclude else []
    if missing:
        raise RestoreError(f"the glob {missing[0]!r} matches nothing in the checkpoint", missing)


def select_entries(document: Document, select: Sequence[str], exclude: Sequence[str]) -> dict[str, Any]:
    """Return the entries of all ranks that are selected, by their paths with a rank."""
    wanted, unwanted = matcher(select or ["**"]), matcher(exclude)
    return {
        path: entry
        for path, entry in document.manifest.items()
        if wanted(path.partition("/")[2]) and not unwanted(path.partition("/")[2])
    }


def selected_locations(document: Document, select: Sequence[str], exclude: Sequence[str]) -> set[str]:
    """Return the files to check before a selection is read: all of the snapshot, and the needed ones of its base."""
    found = find_locations(document.manifest, document.files)
    if document.base is None:
        return found
    chosen = select_entries(document, select, exclude)
    return (found & document.own_files.keys()) | find_locations(chosen, document.files)


def expect_selected(opened: Opened, select: Sequence[str], exclude: Sequence[str]) -> None:
    """Raise unless all files of a snapshot are there, and those of a selection may be used."""
    document = opened.document
    run(expect_files(opened, selected_locations(document, select, exclude), conditions=False))
    if isinstance(document, ForeignDocument) and document.conditions:
        chosen = select_entries(document, select, exclude)
        run(expect_conditions(opened, find_locations(chosen, document.files)))


def seen_by_rank(document: Document, select: Sequence[str], exclude: Sequence[str], rename: Rename | None) -> RankView:
    """Return rank 0's view of a checkpoint, with all sharded and shared entries.

    `gone` has the entries that only other ranks had.
    """
    expect_matches(document, select, exclude)
    view = make_rank_view(document.manifest, 0, document.world_size, 1)
    wanted, unwanted = matcher(select or ["**"]), matcher(exclude)
    gone = [path for path in view.gone if wanted(path.partition("/")[2]) and not unwanted(path.partition("/")[2])]
    kept = choose_entries(view.entries, select, exclude, rename)
    if select or exclude:
        expect_something(kept)
    return RankView(kept, gone=gone)


def expect_sound(entries: Mapping[str, Any], document: Document) -> None:
    """Raise for invalid tensor entries, before their bytes are copied part by part."""
    for path, entry in entries.items():
        for _, tensor in entry.tensors():
            check_tensor(path, tensor, document.files)


class Objects:
    """The values of objects that are stored outside the manifest."""

    def __init__(self, opened: Opened, *, allow_pickle: bool, verify: bool) -> None:
        self._opened = opened
        self._document = opened.document
        self._allow_pickle = allow_pickle
        self._verify = verify

    def read(self, entries: Mapping[str, Any], *, all_or_none: bool = True) -> dict[str, Any]:
        """Return the values of entries.

        If not `all_or_none`, skip entries that need a pickle. Otherwise `UnsafeObjectError` names all of them.
        """
        refused = [
            f"{path}: {entry.obj_type}"
            for path, entry in entries.items()
            if is_refused(entry) and not self._allow_pickle
        ]
        if refused:
            raise UnsafeObjectError(
                f"{self._opened.url}: some objects can only be read by running a pickle; leave them out with "
                f"exclude=[...], or {TRUST}:{listed(refused)}"
            )
        run(expect_files(self._opened, find_locations(entries, self._document.files)))
        read_plan = ReadPlan(self._document.files, allow_pickle=self._allow_pickle)
        for path, entry in entries.items():
            read_plan.new(path, entry)
        read_plan.execute(self._opened, verify=self._verify, all_or_none=all_or_none)
        return read_plan.values

    def bytes_of(self, entries: Mapping[str, e.ObjectEntry]) -> dict[str, bytearray]:
        """Return the stored bytes of objects."""
        return self.read(
            {path: msgspec.structs.replace(each, serializer="bytearray") for path, each in entries.items()}
        )


def is_foreign_object(document: Document, entry: Entry) -> bool:
    """Return True if an entry is an object from another library, which may hold plain values."""
    return entry.is_object and isinstance(document, ForeignDocument)


def clean_extra(entry: e.AnyTensor) -> e.Extra | None:
    """Return an entry's `extra` without the fields that only other formats need."""
    if entry.extra is None:
        return None
    kept = msgspec.structs.replace(entry.extra, strides=None, storage_offset=None)
    return None if kept == e.PLAIN else kept


T = TypeVar("T")
Read = Callable[[Session], Coroutine[Any, Any, Opened]]
LONGEST = 300
"""The maximum length of an argument in an error."""
AT_ONCE = 16
"""The maximum number of concurrent requests."""


class Call(msgspec.Struct, array_like=True):
    """A rank's call, with the arguments that must be the same on all ranks as text."""

    verb: str
    arguments: dict[str, str]


class FoundCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint that the leader opened. All ranks must read this one."""

    save_id: str
    description: str = ""
    """For another library's checkpoint: a digest of its entries."""
    tokens: dict[str, str] = {}
    """For another library's checkpoint: tokens of its files, which may be replaced one by one."""


def open_sources(
    exchange: Exchange,
    verb: str,
    arguments: Mapping[str, object],
    sessions: Sequence[Session],
    read: Read = open_checkpoint,
) -> list[Opened]:
    """Open checkpoints. Several ranks agree on the call first, and raise unless all of them open the same saves.

    From then on, reading raises if a file of another library's checkpoint was replaced.
    """
    opened: list[Opened] = []

    def lead(calls: list[Call]) -> list[FoundCheckpoint]:
        expect_same_calls(calls)
        opened.extend(_open_first(session, read) for session in sessions)
        return [] if exchange.alone else [_describe(each.document) for each in opened]

    given = {**arguments, "keys": [signer_of(session.seal) for session in sessions]}
    mine = Call(verb, {name: _text_of(value) for name, value in given.items()})
    found = exchange.agree(mine, lead, Call, list[FoundCheckpoint])
    if exchange.rank == LEADER:
        return opened
    return [_open_same(session, read, each) for session, each in zip(sessions, found, strict=True)]


def _open_first(session: Session, read: Read) -> Opened:
    """Open a checkpoint, and record which files it has."""
    opened = run(read(session))
    if isinstance(opened.document, ForeignDocument):
        _keep_tokens(opened, run(_find_tokens(opened.storage, opened.document.files.keys() - {INLINE})))
    return opened


async def _find_tokens(storage: Storage, names: Iterable[str]) -> dict[str, str]:
    """Return the tokens of the files that exist. The verb reports the others."""

    async def look(name: str) -> tuple[str, str]:
        with suppress(StorageError):
            return name, (await storage.stat(name)).token
        return name, ""

    return {name: token for name, token in await gather_limited(names, look, AT_ONCE) if token}


def _open_same(session: Session, read: Read, found: FoundCheckpoint) -> Opened:
    """Open the checkpoint that the leader opened."""
    for _ in range(2):
        opened = run(read(session))
        if isinstance(opened.document, ForeignDocument):
            _keep_tokens(opened, found.tokens)
        if _describe(opened.document) == found:
            return opened
    raise SnapshotError(f"{session.url}: was replaced while the ranks opened it; start again")


def _keep_tokens(opened: Opened, tokens: dict[str, str]) -> None:
    cast(ForeignDocument, opened.document).tokens = tokens
    cast(ForeignStorage, opened.stored).expect_tokens(tokens)


def tokens_of(document: Document) -> dict[str, str]:
    """Return the tokens of the files of another library's checkpoint."""
    return document.tokens if isinstance(document, ForeignDocument) else {}


def _describe(document: Document) -> FoundCheckpoint:
    if not isinstance(document, ForeignDocument):
        return FoundCheckpoint(document.save_id)
    entries = digest_range(msgspec.msgpack.encode(list(document.manifest.items())))
    return FoundCheckpoint(document.save_id, entries, document.tokens)


def expect_same_calls(calls: Sequence[Call]) -> None:
    """Raise if the ranks called different verbs, or with different arguments.

    >>> expect_same_calls([Call("copy", {"url": "a"}), Call("copy", {"url": "b"})])
    Traceback (most recent call last):
    snapshot.errors.SnapshotError: all ranks must call with the same arguments, got url: a on rank 0, b on rank 1
    """
    expect_same_verb(calls)
    wrong = []
    for name, first in calls[LEADER].arguments.items():
        values = [call.arguments[name] for call in calls]
        other = next((rank for rank, value in enumerate(values) if value != first), None)
        if other is not None:
            wrong.append(f"{name}: {first[:LONGEST]} on rank {LEADER}, {values[other][:LONGEST]} on rank {other}")
    if wrong:
        raise SnapshotError(f"all ranks must call with the same arguments, got {'; '.join(wrong)}")


def _text_of(value: object) -> str:
    """Return an argument as text. Functions and other objects are known by their names only."""
    if isinstance(value, URL):
        return str(value)
    if isinstance(value, Mapping):
        return repr(sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text_of, value)) or "nothing"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, TensorMap)):
        return str(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def expect_same_plan(exchange: Exchange, items: Iterable[object]) -> None:
    """Raise unless all ranks plan the same items: each computes all shares, but functions may differ between ranks."""

    def lead(plans: list[str]) -> bool:
        expect_equal_plans(plans)
        return True

    if not exchange.alone:
        exchange.agree(digest_plan(items), lead, str, bool)


def digest_plan(items: Iterable[object]) -> str:
    """Return a digest of planned items."""
    return digest_range(repr(list(items)).encode())


def expect_equal_plans(plans: Sequence[str]) -> None:
    """Raise unless the digests of all ranks' plans are equal."""
    other = next((rank for rank, plan in enumerate(plans) if plan != plans[LEADER]), None)
    if other is not None:
        raise SnapshotError(
            f"all ranks must plan the same work, got another plan on rank {other}; pass the same rename and map"
        )


def expect_common_place(exchange: Exchange, url: URL) -> None:
    """Raise if several ranks would write to a storage that each host has for itself."""
    if not exchange.alone and url.scheme == PER_HOST:
        raise SnapshotError(f"{url}: must be a storage that all ranks share; each host has this one for itself")


def share_whole(exchange: Exchange, items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Return each rank's items, in their order. Long ones are dealt first, each to the rank with the fewest bytes."""
    pieces = [PartitionItem((size,), 1, splits=False) for size in sizes]
    return [[items[each.item] for each in share] for share in partition_items(pieces, [0] * exchange.world)]


def share_runs(exchange: Exchange, items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Return each rank's items: one run each, of about the same number of bytes.

    >>> from snapshot.distributed.exchange import solo_exchange
    >>> share_runs(solo_exchange("verify"), "abc", [1, 2, 3])
    [['a', 'b', 'c']]
    """
    shares: list[list[T]] = [[] for _ in range(exchange.world)]
    total = max(1, sum(sizes))
    for item, size, end in zip(items, sizes, itertools.accumulate(sizes), strict=True):
        middle = end - size + size // 2
        shares[min(middle * exchange.world // total, exchange.world - 1)].append(item)
    return shares


def expect_checksums(exchange: Exchange, opened: Opened, manifest: Mapping[str, Any] | None = None) -> None:
    """Raise if the archives of other libraries do not match their checksums. Each rank reads a share.

    With the part of the manifest that is used, only its members of long archives are read.
    """
    found = find_archives(stored_in(opened.document.manifest if manifest is None else manifest), opened.document.files)
    parts = group_by_archive(found)
    archives = sorted(parts)
    shares = share_whole(exchange, archives, [end - begin for _, begin, end in archives])
    expect_sound_archives(opened, shares[exchange.rank], None if manifest is None else parts)
