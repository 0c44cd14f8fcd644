"""The arguments of a take, as one checked value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import msgspec

from snapshot import extensions
from snapshot.errors import SnapshotError
from snapshot.io.session import Key, Seal, signer_of
from snapshot.io.storage import Storage
from snapshot.io.url import URL, Location, Source, locate_source
from snapshot.manifest.document import encode_metadata
from snapshot.options import expect_options
from snapshot.plan.layout import SavePlan
from snapshot.plan.names import matcher
from snapshot.progress import ProgressArgument
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
USUAL_BUDGET = 512 << 20
"""Default budget if files are compressed: they are long, and several are compressed at once."""


def usual_budget(compression: str | None) -> int:
    """Return the default budget of an operation that may compress; 0 for the usual one."""
    return USUAL_BUDGET if compression is not None else 0


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
    """The options of a take, for `Snapshot.take` and `async_take`, and for `SnapshotManager`.

    If a call has an argument of the same name, the argument takes precedence. A wrong value raises `ValueError` or
    `TypeError` when the take begins, on all ranks.

    >>> from snapshot import Snapshot, StateDict, TakeOptions
    >>> options = TakeOptions(read_back=True)
    >>> snapshot = Snapshot.take("memory://docs/options", {"progress": StateDict(step=3)}, options=options)
    """

    replicated: Sequence[str] | None = None
    """Globs over `<key>/<logical path>` of values that are equal on every rank."""
    prepare: Prepare | None = None
    """As `_custom_tensor_prepare_func` of `Snapshot.take`."""
    durable: bool = True
    """Return only when the snapshot survives a loss of power."""
    exclude: Sequence[str] = ()
    """Globs to leave out."""
    memory_budget_bytes: int | None = None
    """Host memory for staging.

    By default 64 MiB on files, 256 MiB elsewhere or with a GPU; for an asynchronous take half of the host's free
    memory, shared by the processes of a job. All pending takes share the budget of the newest call.
    """
    check_replicated: bool = False
    """Also compare replicated values across ranks."""
    read_back: bool | float = False
    """Read the written bytes back and compare them with their digests before the commit.

    True for all bytes, or a fraction from 0 to 1, chosen at random. On files the page cache is dropped first, so that
    the disk is read.
    """
    progress: ProgressArgument = None
    """True for a progress bar, or a function that is called with `Progress`."""
    timeout: float | None = None
    """Seconds without a heartbeat after which another rank counts as dead."""
    plan: SavePlan | None = None
    """A plan that `Snapshot.plan` returned for the same structure."""
    base: BaseArgument = None
    """An earlier snapshot, whose files are shared where tensors are unchanged, as for `Snapshot.take`.

    With `only`, also a folder of safetensors files, such as one from Hugging Face, or a single such file.
    """
    only: Only | None = None
    """`"trainable"`: leave out frozen parameters (`requires_grad=False`) that are bit-equal in `base`.

    A restore compares them with the live tensors, or reads them from the base.
    """
    compression: Compression | None = None
    """`"zstd"`: compress the data files without loss, which saves time on slow links.

    `"auto"`: only if earlier takes of this process show that it does. See docs/guides/compression.md.
    """
    sign: Any = None
    """An Ed25519 private key: sign the snapshot, before it is committed.

    The path of a PEM file, which is read once, or a key object of `cryptography`. Ranks other than 0 may pass the
    public key. See docs/guides/signatures.md.
    """
    allow_pickle: AllowPickle = "warn"
    """What to do about objects that only a pickle can hold, which a restore refuses by default.

    `"warn"` about each of them, raise an `"error"`, or True to store them silently.
    """
    staging: Staging = "blocking"
    """For `async_take`. `"blocking"`: the copy is complete when the call returns.

    `"overlapped"`: parameters and optimizer state are copied during the next forward and backward pass. The next
    `optimizer.step()`, `load_state_dict()` or `restore` waits for the copy. Call `wait_staged()` before changing
    parameters in any other way.
    """
    worker: Worker = "thread"
    """For `async_take`. `"thread"`: threads of this process write.

    `"process"`: a separate process writes, with low CPU and disk priority, without taking this interpreter's lock.
    """
    when_busy: WhenBusy = "wait"
    """For `async_take`, if `SNAPSHOT_PENDING` takes (3 by default) are pending.

    `"wait"` for one of them, or `"raise"` SnapshotBusyError.
    """
    guards: Guards = "suspect"
    """What to do if the state looks wrong, for example if a parameter is NaN.

    Commit it as `"suspect"`, which a manager keeps apart from good steps, just `"report"` it, or `"refuse"` to commit
    it. With `"off"`, the state is not examined. See docs/guides/guards.md.
    """
    statistics: bool = False
    """Also store the norm, range, and counts of NaN and zero of each tensor, for `get_statistics`."""

    @property
    def observed(self) -> dict[str, Any]:
        """The options that observers of a take read."""
        return {"guards": self.guards, "statistics": self.statistics}

    @cached_property
    def signer(self) -> TakeSigner | None:
        """The key that `sign` names."""
        if self.sign is None or isinstance(self.sign, TakeSigner):
            return self.sign
        return find_keys("sign").load_signer(self.sign)

    def check(self) -> None:
        """Raise for a value that is wrong everywhere."""
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
        if self.only not in (None, "trainable"):
            raise ValueError(f"only must be 'trainable' or None, got {self.only!r}")
        if self.plan is not None and not isinstance(self.plan, SavePlan):
            raise TypeError(f"plan must be a plan of Snapshot.plan, got {type(self.plan).__name__}")
        _ = self.bases  # raises for a wrong one
        matcher(self.replicated or ())
        if not 0.0 <= self.read_back_share <= 1.0:
            raise ValueError(f"read_back must be True, False or a fraction from 0 to 1, got {self.read_back!r}")

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
    """All options of one take, checked: also those that belong to its place."""

    storage_options: Mapping[str, Any] | None = None
    overwrite: bool = False
    metadata: Mapping[str, Any] | Future[Mapping[str, Any]] | None = None
    """A future is for an adapter, whose metadata is known only before the commit. The leader waits for it."""
    metadata_json: msgspec.Raw = field(init=False)
    """The user's metadata, as written to the manifest."""

    def __post_init__(self) -> None:
        self.check()
        expect_observed(self.observed, {"guards": "suspect", "statistics": False})
        if self.worker != "thread":
            find_sink(self.worker).check()
        _ = self.signer  # raises for a wrong key
        if self.compression is not None:
            from snapshot.save.compression import expect_compression  # few takes are compressed

            expect_compression(self.compression)
        if self.only and not self.bases:  # a manager adds the base
            raise ValueError("only='trainable' must have a base: the snapshot that has what is left out")
        known = None if isinstance(self.metadata, Future) else self.metadata
        object.__setattr__(self, "metadata_json", encode_metadata(known))


class TakeCall:
    """The arguments of a call that takes a snapshot, as they were given: `options`, and those that go before them."""

    def __init__(self, options: TakeOptions | None, **given: Any) -> None:
        self._options = TAKE_OPTIONS if options is None else options
        self._given = {name: value for name, value in given.items() if value is not None}
        self.timeout: float | None = self._given.get("timeout", getattr(self._options, "timeout", None))

    def request(self) -> TakeRequest:
        """Return the options of the take. Raise for a wrong value."""
        expect_options(self._options, TakeOptions)
        options = {each.name: getattr(self._options, each.name) for each in fields(TakeOptions)}
        options["sign"] = self._options.signer  # a key file is read once
        return TakeRequest(**{**options, **self._given})
