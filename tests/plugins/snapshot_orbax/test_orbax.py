"""Checkpoints of Orbax, in `orbax_files.zip`: every verb reads them, without JAX and without TensorStore.

`write_orbax_files.py` wrote them, with Orbax and TensorStore themselves.
"""

import base64
import json
import math
import random
import shutil
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import snapshot
import snapshot_merge
from snapshot import (
    CorruptSnapshotError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    SnapshotNotFoundError,
    StateDict,
    Target,
    TensorMap,
)
from snapshot.cli import main
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.io.loop import run
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL, Context
from snapshot_orbax.blosc import Blosc
from snapshot_orbax.ocdbt import MANIFEST, _Body, _Room, crc32c, read_database
from snapshot_orbax.zarr import V2, V3, parse_array
from tests.helpers.states import expect_equal
from tests.plugins.snapshot_orbax.orbax_items import ARCHIVE, item, tree

TREES = ["ocdbt", "plain", "zarr3", "plain3"]
zstandard = pytest.importorskip("zstandard")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax")
    zipfile.ZipFile(ARCHIVE).extractall(folder)
    return folder


def keys_of(opened):
    return {path.split("/")[1] for path in opened.get_manifest() if "/" in path}


def read(path):
    opened = Snapshot(path)
    found = {key: opened.read_object(f"0/{key}") for key in keys_of(opened)}
    return {key.replace("%2F", "/"): value for key, value in found.items()}


def in_order(value):
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(each) for each in value] if type(value) is list else value


@pytest.mark.parametrize("name", TREES)
def test_orbax_tree_is_read_and_verified(files, name):
    opened = Snapshot(files / name)
    assert opened.exists()
    assert opened.metadata.format == "orbax"
    expect_equal(in_order(read(files / name)), in_order(tree()))
    for box in ([slice(3, 7), slice(1, 3)], [5], [slice(0, 8), slice(3, 4)]):
        kernel = tree()["params"]["dense"]["kernel"]
        assert torch.equal(opened.read_object("0/params/dense/kernel", box=box), kernel[tuple(box)])
    assert opened.verify()
    assert main(["ls", str(files / name)]) == 0


@pytest.mark.parametrize("name", TREES)
def test_orbax_tree_is_restored_converted_compared_and_copied(files, name, tmp_path):
    params = StateDict(dense={"kernel": torch.empty(8, 4, dtype=torch.bfloat16), "bias": torch.empty(4)})
    Snapshot(files / name).restore({"params": params}, select=["params/**"])
    dense = tree()["params"]["dense"]
    expect_equal(in_order(dict(params["dense"])), {"bias": dense["bias"], "kernel": dense["kernel"]})
    tensors = {key: each for key, each in snapshot.load(files / name).items() if key != "narrow"}
    for target, kind in (("a.pt", "torch"), ("b", "dcp"), ("c", "snapshot"), ("d.safetensors", "safetensors")):
        more = {"exclude": ["complex"]} if kind == "safetensors" else {}
        Snapshot(files / name).convert(Target(tmp_path / target, kind), **more)
        found = snapshot.load(tmp_path / target)
        for key, each in tensors.items():
            if key != "complex" or kind != "safetensors":
                assert torch.equal(found[key], each), key
    assert not Snapshot.diff(files / name, tmp_path / "c")
    Snapshot(files / name).copy(tmp_path / "copy")
    there, here = (
        {str(each.relative_to(root)) for each in root.rglob("*")} for root in (files / name, tmp_path / "copy")
    )
    assert there == here
    assert not Snapshot.diff(files / name, tmp_path / "copy")
    with pytest.raises(snapshot.SnapshotExistsError):
        Snapshot(files / name).copy(tmp_path / "copy")


def test_orbax_restores_into_a_torch_module_with_a_tensor_map(files):
    linear = nn.Linear(8, 4)
    rules = [{"names": "dense.kernel -> weight", "axes": "i o -> o i"}, "dense.bias -> bias"]
    tensor_map = TensorMap(rules, others="drop")
    Snapshot(files / "ocdbt").restore(
        {"params": linear}, select=["params/**"], options=RestoreOptions(map=tensor_map, cast="same_kind")
    )
    dense = tree()["params"]["dense"]
    assert torch.equal(linear.weight, dense["kernel"].float().T)
    assert torch.equal(linear.bias, dense["bias"])


def test_orbax_steps_and_items_are_opened(files, tmp_path):
    three = torch.arange(3.0)
    expect_equal(read(files / "manager" / "3"), {"w": three})
    expect_equal(read(files / "manager" / "3" / "default"), {"w": three})
    expect_equal(read(files / "items" / "4"), {"state": {"w": three}})
    expect_equal(in_order(read(files / "v1")), {"deep": {"b": torch.ones(2, 2)}, "w": three})
    with pytest.raises(SnapshotNotFoundError, match=r"of a run, with the steps 3; open .*/manager/3$"):
        Snapshot(files / "manager").get_manifest()
    with pytest.raises(SnapshotError):
        Snapshot(files / "items" / "4" / "extra").get_manifest()
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "5.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(UnsupportedFormatError, match="not finished"):
        Snapshot(tmp_path / "5.orbax-checkpoint-tmp").get_manifest()
    Snapshot(files / "manager" / "3").copy(tmp_path / "3")
    expect_equal(read(tmp_path / "3"), {"w": three})


@pytest.mark.parametrize("name", ["chunks", "chunks3"])
def test_orbax_arrays_of_several_chunks_are_read(files, name):
    expect_equal(read(files / name), {"w": torch.arange(35.0).view(5, 7)})


@pytest.mark.parametrize("name", ["odd2", "odd3", "deep2", "deep3"])
@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_orbax_arrays_written_by_tensorstore_are_read(files, name, budget, tmp_path):
    expected = {}
    for key in ("edge2", "turned2", "big2", "plain2", "edge3", "shards3"):
        if key.endswith(name[-1]):
            made = [torch.arange(35.0).view(5, 7) + number for number in range(6 if name.startswith("deep") else 1)]
            for each in made if key.startswith(("edge", "shards")) else ():
                each[:2, :3] = 0
            expected[key] = made
    expect_equal(in_order(read(files / name)), in_order(expected))
    Snapshot(files / name).convert(tmp_path / "out", memory_budget_bytes=budget)
    expect_equal(in_order(read(tmp_path / "out")), in_order(expected))
    first = next(iter(expected))
    for row in range(5):
        for box in ([row, slice(2, 7)], [slice(row, 5), slice(1, 5)]):
            found = Snapshot(files / name).read_object(f"0/{first}/0", box=box)
            assert torch.equal(found, expected[first][0][tuple(box)])


def codec_arrays():
    """The arrays of `write_orbax_files.py`."""
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.standard_normal((90, 60)).round(1), axis=1).astype(np.float32)
    tile = rng.integers(0, 255, 9000).astype(np.uint8)
    return {
        "small": np.arange(35, dtype=np.float32).reshape(5, 7),
        "smooth": smooth,
        "noise": rng.integers(0, 60_000, (9, 77)).astype(np.uint16),
        "zeros": np.where(np.arange(9000) == 7, 3.0, 0.0),
        "tiles": np.tile(tile, 2),
    }


@pytest.mark.parametrize("version", "23")
def test_orbax_codecs_of_tensorstore_are_read(files, version, tmp_path):
    opened, arrays = Snapshot(files / f"codecs{version}"), codec_arrays()
    found = opened.read_object("0")
    kinds = sorted(found)
    assert len(kinds) == {"2": 17, "3": 2}[version]
    for kind in kinds:
        assert sorted(found[kind]) == sorted(arrays)
        for name, array in arrays.items():
            assert np.array_equal(found[kind][name].numpy(), array), (kind, name)
    assert torch.equal(
        opened.read_object(f"0/{kinds[0]}/smooth", box=[slice(120, 200)]), found[kinds[0]]["smooth"][120:200]
    )
    opened.convert(tmp_path / "out", memory_budget_bytes=1 << 20)
    expect_equal(in_order(read(tmp_path / "out")), in_order(found))


BLOSC_KINDS = ["lz4", "zstd", "zlib", "blosclz"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_blosc_damaged_chunks_are_refused(files, data):
    kind, shuffle = data.draw(st.sampled_from(BLOSC_KINDS)), data.draw(st.integers(0, 2))
    name = data.draw(st.sampled_from(["smooth", "noise", "tiles"]))
    folder = files / "codecs2" / f"blosc_{kind}_{shuffle}_2.{name}"
    chunk = bytearray(next(each for each in sorted(folder.iterdir()) if each.name[0] != ".").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(chunk), data.draw(st.sampled_from([64, 10**9]))) - 1))
        chunk[place] = data.draw(st.integers(0, 255))
    decompressor, made = Blosc("x"), 0
    try:
        for at in range(0, len(chunk), 1024):
            piece = decompressor(bytes(chunk[at : at + 1024]))
            assert len(piece) <= 96 << 20
            made += len(piece)
    except (CorruptSnapshotError, UnsupportedFormatError):
        return
    assert made < 1 << 32


def test_blosc_blocks_at_the_same_offset_are_refused():
    """Each block of 16 MiB is 2 KiB long, and all of them are at one place."""
    block = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(16 << 20))
    body, count = struct.pack("<I", len(block)) + block, 200
    head = struct.pack("<4B3I", 2, 1, 4 << 5 | 16, 1, count * (16 << 20), 16 << 20, 16 + 4 * count + len(body))
    with pytest.raises(CorruptSnapshotError, match="overlap"):
        Blosc("x")(head + struct.pack("<I", 16 + 4 * count) * count + body)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({0: 9}, "of version 9"),
        ({3: 0}, "of version 2, or with huge blocks"),
        ({2: 5 << 5}, "unknown compression"),
        ({2: 2 << 5}, "got snappy"),
        ({11: 255}, "huge blocks"),
    ],
)
def test_blosc_headers_are_checked(change, expected):
    head = bytearray(struct.pack("<4B3I", 2, 1, 1 << 5, 4, 4096, 4096, 100) + bytes(84))
    for place, value in change.items():
        head[place] = value
    with pytest.raises(UnsupportedFormatError, match=expected):
        Blosc("x")(bytes(head))


def test_blosc_blocks_in_any_order_are_read():
    """Threads of Blosc write blocks in the order in which they end."""
    blocks = [bytes([number]) * 4096 for number in range(6)]
    packed = [zlib.compress(each) for each in blocks]
    order, begins, at, body = [3, 0, 5, 1, 4, 2], {}, 16 + 4 * 6, b""
    for number in order:
        begins[number] = at + len(body)
        body += struct.pack("<I", len(packed[number])) + packed[number]
    head = struct.pack("<4B3I", 2, 1, 3 << 5 | 16, 4, 6 * 4096, 4096, at + len(body))
    whole = head + struct.pack("<6I", *(begins[number] for number in range(6))) + body
    for step in (1, 7, 1024):
        decompressor = Blosc("x")
        made = b"".join(decompressor(whole[at : at + step]) for at in range(0, len(whole), step))
        assert made == b"".join(blocks)


NUMCODECS = {
    ("<u1", 1003): "AgFkAesDAADrAwAALgAAABQAAAAWAAAAeF5jYBixgHHkAqaRC5hHLAAAvAMF4A==",
    ("<u2", 1003): "AgEkAtYHAADWBwAAQQAAABQAAAASAAAAHwABAP/jHwECAP/dUAEAAQABEwAAAC8AAgIA/+MfAwIA/9xQAAMAAwA=",
    ("<u2", 1008): (
        "AgEkAuAHAADgBwAAbAAAABQAAABCAAAAHwABAAsv+P8BAAofPz4ACy8A/j4ACi//Dz8ADA8CAAwfwF4ACw8CAA0PfgAs"
        "DwIALB/wQAAsDwIA//8hUAAAAAAADgAAAB8AAQD////aUAAAAAAA"
    ),
    ("<u4", 1001): (
        "AgEEBKQPAACkDwAAagAAABQAAAAPAAAAIwAAAADg////3AMCAAAADwAAACMAAAAB4P///9wDAgABABMAAAAnAAABAAAA"
        "AgDg////2AMCAgAAFQAAACkAAgAAAAIAAAAD4P///9YDAgAAAA=="
    ),
    ("<u8", 801): (
        "AgGUCAgZAAAACAAAkAAAACAAAAA7AAAAcwAAAFoAAAAXAAAAKLUv/WAAB20AACAAAPgAAgDcgx/fAAsbAAAAKLUv/WAA"
        "B40AADj//z8AwP8AAxAAvP9DxAwWFQAAACi1L/1gCABdAAAQAwACAP0VCgaABRkAAAAotS/9YAAHfQAAKAAA/v8AAxAA"
        "vP8CxwwW"
    ),
}
"""Chunks that numcodecs wrote with bitshuffle: zlib, LZ4 twice, BloscLZ, and zstd with four blocks."""


@pytest.mark.parametrize(("dtype", "count"), NUMCODECS)
def test_blosc_chunks_of_numcodecs_with_bitshuffle_are_read(dtype, count):
    """A block is shuffled only if the number of its elements is a multiple of 8."""
    made = Blosc("x")(base64.b64decode(NUMCODECS[dtype, count]))
    assert np.array_equal(np.frombuffer(made, dtype), np.arange(count) // 251)


def shuffle_bits(block, width):
    """The first bits of the first bytes of all elements, then their second bits, and so on."""
    count = len(block) // width
    if count % 8:
        return block
    elements = np.frombuffer(block, np.uint8, count * width).reshape(count, width)
    bits = [elements[:, byte] >> bit & 1 for byte in range(width) for bit in range(8)]
    packed = [(each.reshape(-1, 8) << np.arange(8)).sum(axis=1).astype(np.uint8).tobytes() for each in bits]
    return b"".join(packed) + block[count * width :]


@given(st.binary(max_size=600), st.integers(1, 9), st.integers(1, 40), st.integers(1, 700))
def test_blosc_bitshuffle_of_any_width_and_size(data, width, per_block, step):
    size = per_block * width
    blocks = [zlib.compress(shuffle_bits(data[at : at + size], width)) for at in range(0, len(data), size)]
    begins = [16 + 4 * len(blocks) + sum(4 + len(each) for each in blocks[:number]) for number in range(len(blocks))]
    body = b"".join(struct.pack("<I", len(each)) + each for each in blocks)
    length = 16 + 4 * len(blocks) + len(body)
    head = struct.pack("<4B3I", 2, 1, 3 << 5 | 16 | 4, width, len(data), size, length)
    whole = head + struct.pack(f"<{len(blocks)}I", *begins) + body
    decompressor = Blosc("x")
    assert b"".join(decompressor(whole[at : at + step]) for at in range(0, len(whole), step)) == data


@pytest.mark.parametrize("budget", [None, 1 << 20])
@pytest.mark.parametrize("kind", ["snapshot", "torch", "dcp", "safetensors"])
def test_orbax_long_compressed_chunks_are_converted(tmp_path, budget, kind):
    """Each is decompressed once as a whole, and written in the order of the tensor."""
    tensor = torch.randn(900, 700, generator=torch.Generator().manual_seed(0))
    chunks = {}
    for row in range(0, 900, 400):
        for column in range(0, 700, 300):
            whole = torch.zeros(400, 300)
            part = tensor[row : row + 400, column : column + 300]
            whole[: part.shape[0], : part.shape[1]] = part
            chunks[f"{row // 400}.{column // 300}"] = zstandard.ZstdCompressor().compress(whole.numpy().tobytes())
    metadata = PLAIN | {"shape": [900, 700], "chunks": [400, 300], "compressor": {"id": "zstd"}}
    item(tmp_path / "in", {"w": (metadata, chunks)})
    target = Target(tmp_path / "out.safetensors" if kind == "safetensors" else tmp_path / "out", kind)
    Snapshot(tmp_path / "in").convert(target, memory_budget_bytes=budget)
    assert torch.equal(snapshot.load(target.url)["w"], tensor)
    assert torch.equal(snapshot.load(tmp_path / "in", memory_budget_bytes=budget)["w"], tensor)
    snapshot_merge.merge(
        [tmp_path / "in", target.url],
        tmp_path / "mean",
        options=snapshot_merge.MergeOptions(memory_budget_bytes=budget),
    )
    assert torch.equal(snapshot.load(tmp_path / "mean")["w"], tensor)


def test_orbax_is_read_from_any_storage(files):
    for name in ("ocdbt", "plain3"):
        url = f"memory://orbax/{name}"
        Snapshot(files / name).copy(url)
        expect_equal(in_order(read(url)), in_order(tree()))


def test_orbax_links_out_of_the_folder_are_not_followed(files, tmp_path):
    (tmp_path / "secret").write_bytes((files / "plain" / "zero" / "0.0").read_bytes())
    Snapshot(files / "plain").copy(tmp_path / "plain")
    (tmp_path / "plain" / "zero" / "0.0").unlink()
    (tmp_path / "plain" / "zero" / "0.0").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeObjectError, match="link out of the folder"):
        Snapshot(tmp_path / "plain").read_object("0/zero")


def test_orbax_damaged_data_is_corrupt(files, tmp_path):
    Snapshot(files / "plain").copy(tmp_path / "plain")
    whole = (tmp_path / "plain" / "long" / "0.0").read_bytes()
    (tmp_path / "plain" / "long" / "0.0").write_bytes(b"\0" + whole[1:])
    with pytest.raises(CorruptSnapshotError, match="long: decompression failed"):
        Snapshot(tmp_path / "plain").read_object("0/long")
    for content in (b"1234", b"12345"):  # and not even whole elements
        (tmp_path / "plain" / "long" / "0.0").write_bytes(zstandard.ZstdCompressor().compress(content))
        with pytest.raises(CorruptSnapshotError, match="its bytes end too early"):
            Snapshot(tmp_path / "plain").read_object("0/long")
    (tmp_path / "plain" / "_strings.json").unlink()
    with pytest.raises(CorruptSnapshotError, match=r"a file of the checkpoint is missing: .*_strings\.json"):
        Snapshot(tmp_path / "plain").get_manifest()


# Databases of OCDBT


@given(st.binary(max_size=3000))
def test_crc32c_equals_google_crc32c(data):
    other = pytest.importorskip("google_crc32c")
    assert crc32c(data) == other.value(data)


def varint(number):
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def varints(*numbers):
    return b"".join(map(varint, numbers))


def table(*files):
    """A table of data files, without prefixes."""
    files = [each.encode() for each in files]
    return (
        varint(len(files)) + varints(*[0] * (len(files) - 1)) + varints(*map(len, files)) + varints(*[0] * len(files))
        + b"".join(files)
    )  # fmt: skip


def node(magic, body, *, pack=False):
    body = zstandard.ZstdCompressor().compress(body) if pack else body
    length = 14 + len(body) + 4
    whole = struct.pack(">I", magic) + struct.pack("<Q", length) + bytes([0, int(pack)]) + body
    return whole + struct.pack("<I", crc32c(whole))


def leaf(values, files=("d/x",)):
    keys = [key.encode() for key in values]
    far = [value for value in values.values() if isinstance(value, tuple)]
    return b"".join([
        bytes([0]), table(*files), varint(len(keys)), varints(*[0] * (len(keys) - 1)), varints(*map(len, keys)),
        b"".join(keys),
        varints(*(value[2] if isinstance(value, tuple) else len(value) for value in values.values())),
        varints(*(int(isinstance(value, tuple)) for value in values.values())),
        varints(*(value[0] for value in far)), varints(*(value[1] for value in far)),
        b"".join(value for value in values.values() if isinstance(value, bytes)),
    ])  # fmt: skip


def interior(children, height, files=("d/x",)):
    """Children: key, length of the common prefix, file, offset and length."""
    columns = list(zip(*children, strict=True))
    keys = [key.encode() for key in columns[0]]
    return b"".join([
        bytes([height]), table(*files), varint(len(keys)), varints(*[0] * (len(keys) - 1)), varints(*map(len, keys)),
        varints(*columns[1]), b"".join(keys), *(varints(*column) for column in columns[2:]),
        *(varints(*[1] * len(keys)) for _ in range(3)),
    ])  # fmt: skip


def manifest(length, *, height=0, offset=0, file="d/x", kind=0):
    config = bytes(16) + varints(kind, 100, 1000) + bytes([4]) + varint(0)
    root = varint(1) + varints(1) + bytes([height]) + varints(0, offset, length, 1, 1, 1) + bytes(8)
    return config + table(file) + root + varint(0)


def place(folder, body, data, *, pack=False):
    (folder / "d").mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(node(0x0CDB3A2A, body, pack=pack))
    (folder / "d" / "x").write_bytes(data)


def database(folder):
    return run(read_database(open_storage(URL.parse(str(folder)), {}, Context()), "", 1 << 30))


@pytest.mark.parametrize("pack", [False, True])
def test_ocdbt_tree_of_nodes_is_read(tmp_path, pack):
    leaves = [
        node(0x0CDB20DE, leaf({"1": b"one", "2": (0, 5, 9)}), pack=pack),
        node(0x0CDB20DE, leaf({"": b"b"}), pack=pack),
    ]
    top = interior([("a1", 1, 0, 0, len(leaves[0])), ("b", 1, 0, len(leaves[0]), len(leaves[1]))], 1)
    top = node(0x0CDB20DE, top, pack=pack)
    data = b"".join(leaves) + top
    place(tmp_path, manifest(len(top), height=1, offset=len(data) - len(top)), data, pack=pack)
    assert database(tmp_path) == {"a1": b"one", "a2": ("d/x", 5, 14), "b": b"b"}


def spoiled(body):
    made = bytearray(node(0x0CDB20DE, body))
    made[-1] ^= 1
    return bytes(made)


BOMB = zstandard.ZstdCompressor(level=-5).compress(bytes(300 << 20))


def packed(content):
    length = 14 + len(content) + 4
    whole = struct.pack(">IxxxxxxxxBB", 0x0CDB20DE, 0, 1) + content
    whole = whole[:4] + struct.pack("<Q", length) + whole[12:]
    return whole + struct.pack("<I", crc32c(whole))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (spoiled(leaf({"a": b"1"})), "a node does not match its checksum"),
        (node(0x0CDB20DE, leaf({"a": b"1"}))[:-1], "another length"),
        (node(0x0CDB1234, leaf({"a": b"1"})), "not a node of OCDBT"),
        (node(0x0CDB20DE, leaf({"a": b"1"}) + b"x"), "more bytes than entries"),
        (node(0x0CDB20DE, leaf({"a": b"1"})[:-1]), "ends too early"),
        (node(0x0CDB20DE, leaf({"a": (3, 0, 1)})), "a file that is not in its table"),
        (node(0x0CDB20DE, leaf({"a": (0, 0, 1)}, ["../x"])), "a location must be a file name inside the folder"),
        (node(0x0CDB20DE, leaf({"a": (0, 0, 1)}, ["/etc/passwd"])), "a location must be a file name inside the folder"),
        (node(0x0CDB20DE, leaf({"a": b"1"}).replace(b"a", b"\xff")), "'utf-8' codec"),
        (node(0x0CDB20DE, bytes([0]) + table() + varint(1 << 40)), "more entries than bytes"),
        (node(0x0CDB20DE, bytes([0]) + varint(1 << 40)), "more entries than bytes"),
        (node(0x0CDB20DE, bytes([0, 0]) + varint(20 << 20) + bytes(80 << 20), pack=True), "more entries than bytes"),
        (node(0x0CDB20DE, bytes([0, 0]) + varint(20 << 20) + bytes(100 << 20), pack=True), "its keys take more than"),
        (node(0x0CDB20DE, bytes([0, 0]) + varint(1 << 20) + bytes(5 << 20), pack=True), "not in order, or one appears"),
        (node(0x0CDB20DE, leaf({"b": b"1", "a": b"2"})), "not in order, or one appears twice"),
        (node(0x0CDB20DE, bytes([0]) + b"\xff" * 20), "a number is too l"),
        (node(0x0CDB20DE, bytes([1]) + leaf({"a": b"1"})[1:]), "must have height 0, got 1"),
        (packed(BOMB), "its nodes have more than 268,435,456 bytes"),
        (packed(b"\x28\xb5\x2f\xfd" + bytes(30)), "decompression failed"),
    ],
)  # fmt: skip
def test_ocdbt_hostile_nodes_are_refused(tmp_path, data, expected):
    place(tmp_path, manifest(len(data)), data)
    with pytest.raises(CorruptSnapshotError, match=expected):
        database(tmp_path)


def growing_keys(count):
    """A leaf of keys, each with one byte more than the one before it."""
    columns = [varints(*range(1, count)), b"\1" * count, b"\1" * count, bytes(2 * count)]
    return bytes([0]) + table() + varint(count) + b"".join(columns)


def test_ocdbt_growing_keys_are_read(tmp_path):
    data = node(0x0CDB20DE, growing_keys(300))
    place(tmp_path, manifest(len(data)), data)
    assert database(tmp_path) == {"\1" * number: b"" for number in range(1, 301)}


def peak_of(folder, expected):
    """Return the memory that was taken until a database was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptSnapshotError, match=expected):
            database(folder)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_ocdbt_nodes_with_long_keys_use_little_memory(tmp_path):
    """The keys of 320 KB have 2 GB."""
    data = node(0x0CDB20DE, growing_keys(65_000))
    place(tmp_path, manifest(len(data)), data)
    assert peak_of(tmp_path, "its keys take more than 1,073,741,824 bytes of memory") < 16 << 20


def test_ocdbt_long_nodes_are_decompressed_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot_orbax.ocdbt.MOST_DECODED", 8 << 20)
    bomb = node(0x0CDB20DE, bytes(7 << 20), pack=True)
    top = node(0x0CDB20DE, interior([(f"{number:02}", 2, 0, 0, len(bomb)) for number in range(16)], 1))
    place(tmp_path, manifest(len(top), height=1, offset=len(bomb)), bomb + top)
    assert peak_of(tmp_path, "more bytes than entries") < 24 << 20


@given(st.lists(st.one_of(st.integers(0, 127), st.integers(0, (1 << 63) - 1)), max_size=40), st.binary(max_size=20))
def test_ocdbt_varints_are_read(numbers, rest):
    body = _Body(varints(*numbers) + rest, _Room(0))
    assert body.varints(len(numbers)) == numbers
    assert body.take(len(rest)) == rest
    body.end()


@pytest.mark.parametrize("data", [b"\x80" * 3, b"\1\x80\x80", b"\x80" * 9 + b"\1" * 5])
def test_ocdbt_damaged_varints_are_refused(data):
    with pytest.raises(ValueError, match="node ends too early"):
        _Body(data, _Room(0)).varints(3)


def test_ocdbt_hostile_manifests_are_refused(tmp_path):
    data = node(0x0CDB20DE, leaf({"a": b"1"}))
    for body, expected in (
        (manifest(1 << 50), "its nodes have more than 268,435,456 bytes"),
        (manifest(len(data), height=99), "must have height 16 at most, got 99"),
        (manifest(len(data), offset=1 << 40), "d/x"),
        (manifest(len(data), file="../x"), "must be a file name inside the folder"),
        (manifest(len(data), file="no/x"), "a node cannot be read"),
    ):
        place(tmp_path, body, data)
        with pytest.raises(CorruptSnapshotError, match=expected):
            database(tmp_path)
    place(tmp_path, manifest(len(data), kind=1), data)
    with pytest.raises(UnsupportedFormatError, match="numbered manifests"):
        database(tmp_path)


def test_ocdbt_node_that_refers_to_itself_is_refused(tmp_path):
    """Each level doubles the keys: the sum of all nodes is limited."""
    parts, begin = [], 0
    last = node(0x0CDB20DE, leaf({f"{number}": b"" for number in range(1000)}))
    parts.append(last)
    size = len(last)
    for height in range(1, 17):
        children = [(f"{number:04}", 4, 0, begin, size) for number in range(1000)]
        made = node(0x0CDB20DE, interior(children, height))
        begin, size = sum(map(len, parts)), len(made)
        parts.append(made)
    place(tmp_path, manifest(size, height=16, offset=begin), b"".join(parts))
    import snapshot_orbax.ocdbt as module

    before, module.MOST_DECODED = module.MOST_DECODED, 1 << 20
    try:
        with pytest.raises(CorruptSnapshotError, match="its nodes have more than"):
            database(tmp_path)
    finally:
        module.MOST_DECODED = before


@settings(max_examples=200)
@given(st.data())
def test_ocdbt_damaged_database_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    body = bytearray(leaf({"a": b"12", "ab": (0, 0, 3), "b/c": b""}, ["d/x", "d/y"]))
    top = bytearray(manifest(0))
    for target in (body, top):
        for _ in range(data.draw(st.integers(0, 3))):
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    held = node(0x0CDB20DE, bytes(body), pack=data.draw(st.booleans()))
    place(folder, bytes(top).replace(manifest(0), manifest(len(held))), held)
    try:
        found = database(folder)
    except (SnapshotError, UnsupportedFormatError):
        return
    assert all(isinstance(key, str) for key in found)


# Arrays of zarr, and trees


PLAIN = {"shape": [4], "chunks": [2], "dtype": "<f4", "compressor": None, "fill_value": 0, "zarr_format": 2}
HALF = struct.pack("<2f", 1, 2)


def test_zarr_chunk_that_is_not_stored_has_the_fill_value(tmp_path):
    item(tmp_path, {"w": (PLAIN, {"1": HALF})})
    assert read(tmp_path)["w"].tolist() == [0, 0, 1, 2]
    for number, fill in enumerate((1.5, -0.0, "NaN", [0.0, -0.0])):
        folder = item(tmp_path / f"{number}", {"w": (PLAIN | {"fill_value": fill}, {"1": HALF})})
        with pytest.raises(UnsupportedFormatError, match="fill value"):
            Snapshot(folder).get_manifest()
        item(folder / "full", {"w": (PLAIN | {"fill_value": fill}, {"0": HALF, "1": HALF})})
        assert read(folder / "full")["w"].tolist() == [1, 2, 1, 2]


def test_zarr_scalar_that_is_not_stored_is_zero(tmp_path):
    leaves = {"n": {"key_metadata": [{"key": "n"}], "value_metadata": {"value_type": "scalar"}}}
    number = PLAIN | {"shape": [], "chunks": []}
    item(tmp_path / "yes", {"n": (number, {})}, leaves)
    assert read(tmp_path / "yes") == {"n": 0.0}
    item(tmp_path / "no", {"n": (number | {"fill_value": 7.0}, {})}, leaves)
    with pytest.raises(UnsupportedFormatError, match="missing chunks"):
        Snapshot(tmp_path / "no").get_manifest()


def sharded(folder, array, per_shard, damage=0):
    """Write an array of one dimension in shards, with a chunk for each element."""
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}]
    given = {"chunk_shape": [1], "codecs": plain, "index_codecs": [*plain, {"name": "crc32c"}]}
    metadata = {
        "shape": [len(array)], "data_type": "float32", "zarr_format": 3, "node_type": "array", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [per_shard]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": given}],
    }  # fmt: skip
    (folder / "w" / "c").mkdir(parents=True)
    (folder / "w" / V3).write_text(json.dumps(metadata))
    leaves = {"w": {"key_metadata": [{"key": "w"}]}}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": leaves, "use_ocdbt": False, "use_zarr3": True}))
    for number, begin in enumerate(range(0, len(array), per_shard)):
        values = array[begin : begin + per_shard].numpy().tobytes()
        index = np.array([(4 * each, 4) for each in range(per_shard)], "<u8").tobytes()
        checksum = struct.pack("<I", crc32c(index) ^ damage)
        (folder / "w" / "c" / f"{number}").write_bytes(values + index + checksum)
    return folder


def test_zarr_shard_index_is_checked_once(tmp_path, monkeypatch):
    array, lengths = torch.arange(2000.0), []

    def count(data):
        lengths.append(len(data))
        return crc32c(data)

    monkeypatch.setattr("snapshot_orbax.zarr.crc32c", count)
    opened = Snapshot(sharded(tmp_path / "good", array, 1000))
    assert torch.equal(opened.read_object("0/w"), array)
    assert lengths == [16_000] * 2
    with pytest.raises(CorruptSnapshotError, match="'w/c/0' does not match"):
        Snapshot(sharded(tmp_path / "bad", array, 1000, damage=1)).get_manifest()


def test_zarr_shard_indices_have_a_size_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot_orbax.checkpoint._MOST_INDICES", 40_000)
    assert Snapshot(sharded(tmp_path / "two", torch.arange(2000.0), 1000)).get_manifest()
    with pytest.raises(UnsupportedFormatError, match="16,004 bytes"):
        Snapshot(sharded(tmp_path / "three", torch.arange(3000.0), 1000)).get_manifest()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"shape": [-1]}, "invalid shape"),
        ({"shape": [1 << 40], "chunks": [1]}, "has 1,099,511,627,776 chunks, but only 2 values"),
        ({"shape": [1 << 61], "chunks": [1 << 61]}, "invalid shape"),
        ({"shape": [1 << 40], "chunks": [1 << 40]}, "bytes of chunks are missing"),
        ({"chunks": [0]}, "do not fit the shape"),
        ({"chunks": [2, 2]}, "do not fit the shape"),
        ({"dimension_separator": "x"}, "invalid separator"),
        ({"shape": "x"}, r"w/\.zarray"),
    ],
)
def test_zarr_hostile_arrays_are_refused(tmp_path, change, expected):
    item(tmp_path, {"w": (PLAIN | change, {"7": HALF})})
    with pytest.raises(CorruptSnapshotError, match=expected):
        Snapshot(tmp_path).get_manifest()


@pytest.mark.parametrize(
    "change",
    [{"filters": [{"id": "delta"}]}, {"compressor": {"id": "bz2"}}, {"zarr_format": 9}, {"order": "X"}],
    ids=str,
)
def test_zarr_unsupported_arrays_are_named(tmp_path, change):
    item(tmp_path, {"w": (PLAIN | change, {"0": HALF, "1": HALF})})
    with pytest.raises(UnsupportedFormatError, match=r"w/\.zarray: .*zarr"):
        Snapshot(tmp_path).get_manifest()


def test_zarr_dtype_that_torch_lacks_is_listed_and_refused(tmp_path):
    item(tmp_path, {"w": (PLAIN | {"dtype": "float128"}, {"0": HALF, "1": HALF}), "v": (PLAIN, {"0": HALF, "1": HALF})})
    assert Snapshot(tmp_path).get_manifest()["0/w"].dtype == "float128"
    with pytest.raises(UnsupportedFormatError, match="w: tensors of type float128 are listed, but not read"):
        Snapshot(tmp_path).read_object("0/w")
    assert read_only(tmp_path, "v").tolist() == [1, 2, 1, 2]


def read_only(path, key):
    return Snapshot(path).read_object(f"0/{key}")


def test_zarr_chunk_that_is_too_short_is_corrupt(tmp_path):
    item(tmp_path, {"w": (PLAIN, {"0": HALF[:4], "1": HALF})})
    with pytest.raises(CorruptSnapshotError, match="a chunk has 4 bytes"):
        Snapshot(tmp_path).get_manifest()


def test_zarr_compressed_array_uses_no_more_memory_than_allowed(tmp_path):
    size = 3 << 30
    metadata = PLAIN | {"shape": [size], "chunks": [size], "dtype": "|u1", "compressor": {"id": "zstd"}}
    item(tmp_path, {"w": (metadata, {"0": zstandard.ZstdCompressor().compress(bytes(1000))})})
    assert tuple(Snapshot(tmp_path).get_manifest()["0/w"].shape) == (size,)
    with pytest.raises(CorruptSnapshotError, match="far more memory"):
        Snapshot(tmp_path).read_object("0/w")


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ({"w": {"key_metadata": []}}, "must have 1 to 100 keys, got 0"),
        ({"w": {"key_metadata": [{"key": "w"}] * 101}}, "w.w.*is missing|must have 1 to 100 keys"),
        (
            {"a": {"key_metadata": [{"key": "w"}]}, "b": {"key_metadata": [{"key": "w"}]}},
            "both a value and a container",
        ),
        (
            {
                "a": {"key_metadata": [{"key": "w"}]},
                "b": {"key_metadata": [{"key": "w"}, {"key": "x"}], "value_metadata": {"value_type": "None"}},
            },
            "both a value and a container",
        ),
        ({"w": {"key_metadata": [{"key": "s"}], "value_metadata": {"value_type": "string"}}}, "_strings.json|missing"),
        ({"w": {"key_metadata": [{"key": "../../etc"}]}}, "etc"),
        ({"w": 1}, "_METADATA"),
    ],
)
def test_orbax_hostile_trees_are_refused(tmp_path, leaves, expected):
    item(tmp_path, {"w": (PLAIN, {"0": HALF, "1": HALF})}, leaves)
    with pytest.raises(SnapshotError, match=expected):
        Snapshot(tmp_path).get_manifest()


@settings(max_examples=200)
@given(st.sampled_from([V2, V3]), st.integers(0, 2**32))
def test_zarr_damaged_metadata_is_refused(name, seed):
    """Values of the wrong kind, anywhere in the metadata of an array."""
    chance = random.Random(seed)
    third = {
        "shape": [4, 4], "data_type": "float32", "zarr_format": 3, "node_type": "array", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": [1, 2], "codecs": [{"name": "bytes"}, {"name": "zstd"}],
            "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}]}}],
    }  # fmt: skip
    whole = json.loads(json.dumps(PLAIN if name == V2 else third))
    spots = [(held, key) for held in walk(whole) for key in (held if isinstance(held, dict) else range(len(held)))]
    for held, key in chance.sample(spots, chance.randint(0, 2)):
        held[key] = chance.choice([None, -1, 0, 1 << 62, "x", [], {}, [1, 2], True, 1.5])
    try:
        made = parse_array(name, json.dumps(whole).encode(), "x")
    except (CorruptSnapshotError, UnsupportedFormatError):
        return
    assert math.prod(max(1, each) for each in made.shape) < 1 << 60


def walk(value):
    if isinstance(value, (dict, list)):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from walk(each)


def test_orbax_nodes_and_values_in_separate_files_are_read(files):
    found = Snapshot(files / "split")
    assert found.read_object("0/w").equal(torch.arange(3000.0).view(30, 100))
    assert found.read_object("0/b/c").equal(torch.ones(5))
    assert found.verify()


def _copy(files, folder):
    shutil.copytree(files / "committed", folder)
    return folder


def _drop_times(step):
    """Let a step be one of an earlier version, whose metadata has no times."""
    (step / "_CHECKPOINT_METADATA").write_text("{}")


UNFINISHED = "is a save of Orbax that was not finished"


@pytest.mark.parametrize("times", [True, False])
def test_orbax_save_without_a_commit_is_not_a_checkpoint(files, tmp_path, times):
    root = _copy(files, tmp_path / "run")
    if not times:
        _drop_times(root / "3"), _drop_times(root / "4")
    assert Snapshot(root / "3").read_object("0/w").equal(torch.arange(3.0))
    assert Snapshot(root / "3" / "default").read_object("0/w").equal(torch.arange(3.0))
    with pytest.raises(UnsupportedFormatError, match=UNFINISHED):
        Snapshot(root / "4").get_manifest()
    if times:  # without them, nothing tells it of an item
        with pytest.raises(UnsupportedFormatError, match=UNFINISHED):
            Snapshot(root / "4" / "default").get_manifest()
    for lost in ("default/_METADATA", "default/manifest.ocdbt"):  # it ended even earlier
        (root / "4" / lost).unlink()
        with pytest.raises(UnsupportedFormatError, match=UNFINISHED):
            Snapshot(root / "4").get_manifest()


def test_orbax_save_of_an_earlier_version_needs_no_commit_file(files, tmp_path):
    root = _copy(files, tmp_path / "run")
    (root / "3" / "commit_success.txt").unlink()
    assert Snapshot(root / "3").read_object("0/w").equal(torch.arange(3.0))
    (root / "3").rename(root / "5")  # a later step has one, so the version was changed in between
    (root / "4" / "commit_success.txt").write_text("")
    _drop_times(root / "4")
    (root / "5").rename(root / "2")
    _drop_times(root / "2")
    assert Snapshot(root / "2").read_object("0/w").equal(torch.arange(3.0))
