"""The formats of other libraries: what each is recognised by, and the module that reads it, imported on first use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from snapshot import extensions
from snapshot.errors import SnapshotError, StorageError
from snapshot.events import log
from snapshot.formats.foreign import ForeignDocument, ForeignStorage
from snapshot.io.storage import Storage
from snapshot.io.url import URL

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

GROUP: extensions.Group = "snapshot.formats"
"""The entry-point group of formats: `name = "package.module:FORMAT"`, which is a `Format`."""


class FormatOptions(Protocol):
    """Options of one format: a frozen dataclass of its package."""

    to: ClassVar[str]
    """The value of `Target(to=...)`."""

    def agreed(self) -> Mapping[str, object]:
        """Return what must be the same on all ranks, by the names of the arguments."""
        ...

    @classmethod
    def add_flags(cls, parser: ArgumentParser) -> None:
        """Add the flags of the command that stand for them."""
        ...

    @classmethod
    def of_flags(cls, arguments: Namespace) -> FormatOptions | None:
        """Return what the flags stand for; None if there are none."""
        ...


@dataclass(frozen=True)
class Format:
    """What a format is recognised by, and where its functions are: `"package.module:function"`."""

    name: str
    order: int = 90
    """Formats with lower numbers are asked first."""
    folder: str = ""
    """`async def describe(folder: SearchedFolder) -> ForeignDocument | None`, for the checkpoint in a folder."""
    names: str = ""
    """A pattern. `folder` is asked about a folder that has a name like that, or about each if it is empty."""
    file: str = ""
    """`async def describe(storage, name, size, limit) -> ForeignDocument`, for a file that begins with one of `heads`.
    """
    heads: tuple[bytes, ...] = ()
    view: str = ""
    """`def view(opened: Opened, tensor_map: TensorMap) -> Opened`, for maps with one of the `methods`."""
    methods: tuple[str, ...] = ()
    """Values of `TensorMap(dequantise=...)`."""
    codec: str = ""
    """`def make(path: str) -> Decompressor`, for files that are packed with one of the `codecs`."""
    codecs: tuple[str, ...] = ()
    writes: str = ""
    """The value of `Target(to=...)` for this format."""
    plan: str = ""
    """`def plan(export: Export, request: Request) -> Plan`, for what it writes."""
    one_file: bool = False
    """True if it always writes one file."""
    suffixes: tuple[str, ...] = ()
    """Suffixes such as `".pt"`. A name with one of them stands for this format, and for one file."""
    prepare: str = ""
    """`def prepare(operation, target)`, which returns what `Request.prepared` is."""
    choose_map: str = ""
    """`def choose_map(prepared, manifest) -> TensorMap | None`, for a conversion without a map; beside `prepare`."""
    options: str = ""
    """A class of `FormatOptions`: that of `Target(format_options=...)` for what it writes."""
    needs_options: bool = False
    """True if it cannot be written without them."""
    whole_folder: bool = False
    """True if a copy takes all files of the folder: the index does not name them."""


class SearchedFolder:
    """A folder in which a checkpoint is looked for."""

    def __init__(self, url: URL, storage: Storage, beside: Callable[[URL], Storage], limit: int) -> None:
        """`beside` opens another storage. `limit`: the maximum length of a description to read."""
        self.url, self.storage, self.beside, self.limit = url, storage, beside, limit
        self._names: list[str] | None = None

    @property
    def linkless(self) -> Storage:
        """A view of the folder that follows no link out of it: what a pickle holds has no digest."""
        return ForeignStorage(self.storage, b"", links=False)

    async def names(self) -> Sequence[str]:
        """Return the names in the folder, those of folders with a trailing `/`; empty if they cannot be listed."""
        if self._names is None:
            try:
                listed = self.storage.capabilities.list
                self._names = await self.storage.list(recursive=False) if listed else []
            except StorageError:
                self._names = []
        return self._names


SNAPSHOT = "snapshot"
"""The value of `Target(to=...)` for a snapshot, which is written by a take, and recognised before all formats."""
_BUILT_IN = (
    Format("dcp", 10, "snapshot.formats.dcp:describe_folder", writes="dcp", plan="snapshot.transform.to_dcp:plan"),
    Format(
        "hugging_face",
        30,
        "snapshot.formats.hugging_face:describe_folder",
        writes="safetensors",
        plan="snapshot.transform.to_safetensors:plan",
        suffixes=(".safetensors",),
    ),
    Format("rank_files", 60, "snapshot.formats.rank_files:describe_folder"),
    Format(
        "torch_save", writes="torch", plan="snapshot.transform.to_torch:plan", one_file=True, suffixes=(".pt", ".pth")
    ),
    Format(SNAPSHOT, writes=SNAPSHOT),
)


@cache
def formats() -> tuple[Format, ...]:
    """Return all formats, in the order in which they are asked. Only the declarations of plugins are imported.

    A declaration of another package that cannot be loaded, or has what another format has, is logged and left out.
    """
    found: list[Format] = []
    owners: dict[str, str] = {}
    declared = [*extensions.load_declared(GROUP, Format, "the format")]
    for point, made in [*((each.name, each) for each in _BUILT_IN), *declared]:
        claims = _claims_of(made)
        taken = [f"{claim}, as {owners[claim]} does" for claim in claims if claim in owners]
        if extensions.is_reserved(GROUP, made.writes) and not extensions.is_own(made.plan):
            taken.append(f"to={made.writes!r}, which is of a plugin of this library")
        if taken:
            log.warning("the format %s is left out: it declares %s", point, taken[0])
            continue
        owners |= dict.fromkeys(claims, made.name)
        found.append(made)
    return tuple(sorted(found, key=lambda each: each.order))


def _claims_of(made: Format) -> list[str]:
    """Return what only one format may have, as in a message."""
    return [
        f"the name {made.name!r}",
        *([f"to={made.writes!r}"] if made.writes else []),
        *(f"the suffix {each!r}" for each in made.suffixes),
        *(f"the method {each!r}" for each in made.methods),
        *(f"the codec {each!r}" for each in made.codecs),
    ]


async def describe_folder(folder: SearchedFolder, first: int = 0) -> ForeignDocument | None:
    """Return the checkpoint in a folder; None if no format knows it. `first`: the first order to ask."""
    for each in formats():
        if each.order < first or not each.folder:
            continue
        if each.names and not any(re.fullmatch(each.names, name) for name in await folder.names()):
            continue
        found: ForeignDocument | None = await resolve_name(each.folder)(folder)
        if found is not None:
            return found
    return None


def find_by_head(head: bytes) -> Any:
    """Return the function that describes a file that begins so, or None."""
    each = next((each for each in formats() if head.startswith(each.heads)), None)
    return None if each is None else resolve_name(each.file)


def find_view(method: str) -> Any:
    """Return the function that gives a checkpoint plain weights in place of those of a method."""
    each = next((each for each in formats() if method in each.methods), None)
    if each is None:
        extensions.require(GROUP, "quantised", f"dequantise={method!r}")  # raises
        raise SnapshotError(f"dequantise={method!r}: no format has this method")
    return resolve_name(each.view)


def find_codec(codec: str) -> Any:
    """Return the function that makes a decompressor of a plugin's codec, or None."""
    each = next((each for each in formats() if codec in each.codecs), None)
    return None if each is None else resolve_name(each.codec)


def find_writer(to: str) -> Format:
    """Return the format that writes a value of `Target(to=...)`."""
    found = next((each for each in formats() if each.writes == to), None)
    if found is None:
        extensions.require(GROUP, to, f"to={to!r}")  # raises
        raise SnapshotError(f"to={to!r}: no format writes this")
    return found


def option_classes() -> list[type[FormatOptions]]:
    """Return the classes of all formats' options. One of another package that cannot be loaded is logged."""
    found = []
    for each in formats():
        try:
            found += [resolve_name(each.options)] if each.options else []
        except Exception as error:
            if extensions.is_own(each.options.partition(":")[0]):
                raise
            log.warning("the format %s: cannot import its options: %r", each.name, error)
    return found


def find_suffix(suffix: str) -> Format | None:
    """Return the format of files whose names end so, or None. Raise if the package that has it is not installed."""
    found = next((each for each in formats() if suffix in each.suffixes), None)
    if found is None and extensions.is_reserved(GROUP, suffix[1:]):
        return find_writer(suffix[1:])  # raises
    return found


def is_writable(to: str) -> bool:
    """Return True if this is a value of `Target(to=...)`, also if its package is not installed."""
    return to in written_formats() or extensions.is_reserved(GROUP, to)


def written_formats() -> list[str]:
    """Return what all formats write: values of `Target(to=...)`."""
    return sorted(each.writes for each in formats() if each.writes)


def find_format(name: str) -> Format | None:
    """Return the format of this name, if there is one."""
    return next((each for each in formats() if each.name == name), None)
