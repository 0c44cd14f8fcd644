"""Plain values from archives of other libraries that torch's `weights_only` reader refuses.

That reader rejects NumPy arrays, which are in the states of random number generators and metrics.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.formats import safe_pickle as p
from snapshot.formats import zip_directory
from snapshot.formats.pickle_scan import expect_stored
from snapshot.formats.to_entries import (
    RebuiltTensor,
    estimate_length,
    limit_nodes,
    make_numpy_value,
    make_scalar,
    rebuild_tensor,
)
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE
from snapshot.tensors.strides import measure_span
from snapshot.text import with_article


class NotPlainError(Exception):
    """A value that only running a pickle could create."""


def read_plain_value(path: str, data: bytes | bytearray, stored: int | None = None) -> Any:
    """Return the value in a torch archive of containers, numbers, texts, arrays and tensors only.

    `stored` is the length of the archive on storage, if it was decompressed.
    """
    try:
        begin, end = zip_directory.find_directory(bytes(data[-zip_directory.TAIL :]), len(data))
        members = zip_directory.read_members(bytes(data[begin:end]), begin)
        held = {each.name.partition("/")[2]: each for each in members}
        content = _read_member(data, held["data.pkl"])
        length = expect_stored(len(content), len(data) if stored is None else stored, "its pickle")
        return _Builder(data, held, length).build_value(p.load_pickle(content, path, length), 0)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise NotPlainError(str(error)) from error


def _read_member(data: bytes | bytearray, member: zip_directory.ZipMember) -> bytes:
    at = member.header + zip_directory.find_data_begin(
        bytes(data[member.header : member.header + zip_directory.HEADER])
    )
    if member.method != zip_directory.STORED:
        raise ValueError("the archive is compressed")
    return bytes(data[at : at + member.size])


def read_pickle(data: bytes | bytearray) -> bytes:
    """Return the pickle in a torch archive."""
    begin, end = zip_directory.find_directory(bytes(data[-zip_directory.TAIL :]), len(data))
    found = {each.name.partition("/")[2]: each for each in zip_directory.read_members(bytes(data[begin:end]), begin)}
    return _read_member(data, found["data.pkl"])


class _Builder:
    """Builder of values from stand-ins."""

    def __init__(self, data: bytes | bytearray, members: dict[str, zip_directory.ZipMember], length: int) -> None:
        self._data = data
        self._members = members
        self._left = limit_nodes(length)
        self._room = (1 << 24) + 8 * len(data)
        """Remaining number of bytes to copy: repeated values and views can each be long."""

    def _find_member(self, name: str) -> bytes:
        member = self._members.get(name)
        return b"" if member is None else _read_member(self._data, member)

    def _spend(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise NotPlainError("too many repeated values")

    def build_value(self, value: Any, depth: int) -> Any:  # noqa: PLR0911 - one for each kind
        """Return the value of a stand-in, or of a container of stand-ins."""
        self._left -= 1
        if self._left < 0 or depth > 200:
            raise NotPlainError("too many repeated values, or nested too deeply")
        kind = type(value)
        if isinstance(value, dict):
            items = [(self._build_key(key), self.build_value(child, depth + 1)) for key, child in dict.items(value)]
            return _DICTS[kind](value, items) if kind in _DICTS else _refuse_value(value)
        if kind in (list, tuple, set, frozenset):
            return kind(self.build_value(child, depth + 1) for child in value)
        if kind is p.Deque:
            return collections.deque([self.build_value(child, depth + 1) for child in list(value)], value.maxlen)
        self._spend(estimate_length(value))
        entry = make_scalar(value)
        if entry is not None:
            return entry.value()
        tensor = rebuild_tensor(value)
        if tensor is not None:
            return self._build_tensor(tensor)
        array = make_numpy_value(value)
        if array is None:
            return _refuse_value(value)
        self._spend(array.nbytes)
        return array.copy()

    def _build_key(self, key: Any) -> Any:
        entry = make_scalar(key)
        return _refuse_value(key) if entry is None else entry.value()

    def _build_tensor(self, found: RebuiltTensor) -> torch.Tensor:
        data = self._find_member(f"data/{found.storage}")
        if found.dtype not in ITEMSIZE:
            return _refuse_value(found)  # type: ignore[no-any-return]
        self._spend(len(data) + math.prod(found.shape) * ITEMSIZE[found.dtype])
        reach = (found.offset + measure_span(found.shape, found.strides)) * ITEMSIZE[found.dtype]
        if reach > len(data) or 0 in found.strides or (self._find_member("byteorder") or b"little") != b"little":
            return _refuse_value(found)  # type: ignore[no-any-return]
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(BY_NAME[found.dtype]) if data else None
        if held is None:
            return torch.empty(found.shape, dtype=BY_NAME[found.dtype])
        made = held.as_strided(found.shape, found.strides, found.offset).clone()
        made = made.conj() if "conj" in found.bits else made
        made = (torch._neg_view(made) if "neg" in found.bits else made).resolve_neg().resolve_conj()
        return (
            torch.nn.Parameter(made, found.requires_grad)
            if found.subclass
            else made.requires_grad_(found.requires_grad)
        )


def _refuse_value(value: Any) -> Any:
    raise NotPlainError(with_article(getattr(value, "name", type(value).__name__)))


def _make_defaultdict(value: Any, items: list[tuple[Any, Any]]) -> Any:
    factory = vars(value).get("factory")
    name = str(getattr(factory, "name", getattr(factory, "__name__", ""))).rpartition(".")[2]
    known = {each.__name__: each for each in (list, dict, set, tuple, int, float, str, bool)}
    if factory is not None and name not in known:
        _refuse_value(factory)
    return collections.defaultdict(known.get(name), items)


_DICTS: dict[Any, Callable[[Any, list[tuple[Any, Any]]], Any]] = {
    dict: lambda value, items: dict(items),
    collections.OrderedDict: lambda value, items: collections.OrderedDict(items),
    p.Counter: lambda value, items: collections.Counter(dict(items)),
    p.DefaultDict: _make_defaultdict,
}
