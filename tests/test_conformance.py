"""The vectors in docs/conformance, for readers in other languages: the library and docs/reader.py agree with each.

`python -m tests.test_conformance` writes the files that do not exist. Existing ones never change.
"""

import base64
import contextlib
import datetime
import decimal
import fractions
import json
import math
import pathlib
import struct
import uuid
import zoneinfo
from pathlib import Path

import numpy as np
import pytest
import torch

from snapshot.errors import SnapshotError
from snapshot.manifest.containers import DictEntry
from snapshot.manifest.entries import AnyEntry
from snapshot.manifest.paths import decode_component, encode_component, encode_key, find_tagged_keys, quote_path
from snapshot.manifest.values import Scalar, make_plain_entry
from snapshot.tensors.digest import BLOCK, RunningDigest, digest_bytes, digest_range, root_of, tree_of
from snapshot.tensors.split_zstd import BlockCodec, BlockTable
from snapshot_signing.keys import decode_signature, encode_signature, load_key, load_signer
from tests.corpus.__main__ import SNAPSHOTS
from tests.corpus.cases import SECRET
from tests.helpers.format_reader import reader

FOLDER = Path(__file__).parents[1] / "docs/conformance"
KINDS: dict[str, type[Scalar]] = {kind.__struct_config__.tag: kind for kind in AnyEntry.__args__}
READ = {"int", "float", "complex", "bool", "bytes", "str", "NoneType"}
"""Types whose texts docs/reader.py reads."""


def pattern(length):
    """Return bytes of any length: byte i is i mod 251."""
    return bytes(range(251)) * (length // 251) + bytes(range(length % 251))


def text_of(data):
    return base64.b64encode(data).decode()


# Digests

LENGTHS = (0, 1, 3, 16, 17, 128, 129, 240, 241, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 600_000)


def make_digests():
    ranges = []
    for length in LENGTHS:
        running = RunningDigest()
        running.update(memoryview(pattern(length)))
        digest, table = running.finish()
        ranges.append({"length": length, "digest": digest, **({"table": table.hex()} if table else {})})
    return {
        "data": "byte i is i mod 251",
        "ranges": ranges,
        "whole": [{"length": length, "digest": digest_range(pattern(length))} for length in (0, BLOCK, 600_000)],
    }


# Blocks of compressed files


def make_blocks():
    codec = BlockCodec()
    ramp = np.arange(512)
    arrays = {
        1: (ramp % 7).astype(np.uint8), 2: ramp.astype("<i2"), 4: (ramp * 3).astype("<u4"), 8: -ramp.astype("<i8"),
        130: (ramp / 7).astype("<f2"), 132: np.sin(ramp).astype("<f4"), 136: np.cos(ramp).astype("<f8"),
    }  # fmt: skip
    blocks = [(kind, array.tobytes()) for kind, array in arrays.items()]
    blocks += [(132, (1 / (1 + np.arange(3000))).astype("<f4").tobytes()), (4, bytes(4)), (130, b"\x01\x80")]
    blocks += [(1, np.random.default_rng(1).bytes(300))]
    stored = [
        {"kind": kind, "data": text_of(data), "stored": text_of(encode(codec, data, kind))} for kind, data in blocks
    ]
    zeros = bytes(BLOCK)
    filled = {"kind": 4, "zeros": BLOCK, "stored": text_of(encode(codec, zeros, 4))}
    return {"blocks": [*stored, filled], "refused": list(make_refused(codec)), "table": make_table()}


def encode(codec, data, kind):
    out = memoryview(bytearray(len(data)))
    return bytes(out[: codec.encode(data, kind, out)])


def make_refused(codec):
    """Yield stored blocks that a reader must refuse."""
    size = 2048
    good = encode(codec, bytes(range(8)) * (size // 8), 1)
    [length] = struct.unpack("<I", good[:4])

    def refused(why, stored, kind=1):
        return {"why": why, "kind": kind, "size": size, "stored": text_of(stored)}

    yield refused("the length of the plane is too small", struct.pack("<I", length - 1) + good[4:])
    yield refused("the length of the plane is too large", struct.pack("<I", length + 1) + good[4:])
    yield refused("zeros beyond 1/256 of the block", good + b"\0")
    yield refused("the frame has another content size", encode(codec, bytes(range(8)) * 512, 1))
    yield refused("the lengths of the planes are missing", b"\1\0\0\0\0\0\0")
    yield refused("two planes for elements of four bytes", struct.pack("<2I", 0, 0), 132)
    damaged = bytearray(good)
    damaged[4] ^= 1
    yield refused("the frame has no magic number", bytes(damaged))


def make_table():
    """Return the table of a file in the corpus, as bytes and as numbers."""
    folder = SNAPSHOTS / "compressed/first"
    manifest = json.loads((folder / ".snapshot_metadata").read_bytes())
    [(location, file)] = [(name, each) for name, each in manifest["files"].items() if "packed" in each]
    index, begin, end = file["packed"]["index"]
    data = (folder / index).read_bytes()[begin:end]
    records = [
        {"stored": stored, "length": word & 0xFFFFFF, "kind": word >> 24, "sum": f"{total:016x}"}
        for stored, word, total in struct.iter_unpack("<IIQ", data)
    ]
    stored = text_of((folder / location).read_bytes())
    return {"size": file["size"], "table": data.hex(), "records": records, "stored": stored}


# Signatures


def make_signatures():
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    signer = load_signer(Ed25519PrivateKey.from_private_bytes(SECRET))
    trees = {length: tree_of(pattern(length)) for length in (0, 1, BLOCK, BLOCK + 1, 600_000)}
    manifest = b'{"any":"bytes"}'
    files = {
        "data/0123456789ab-0-0.safetensors": root_of(trees[600_000]),
        "data/0123456789ab-0-1.bin": root_of(trees[1]),
    }
    file = encode_signature(signer, "0123456789ab", tree_of(manifest), files)
    return {
        "data": "byte i of a file is i mod 251",
        "trees": [
            {"length": length, "leaves": tree.leaves.hex(), "root": tree.root.hex()} for length, tree in trees.items()
        ],
        "secret_key": SECRET.hex(),
        "public_key": signer.raw.hex(),
        "manifest": manifest.decode(),
        "signature_file": file.decode(),
    }


# Paths

COMPONENTS = ("", "weight", "layer.0.weight", "a/b", "100%", "%2F", "é 漢", "[x]", "..", "\ud800", "a\udfff/%", "\x00")
DICTS = ({"a": 0, "b": 0}, {1: 0, "1": 0, 2: 0}, {True: 0, "True": 0}, {None: 0, 2.5: 0, -1: 0},
         {1 << 70: 0, "a/b": 0, "\udcff": 0}, {float("inf"): 0, "inf": 0}, {-0.0: 0})  # fmt: skip
HEADERS = ("model/weight", "__metadata__", "a[0]", "a/__metadata__")


def make_paths():
    dicts = []
    for each in DICTS:
        keys, tagged = [encode_key(key) for key in each], find_tagged_keys(each)
        entry = DictEntry(keys, tagged or None)
        dicts.append({"keys": keys, **({"tagged": tagged} if tagged else {}), "components": entry.components()})
    return {
        "components": [{"text": text, "component": encode_component(text)} for text in COMPONENTS],
        "dicts": dicts,
        "names_in_headers": [{"path": path, "name": quote_path(path)} for path in HEADERS],
    }


# Texts of values

UTC = datetime.UTC
VALUES = (
    0, -1, 1 << 70, (1 << 12_999) - 1, 1 << 12_999, -(1 << 13_000), True, False, None, 0.1, -0.0, math.inf,
    complex(1.5, -2.0), "", "text é", "%", "a\ud800%", b"", b"\x00\xff", torch.bfloat16, torch.device("cuda:1"),
    torch.Size([]), torch.Size([2, 0, 3]), datetime.timedelta(-2, 3, 4), UTC,
    datetime.timezone(datetime.timedelta(hours=-3, minutes=-30), "half/way"), zoneinfo.ZoneInfo("Asia/Kathmandu"),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.date(1, 1, 1), datetime.time(23, 59, 59, 999_999, tzinfo=UTC), datetime.time(1, 2, fold=1),
    pathlib.PurePosixPath("a%b/ü"), pathlib.PureWindowsPath("c:\\x"), uuid.UUID(int=5),
    uuid.UUID(int=5, is_safe=uuid.SafeUUID.safe), decimal.Decimal("-1.50E+7"), fractions.Fraction(-3, 7),
    range(10, 0, -3),
)  # fmt: skip
NAN = "7ff8000000000123"
"""A NaN whose payload must survive."""
REFUSED = (
    ("int", ""), ("int", "1.0"), ("int", "x"), ("bool", "true"), ("NoneType", ""), ("float", "0.1"), ("float", "00"),
    ("complex", "00"), ("bytes", "?"), ("bytes", "AA"), ("dtype", "torch.float32"), ("Size", "1,"), ("Size", "x"),
    ("date", "20260102"), ("datetime", "2026-01-02"), ("datetime", "2026-01-02T03:04:00Z"), ("time", "1:02"),
    ("timedelta", "0,0,1000000"), ("timedelta", "1"), ("timezone", "2,0,0"), ("ZoneInfo", "../etc"), ("Path", "a"),
    ("Path", "Other:a"), ("UUID", "5"), ("Decimal", "1e7"), ("Fraction", "2/4"), ("Fraction", "1/0"), ("range", "1,2"),
    ("range", "0,1,0"),
)  # fmt: skip


def make_texts():
    values = []
    for value in VALUES:
        entry = make_plain_entry(value)
        more = {"escaped": True} if getattr(entry, "escaped", False) else {}
        python = hex(value) if entry.type == "int" and entry.serialized_value.startswith(("0x", "-0x")) else repr(value)
        values.append({"type": entry.type, "serialized_value": entry.serialized_value, **more, "python": python})
    values.append({"type": "float", "serialized_value": NAN, "python": "nan"})
    return {"values": values, "refused": [{"type": kind, "serialized_value": text} for kind, text in REFUSED]}


MAKERS = {"digests": make_digests, "blocks": make_blocks, "signatures": make_signatures, "paths": make_paths,
          "texts": make_texts}  # fmt: skip


def load(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "blocks"])  # zstd's frames may differ
def test_conformance_vectors_are_made_by_the_library(name):
    if name == "signatures":
        pytest.importorskip("cryptography")
    assert json.loads(json.dumps(MAKERS[name]())) == load(name)


def test_conformance_digests_of_the_reader_are_equal():
    vectors = load("digests")
    for each in vectors["ranges"]:
        data = pattern(each["length"])
        assert reader.digest_range(data) == (each["digest"], bytes.fromhex(each.get("table", "")))
        assert digest_bytes(data) == each["digest"]
    for each in vectors["whole"]:
        assert reader.digest(pattern(each["length"])) == each["digest"]


def test_conformance_blocks_decode():
    pytest.importorskip("zstandard")
    for each in load("blocks")["blocks"]:
        data = base64.b64decode(each["data"]) if "data" in each else bytes(each["zeros"])
        stored, made = base64.b64decode(each["stored"]), bytearray(len(data))
        BlockCodec().decode(memoryview(stored), each["kind"], memoryview(made))
        assert made == data
        assert reader.decode_block(stored, len(data), each["kind"]) == data
        assert encode_and_decode(data, each["kind"]) == data


def encode_and_decode(data, kind):
    made = bytearray(len(data))
    BlockCodec().decode(memoryview(encode(BlockCodec(), data, kind)), kind, memoryview(made))
    return bytes(made)


@pytest.mark.parametrize("number", range(7))
def test_conformance_damaged_blocks_are_refused(number):
    pytest.importorskip("zstandard")
    vectors = load("blocks")["refused"]
    assert len(vectors) == 7
    stored, size, kind = (vectors[number][key] for key in ("stored", "size", "kind"))
    stored = base64.b64decode(stored)
    with pytest.raises(SnapshotError):
        BlockCodec().decode(memoryview(stored), kind, memoryview(bytearray(size)))
    with pytest.raises(reader.FormatError), reader.refusing("a block"):
        reader.decode_block(stored, size, kind)


def test_conformance_block_table_is_that_of_a_corpus_file():
    vector = load("blocks")["table"]
    assert vector == make_table()
    stored = base64.b64decode(vector["stored"])
    table = BlockTable(bytes.fromhex(vector["table"]), vector["size"], len(stored))
    assert [f"{each:016x}" for each in table.sums.tolist()] == [each["sum"] for each in vector["records"]]
    assert sum(each["length"] for each in vector["records"]) == vector["size"]


def test_conformance_signature_verifies():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    vectors = load("signatures")
    key = load_key(ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(vectors["public_key"])))
    statement = decode_signature(vectors["signature_file"].encode(), key, "the vector")
    roots = {each["length"]: each["root"] for each in vectors["trees"]}
    assert dict(statement.files) == {
        "data/0123456789ab-0-0.safetensors": (600_000, roots[600_000]),
        "data/0123456789ab-0-1.bin": (1, roots[1]),
    }


def test_conformance_path_components_decode():
    for each in load("paths")["components"]:
        assert decode_component(each["component"]) == each["text"]
        assert reader.read_text("str", each["component"], escaped=True) == each["text"]


def test_conformance_serialized_values_decode():
    for each, value in zip(load("texts")["values"], (*VALUES, math.nan), strict=True):
        fields = {name: field for name, field in each.items() if name in ("serialized_value", "escaped")}
        found = KINDS[each["type"]](**fields).value()
        assert repr(found) == repr(value)
        if each["type"] in READ:
            read = reader.read_text(each["type"], each["serialized_value"], each.get("escaped"))
            assert repr(read) == repr(value)
            assert type(read) is type(value)
    assert struct.pack(">d", reader.read_text("float", NAN)).hex() == NAN


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_conformance_invalid_serialized_values_are_refused(number):
    each = load("texts")["refused"][number]
    with pytest.raises(SnapshotError):
        KINDS[each["type"]](each["serialized_value"]).value()
    if each["type"] in READ:
        with pytest.raises(reader.FormatError), reader.refusing("a text"):
            reader.read_text(each["type"], each["serialized_value"])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, make in MAKERS.items():
        with contextlib.suppress(FileExistsError), open(FOLDER / f"{name}.json", "x") as file:
            file.write(json.dumps(make(), indent=1) + "\n")
