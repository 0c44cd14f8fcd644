"""One restore, step by step: open, plan, check, read, place, hand back.

Everything that can be known without reading data is checked before the first byte reaches a live tensor; all mismatches
are reported at once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from snapshot.engine.gather import Gather
from snapshot.engine.loop import run
from snapshot.engine.operation import Operation
from snapshot.engine.quiet import no_collection
from snapshot.engine.reader import Reader, ReadResult, Want
from snapshot.engine.targets import shared_memory, writable
from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.events import Meter
from snapshot.manifest import entries as e
from snapshot.manifest.check import check_tensor, check_tree, locations_of
from snapshot.manifest.paths import component
from snapshot.manifest.scalars import Scalar
from snapshot.manifest.view import Rename, by_key, nearest, rank_view, renamed
from snapshot.plan.globs import matcher, unmatched
from snapshot.report import Notes, RestoreReport, listed
from snapshot.state import arrays
from snapshot.state.kinds import Kind, kind_of, names_beneath
from snapshot.state.live import MISSING, Choice, inflate
from snapshot.state.rng import RNGState
from snapshot.tensors.dtypes import BY_NAME

CASTS: dict[str, Callable[[torch.dtype, torch.dtype], bool]] = {
    "error": lambda saved, wanted: False,
    "same_kind": torch.can_cast,
    "any": lambda saved, wanted: True,
}


class Restore:
    """A restore under way."""

    def __init__(
        self,
        operation: Operation,
        *,
        strict: bool,
        include: Sequence[str],
        exclude: Sequence[str],
        rename: Rename | None,
        cast: str,
        verify: bool,
        atomic: bool,
        allow_pickle: bool,
        meter: Meter,
    ) -> None:
        if cast not in CASTS:
            raise ValueError(f"cast={cast!r} is none of {', '.join(map(repr, CASTS))}")
        self._operation = operation
        self._strict = strict
        self._include, self._exclude = include, exclude
        self._filtered = bool(include or exclude)
        included, excluded = matcher(include or ["**"]), matcher(exclude)
        self._wanted: Callable[[str], bool] = lambda path: included(path) and not excluded(path)
        self._rename = rename
        self._cast = cast
        self._verify = verify
        self._atomic = atomic
        self._allow_pickle = allow_pickle
        self._meter = meter
        self._notes = Notes()
        self._seconds: dict[str, float] = {}
        self._restored = 0
        self._skipped: set[str] = set()
        self._choices: dict[str, Choice] = {}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def run(self, app_state: Mapping[str, Any]) -> RestoreReport:
        """Do all of it."""
        with no_collection():
            return self._run(app_state)

    def _run(self, app_state: Mapping[str, Any]) -> RestoreReport:
        with self._phase("open"):
            document = run(self._operation.open())
        with self._phase("plan"):
            view = rank_view(document.manifest, 0, document.world_size)
            view = renamed(view, self._rename) if self._rename else view
            grouped = self._chosen(by_key(view), app_state)
        with self._phase("check"):
            needed = set().union(*(locations_of(entries, document.files) for entries in grouped.values()))
            run(self._operation.expect_files(document, needed))
        with self._phase("plan"):
            gather = Gather(document.files, allow_pickle=self._allow_pickle)
            kinds = [kind_of(key, stateful) for key, stateful in self._ordered(app_state) if key in grouped]
            for kind in kinds:
                self._match(kind, grouped[kind.key], gather)
            self._notes.mismatches += shared_memory(gather)
            if self._notes.mismatches:
                raise RestoreError(
                    f"{self._operation.url}: does not fit the application, and nothing was touched:"
                    f"{listed(self._notes.mismatches, 100)}",
                    self._notes.mismatches,
                )
        result = self._read(gather)
        with self._phase("place"):
            gather.finish()
        with self._phase("hand back"):
            for kind in kinds:
                self._hand_back(kind, grouped[kind.key], gather.values)
        return RestoreReport(
            self._restored, result.bytes_read, result.requests, self._seconds, tuple(self._notes.lines)
        )

    # Plan

    def _ordered(self, app_state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The statefuls in the order in which they are asked and handed back: by key, the RNG state last."""
        items = sorted(app_state.items(), key=lambda item: (isinstance(item[1], RNGState), item[0]))
        return [(component(key), stateful) for key, stateful in items]

    def _chosen(self, grouped: dict[str, dict[str, Any]], app_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The entries of each key that is asked for; keys of which nothing is wanted are left alone."""
        every = [path for entries in grouped.values() for path in entries] if self._filtered else []
        for glob in unmatched(self._include, every) if self._include else ():
            self._notes.mismatches.append(f"include: the glob {glob!r} matches nothing in the snapshot")
        for glob in unmatched(self._exclude, every) if self._exclude else ():
            warnings.warn(f"exclude: the glob {glob!r} matches nothing in the snapshot", stacklevel=6)
        wanted = {}
        for key, _ in self._ordered(app_state):
            entries = grouped.get(key)
            if entries is None:
                if self._filtered and not self._wanted(key):
                    continue
                self._notes.mismatches.append(f"{key}: the snapshot has no such key; {nearest(key, grouped)}")
                continue
            check_tree(key, entries)
            if self._filtered:
                choice = Choice(entries, self._wanted)
                if choice.nothing:
                    self._notes.add("skipped", key, "not asked for")
                    continue
                if choice.skipped:
                    self._choices[key] = choice
                self._skipped |= choice.skipped
                for path in sorted(choice.skipped):
                    self._notes.add("skipped", path, "not asked for")
            wanted[key] = entries
        return wanted

    def _match(self, kind: Kind, entries: dict[str, Any], gather: Gather) -> None:
        """Find each entry's place in what the stateful holds."""
        self._match_structure(kind, entries)
        live, skipped = kind.live, self._skipped
        for path, entry in entries.items():
            held = live.get(path, MISSING)
            if type(entry) is e.TensorEntry and path not in skipped and gather.in_place(path, entry, held, kind.exact):
                self._restored += 1
                continue
            if isinstance(entry, e.Container):
                if held is not MISSING and kind.by_name:
                    self._notes.mismatches.append(f"{path}: the snapshot has a {_tag(entry)}, the application a tensor")
                continue
            if path in skipped:
                if held is not MISSING:
                    gather.values[path] = held
                continue
            self._restored += 1
            if type(entry) is e.TensorEntry and isinstance(held, torch.Tensor):
                self._match_tensor(kind, path, entry, held, gather)
            elif isinstance(entry, Scalar):
                if isinstance(held, torch.Tensor):
                    self._replace(kind, path, entry)
                gather.values[path] = entry.value()
            else:
                self._match_other(kind, path, entry, held, gather)

    def _match_structure(self, kind: Kind, entries: dict[str, Any]) -> None:
        """What is to be known of containers and names, before a leaf is looked at."""
        choice = self._choices.get(kind.key)
        if choice is None or not choice.skipped.intersection(kind.needs):
            self._notes.mismatches += kind.mismatches(entries)
        if kind.by_name:
            self._match_names(kind, entries)
        elif choice is not None:
            try:
                choice.merge(kind.key, entries, dict.fromkeys(entries), kind.state)
            except RestoreError as error:
                self._notes.mismatches.append(str(error))

    def _match_names(self, kind: Kind, entries: dict[str, Any]) -> None:
        """Compare a module's names with the snapshot's; what has no match is an error, or left out and reported."""
        saved = names_beneath(kind.key, entries)
        if saved is None or not isinstance(kind.state, dict):
            self._notes.mismatches.append(f"{kind.key}: the snapshot holds no module's state under this key")
            return
        here = {f"{kind.key}/{component(name)}": None for name in kind.state}
        there = set(saved)
        missing = [path for path in here if path not in there and self._wanted(path)]
        unexpected = [path for path in saved if path not in here]
        if self._strict:
            self._notes.mismatches += [f"{path}: is in the application, not in the snapshot" for path in missing]
            self._notes.mismatches += [
                f"{path}: is in the snapshot, not in the application"
                for path in unexpected
                if path not in self._skipped
            ]
        for path in missing if not self._strict else ():
            self._notes.add("missing", path, "left as it is")
        for path in unexpected:
            if path not in self._skipped:
                self._notes.add("unexpected", path)
        away = set(unexpected)
        depth = kind.key.count("/") + 2
        for below in [each for each in entries if "/".join(each.split("/", depth)[:depth]) in away] if away else ():
            del entries[below]
        top = entries[kind.key]
        entries[kind.key] = top.without(path not in here for path in saved)

    def _match_tensor(self, kind: Kind, path: str, entry: Any, held: torch.Tensor, gather: Gather) -> None:
        """A saved tensor and a live one: in place if they agree, else cast, replaced, or an error."""
        notes = self._notes
        if isinstance(held, UninitializedTensorMixin):
            gather.new(path, entry)
            return
        if held.is_meta:
            notes.mismatches.append(f"{path}: is on the meta device; give it memory first: module.to_empty(device=...)")
            return
        extra = getattr(entry, "extra", None) or e.PLAIN
        if not kind.exact and extra.subclass != _subclass(held):
            notes.add("replaced", path, f"a {extra.subclass or 'plain tensor'} instead of a {type(held).__name__}")
            gather.new(path, entry, held.device)
            return
        if held.shape != entry.shape or not writable(held):
            what = (
                f"the snapshot has {list(entry.shape)}, the application {list(held.shape)}"
                if held.shape != entry.shape
                else "the application's tensor has elements that share memory, or is of another layout"
            )
            if kind.exact:
                notes.mismatches.append(f"{path}: {what}")
            else:
                notes.add("replaced", path, what)
                gather.new(path, entry, held.device)
            return
        saved = BY_NAME.get(entry.dtype)
        if saved is not held.dtype and saved is not None:
            what = f"the snapshot has {entry.dtype}, the application {str(held.dtype).removeprefix('torch.')}"
            if not kind.exact:
                notes.add("replaced", path, what)
                gather.new(path, entry, held.device)
                return
            if not CASTS[self._cast](saved, held.dtype):
                hint = "; allow it with cast='same_kind' or 'any'" if self._cast == "error" else ""
                notes.mismatches.append(f"{path}: {what}{hint}")
                return
            notes.add("cast", path, what)
        check_tensor(path, entry, gather.files)
        gather.into(path, entry, held, live=True)
        gather.values[path] = held

    def _match_other(self, kind: Kind, path: str, entry: Any, held: Any, gather: Gather) -> None:
        """Everything that is not one stored range for one live tensor."""
        if isinstance(entry, e.TENSORS) and isinstance(held, torch.Tensor):
            self._match_tensor(kind, path, entry, held, gather)
            return
        if type(entry) is e.NDArrayEntry and not entry.scalar and _fits(held, entry, path):
            gather.into_array(path, entry, held)
            return
        shape = entry.shape if isinstance(entry, e.TENSORS) else ()
        if type(entry) is e.TensorPartsEntry and isinstance(held, torch.Tensor):
            saved = entry.params.get("shape")
            if kind.by_name and saved is not None and list(held.shape) != saved:
                self._notes.mismatches.append(f"{path}: the snapshot has {saved}, the application {list(held.shape)}")
            elif not kind.by_name:
                self._notes.add("replaced", path, f"a new {entry.kind} tensor")
        elif held is not MISSING and not isinstance(entry, e.ObjectEntry):
            self._replace(kind, path, entry)
        gather.new(path, entry, kind.device(path, shape))

    def _replace(self, kind: Kind, path: str, entry: Any) -> None:
        """Something of another kind than what is there: a module cannot take it, everything else can."""
        if kind.by_name and isinstance(kind.live.get(path), torch.Tensor):
            self._notes.mismatches.append(f"{path}: the snapshot has a {_tag(entry)}, the application a tensor")
        else:
            self._notes.add("replaced", path, f"a new {_tag(entry)}")

    # Read

    def _read(self, gather: Gather) -> ReadResult:
        """Objects first, then (atomic) every byte once without touching anything, then all into its place."""
        total = sum(want.end - want.begin for want in gather.wants)
        self._meter.begin(total * (2 if self._atomic else 1))
        with self._phase("read"):
            seen = self._fetch(gather.objects)
            gather.finish_objects()
            if self._atomic:
                dry = [
                    Want(want.name, want.stored, want.location, want.begin, want.end) for want in gather.wants
                ]  # fmt: skip
                first = self._fetch(dry, verify=True)
                seen.bytes_read += first.bytes_read
                seen.requests += first.requests
            result = self._fetch(gather.wants)
            result.bytes_read += seen.bytes_read
            result.requests += seen.requests
        return result

    def _fetch(self, wants: Sequence[Want], *, verify: bool | None = None) -> ReadResult:
        return fetch(self._operation, wants, self._verify if verify is None else verify, self._meter)

    # Hand back

    def _hand_back(self, kind: Kind, entries: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        choice = self._choices.get(kind.key)
        if choice is None or kind.by_name:
            state = inflate(kind.key, entries, values)
        else:
            state = choice.merge(kind.key, entries, values, kind.state)
        try:
            left = kind.hand_back(state, self._strict and not self._filtered)
        except Exception as error:
            error.add_note(f"raised by load_state_dict() of app_state[{kind.key!r}]; its tensors have been restored")
            raise
        for path in left:
            self._notes.add("skipped", path, "has no place here")


def fetch(operation: Operation, wants: Sequence[Want], verify: bool, meter: Meter) -> ReadResult:
    """Read wants, and raise for what does not verify."""
    if not wants:
        return ReadResult()
    reader = Reader(operation.storage, operation.budget, verify=verify, wanted_part=operation.settings.part_bytes)
    result = run(reader.read(wants, meter.wrote))
    if result.faults:
        touched = sorted(result.touched)
        raise CorruptSnapshotError(
            f"{operation.url}: {len(result.faults)} damaged:{listed(result.faults)}"
            + (
                f"\nlive tensors that have been written to, and may hold wrong data now:{listed(touched)}"
                if touched
                else ""
            ),
            faults=result.faults,
            touched=touched,
        )
    return result


def _tag(entry: Any) -> str:
    return str(type(entry).__struct_config__.tag)


def _subclass(tensor: torch.Tensor) -> str | None:
    return None if type(tensor) is torch.Tensor else f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _fits(held: Any, entry: e.NDArrayEntry, path: str) -> bool:
    return (
        type(held) is np.ndarray
        and held.flags.c_contiguous
        and held.flags.writeable
        and held.shape == entry.shape
        and entry.order == "C"
        and BY_NAME.get(entry.data.dtype) is not None
        and arrays.numpy_dtype(path, entry.dtype) == held.dtype
    )
