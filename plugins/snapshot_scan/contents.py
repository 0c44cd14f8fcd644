"""What is in a file, by its content: pickles, archives, compressed bytes, model code, or data that nothing runs."""

from __future__ import annotations

import ast
import bz2
import io
import json
import lzma
import math
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from snapshot.formats import zip_archive
from snapshot_scan.names import Name, judge_name
from snapshot_scan.pickles import MOST_OPCODES, Pickle

RUNS, UNKNOWN, HARMLESS, UNEXAMINED = "runs code", "unknown", "harmless", "not examined"
RULES = {
    "code": (RUNS, "A pickle names a function that runs code, or calls one that is not known."),
    "unknown": (UNKNOWN, "A pickle names a class or function that is not known to be harmless."),
    "known": (HARMLESS, "A pickle names a class or function that checkpoints need."),
    "pickle": (UNKNOWN, "A pickle is broken, or does what checkpoints do not need."),
    "model": (RUNS, "A file has code that a reader may run: TorchScript, Lambda layers, file operations, programs."),
    "archive": (UNKNOWN, "An archive is damaged, or two readers may find different contents in it."),
    "link": (UNKNOWN, "A link, or a name in an archive, leads out of its folder."),
    "limit": (UNEXAMINED, "A limit on memory or time ended the examination."),
    "unexamined": (UNEXAMINED, "A file, or a part of it, could not be examined."),
}
"""The kinds of findings: the verdict of each, and a sentence."""
MiB = 1 << 20
INFLATED = 64 * MiB
"""Bytes that one compressed content may have."""
MOST_INFLATED = 1024 * MiB
"""Decompressed bytes of all contents of one file."""
SEARCHED_TEXT = 256 * MiB
"""Bytes of a text, or of a file in HDF5, that are searched for code of models."""
MOST_FINDINGS = 10_000
MOST_CONTENTS = 500_000
"""Members of all archives in one file."""
DEEPEST = 4
"""Archives and compressed contents in each other."""
SEARCHED = 64 * MiB
"""Bytes after a pickle, or after a fault in one, that are searched for another one."""
MOST_PLACES = 50_000
"""Places in them where a pickle may begin, or headers in a broken archive."""
DIRECTORY = 64 * MiB
"""Bytes of an archive's directory."""
SLACK = 32
"""Bytes between the members of an archive: a descriptor, and some more."""
LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The number in the first of the five pickles of an old torch file, after which the bytes of its storages follow."""
_PICKLED = re.compile(
    r"\.(pkl|pickle|p|pt|pth|ckpt|joblib|dill|npy|npz|keras|nemo|tar|zip|h5|hdf5|gz|bz2|xz|lzma|z)$", re.IGNORECASE
)
_MAYBE = re.compile(r"\.(bin|dat|data)$", re.IGNORECASE)
"""Files that may be pickles or anything else."""
_OBJECTS = re.compile(r"(^|/)data/[0-9a-f]{12}-\d+-\d+\.bin$")
"""Files of a snapshot with archives among other bytes: its manifest tells where."""
_CHUNK = re.compile(r"(^|/)([0-9a-f]{32}|\d+(\.\d+)*|c|manifest\.ocdbt)$")
"""Files of arrays of Orbax and Zarr, whose blocks are compressed."""
_ZSTD = b"\x28\xb5\x2f\xfd"
_CLOSED = {
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "RAR",
    _ZSTD: "zstd",
    b"\x04\x22\x4d\x18": "LZ4",
    b"ZF0x": "old joblib",
}
_DATA = {b"GGUF": "GGUF", b"\x89PNG": "image", b"\xff\xd8\xff": "image", b"GIF8": "image", b"RIFF": "media"}
_ZLIB, _LZMA = partial(zlib.decompressobj, 47), partial(lzma.LZMADecompressor, memlimit=4 * INFLATED)
_DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
    **dict.fromkeys((b"\x1f\x8b", b"x\x01", b"x^", b"x\x9c", b"x\xda"), _ZLIB),
    **{b"BZh": bz2.BZ2Decompressor, b"\xfd7zXZ\0": _LZMA, b"]\0": _LZMA},
}
_CERTAIN = (b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0")
"""First bytes that no other content has."""
_BOMS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_DEFLATE = partial(zlib.decompressobj, -15)
_METHODS: dict[int, Callable[[], Any]] = {zip_archive.DEFLATED: _DEFLATE, 12: bz2.BZ2Decompressor, 14: _LZMA}
"""Of the members of zip archives."""
_NAMED = re.compile(
    rb"[ci]([^\n]{1,200})\n([^\n]{1,200})\n"
    rb"|[\x8cU].([^\x8c\x93\x94]{1,99})\x94?[\x8cU].([^\x8c\x93\x94]{1,99})\x94?\x93",
    re.DOTALL,
)
"""What looks like an instruction that names something, in bytes that cannot be followed."""
_PROGRAM = re.compile(rb"\x7fELF|MZ.{0,1000}?PE\0\0|\xcf\xfa\xed\xfe|\xca\xfe\xba\xbe", re.DOTALL)
_TAG = re.compile(
    rb'"class_name"\s{0,40}:\s{0,40}"(?:Lambda|__lambda__)"|"class_name"\s{0,40}:?\s{41}'
    rb"|!!python/[\w/:.]{1,60}|tag:yaml\.org,2002:python|!!\w*%[0-9a-fA-F]{2}|(?:\A|\n)%TAG "
)
"""Layers of Keras with code, also behind many spaces, and YAML's objects of Python, also by other names for them."""
_CONFIG = re.compile(_TAG.pattern + rb"|\\u00(?:[46][1-9a-fA-F]|[57][0-9aA]|5[fF])")
"""Those in JSON, also behind letters that are escaped, as no writer does."""
_OPERATION = re.compile(rb"ReadFile|WriteFile|MatchingFiles|EagerPyFunc|PyFunc|" + _TAG.pattern)


class Finding(NamedTuple):
    """One finding in a file, or in a member of an archive."""

    file: str
    member: str
    rule: str
    text: str
    name: str | None = None

    @property
    def verdict(self) -> str:
        """What the finding means for the reader."""
        return RULES[self.rule][0]


class Region(io.RawIOBase):
    """A range of a file, as a stream of its own. `source` reads at most some bytes from a place."""

    def __init__(self, source: Callable[[int, int], bytes], size: int, begin: int = 0) -> None:
        self._source, self.size, self._begin, self._position = source, size, begin, 0

    def at(self, offset: int, count: int) -> bytes:
        """Return bytes from an offset on: fewer if the range ends before."""
        count = min(count, self.size - offset)
        return self._source(self._begin + offset, count) if offset >= 0 and count > 0 else b""

    def sub(self, offset: int, size: int | None = None) -> Region:
        """Return a range of this range."""
        most = max(0, self.size - offset)
        return Region(self._source, most if size is None else max(0, min(size, most)), self._begin + offset)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self.size)[whence])
        return self._position

    def read(self, count: int = -1) -> bytes:
        """Return at most 16 MiB, whatever a hostile header asks for."""
        data = self.at(self._position, min(count, 16 * MiB) if count >= 0 else 16 * MiB)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def search(self, pattern: re.Pattern[bytes], begin: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the places and bytes of all matches from `begin` on; those at the edges of blocks may come twice."""
        for place in range(begin, self.size, MiB):
            yield from ((place + each.start(), each[0]) for each in pattern.finditer(self.at(place, MiB + 1024)))


def of_bytes(data: bytes) -> Region:
    """Return a region of bytes in memory."""
    return Region(lambda begin, count: data[begin : begin + count], len(data))


class Examination:
    """The examination of one file, with its findings and what is left of its limits."""

    def __init__(self, file: str, allow: Sequence[str] = ()) -> None:
        self.file, self._allow = file, allow
        self.findings: dict[Finding, None] = {}
        self._opcodes, self._inflated, self._contents = MOST_OPCODES, MOST_INFLATED, MOST_CONTENTS

    def report(self, member: str, rule: str, text: str, name: str | None = None) -> None:
        """Add a finding."""
        found = Finding(self.file, member, rule, text, name)
        if len(self.findings) >= MOST_FINDINGS:
            found = Finding(self.file, "", "limit", f"more than {MOST_FINDINGS:,} findings")
        self.findings[found] = None

    def examine(self, region: Region, member: str = "", depth: int = 0, name: str = "") -> str:  # noqa: PLR0911, PLR0912
        """Examine a content, and those in it. Return its kind. `name` is its own, without the suffix of an archive."""
        head, name = region.at(0, 1024), name or member or self.file
        self._contents -= 1
        if depth > DEEPEST or self._contents < 0:
            what = f"{DEEPEST} archives in each other" if depth > DEEPEST else f"{MOST_CONTENTS:,} members"
            self.report(member if self._contents > 0 else "", "limit", f"more than {what}")
            return "archive"
        # the first bytes of other kinds are instructions, too: a file can be a pickle at the same time
        is_zip = head.startswith(zip_archive.SIGNATURE)
        end = -4 if region.size > len(head) else None  # a letter may be cut there
        is_text = b"\0" not in head and "\ufffd" not in head.decode("utf-8", "replace")[:end]
        pickled = not is_zip and self._read_pickles(region, member, bool(_PICKLED.search(name)), text=is_text)
        if is_zip or find_end(region) >= 0:
            self._open_zip(region, member, depth)
            return "archive"
        if _is_tar(head):
            self._open_tar(region, member, depth)
            return "archive"
        for magic, start in _DECOMPRESSORS.items():
            certain = head.startswith(_CERTAIN)
            if head.startswith(magic) and self._inflate(region, start, member, depth, certain=certain):
                return "compressed"
        for magic, kind in _CLOSED.items():
            if head.startswith(magic) and not (magic == _ZSTD and _CHUNK.search(name)):
                self.report(member, "unexamined", f"a {kind} file, which cannot be opened here")
                return kind
        if head.startswith(b"\x93NUMPY"):
            self._read_npy(region, member, depth)
            return "array"
        if head.startswith(b"\x89HDF\r\n\x1a\n"):
            self._search_names(region.sub(0, SEARCHED), member)
            self._search_text(region, member, _CONFIG)  # which is stored as it is
            return "HDF5"
        if _PROGRAM.match(head):
            self.report(member, "model", "a program or a library")
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < region.size:
            return "safetensors"
        if pickled:
            return "pickle"
        codec = next((codec for bom, codec in _BOMS.items() if head.startswith(bom)), "")
        if codec:
            region, is_text = of_bytes(region.at(0, 16 * MiB).decode(codec, "replace").encode()), True
        kind = next((kind for magic, kind in _DATA.items() if head.startswith(magic)), "text" if is_text else "data")
        if name.endswith(".json"):
            self._read_json(region, member)
        if is_text or name.endswith((".json", ".pb", ".pbtxt")):
            in_json = is_text and region.at(0, 4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
            pattern = _OPERATION if name.endswith((".pb", ".pbtxt")) else _CONFIG if in_json else _TAG
            self._search_text(region, member, pattern)
        if head and (found := _PICKLED.search(name)):
            self.report(member, "unexamined", f"{'unknown data' if kind == 'data' else kind}, not a {found[0]} file")
        return kind

    def _read_pickles(self, region: Region, member: str, expected: bool, *, text: bool = False) -> bool:
        """Follow the pickles in a content, one after the other. Return False if it begins with none."""
        legacy, stream, count, end = LEGACY in region.at(0, 32), io.BufferedReader(region.sub(0), 1 << 16), 0, 0
        places: Iterator[int] = iter((0,))
        tried = 0
        while (place := next(places, -1)) >= 0 and self._opcodes > 0 and place - end < SEARCHED:
            tried += 1
            if tried > MOST_PLACES:
                self.report(member, "limit", f"more than {MOST_PLACES:,} places where a pickle may begin")
                break
            stream.seek(place)
            found = Pickle(tolerant=expected or bool(_MAYBE.search(member or self.file)))
            found.follow(stream, region.size, self._opcodes)
            self._opcodes -= found.opcodes
            if not found.is_pickle(expected=expected and not count, searched=place > end, text=text):
                if found.stopped:  # data, or a pickle without names: another one may follow
                    end = stream.tell() if place == end and not found.faults else end
                    places = chain((stream.tell(),), places)
                continue
            storages = legacy and count >= 5  # their bytes follow
            if not storages and region.at(end, min(place - end, 4096)).strip():
                self.report(member, "unexamined", f"{place - end:,} bytes before a pickle")
            count, end = count + 1, stream.tell()
            for name, called in found.names.items():
                rule = judge_name(name, called=called, allow=self._allow)
                self.report(member, rule, f"{'calls' if called else 'names'} {name}", str(name))
            for fault in found.faults:
                self.report(member, "pickle", fault)
            if not found.stopped:  # joblib has the bytes of arrays between instructions
                self._search_names(region.sub(end, SEARCHED), member)
            if found.limited:
                self.report(member, "limit", f"a pickle of more than {found.opcodes - 1:,} instructions")
            places = _find_pickles(region, end)
        if self._opcodes <= 0:
            self.report(member, "limit", f"more than {MOST_OPCODES:,} instructions in the file")
        if count and not (legacy and count >= 5) and region.at(end, 4096).strip():
            self.report(member, "unexamined", f"{region.size - end:,} bytes after a pickle")
        return count > 0

    def _search_names(self, region: Region, member: str) -> None:
        """Find names that run code in bytes that cannot be followed."""
        for match in (_NAMED.fullmatch(data) for _, data in region.search(_NAMED)):
            parts = [each.decode("utf-8", "backslashreplace") for each in (match.groups() if match else ()) if each]
            if len(parts) == 2 and judge_name(name := Name(*parts)) == "code":
                self.report(member, "code", f"names {name}, in bytes that cannot be followed", str(name))

    def _read_npy(self, region: Region, member: str, depth: int) -> None:
        """Examine what is after the header of an array: a pickle of objects, or other contents after its numbers."""
        begin, nbytes = read_array(region)
        if nbytes is None:
            if not self._read_pickles(region.sub(begin), member, expected=True):
                self.report(member, "unexamined", "an array of objects without a pickle, or without a header")
        elif region.size > begin + nbytes:
            self.report(member, "unexamined", f"{region.size - begin - nbytes:,} bytes after an array")
            self.examine(region.sub(begin + nbytes), member, depth + 1)

    def _open_zip(self, region: Region, member: str, depth: int) -> None:
        """Examine the members of the last archive in a content, and then what is before it."""
        name, start = member or self.file, region.size
        among = bool(_OBJECTS.search(name))
        while start:
            region = region.sub(0, start)
            self._contents -= 1
            if self._contents < 0:
                self.report("", "limit", f"more than {MOST_CONTENTS:,} members")
                return
            try:
                tail = region.at(max(0, region.size - zip_archive.TAIL), zip_archive.TAIL)
                begin, end = zip_archive.find_directory(tail, region.size)
                long = tail[-42:-38] == b"PK\6\7"
                if long and tail[-58:-42] != (end - begin).to_bytes(8, "little") + begin.to_bytes(8, "little"):
                    raise ValueError("an archive with two directories")
                if end - begin > DIRECTORY:
                    raise ValueError(f"an archive's directory of {end - begin:,} bytes")
                start = region.size - (zip_archive.TAIL if long else 22) - end
                members = zip_archive.read_members(region.at(start + begin, end - begin), begin)
                self._open_members(region.sub(start, begin), members, member, depth)
            except ValueError as error:
                if not among:
                    self.report(member, "archive", str(error))
                self._open_headers(region, member, depth)
                return
            joined = start and find_end(region.sub(0, start)) == start
            if start and not among and not (joined and name.endswith(".distcp")):
                self.report(member, "archive", f"{start:,} bytes before an archive")
            if start and not joined:
                self.examine(region.sub(0, start), member, depth + 1)
                return

    def _open_members(self, archive: Region, members: list[zip_archive.ZipMember], where: str, depth: int) -> None:
        names, last = Counter(each.name.lower() for each in members), 0
        for each in sorted(members, key=lambda each: each.header):
            head = archive.at(each.header, 30 + 4 * len(each.name) + 64)
            begin = each.header + zip_archive.find_data_begin(head)
            same = zip_archive.read_name(head) == each.name and head[8] == each.method
            if not same or head[6] & zip_archive.UNREADABLE:
                raise ValueError(f"member {each.name} has another header than the directory says")
            if not last <= each.header <= last + SLACK or names[each.name.lower()] > 1:
                self.report(where, "archive", f"member {each.name} overlaps, is there twice, or is after a gap")
            last = begin + each.packed
            data = archive.sub(begin, each.packed)
            self._open_member(data, each.name, each.method, where, depth)
            if each.method == zip_archive.STORED and each.size < MiB and each.crc not in (0, zlib.crc32(data.read())):
                self.report(where, "archive", f"member {each.name} has a wrong checksum")
        if archive.size > last + SLACK:
            self.report(where, "archive", "bytes between the members and their directory")

    def _open_member(self, data: Region, name: str, method: int, where: str, depth: int) -> None:
        inner = f"{where}:{name}" if where else name
        self._check_path(name, inner)
        if re.search(r"(^|/)code/.+\.py$", name):
            self.report(where, "model", "TorchScript code")
        if method == 14:  # LZMA, with another header than in a file
            data = of_bytes(data.at(4, 5) + b"\xff" * 8 + data.at(9, INFLATED))
        start = _METHODS.get(method)
        if method == zip_archive.STORED:
            self.examine(data, inner, depth + 1)
        elif start is None or not self._inflate(data, start, inner, depth):
            self.report(inner, "unexamined", f"it cannot be decompressed by method {method}")

    def _open_headers(self, region: Region, where: str, depth: int) -> None:
        """Examine what is after each header in a broken archive, whatever a directory says."""
        signatures = region.search(re.compile(rb"PK(?:\x03\x04|\x01\x02|\x05\x06|\x06\x06|\x07\x08)"))
        places = [*dict.fromkeys(islice(signatures, MOST_PLACES)), (region.size, b"")]
        if len(places) > MOST_PLACES // 2:
            self.report(where, "limit", f"a broken archive with more than {MOST_PLACES // 2:,} headers")
        for (place, signature), (following, _) in pairwise(places[: MOST_PLACES // 2]):
            head = region.at(place, min(following - place, zip_archive.LONGEST_HEADER))
            if signature == zip_archive.SIGNATURE and len(head) >= 30:
                data = region.sub(place, following - place).sub(min(len(head), zip_archive.find_data_begin(head)))
                self._open_member(data, zip_archive.read_name(head), head[8], where, depth)

    def _open_tar(self, region: Region, where: str, depth: int) -> None:
        names = set[str]()
        try:
            with tarfile.open(fileobj=region.sub(0), mode="r:") as archive:
                for each in archive:
                    inner = f"{where}:{each.name}" if where else each.name
                    self._check_path(each.name, inner)
                    if each.name in names and not each.isdir():
                        self.report(where, "archive", f"member {each.name} is there twice")
                    names.add(each.name)
                    if each.issym() or each.islnk():
                        self.report(inner, "link", f"a link to {each.linkname} in an archive")
                    elif each.isreg() and each.sparse is None:
                        self.examine(region.sub(each.offset_data, each.size), inner, depth + 1)
                    elif not each.isdir():
                        self.report(inner, "unexamined", "a special file in an archive")
                rest = region.sub(archive.offset)
                if rest.size > SEARCHED or next(rest.search(re.compile(rb"[^\0]")), None):
                    self.report(where, "archive", "bytes after the end of a tar archive")
        except (tarfile.TarError, ValueError, OverflowError) as error:
            self.report(where, "unexamined", f"a broken tar archive: {error}")

    def _check_path(self, path: str, inner: str) -> None:
        parts = path.replace("\\", "/").split("/")
        if ".." in parts or not parts[0] or parts[0][1:2] == ":":
            self.report(inner, "link", "the name of a member leads out of the folder")

    def _inflate(
        self, region: Region, start: Callable[[], Any], member: str, depth: int, *, certain: bool = False
    ) -> bool:
        """Examine decompressed bytes. Return False if they cannot be decompressed at all, unless it is `certain`."""
        if self._inflated <= 0:
            self.report(member, "limit", f"more than {MOST_INFLATED:,} decompressed bytes in the file")
            return True
        for most in (64 << 10, max(64 << 10, min(INFLATED, self._inflated))):
            made, error = _decompress(region, start, most)
            plain = made.startswith(b"\x93NUMPY") and read_array(of_bytes(made))[1] is not None
            if len(made) <= most:
                break
        self._inflated -= len(made)
        limited = "memory" in error.lower()
        if made or certain or limited:
            if error:
                self.report(member, "unexamined", error)
            elif len(made) > most and not plain:
                self.report(member, "limit", f"only the first {most:,} decompressed bytes were examined")
            if not (len(made) > most and plain):
                inner = re.sub(r"(?i)\.(gz|bz2|xz|lzma|z)$", "", member or self.file)
                self.examine(of_bytes(made), member, depth + 1, inner)
        return bool(made) or certain or limited or not error

    def _search_text(self, region: Region, member: str, pattern: re.Pattern[bytes]) -> None:
        """Find operations on files, Lambda layers of Keras, and objects of Python in YAML."""
        if region.size > SEARCHED_TEXT:
            self.report(member, "limit", f"only the first {SEARCHED_TEXT:,} bytes were searched")
        for found in {found.decode().strip() for _, found in region.sub(0, SEARCHED_TEXT).search(pattern)}:
            self.report(member, "model", found)

    def _read_json(self, region: Region, member: str) -> None:
        """Search the values of a JSON file, however it is written."""
        try:
            value = json.loads(region.at(0, SEARCHED))
            self._search_text(of_bytes(json.dumps(value).encode()), member, _TAG)
        except RecursionError:
            self.report(member, "limit", "a JSON file that nests too deep")
        except ValueError:  # it is none, or is too long, and is searched as it is
            return


def read_array(region: Region) -> tuple[int, int | None]:
    """Return where the data of a NumPy file begins, and its length; None if it is a pickle, or not known."""
    width = 2 if region.at(6, 1) == b"\1" else 4
    begin = 8 + width + int.from_bytes(region.at(8, width), "little")
    try:
        header = ast.literal_eval(region.at(8 + width, min(begin, MiB)).decode("latin-1")[: begin - 8 - width])
        dtype = import_module("numpy").lib.format.descr_to_dtype(header["descr"])
        return begin, None if dtype.hasobject else math.prod(header["shape"]) * dtype.itemsize
    except Exception:  # noqa: BLE001 - a hostile header may cause any
        return begin, None


def _decompress(region: Region, start: Callable[[], Any], most: int) -> tuple[bytes, str]:
    """Return decompressed bytes of all members, one more than `most` if there are, and what ended them too early."""
    made, place, machine, data = bytearray(), 0, start(), b""
    try:
        while len(made) <= most:
            if machine.eof:
                data = machine.unused_data.lstrip(b"\0")
            if not data:
                if place >= region.size:
                    return bytes(made), "" if machine.eof else "compressed bytes that are cut off"
                data = region.at(place, MiB)
                place += len(data)
            if machine.eof:
                machine = start()
            made += machine.decompress(data, most + 1 - len(made))
            data = b""
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as raised:
        return bytes(made), f"cannot be decompressed: {raised}"
    return bytes(made), ""


def _is_tar(head: bytes) -> bool:
    """Return True if readers take a content for a tar archive, by the checksum of its first header."""
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def find_end(region: Region) -> int:
    """Return the end of the last zip archive in a content; -1 if there is none."""
    for length in (22 + 20, 0xFFFF + zip_archive.TAIL):  # mostly there is no comment
        tail = region.at(max(0, region.size - length), length)
        place = tail.rfind(b"PK\5\6")
        if place >= 0:
            break
    directory = region.size - len(tail) + place - int.from_bytes(tail[place + 12 : place + 16], "little")
    certain = place >= 0 and (tail[:place][-20:].startswith(b"PK\6\7") or region.at(directory, 2) == b"PK")
    return region.size - len(tail) + place + 22 if certain else -1


def _find_pickles(region: Region, place: int) -> Iterator[int]:
    """Yield a place, and then those after it where a pickle may begin."""
    yield place
    yield from (found for found, _ in region.search(re.compile(rb"\x80[\0-\5]"), place) if found > place)
