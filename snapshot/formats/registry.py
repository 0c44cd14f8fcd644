"""The formats of other libraries: what each is recognised by, and the module that reads it, imported on first use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from msgspec.structs import replace

from snapshot import extensions
from snapshot.errors import MissingExtraError, SnapshotError, StorageError
from snapshot.events import log
from snapshot.formats.foreign import ForeignDocument, ForeignStorage
from snapshot.formats.zip_archive import SIGNATURE
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
    """Lower numbers are asked first, after all formats of this library."""
    folder: str = ""
    """`async def describe(folder: SearchedFolder) -> ForeignDocument | None`, for the checkpoint in a folder."""
    names: str = ""
    """A pattern. `folder` is asked about a folder that has a name like that, or about each if it is empty."""
    file: str = ""
    """`async def describe(storage, name, size, limit) -> ForeignDocument`, for a file that begins with one of `heads`.
    """
    heads: tuple[bytes, ...] = ()
    refines: str = ""
    """Name of another format, whose folders this one may know more closely. It is asked after that has opened one."""
    refine: str = ""
    """`async def refine(folder: SearchedFolder, found: ForeignDocument) -> ForeignDocument | None`, for `refines`.

    It returns a document in the place of `found`, which usually has parts of that, or None to leave it as it is."""
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
    """`def plan(export: Export, request: ExportRequest) -> ExportPlan`, for what it writes."""
    one_file: bool = False
    """True if it always writes one file."""
    suffixes: tuple[str, ...] = ()
    """Suffixes such as `".pt"`. A name with one of them stands for this format, and for one file."""
    prepare: str = ""
    """`def prepare(operation, target)`, which returns what `ExportRequest.prepared` is."""
    choose_map: str = ""
    """`def choose_map(prepared, manifest) -> TensorMap | None`, for a conversion without a map; beside `prepare`."""
    options: str = ""
    """A class of `FormatOptions`: that of `Target(format_options=...)` for what it writes."""
    needs_options: bool = False
    """True if it cannot be written without them."""
    whole_folder: bool = False
    """True if a copy takes all files of the folder: the index does not name them."""
    unlisted: bool = False
    """True if `folder` is also asked where names cannot be listed, since it knows which files to look for."""

    def __post_init__(self) -> None:
        extensions.expect_types(self)
        whole = bool(self.refines) == bool(self.refine) == (":" in self.refine)
        if not whole or (self.refines and self.refines == self.name):
            raise TypeError(
                f"refines and refine must name another format and a function, or nothing, got {self.refines!r} and "
                f"{self.refine!r}"
            )


class SearchedFolder:
    """A folder in which a checkpoint is looked for."""

    def __init__(
        self,
        url: URL,
        storage: Storage,
        beside: Callable[[URL], Storage],
        limit: int,
        reads: Callable[[ForeignDocument], Any] | None = None,
    ) -> None:
        """`beside` opens another storage. `limit`: the maximum length of a description to read.

        `reads` returns the `Opened` of a document, with which a format reads values that it must know to describe them.
        """
        self.url, self.storage, self.beside, self.limit, self.reads = url, storage, beside, limit, reads
        self.is_listed = False
        """True after `names`, if they could be listed."""
        self._names: list[str] | None = None

    @property
    def linkless(self) -> Storage:
        """A view of the folder that follows no link out of it: what a pickle holds has no digest."""
        return ForeignStorage(self.storage, b"", links=False)

    async def names(self) -> Sequence[str]:
        """Return the names in the folder, those of folders with a trailing `/`; empty if they cannot be listed."""
        if self._names is None:
            try:
                self.is_listed = self.storage.capabilities.list
                self._names = await self.storage.list(recursive=False) if self.is_listed else []
            except StorageError:
                self.is_listed, self._names = False, []
        return self._names

    async def may_have(self, made: Format) -> bool:
        """Return True if the folder has a name as a format's folders have one, or if that cannot be told."""
        names = await self.names() if made.names else ()
        spellings = (each for name in names for each in {name, name.rstrip("/")})  # a folder may be there by mistake
        found = not made.names or any(re.fullmatch(made.names, each) for each in spellings)
        return found or (made.unlisted and not self.is_listed)


SNAPSHOT = "snapshot"
"""The value of `Target(to=...)` for a snapshot, which is written by a take, and recognised before all formats."""
_BUILT_IN = (
    Format(
        "dcp",
        10,
        "snapshot.formats.dcp:describe_folder",
        r"\.metadata",
        unlisted=True,
        writes="dcp",
        plan="snapshot.transform.to_dcp:plan",
    ),
    Format(
        "hugging_face",
        30,
        "snapshot.formats.hugging_face:describe_folder",
        r"(?s).*\.(safetensors|bin|json)",
        unlisted=True,
        writes="safetensors",
        plan="snapshot.transform.to_safetensors:plan",
        suffixes=(".safetensors",),
    ),
    Format("rank_files", 60, "snapshot.formats.rank_files:describe_folder", r"(?s).*\.(pt|pth|bin|ckpt)"),
    Format(
        "torch_save",
        file="snapshot.formats.torch_save:describe_file",
        heads=(SIGNATURE,),
        writes="torch",
        plan="snapshot.transform.to_torch:plan",
        one_file=True,
        suffixes=(".pt", ".pth"),
    ),
    Format(SNAPSHOT, writes=SNAPSHOT),
)


class _Listed(NamedTuple):
    """All declared formats, in the order in which they are asked."""

    own: tuple[Format, ...]
    others: tuple[Format, ...]
    left_out: dict[str, SnapshotError]
    """Why a declaration of another package is left out, by its entry point."""
    points: dict[str, str]
    """The entry point of each format, by its name."""


@cache
def _listed() -> _Listed:
    own, others = list(_BUILT_IN), list[Format]()
    owners = {claim: each.name for each in _BUILT_IN for claim in _claims_of(each)}
    left_out: dict[str, SnapshotError] = {}
    points: dict[str, str] = {}
    for point, made in extensions.load_declared(GROUP, Format, "the format"):
        if isinstance(made, SnapshotError):
            left_out[point] = made
            continue
        is_own, claims = (GROUP, point) in extensions.own_points(), _claims_of(made)
        known = owners if is_own else extensions.CLAIMS | owners
        taken = next((f"{claim}, as {known[claim]} does" for claim in claims if claim in known), None)
        if taken is not None:
            what = f"the format {point} of {_owner_of(point)} is left out"
            left_out[point] = SnapshotError(f"{what}: it declares {taken}")
            log.warning("%s", left_out[point])
            continue
        owners |= dict.fromkeys(claims, made.name)
        points[made.name] = point
        (own if is_own else others).append(made)
    in_order = attrgetter("order")
    return _Listed(tuple(sorted(own, key=in_order)), tuple(sorted(others, key=in_order)), left_out, points)


def formats() -> tuple[Format, ...]:
    """Return all formats, in the order in which they are asked: those of this library first.

    Only the declarations of plugins are imported. One of another package that cannot be loaded, or has what another
    format has, is logged and left out.
    """
    return _listed().own + _listed().others


def is_own(made: Format) -> bool:
    """Return True for a format of this library or of its plugins."""
    return made in _listed().own


def _claims_of(made: Format) -> list[str]:
    """Return what only one format may have, as in a message."""
    return [
        f"the name {made.name!r}",
        *([f"to={made.writes!r}"] if made.writes else []),
        *(f"the suffix {each!r}" for each in made.suffixes),
        *(f"dequantise={each!r}" for each in made.methods),
        *(f"the codec {each!r}" for each in made.codecs),
    ]


def _owner(made: Format) -> str:
    return _owner_of(_listed().points.get(made.name, ""))


def _owner_of(point: str) -> str:
    found = extensions.find(GROUP, point)
    return extensions.OWN if found is None else extensions.owner_of(found)


def resolve(made: Format, place: str) -> Any:
    """Return what a format names. An error of another package names it."""
    try:
        return resolve_name(place)
    except BaseException as error:
        if extensions.is_own(place.partition(":")[0]) or extensions.is_interrupt(error):
            raise
        raise SnapshotError(f"the format {made.name} of {_owner(made)} cannot import {place}: {error!r}") from error


async def describe_folder(folder: SearchedFolder, first: int = 0) -> ForeignDocument | None:
    """Return the checkpoint in a folder; None if no format knows it. `first`: the first order to ask."""
    for each in formats():
        if each.order < first or not each.folder or not await folder.may_have(each):
            continue
        found = await _ask(each, each.folder, folder)
        if found is not None:
            return await _refine(each.name, folder, found)
    return None


async def _refine(name: str, folder: SearchedFolder, found: ForeignDocument) -> ForeignDocument:
    """Return what the formats that refine another one make of its document: each gets that of the one before it."""
    for each in formats():
        if each.refines == name:
            own = replace(found, manifest=dict(found.manifest), files=dict(found.files))
            found = await _ask(each, each.refine, folder, own) or found  # a copy, since it may fail half-way
    return found


async def _ask(made: Format, place: str, folder: SearchedFolder, *found: ForeignDocument) -> ForeignDocument | None:
    """Call a function of a format.

    If it is of another package, a fault of its code is logged, and what it says of its checkpoint is raised.
    """
    answer: ForeignDocument | None
    if is_own(made):
        answer = await resolve(made, place)(folder, *found)
        return answer
    try:
        describe = resolve(made, place)
    except SnapshotError as error:
        log.warning("%s", error)
        return None
    try:
        answer = await describe(folder, *found)
        if answer is not None and not isinstance(answer, ForeignDocument):
            raise TypeError(f"{place} must return a document or None, got {answer!r}")
        return answer
    except SnapshotError:
        raise
    except Exception as error:  # noqa: BLE001 - other formats may know the folder
        log.warning("%s: the format %s of %s failed: %r", folder.url, made.name, _owner(made), error, exc_info=error)
        return None


def find_by_head(head: bytes, *, own: bool) -> Any:
    """Return the function that describes a file that begins so, or None. `own`: of this library's formats."""
    each = next((each for each in (_listed().own if own else _listed().others) if head.startswith(each.heads)), None)
    return None if each is None else resolve(each, each.file)


def find_view(method: str) -> Any:
    """Return the function that gives a checkpoint plain weights in place of those of a method."""
    each = next((each for each in formats() if method in each.methods), None)
    if each is None:
        raise _missing(f"dequantise={method!r}")
    return resolve(each, each.view)


def _missing(claim: str, name: str = "") -> SnapshotError:
    """Return the error for something that no format has: its package is missing, or was left out."""
    package = extensions.CLAIMS.get(claim)
    if package is not None:
        return MissingExtraError(f"{claim}: {package} of {extensions.OWN} is not installed")
    return _listed().left_out.get(name) or SnapshotError(f"{claim}: no installed format has it")


def find_codec(codec: str) -> Any:
    """Return the function that makes a decompressor of a plugin's codec, or None."""
    each = next((each for each in formats() if codec in each.codecs), None)
    return None if each is None else resolve(each, each.codec)


def find_writer(to: str) -> Format:
    """Return the format that writes a value of `Target(to=...)`."""
    found = next((each for each in formats() if each.writes == to), None)
    if found is None:
        raise _missing(f"to={to!r}", to)
    return found


def add_options(parser: ArgumentParser) -> list[type[FormatOptions]]:
    """Add the flags of all formats' options, and return their classes. One of another package that fails is logged."""
    added = []
    for each in formats():
        if not each.options:
            continue
        try:
            made = resolve(each, each.options)
            made.add_flags(parser)
        except Exception as error:
            if extensions.is_own(each.options.partition(":")[0]):
                raise
            log.warning("the format %s of %s: cannot add its options: %r", each.name, _owner(each), error)
        else:
            added.append(made)
    return added


def expect_options(options: FormatOptions) -> None:
    """Raise `TypeError` if these are not the options of the format that they name."""
    written = getattr(options, "to", None)
    if not isinstance(written, str) or isinstance(options, type):
        raise TypeError(f"format_options must be options of a format, got {options!r}")
    found = find_writer(written)
    if not found.options or not isinstance(options, resolve(found, found.options)):
        known = found.options.replace(":", ".") or f"None, since to={written!r} has no options"
        raise TypeError(f"format_options must be {known}, got {options!r}")


def find_suffix(suffix: str) -> Format | None:
    """Return the format of files whose names end so, or None. Raise if the package that has it is not installed."""
    found = next((each for each in formats() if suffix in each.suffixes), None)
    if found is None and (claim := f"the suffix {suffix!r}") in extensions.CLAIMS:
        raise _missing(claim)
    return found


def is_writable(to: str) -> bool:
    """Return True for a value of `Target(to=...)`, also if its package is missing or its declaration left out."""
    return to in written_formats() or f"to={to!r}" in extensions.CLAIMS or to in _listed().left_out


def written_formats() -> list[str]:
    """Return what all formats write: values of `Target(to=...)`."""
    return sorted(each.writes for each in formats() if each.writes)


def find_format(name: str) -> Format | None:
    """Return the format of this name, if there is one."""
    return next((each for each in formats() if each.name == name), None)
