"""A reader of snapshots in one file, for a program or a day without the library.

    python reader.py FOLDER                      list all names, with dtypes and shapes
    python reader.py FOLDER NAME                 print a tensor or a value
    python reader.py FOLDER NAME -o weight.npy   save a tensor for NumPy
    python reader.py FOLDER --verify             list all names, and read each

It needs numpy and xxhash, and zstandard for compressed files; neither torch nor the library. It reads the formats
snapshot/1, snapshot/2 and snapshot/3, as format.md specifies them, and verifies all bytes that it reads. Damaged and
hostile files raise a FormatError. A dtype that NumPy lacks, such as bfloat16, becomes an integer of the same size.

It does not check signatures, or that a manifest has the canonical form. It does not follow a snapshot to its base. It
runs no pickle: objects are bytes. Sparse and quantised tensors are dicts of their parts, which it does not compose.
Of containers and tensor subclasses, it reads the contents, by their own names. Dates, paths and the like are texts.
"""

import argparse
import base64
import bisect
import contextlib
import json
import math
import re
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash

BLOCK = 256 << 10
FORMATS = ("snapshot/1", "snapshot/2", "snapshot/3")
KINDS = (1, 2, 4, 8, 128 + 2, 128 + 4, 128 + 8)
SHOWN = ("type", "dtype", "shape", "kind", "obj_type", "serializer", "serialized_value")
LOCATION = re.compile(r"data/[0-9a-z]+-[0-9]+(-[0-9]+\.(safetensors|bin|stats)|\.json)")
MANIFEST = re.compile(rb'(.*),"digest":"(xxh3:[0-9a-f]{32})"\}', re.DOTALL)
DTYPES = {"bool": "?", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16"}
DTYPES |= {f"{sign}int{8 * size}": f"<{sign or 'i'}{size}" for sign in ("", "u") for size in (1, 2, 4, 8)}
DTYPES |= {"bfloat16": "<u2", "bits16": "<u2", "complex32": "<u4", "bcomplex32": "<u4"}  # as integers of their size
DTYPES |= dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), "u1")
DTYPES |= dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), "u1")
DTYPES |= dict.fromkeys(("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8"), "u1")


class FormatError(Exception):
    """Raised for files that are damaged, hostile, or not a snapshot."""


def check(holds, subject, expected, got):
    """Raise a FormatError unless something holds."""
    if not holds:
        raise FormatError(f"{printable(subject)} must be {expected}, got {printable(got)[:200]}")


@contextlib.contextmanager
def refusing(subject):
    """Raise a FormatError for any other error, such as that of a missing field, or of a text for a number."""
    try:
        yield
    except Exception as error:
        check(isinstance(error, FormatError), subject, "readable", f"{type(error).__name__}: {error}")
        raise


def printable(text):
    """Return a text without control characters, which a terminal would obey."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def digest(data):
    """Return the digest of a block, a header, a table, or a manifest."""
    return "xxh3:" + xxhash.xxh3_128_hexdigest(data)


def digest_range(data):
    """Return the digest of a range of any length, and the table of its blocks, which a short one lacks."""
    if len(data) <= BLOCK:
        return digest(data), b""
    table = b"".join(xxhash.xxh3_128_digest(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK))
    return digest(table), table


def decode_manifest(path):
    """Return a manifest, or a part of one, as a dict, and the digest of its file."""
    check(path.is_file() and path.stat().st_size <= 1 << 30, path, "a file of at most 1 GiB", "another, or none")
    data = path.read_bytes()
    found = MANIFEST.fullmatch(data)
    check(found, path, "a manifest that ends with its digest", f"{len(data)} bytes")
    check(digest(found[1]) == found[2].decode(), f"{path}: digest", found[2].decode(), digest(found[1]))
    return json.loads((found[1] + b"}").decode(), object_pairs_hook=distinct), digest(data)


def distinct(pairs):
    check(len(dict(pairs)) == len(pairs), "an object", "one with distinct keys", [key for key, _ in pairs])
    return dict(pairs)


def decode_block(stored, size, kind):
    """Return the `size` bytes of a block of a compressed file."""
    if len(stored) == size:
        return stored
    width, count = kind % 128, size // (kind % 128)
    lengths = struct.unpack_from(f"<{width}I", stored)
    at, end = 4 * width, 4 * width + sum(lengths)
    fits = len(stored) == max(end, -(-size // 256)) and max(lengths) <= count and not any(stored[end:])
    check(fits, "a stored block", "its planes, and zeros up to 1/256 of its length", f"planes of {lengths} bytes")
    planes = np.empty((count, width), np.uint8)
    for number, length in enumerate(lengths):
        plane = stored[at : at + length]
        if length != count:
            import zstandard  # only for compressed files

            found = zstandard.frame_content_size(plane)  # a longer one must not take memory
            check(found == count, "a zstd frame", f"one of {count} bytes", found)
            plane = zstandard.ZstdDecompressor(max_window_size=BLOCK).decompress(plane, count, allow_extra_data=False)
        planes[:, number] = np.frombuffer(plane, np.uint8)
        at += length
    words = planes.reshape(-1).view(f"<u{width}")
    return (words if kind < 128 else words >> 1 | words << (8 * width - 1)).tobytes()


class DataFile:
    """A data file, as it is without compression. Its length and its header are checked when it is opened."""

    def __init__(self, snapshot, location):
        check(LOCATION.fullmatch(location), "a location", "the name of a data file", location)
        entry, self.path = snapshot.files[location], snapshot.folder / location
        check(not entry.get("in_base"), location, "in this snapshot", "a file of its base: read the name there")
        self.size, self.header, packed = entry["size"], entry.get("header", 0), entry.get("packed")
        stored = entry["size"] if packed is None else packed["size"]
        fits = self.path.is_file() and self.path.stat().st_size == stored
        check(fits, self.path, f"a file of {stored} bytes", "another, or none")
        self.blocks = None if packed is None else self._find_blocks(snapshot, packed)
        found, expected = digest(self.read(0, self.header)) if self.header else None, entry.get("header_digest")
        check(found == expected, f"{self.path}: digest of the header", expected, found)

    def _find_blocks(self, snapshot, packed):
        """Return the blocks of a compressed file: begin and end in the file, place and length as stored, kind, sum."""
        check(packed["codec"] == "split+zstd", f"{self.path}: codec", "split+zstd", packed["codec"])
        table = snapshot.read_data(*packed["index"])
        check(digest(table) == packed["index_digest"], f"{self.path}: table", packed["index_digest"], digest(table))
        blocks, end, place = [], 0, 0
        for stored, word, total in struct.iter_unpack("<IIQ", table):
            kind, size = word >> 24, word & 0xFFFFFF
            fits = kind in KINDS and size % (kind % 128) == 0 and 0 < size <= BLOCK and stored <= size <= 256 * stored
            fits = fits if blocks else (stored, word) == (4096, 0)  # the first one is the header of the stored file
            check(fits, f"{self.path}: block {len(blocks)}", "one that can be", (stored, size, kind))
            blocks.append((end, end + size, place, stored, kind, total))
            end, place = end + size, place + stored
        check((end, place) == (self.size, packed["size"]), f"{self.path}: table", "that of all its bytes", end)
        return blocks

    def read(self, begin, end):
        """Return bytes of the file, which the caller verifies."""
        with open(self.path, "rb") as file:
            if self.blocks is None or begin == end:
                file.seek(begin)
                return file.read(end - begin)
            first = bisect.bisect_right(self.blocks, begin, key=lambda block: block[1])
            last = bisect.bisect_left(self.blocks, end, key=lambda block: block[1])
            decoded = []
            for start, stop, place, length, kind, total in self.blocks[first : last + 1]:
                file.seek(place)
                stored = file.read(length)
                found = xxhash.xxh3_64_intdigest(stored)
                check(found == total, f"{self.path}: sum of the block at {place}", total, found)
                decoded.append(decode_block(stored, stop - start, kind))
        return b"".join(decoded)[begin - self.blocks[first][0] :][: end - begin]


class Snapshot:
    """A snapshot in a folder. Its `entries` are those of the manifest: name -> dict."""

    def __init__(self, folder):
        self.folder, self._opened = Path(folder), {}
        with refusing(folder):
            main, _ = decode_manifest(self.folder / ".snapshot_metadata")
            check(main["format"] in FORMATS, f"{folder}: format", " or ".join(FORMATS), main["format"])
            self.files, self.metadata = main["files"], main["metadata"]
            self.entries, self._nbytes = dict(main["manifest"]), sum(file["size"] for file in self.files.values())
            for location, expected in [(part["location"], part["digest"]) for part in main["parts"]]:
                check(LOCATION.fullmatch(location), "a location", "the name of a part", location)
                part, found = decode_manifest(self.folder / location)
                check(found == expected, f"{location}: digest", expected, found)
                for name, entry in part["manifest"].items():
                    held = self.entries.setdefault(name, entry)
                    if held is not entry:  # each part of the manifest has some boxes of a sharded tensor
                        check({**held, "shards": 0} == {**entry, "shards": 0}, name, "described once", "two entries")
                        held["shards"] += entry["shards"]

    def read(self, name):
        """Return the contents of a name, verified: a dtype, a type or a class, and an array, a value or bytes."""
        check(name in self.entries, "the name", "one of the list", name)
        with refusing(name):
            entry = self.entries[name]
            if "shape" in entry and "keys" not in entry:
                return str(entry["dtype"]), self._read_array(name, entry)
            if "parts" in entry:
                return entry["kind"], {key: self._read_array(name, part) for key, part in entry["parts"].items()}
            if "location" in entry:
                return entry["obj_type"], self._read_range(name, entry)
            kind, text = entry["type"], entry.get("serialized_value")
            check(isinstance(text, str), name, "a tensor or a value", f"a {kind}: read the names below it")
            return kind, read_text(kind, text, entry.get("escaped"))

    def read_data(self, location, begin, end):
        """Return a range of a data file, which the caller verifies."""
        file = self._opened.get(location) or self._opened.setdefault(location, DataFile(self, location))
        fits = file.header <= begin <= end <= file.size
        check(fits, f"{location}: a range", f"between {file.header} and {file.size}", [begin, end])
        return file.read(begin, end)

    def _read_range(self, name, entry):
        """Return the bytes of an entry, verified."""
        data = self.read_data(entry["location"], *entry["byte_range"])
        found, table = digest_range(data)
        check(found == entry["digest"], f"{name}: digest", entry["digest"], found)
        check(not table or table == self.read_data(*entry["blocks"]), f"{name}: table", "that of the blocks", "another")
        return data

    def _read_array(self, name, entry):
        """Return a tensor, or an array of NumPy."""
        shape, kind = entry["shape"], entry["dtype"]
        if entry["type"] == "ndarray":
            dtype = np.lib.format.descr_to_dtype(as_tuples(kind[1] if kind[0] == "record" else kind))
            data = self._read_array(name, entry["data"]).tobytes() if dtype.itemsize else b""
            fits = len(data) == math.prod(shape) * dtype.itemsize and not dtype.hasobject  # bytes are not pointers
            check(fits, name, f"{dtype}{shape}, without objects", f"{len(data)} bytes")
            return np.ndarray(shape, dtype, data).copy()
        check(kind in DTYPES, f"{name}: dtype", "known to this reader", kind)
        nbytes, dtype = math.prod(shape) * np.dtype(DTYPES[kind]).itemsize, DTYPES[kind]
        check(nbytes <= self._nbytes, name, f"of at most {self._nbytes} bytes, those of all files", nbytes)
        array, filled = np.empty(shape, dtype), np.zeros(shape, bool)
        whole = {"offsets": [0] * len(shape), "sizes": shape, "tensor": entry}
        for box in entry.get("shards", entry.get("chunks", [whole])):
            offsets, sizes, stored = box["offsets"], box["sizes"], box["tensor"]
            fits = all(0 <= low <= low + n <= size for low, n, size in zip(offsets, sizes, shape, strict=True))
            fits = fits and (stored["dtype"], stored["shape"], stored.get("serializer")) == (kind, sizes, None)
            check(fits, f"{name}: a box", f"in {kind}{shape}, and stored unchanged", box)
            place = tuple(slice(low, low + n) for low, n in zip(offsets, sizes, strict=True))
            check(not filled[place].any(), f"{name}: the box at {offsets}", "apart from all others", "an overlap")
            array[place] = np.frombuffer(self._read_range(name, stored), dtype).reshape(sizes)
            filled[place] = True
        check(filled.all(), name, "filled by its boxes", f"{int(filled.sum())} of {filled.size} elements")
        return array


def as_tuples(descr):
    """Return NumPy's text for a dtype, or its fields as tuples, which JSON lacks: (name, dtype) or with a shape."""
    if isinstance(descr, str):
        return descr
    named = [(tuple(name) if isinstance(name, list) else name, *rest) for name, *rest in descr]
    return [(name, as_tuples(kind), *map(tuple, shape)) for name, kind, *shape in named]


def read_text(kind, text, escaped=False):
    """Return the value of a text. An escaped one has %25, %2F and %uD800, like the components of a name."""
    if kind == "int":
        return int(text, 16 if "x" in text else 10)
    if kind in ("float", "complex"):
        numbers = struct.unpack(">d" if kind == "float" else ">dd", bytes.fromhex(text))
        return numbers[0] if kind == "float" else complex(*numbers)
    if kind in ("bool", "NoneType"):
        return {"True": True, "False": False, "None": None}[text]
    if kind == "bytes":
        return base64.b64decode(text, validate=True)
    return re.sub("%(25|2F|u[0-9A-F]{4})", lambda found: chr(int(found[1].lstrip("u"), 16)), text) if escaped else text


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Read a snapshot without the library.")
    parser.add_argument("folder")
    parser.add_argument("name", nargs="?")
    parser.add_argument("-o", "--output", help="a .npy file for the tensor")
    parser.add_argument("--verify", action="store_true", help="read all names")
    options = parser.parse_args(arguments)
    with refusing(options.folder):
        snapshot = Snapshot(options.folder)
        if any(snapshot.folder.glob("data/*.signature")):
            print("this reader does not check the signature", file=sys.stderr)
        for name, entry in snapshot.entries.items() if options.name is None else ():
            words = (entry[key] for key in SHOWN if key in entry)
            print(printable(name), *(printable(word)[:80] for word in words))
            if options.verify and not entry.keys() & {"keys", "length"}:
                snapshot.read(name)
        if options.name is not None:
            kind, value = snapshot.read(options.name)
            if options.output is None:
                print(printable(kind), value if np.ndim(value) else printable(value), sep="\n")
            else:
                check(isinstance(value, np.ndarray), options.name, "a tensor", kind)
                np.save(options.output, value, allow_pickle=False)


if __name__ == "__main__":
    try:
        main()
    except FormatError as error:
        sys.exit(str(error))
