"""A reference to one checkpoint: its place, its sessions, and its manifest, which is read once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from snapshot.errors import CorruptSnapshotError
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL, expect_mapping
from snapshot.loading.open import open_document, read_from
from snapshot.manifest.document import Document
from snapshot.signing.keys import Key, load_key
from snapshot.signing.seal import KeySeal, Seal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def seal_with(key: Key | None) -> Seal | None:
    """Return the check that everything that is read has the signature of a key; None without a key."""
    return None if key is None else KeySeal(load_key(key))


def of_object(method: F) -> F:
    """Let a method name the mistake if it is called on the class: `Snapshot.restore(path, ...)`."""

    @functools.wraps(method)
    def checked(*arguments: Any, **named: Any) -> Any:
        if not arguments or not isinstance(arguments[0], OpenedCheckpoint):
            shown = repr(arguments[0]) if arguments and isinstance(arguments[0], (str, os.PathLike)) else "path"
            raise TypeError(
                f"{method.__name__}() must be called on a snapshot, not on the class: "
                f"Snapshot({shown}).{method.__name__}(...)"
            )
        return method(*arguments, **named)

    return cast(F, checked)


class OpenedCheckpoint:
    """The place of a checkpoint, and its manifest once it has been read."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        key: Key | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.pg = pg
        self.seal = seal_with(key)
        self._url = URL.parse(self.path)
        self._options = dict(expect_mapping(storage_options))
        self._allow_pickle = allow_pickle
        self._document: Document | None = None

    def source(self) -> tuple[URL, Mapping[str, Any]]:
        """Return the URL and the storage options, for a take that is based on this snapshot."""
        return self._url, self._options

    def new_session(self, budget: int | None) -> Session:
        """Open a session at the URL. The caller closes it."""
        return Session(self._url, self._options, budget=budget, seal=self.seal)

    def _use(self, work: Callable[[Session], T]) -> T:
        """Do something in a new session."""
        session = self.new_session(None)
        try:
            return work(session)
        finally:
            run(session.close())

    def _open(self) -> Document:
        """Return the manifest. It is read once, since a snapshot never changes; `restore` reads it again."""
        if self._document is None:
            self._document = self._use(lambda session: run(open_document(session)))
        return self._document

    def _read(self, budget: int | None, read: Callable[[Session, Document], Any]) -> Any:
        """Read with the cached manifest, or with the new one if the snapshot was replaced since."""
        known = self._open()
        session = self.new_session(budget)
        try:
            run(read_from(session, known))
            return read(session, known)
        except CorruptSnapshotError:
            run(session.close())
            session = self.new_session(budget)
            self._document = run(open_document(session))
            if self._document.save_id == known.save_id:
                raise
            return read(session, self._document)
        finally:
            run(session.close())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._url)!r})"
