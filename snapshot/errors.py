"""All exceptions that this library raises on purpose, each with its own class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self


class SnapshotError(Exception):
    """The base class of all errors of this library."""

    cure = ""
    """Advice for the caller, at the end of the message. The command replaces it by advice about its own options."""

    def with_cure(self, cure: str) -> Self:
        """Set the cure, and return the error."""
        self.cure = cure
        return self

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}; {self.cure}" if self.cure else text


class SnapshotNotFoundError(SnapshotError, FileNotFoundError):
    """Raised when there is no snapshot at a path."""


class SnapshotExistsError(SnapshotError, FileExistsError):
    """Raised when a save would replace a snapshot without `overwrite=True`."""


class CorruptSnapshotError(SnapshotError, ValueError):
    """Raised when stored bytes differ from the bytes that were written, or were wrong when they were written.

    `faults` has a line per damaged entry: its name, file, range and both digests. `touched` names the live tensors that
    were written before the error; some of them hold partial or wrong data.
    """

    def __init__(self, message: str, *, faults: Sequence[str] = (), touched: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)
        self.touched = tuple(touched)


class SignatureError(CorruptSnapshotError):
    """Raised when a key was given, and a snapshot has no signature by this key, or its manifest is not the signed one.

    Signed data that was changed is a `CorruptSnapshotError`, as other damage is, but for keys that sign whole files.
    """


class UnsupportedFormatError(SnapshotError):
    """Raised for newer formats, for formats that are known but not read, and for content that is not supported."""


class UnsafeObjectError(SnapshotError):
    """Raised when reading an object needs a pickle that was not allowed."""


class RestoreError(SnapshotError):
    """Raised when a snapshot does not fit the application. `mismatches` lists every reason."""

    def __init__(self, message: str, mismatches: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class CommitUnknown(SnapshotError):
    """Raised when it is unknown whether a snapshot was committed. Check again later."""


class SnapshotBusyError(SnapshotError):
    """Raised when the limit of concurrent async takes is reached and `when_busy="raise"`."""


class SuspectStateError(SnapshotError):
    """Raised instead of a commit if a guard found something, and `guards` is `"refuse"`.

    `findings` has a line for each.
    """

    def __init__(self, message: str, findings: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


class CancelledError(SnapshotError):
    """Raised by `wait()` when the pending snapshot was cancelled."""


class RunForkedError(SnapshotError):
    """Two jobs continued one run without seeing each other, or its root was rolled back.

    A person must choose the attempt that the run continues: `snapshot attempts`.
    """


class RunDeletedError(SnapshotError):
    """The far root does not have the run any more. It is never created again."""


class OtherWriterError(SnapshotError):
    """Another job writes to the root of a manager without near folders."""


class RankError(SnapshotError):
    """Raised on every rank when one rank failed. Names the rank and, as `kind`, its exception's class."""

    def __init__(self, message: str, *, rank: int = -1, kind: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


class MissingExtraError(SnapshotError, ImportError):
    """Raised when a package is missing. Names the extra of this library that provides it."""


class StorageError(SnapshotError, OSError):
    """Raised when a storage operation fails. Names the URL; the backend's exception is the cause."""

    uncertain = False
    """True if the operation may still have taken effect, because its response was lost."""


class BucketNotFoundError(StorageError):
    """Raised when the bucket or container does not exist, so that no repeat can succeed."""


class StorageNotFoundError(StorageError, FileNotFoundError):
    """Raised when a file does not exist."""


class StorageConflictError(StorageError):
    """Raised when the condition of a conditional `put` does not hold."""


@contextmanager
def noting(text: str) -> Iterator[None]:
    """Add a note to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


@contextmanager
def system_limits(what: str) -> Iterator[None]:
    """Raise `SnapshotError` if the system is out of descriptors, threads or memory."""
    try:
        yield
    except SnapshotError:
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        why = str(error) or type(error).__name__
        raise SnapshotError(f"{what}: {why}; raise the limit of the process (ulimit -a shows all)") from error
