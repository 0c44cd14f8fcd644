"""Every exception that this library raises on purpose, so that callers can tell them apart by class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class SnapshotError(Exception):
    """The root of all errors of this library."""


class SnapshotNotFoundError(SnapshotError, FileNotFoundError):
    """Raised when there is no snapshot at a path."""


class SnapshotExistsError(SnapshotError, FileExistsError):
    """Raised when a snapshot would be written over another one without `overwrite=True`."""


class CorruptSnapshotError(SnapshotError, ValueError):
    """Raised when stored bytes are not the bytes that were written.

    `faults` holds a line per damaged entry: its name, file, range and both digests. `touched` names the live tensors
    that had been written to when the error was raised: some are whole, some hold partial or wrong data.
    """

    def __init__(self, message: str, *, faults: Sequence[str] = (), touched: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)
        self.touched = tuple(touched)


class UnsupportedFormatError(SnapshotError):
    """Raised when a snapshot is of a newer format, or holds something that this version does not know."""


class UnsafeObjectError(SnapshotError):
    """Raised when reading an object would need a pickle that was not allowed."""


class RestoreError(SnapshotError):
    """Raised when a snapshot does not fit the application; `mismatches` lists every reason, not only the first."""

    def __init__(self, message: str, mismatches: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class CommitUnknown(SnapshotError):
    """Raised when it cannot be known whether a snapshot was committed: look again later."""


class SnapshotBusyError(SnapshotError):
    """Raised when too many asynchronous takes are under way, and the new one is not to wait."""


class CancelledError(SnapshotError):
    """Raised by `wait()` when the pending snapshot was cancelled."""


class RankError(SnapshotError):
    """Raised on every rank when one rank failed; names the rank and its exception, whose class's name is `kind`."""

    def __init__(self, message: str, *, rank: int = -1, kind: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


class MissingExtraError(SnapshotError, ImportError):
    """Raised when a storage or feature needs a package that is not installed; says which `pip install` cures it."""


class StorageError(SnapshotError, OSError):
    """Raised when a storage refuses or fails; names the URL, and keeps the backend's exception as its cause."""

    uncertain = False
    """Whether what was asked for may have been done all the same, or may still be: its answer never came."""


class StorageNotFoundError(StorageError, FileNotFoundError):
    """Raised when a file is not there."""


class StorageConflictError(StorageError):
    """Raised when a conditional `put` finds something else than it expected."""


@contextmanager
def system_limits(what: str) -> Iterator[None]:
    """Raise `SnapshotError`, with its cause, where the system gives no more descriptors, threads or memory."""
    try:
        yield
    except SnapshotError:
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        why = str(error) or type(error).__name__
        raise SnapshotError(f"{what}: {why}; raise the limit of the process (ulimit -a shows all)") from error
