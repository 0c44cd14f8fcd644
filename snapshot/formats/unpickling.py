"""Location and creation of objects that only running another library's pickle creates."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.formats.pickled_objects import MODULE, REFUSED, make_refusal
from snapshot.manifest.entries import ObjectEntry
from snapshot.manifest.paths import encode_key, find_tagged_keys, key_component
from snapshot.text import with_article

INLINE = "(in the pickle)"
"""Location of bytes inside a pickle, which are not a range of a file."""


def make_refused_entry(what: str) -> ObjectEntry:
    """Return the entry of an object of this class or kind, which is only read if pickles are allowed."""
    return ObjectEntry(INLINE, (0, 0), REFUSED, what)


def locate_object(entry: ObjectEntry, file: str, route: str) -> None:
    """Record the torch.save file of a refused object, and the path inside it."""
    entry.location, entry.serializer = file, f"{REFUSED} {route}".rstrip()


def is_refused(entry: Any) -> bool:
    """Return True for an object that is only read if pickles are allowed, with its whole file."""
    return isinstance(entry, ObjectEntry) and entry.serializer.startswith(REFUSED)


def expect_no_module(where: object, manifest: Mapping[str, Any], *, allow_pickle: bool) -> None:
    """Raise if there is a pickled module: the application probably expected its state dict."""
    for path, entry in manifest.items():
        if is_refused(entry) and entry.obj_type.startswith(MODULE):
            if not allow_pickle:
                raise make_refusal(path, entry.obj_type)
            raise RestoreError(
                f"{where}: {path} is {with_article(entry.obj_type)}, but restore needs its state dict; "
                f"use Snapshot(..., allow_pickle=True).read_object({path!r}).state_dict()",
                [path],
            )


class SavedFile(NamedTuple):
    """Contents of a torch.save file."""

    value: Any


def find_object(path: str, saved: Any, entry: ObjectEntry) -> Any:
    """Return the object of a refused entry in the saved contents."""
    route = entry.serializer.removeprefix(REFUSED).strip(" ")
    for name in route.split("/") if route else ():
        try:
            saved = _find_child(saved, name)
        except (LookupError, ValueError) as error:
            raise CorruptSnapshotError(f"{path}: running its pickle does not create {route}") from error
    return saved


def _find_child(holder: Any, name: str) -> Any:
    if isinstance(holder, (list, tuple, deque)):
        return holder[int(name)]
    if not isinstance(holder, dict):
        raise LookupError(name)
    keys = list(holder)
    tagged = set(find_tagged_keys(keys))
    for place, key in enumerate(keys):
        encoded = encode_key(key)
        if encoded is not None and key_component(encoded, place in tagged) == name:
            return holder[key]
    raise LookupError(name)
