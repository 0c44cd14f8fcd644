"""The steps of a run as `snapshot ui` shows them: listed, checked, compared and measured. Nothing is written."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from snapshot.checkpoint import Checkpoint
from snapshot.cli.diff import diff_fields
from snapshot.cli.tiered import runs_in, tier_rows
from snapshot.cli.ui_health import health, measured_tensors, size_of
from snapshot.errors import SnapshotNotFoundError
from snapshot.loading.open import open_document
from snapshot.manager.root import Root
from snapshot.manager.step_metadata import noted_metrics
from snapshot.manifest.document import Document
from snapshot.manifest.head import ManifestHead
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.storage import FileStat
from snapshot.tiers.near_steps import PINNED, NearFolder, NearStep
from snapshot.url import URL
from snapshot.version import VERSION

CHANGES = 500
"""Maximum number of changes of a comparison that are reported."""
NAMES = 200
"""Maximum number of names of tensors that are reported."""
METRICS = 50
"""Maximum number of metrics of a step that are reported."""
LONGEST = 500
"""Maximum length of a reported name, value or error in characters."""
KEPT = 10_000
"""Number of results of `health` that are kept in memory."""
BUDGET = 128 << 20
"""Memory budget of a comparison in bytes."""
TORN = "no manifest: a take that runs or was interrupted, or another library's files"


class RunView:
    """The steps under a root, and in the near folder of this host if one is given."""

    def __init__(self, root: str, near: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.url = URL.parse(root)
        self._near = near
        self._options = options
        self._root = Root(self.url, options)
        self._listing = threading.Lock()
        self._seen: dict[int, tuple[FileStat, ManifestHead]] = {}
        """The manifests that were listed last."""
        self._healths: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    def steps(self, most: int) -> dict[str, Any]:
        """Return the newest steps, the newest first."""
        if self.url.scheme == "file" and not os.path.isdir(self.url.location):
            raise SnapshotNotFoundError(f"{self.url}: no such folder")
        with self._listing:
            numbers = run(self._root.numbers())
            near = self._near_steps()
            every = sorted({*numbers, *near})
            chosen = set(every[-most:])
            folders = run(self._root.examine([step for step in numbers if step in chosen]))
            heads = run(self._root.heads(folders.committed))
            pinned = run(self._root.pinned(heads))
            self._seen = {
                step: (folders.committed[step], head) for step, head in heads.items() if isinstance(head, ManifestHead)
            }
        described: dict[int, object] = dict.fromkeys(chosen, TORN) | dict(folders.unreadable)
        described |= {step: near[step][1].head for step in chosen & near.keys()}
        described |= heads
        places: dict[int, dict[str, str]] = {}
        line = run(self._root.line())
        for folder in self._runs():
            for row in tier_rows(folder, heads, line):
                if places.get(row["step"], {"near": "absent"})["near"] == "absent":
                    places[row["step"]] = {"near": row["near"], "far": row["far"]}
        rows = [
            _row(step, described[step])
            | places.get(step, {})
            | {"pinned": step in pinned or self._is_pinned_near(step, near)}
            for step in sorted(chosen, reverse=True)
        ]
        return {"url": str(self.url), "near": self._near, "version": VERSION, "total": len(every), "steps": rows}

    def check(self, step: int) -> dict[str, Any]:
        """Return the first missing or short file of a listed step. No data is read."""
        if step not in self._seen:
            raise SnapshotNotFoundError(f"{self._root.step_url(step)}: is not in the root")
        stat, head = self._seen[step]
        fault = run(Root(self.url, self._options).missing(step, stat, head))  # a root keeps what it found once
        if fault and run(self._root.token(step)) != stat.token:
            raise SnapshotNotFoundError(f"{self._root.step_url(step)}: was removed or replaced meanwhile")
        return {"step": step, "fault": _short(fault)}

    def diff(self, a: int, b: int, *, values: bool) -> dict[str, Any]:
        """Return the differences between two steps. With `values`, the largest relative ones are first."""
        sides = self._checkpoint(a), self._checkpoint(b)
        found = Checkpoint.diff(*sides, values=values, memory_budget_bytes=BUDGET)
        told = diff_fields(found) | {"summary": found.summary}
        changes = told["changes"]
        if values:
            changes.sort(key=_weight, reverse=True)
        told["changes"] = [
            change | {name: _short(change[name]) for name in ("path", "before", "detail")}
            for change in changes[:CHANGES]
        ]
        return told | {"left_out": max(0, len(changes) - CHANGES)}

    def tensors(self, step: int, glob: str) -> dict[str, Any]:
        """Return the number and size of the floating-point tensors of a step that a glob matches, and some names."""
        with self._opened(step) as (_, document):
            found = measured_tensors(document, glob)
        keys = sorted({path.split("/", 2)[1] for path in document.manifest if path.count("/") > 1})
        return {
            "step": step,
            "tensors": len(found),
            "bytes": size_of(found),
            "names": [name for name in list(found)[:NAMES] if len(name) <= LONGEST],
            "keys": [key for key in keys[:NAMES] if len(key) <= LONGEST and not set("*?[") & set(key)],
        }

    def health(self, step: int, glob: str, is_over: Callable[[], bool]) -> dict[str, Any]:
        """Return the health of the tensors of a step that a glob matches. Results are kept by save id."""
        with self._opened(step) as (session, document):
            key = document.save_id, glob
            if key not in self._healths:
                found = health(session, document, glob, is_over)
                for each in (*found["each"], *found["worst"]):
                    each["name"] = _short(each["name"])
                self._healths[key] = found
                while len(self._healths) > KEPT:
                    self._healths.popitem(last=False)
            return {"step": step} | self._healths[key]

    @contextmanager
    def _opened(self, step: int) -> Iterator[tuple[Session, Document]]:
        """Open a step for reading."""
        session = self._checkpoint(step).new_session(BUDGET)
        try:
            yield session, run(open_document(session))
        finally:
            run(session.close())

    def _runs(self) -> list[NearFolder]:
        return [] if self._near is None else runs_in(self._near, self.url)

    def _near_steps(self) -> dict[int, tuple[NearFolder, NearStep]]:
        return {step: (folder, near) for folder in self._runs() for step, near in folder.steps().items()}

    def _is_pinned_near(self, step: int, near: Mapping[int, tuple[NearFolder, NearStep]]) -> bool:
        return step in near and os.path.exists(f"{near[step][0].step_path(step)}/{PINNED}")

    def _checkpoint(self, step: int) -> Checkpoint:
        """Return a step: from the near folder if it has all files of the same save, otherwise from the root."""
        folder, near = self._near_steps().get(step, (None, None))
        if folder is not None and near is not None and self._root.save_id(step) in ("", near.save_id):
            files = folder.files(step)
            if all(files.get(name) == size for name, size in near.head.sizes().items()):
                return Checkpoint(folder.step_path(step))
        return Checkpoint(self._root.step_url(step).reveal(), storage_options=self._options)


def _row(step: int, head: object) -> dict[str, Any]:
    """Return the properties of a step by its manifest, or by a text or an error about it."""
    if not isinstance(head, ManifestHead):
        return {"step": step, "metrics": {}, "problem": _short(str(head))}
    metrics = noted_metrics(head.metadata)
    return {
        "step": step,
        "taken": head.created,
        "metrics": {_short(name, 100): metrics[name] for name in list(metrics)[:METRICS]},
        "bytes": head.nbytes,
        "shared": sum(file.stored_size for file in head.files.values() if file.origin is not None and not file.in_base),
    }


def _weight(change: Mapping[str, Any]) -> tuple[int, float]:
    """Return a sort key for a change: NaN on one side counts most, then the relative difference."""
    values = change["values"]
    return (values["not_numbers"], values["relative"]) if values else (0, 0.0)


def _short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
