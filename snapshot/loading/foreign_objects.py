"""Objects in other libraries' archives that hold only plain values, expanded to entries.

An optimizer can then be restored from the contents of its groups instead of opaque objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from snapshot.errors import SnapshotError
from snapshot.formats import safe_pickle
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.from_pickle import read_pickle
from snapshot.formats.to_entries import EntryTree, RebuiltTensor
from snapshot.loading.open import expect_files
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document
from snapshot.manifest.validate import find_locations
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.state.stateful_kinds import Kind

LONGEST = 1 << 20
"""Longer objects are not expanded."""


def expand_objects(
    session: Session,
    document: Document,
    entries: dict[str, Any],
    wanted: Callable[[str], bool],
    kind: type[Kind],
) -> None:
    """Replace `wanted` objects of plain values by entries, for statefuls of this kind. Other objects stay unchanged."""
    if not isinstance(document, ForeignDocument) or not kind.unfolds:
        return
    chosen = {
        path: msgspec.structs.replace(entry, serializer="bytearray")
        for path, entry in entries.items()
        if isinstance(entry, e.ObjectEntry)
        and entry.serializer == "torch_save"
        and entry.nbytes <= LONGEST
        and wanted(path)
    }
    if not chosen:
        return
    run(expect_files(session, document, find_locations(chosen, document.files)))
    read_plan = ReadPlan(document.files)
    for path, entry in chosen.items():
        read_plan.new(path, entry)
    read_plan.execute(session, verify=False)
    for path in chosen:
        try:
            content = read_pickle(read_plan.values[path])
            tree = EntryTree(path, _refuse_tensor, len(content))
            tree.add(path, safe_pickle.load_pickle(content, path))
        except (SnapshotError, ValueError, KeyError):
            continue  # reading it raises
        if not tree.inline and not any(isinstance(each, e.ObjectEntry) for each in tree.entries.values()):
            entries.update(tree.entries)


def _refuse_tensor(path: str, found: RebuiltTensor) -> e.TensorEntry:
    raise ValueError("a tensor in an object")
