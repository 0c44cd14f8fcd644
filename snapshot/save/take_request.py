"""The arguments of a take, as one checked value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import msgspec

from snapshot import extensions
from snapshot.errors import SnapshotError
from snapshot.io.session import Key, Seal, signer_of
from snapshot.io.storage import Storage
from snapshot.io.url import URL, Location, Source, locate_source
from snapshot.manifest.document import encode_metadata
from snapshot.plan.layout import SavePlan
from snapshot.plan.names import matcher
from snapshot.progress import ProgressArgument
from snapshot.save.compression import expect_compression
from snapshot.save.findings import Guards
from snapshot.save.observers import expect_observed
from snapshot.state.leaves import Prepare
from snapshot.tensors.digest import FileTree, Root

if TYPE_CHECKING:
    from snapshot.distributed.operation import Operation
    from snapshot.reports import VerifyReport

Staging = Literal["blocking", "overlapped"]
Worker = Literal["thread", "process"] | str
"""Who writes the files of an asynchronous take: this process, another one, or a plugin."""
WhenBusy = Literal["wait", "raise"]
Only = Literal["trainable"]
AllowPickle = Literal["warn", "error", True]


Compression = Literal["zstd", "auto"]
BaseArgument = Source | Sequence[Source] | None


@runtime_checkable
class TakeSigner(Protocol):
    """A key that signs a take."""

    def expect_signable(self, storage: Storage, *, leads: bool) -> None:
        """Raise `ValueError` if a take with this storage cannot be signed, or if its leader has no private key."""
        ...

    def files_of(self, save_id: str, location: str) -> list[str]:
        """Return the files that are stored beside a rank's data files. `location`: one of those."""
        ...

    async def put_leaves(self, storage: Storage, trees: Mapping[str, FileTree]) -> None:
        """Store the hashes of files, before they are signed."""
        ...

    async def put_signature(self, storage: Storage, save_id: str, manifest: bytes, files: Mapping[str, Root]) -> None:
        """Sign a manifest and its files."""
        ...


class OptionalSeal(Seal, Protocol):
    """A seal of a base. It accepts a snapshot without a signature, and verifies one that has it."""

    fault: str
    """Why the snapshot that was opened last is not signed; empty if it is."""


class Keys(Protocol):
    """The plugin that knows the keys of `sign=` and `key=`."""

    def load_signer(self, key: Key, argument: str = "sign", *, private: bool = False) -> TakeSigner:
        """Return what signs with a key. Raise `ValueError` or `TypeError` for a wrong one, or a public one."""
        ...

    def seal(self, key: Key) -> Seal:
        """Return the check that everything that is read has the signature of a key."""
        ...

    def optional_seal(self, signer: TakeSigner) -> OptionalSeal:
        """Return the seal with which a signed take opens its base."""
        ...

    def sign(self, operation: Operation, place: Location, signer: TakeSigner) -> VerifyReport:
        """Verify what is stored at a place, and sign it."""
        ...


def find_keys(argument: str) -> Keys:
    """Return the plugin that knows keys. Without it, a key that an argument names is an error, and never ignored."""
    found: Keys = extensions.require("snapshot.seals", "ed25519", argument)
    return found


def seal_with(key: Key | None) -> Seal | None:
    """Return the check that everything that is read has the signature of a key; None without a key."""
    return None if key is None else find_keys("key").seal(key)


@runtime_checkable
class Sink(Protocol):
    """A plugin that writes the files of asynchronous takes in place of this process: a value of `worker=`."""

    def check(self) -> None:
        """Raise if it cannot be used on this machine."""
        ...

    def start(self, url: URL, options: Mapping[str, Any] | None) -> Any:
        """Return what writes a take: a `PartSink`. Raise `ValueError` if it cannot write there."""
        ...


def find_sink(worker: str) -> Sink:
    """Return a plugin that writes the files of takes."""
    if worker != "process" and worker not in extensions.names("snapshot.sinks"):
        raise ValueError(f"worker must be 'thread', 'process' or a plugin's name, got {worker!r}")
    found = extensions.require("snapshot.sinks", worker, f"worker={worker!r}")
    if not isinstance(found, Sink):
        raise SnapshotError(f"worker={worker!r}: its entry point must name a Sink, got {type(found).__name__}")
    return found


@dataclass(frozen=True, kw_only=True)
class TakeOptions:
    """The options that all takes of a run share, for `SnapshotManager.take` and `async_take`.

    Each is explained at `Snapshot.take` and `Snapshot.async_take`. Wrong values raise `ValueError` or `TypeError`.

    >>> from snapshot import TakeOptions
    >>> options = TakeOptions(replicated=["model/**"], staging="overlapped")
    """

    replicated: Sequence[str] | None = None
    prepare: Prepare | None = None
    """As `_custom_tensor_prepare_func` of `Snapshot.take`."""
    durable: bool = True
    exclude: Sequence[str] = ()
    memory_budget_bytes: int | None = None
    check_replicated: bool = False
    read_back: bool | float = False
    progress: ProgressArgument = None
    timeout: float | None = None
    plan: SavePlan | None = None
    base: BaseArgument = None
    only: Only | None = None
    compression: Compression | None = None
    sign: Any = None
    """The path of a PEM file with an Ed25519 key, or a key object of `cryptography`."""
    allow_pickle: AllowPickle = "warn"
    staging: Staging = "blocking"
    worker: Worker = "thread"
    when_busy: WhenBusy = "wait"
    guards: Guards = "suspect"
    statistics: bool = False
    signer: TakeSigner | None = field(init=False)
    """The key that `sign` names."""

    @property
    def observed(self) -> dict[str, Any]:
        """The options that observers of a take read."""
        return {"guards": self.guards, "statistics": self.statistics}

    def __post_init__(self) -> None:
        for name, allowed in (("staging", Staging), ("when_busy", WhenBusy)):
            if getattr(self, name) not in get_args(allowed):
                choices = " or ".join(map(repr, get_args(allowed)))
                raise ValueError(f"{name} must be {choices}, got {getattr(self, name)!r}")
        if self.allow_pickle not in ("warn", "error") and self.allow_pickle is not True:
            raise ValueError(f"allow_pickle must be 'warn', 'error' or True, got {self.allow_pickle!r}")
        if self.guards not in get_args(Guards):
            raise ValueError(f"guards must be {', '.join(map(repr, get_args(Guards)))}, got {self.guards!r}")
        if not isinstance(self.statistics, bool):
            raise TypeError(f"statistics must be True or False, got {self.statistics!r}")
        expect_observed(self.observed, {"guards": "suspect", "statistics": False})
        if self.worker != "thread":
            find_sink(self.worker).check()
        if self.only not in (None, "trainable"):
            raise ValueError(f"only must be 'trainable' or None, got {self.only!r}")
        _ = self.bases  # raises for a wrong one
        expect_compression(self.compression)
        signer = (
            self.sign
            if self.sign is None or isinstance(self.sign, TakeSigner)
            else find_keys("sign").load_signer(self.sign)
        )
        object.__setattr__(self, "signer", signer)
        matcher(self.replicated or ())
        if not 0.0 <= self.read_back_share <= 1.0:
            raise ValueError(f"read_back must be True, False or a fraction from 0 to 1, got {self.read_back!r}")

    def at(
        self,
        storage_options: Mapping[str, Any] | None,
        *,
        overwrite: bool,
        metadata: Mapping[str, Any] | None,
        **changes: Any,
    ) -> TakeRequest:
        """Return the request of a take with these options, but for some changes. The key is not read again."""
        shared = {each.name: getattr(self, each.name) for each in fields(TakeOptions) if each.init}
        own = {"storage_options": storage_options, "overwrite": overwrite, "metadata": metadata}
        return TakeRequest(**{**shared, "sign": self.signer, **own, **changes})

    @property
    def bases(self) -> list[Source]:
        """The snapshots that the take is based on, the newest first."""
        if self.base is None:
            return []
        given: list[Any] = list(self.base) if isinstance(self.base, (list, tuple)) else [self.base]
        for each in given:
            if not isinstance(each, (str, os.PathLike)) and not isinstance(getattr(each, "location", None), Location):
                raise TypeError(
                    f"base must be a path, a URL or a Snapshot, or a list of them, got {type(each).__name__}"
                )
        return given

    @property
    def keys(self) -> list[str]:
        """The public keys of the take and of its bases, which must be the same on all ranks; empty texts for none."""
        return [str(self.signer or ""), *(signer_of(locate_source(each).seal) for each in self.bases)]

    @property
    def two_copies(self) -> bool:
        """True if the newest two snapshots must have two physical copies of what is unchanged."""
        return isinstance(self.base, (list, tuple))

    @property
    def read_back_share(self) -> float:
        """The fraction of the written bytes that is read back before the commit."""
        return float(self.read_back)


TAKE_OPTIONS = TakeOptions()
"""The defaults."""


@dataclass(frozen=True, kw_only=True)
class TakeRequest(TakeOptions):
    """All options of one take: also those that belong to its place."""

    storage_options: Mapping[str, Any] | None = None
    overwrite: bool = False
    metadata: Mapping[str, Any] | Future[Mapping[str, Any]] | None = None
    """A future is for an adapter, whose metadata is known only before the commit. The leader waits for it."""
    metadata_json: msgspec.Raw = field(init=False)
    """The user's metadata, as written to the manifest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only and not self.bases:  # a manager adds the base
            raise ValueError("only='trainable' must have a base: the snapshot that has what is left out")
        known = None if isinstance(self.metadata, Future) else self.metadata
        object.__setattr__(self, "metadata_json", encode_metadata(known))
