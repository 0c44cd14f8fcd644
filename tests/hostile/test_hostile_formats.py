"""Checkpoints of others that somebody damaged, or made to do harm: only our errors come out, soon, in little memory,
and nothing that a pickle says is run."""

import contextlib
import json
import os
import pickle
import struct
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, StateDict
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.tensors.geometry import Split
from tests.helpers.stand_in_pickles import dtensor, placement, save, tensor_mesh
from tests.helpers.states import equal
from tests.helpers.versions import ALONE
from tests.hostile.hostile_snapshots import Live, bounded, contents, shown, store
from tests.hostile.pickle_opcodes import FLOATS, PROTO, archive, doubling, get, name_of, put, text
from tests.plugins.snapshot_deepspeed.deepspeed_archive import write_stand_in
from tests.plugins.snapshot_torch_checkpointing.torch_checkpointing_metadata import write_metadata

STRIDE = int(os.environ.get("SNAPSHOT_TEST_STRIDE", "67"))
"""Of how many bytes one is flipped; 1 in a soak."""


@pytest.fixture(autouse=True)
def quiet():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


STATE = {
    "w": torch.arange(12.0).view(3, 4),
    "t": torch.arange(6.0).view(2, 3).t(),
    "n": {"s": torch.tensor(2), "i": 3, "l": [1.5, "x"]},
    "a": np.arange(3),
}


def torch_file(folder):
    torch.save(STATE, folder / "x.pt")
    return "x.pt"


def dcp_folder(folder):
    dcp.save({"w": STATE["w"], "t": STATE["t"], "n": {"i": 3}}, checkpoint_id=folder, **ALONE)
    return ""


def one_safetensors(folder):
    save_file({"w": STATE["w"], "i": torch.arange(5)}, folder / "model.safetensors", metadata={"format": "pt"})
    return ""


def index_of_two(folder):
    for name in "ab":
        save_file({name: STATE["w"]}, folder / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ""


def index_of_two_archives(folder):
    for name in "ab":
        torch.save({name: STATE["w"]}, folder / f"{name}.bin")
    index = {"metadata": {}, "weight_map": {name: f"{name}.bin" for name in "ab"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return ""


def torchsnapshot_folder(folder):
    torchsnapshot = pytest.importorskip("torchsnapshot")
    state = {"w": STATE["w"], "n": STATE["n"], "b": b"xy", "c": torch.ones(2, dtype=torch.complex64), "p": (1, 2)}
    torchsnapshot.Snapshot.take(str(folder), {"m": torchsnapshot.StateDict(**state)})
    return ""


def files_of_ranks(folder):
    for rank in range(2):
        local = STATE["w"][2:] if rank else STATE["w"][:2]
        shards = dtensor(local, (3, 4), (placement(Split(0)),), tensor_mesh([0, 1], [rank]))
        save({"w": shards, "t": STATE["t"], "n": STATE["n"], "own": rank}, folder / f"rank_{rank}.pt")
    return ""


FORMATS = [torch_file, dcp_folder, one_safetensors, index_of_two, index_of_two_archives, torchsnapshot_folder]


def deepspeed_folder(folder):
    write_stand_in(folder)
    return ""


def torch_checkpointing_folder(folder):
    write_metadata(folder, {"w": (torch.arange(12).view(3, 4), (2,), (Split(0),))})
    return ""


FORMATS += [files_of_ranks, deepspeed_folder, torch_checkpointing_folder]
SUMMED = {torch_file, dcp_folder, files_of_ranks, deepspeed_folder}
"""Formats that carry checksums, which torch never looks at."""


def exercise(url, key="all", path="0"):
    """Do all that a user may do. What was read, and whether `verify` found all good; only our errors come out, and a
    stateful is given nothing by what fails."""
    snapshot, found, good = Snapshot(url), None, None
    with contextlib.suppress(SnapshotError):
        good = bool(snapshot.verify())
    for verb in (snapshot.exists, snapshot.get_manifest):
        with contextlib.suppress(SnapshotError):
            shown(verb())
    with contextlib.suppress(SnapshotError):
        found = snapshot.read_object(path)
        shown(found)
    live = Live(w=torch.zeros(3, 4))
    try:
        snapshot.restore({key: live}, strict=False)
    except SnapshotError:
        assert not live.given
    return found, good


@pytest.mark.parametrize("write", FORMATS, ids=lambda each: each.__name__)
def test_foreign_format_flipped_bytes_are_found_or_change_nothing(tmp_path, write):
    name = write(tmp_path)
    files = {f"flip/{each.relative_to(tmp_path)}": each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    for path in list(contents()):
        if path.startswith("flip/"):
            store(path, b"")
    for path, data in files.items():
        store(path, data)
    key, path = ("m", "0/m") if write is torchsnapshot_folder else ("all", "0")
    url = f"memory://flip/{name}".rstrip("/")
    right, good = exercise(url, key, path)
    assert right is not None
    assert good
    refused = 0
    try:
        for file, data in files.items():
            for at in range(len(file) % STRIDE, len(data), STRIDE):
                changed = bytearray(data)
                changed[at] ^= 0xFF if at % 2 else 1 << at % 8
                store(file, changed)
                with bounded():
                    found, good = exercise(url, key, path)
                refused += found is None
                if write in SUMMED and found is not None and not equal(found, right) and ".metadata" not in file:
                    assert not good, f"{file}: byte {at} was flipped, and nobody noticed"
            store(file, data)
    finally:
        from snapshot.storages import memory

        for file in files:
            memory._tree.get().files.pop(file, None)
    assert refused


# Pickles


def number(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def row(*values):
    return b"(" + b"".join(values) + b"t"


def tensor(shape=(4,), strides=(1,), offset=0, key="0", function="_rebuild_tensor_v2", kind="FloatStorage"):
    storage = row(text("storage"), name_of("torch", kind), text(key), text("cpu"), number(4)) + b"Q"
    arguments = storage, number(offset), row(*map(number, shape)), row(*map(number, strides)), b"\x89}"
    return name_of("torch._utils", function) + row(*arguments) + b"R"


def saved(**values):
    return PROTO + b"}(" + b"".join(text(name) + value for name, value in values.items()) + b"u."


def attack(folder, content, room=1 << 30):
    """Do everything with a file; what was read, or None."""
    (folder / "x.pt").write_bytes(content)
    with bounded(room):
        return exercise(folder / "x.pt")[0]


def pairs(count, key):
    return PROTO + b"}(" + b"".join(key(index) + b"K\1" for index in range(1, count)) + b"u."


HASH = (1 << 61) - 1


def _other(first, target=12345):
    """The number that makes a pair's hash what it is to be, nearly always: how CPython hashes tuples can be undone."""
    p1, p2, p5, word = 11400714785074694791, 14029467366897019727, 2870177450012600261, 1 << 64
    total = (p5 + first * p2) % word
    total = ((total << 31 | total >> 33) * p1) % word
    wanted = (target * pow(p1, -1, word)) % word
    wanted = (wanted >> 31 | wanted << 33) % word
    return ((wanted - total) * pow(p2, -1, word)) % word % HASH


MANY = 4_000
BOMBS = {
    "tuples": PROTO + doubling(b")", b".", lambda got: got + got + b"\x86"),
    "lists": PROTO + doubling(b"]", b".", lambda got: b"](" + got + got + b"e"),
    "dicts": PROTO + doubling(b"}", b".", lambda got: b"}(K\1" + got + b"K\2" + got + b"u"),
    "key": PROTO + b"}" + doubling(b")", b"K\1s.", lambda got: got + got + b"\x86"),
    "keys": PROTO + b"}(" + doubling(b")", b"K\1u.", lambda got: got + got + b"\x86"),
    "item": PROTO + b"\x8f(" + doubling(b")", b"\x90.", lambda got: got + got + b"\x86"),
    "frozen": PROTO + b"(" + doubling(b")", b"\x91.", lambda got: got + got + b"\x86"),
    "set": PROTO + name_of("builtins", "set") + b"](" + doubling(b")", b"e\x85R.", lambda got: got + got + b"\x86"),
    "ordered": PROTO
    + name_of("collections", "OrderedDict")
    + b"](" + doubling(b")", b"K\1\x86e\x85R.", lambda got: got + got + b"\x86"),
    "size": PROTO + name_of("torch", "Size") + doubling(b")", b"\x85\x85R.", lambda got: got + got + b"\x86"),
    "dict": PROTO + b"(" + doubling(b")", b"K\1d.", lambda got: got + got + b"\x86"),
    "shape": saved(w=tensor().replace(row(number(4)), doubling(b")", b"", lambda got: got + got + b"\x86"), 1)),
    "nested key": PROTO + b"})" + b"\x85" * 150_000 + b"K\1s.",
    "nested key in memory": PROTO + b"})" + b"\x85r\1\0\0\0" * 150_000 + b"K\1s.",
    "nested tuples": PROTO + b"(" * 30_000 + b"t" * 30_000 + b".",
    "nested lists": PROTO + b"]" * 30_000 + b"a" * 29_999 + b".",
    "nested dicts": PROTO + b"}K\1" * 30_000 + b"}" + b"s" * 30_000 + b".",
    "nested stands": PROTO + name_of("a", "b") + put(0) + b")" + (b"\x85" + put(1) + get(0) + get(1) + b"R") * 10_000
    + b".",
    "frozen again": PROTO + b"](" + b"K\1" * MANY + b"e" + put(0) + b"]("
    + (name_of("builtins", "frozenset") + get(0) + b"\x85R") * MANY + b"e.",
    "stands again": PROTO + row(*[b"K\1"] * MANY) + put(0) + name_of("a", "b") + put(1) + b"]("
    + (get(1) + get(0) + b"R") * MANY + b"e.",
    "sizes again": PROTO + row(*[b"K\1"] * MANY) + b"\x85" + put(0) + name_of("torch", "Size") + put(1) + b"]("
    + (get(1) + get(0) + b"R") * MANY + b"e.",
    "texts again": PROTO + text("x" * 100_000) + put(0) + b"](" + get(0) * MANY + b"e.",
    "bytes again": PROTO + b"B" + struct.pack("<I", 100_000) + bytes(100_000) + put(0) + b"](" + get(0) * MANY + b"e.",
    "encoded again": PROTO + text("x" * 100_000) + text("latin1") + b"\x86" + put(0) + name_of("_codecs", "encode")
    + put(1) + b"](" + (get(1) + get(0) + b"R") * MANY + b"e.",
    "alike ints": pairs(MANY, lambda index: number(index * HASH)),
    "alike negative ints": pairs(MANY, lambda index: number(-index * HASH)),
    "alike complex": PROTO + name_of("builtins", "complex") + put(0) + pairs(
        MANY, lambda index: get(0) + struct.pack(">cdcd", b"G", -1000003.0 * index, b"G", index) + b"\x86R"
    )[2:],
    "alike tuples": pairs(MANY, lambda index: row(number(index), number(_other(index)))),
    "put": PROTO + b"}r\xff\xff\xff\x7f.",
    "bytes": PROTO + b"\x8e" + struct.pack("<Q", 1 << 62) + b".",
    "text": PROTO + b"\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "frame": PROTO + b"\x95" + struct.pack("<Q", 1 << 40) + b"}.",
    "int": PROTO + b"\x8b" + struct.pack("<i", 1 << 20) + b"\xff" * (1 << 20) + b".",
    "negative int": PROTO + b"\x8b" + struct.pack("<i", -1) + b".",
    "itself": PROTO + b"]" + b"q\0h\0a.",
    "itself in a dict": PROTO + b"}q\0K\1h\0s.",
    "itself in a tuple": PROTO + b"]q\0h\0\x85a.",
    "itself in a stand": PROTO + b"]q\0" + name_of("a", "b") + b"h\0\x85Ra.",
}  # fmt: skip


SLOW = {"nested key in memory", "alike complex", "alike negative ints", "nested stands"}
"""They are like others, and take seconds."""


@pytest.mark.timeout(100)
@pytest.mark.parametrize("what", [what for what in BOMBS if STRIDE == 1 or what not in SLOW])
def test_torch_and_dcp_pickle_bombs_are_refused(tmp_path, what):
    attack(tmp_path, archive(BOMBS[what]))
    # the same where DCP has its metadata, and in an object
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(BOMBS[what])
    with bounded():
        assert exercise(tmp_path / "d")[0] is None
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(tmp_path / "d").get_manifest()


DANGEROUS = [
    ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"),
    ("builtins", "__import__"), ("__builtin__", "eval"), ("subprocess", "Popen"), ("torch", "load"),
    ("torch.storage", "_load_from_bytes"), ("torch.hub", "load"), ("numpy", "load"), ("functools", "partial"),
    ("operator", "attrgetter"), ("snapshot.formats.safe_pickle", "load"), ("collections.OrderedDict", "__init__"),
    ("torch", "FloatStorage.__class__"), ("pathlib", "Path"), ("io", "open"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), DANGEROUS, ids=lambda each: each)
def test_torch_and_dcp_pickles_call_no_function_they_name(tmp_path, module, name):
    mark = tmp_path / "ran"
    for argument in (f"touch {mark}", f"open({str(mark)!r}, 'w')", str(mark)):
        harm = name_of(module, name) + text(argument) + b"\x85R"
        assert attack(tmp_path, archive(PROTO + harm + b".")) is None
        attack(tmp_path, archive(saved(harm=harm, w=tensor())))
        assert torch.equal(Snapshot(tmp_path / "x.pt").read_object("0/w"), torch.tensor([1.0, 2, 3, 4]))
        with pytest.raises(UnsafeObjectError, match=r"0/harm: an? "):
            Snapshot(tmp_path / "x.pt").read_object("0/harm")
        live = StateDict(w=torch.zeros(4), harm=None)
        with pytest.raises(UnsafeObjectError):
            Snapshot(tmp_path / "x.pt").restore({"s": live})
        assert not live["w"].any()
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / ".metadata").write_bytes(PROTO + harm + b".")
        with pytest.raises(SnapshotError):
            Snapshot(tmp_path / "d").get_manifest()
    assert not mark.exists()


NAMED = [
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("collections", "Counter"),
    ("collections", "deque"), ("torch", "Size"), ("torch", "float32"),
    ("torch", "FloatStorage"), ("torch", "device"), ("builtins", "set"),
    ("builtins", "frozenset"), ("builtins", "complex"), ("builtins", "bytes"), ("_codecs", "encode"), ("a", "b"),
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"), ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "scalar"),
    ("torch.distributed.checkpoint.metadata", "Metadata"), ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
]  # fmt: skip


def test_pickle_stand_ins_with_wrong_arguments_are_harmless(tmp_path):
    """Every stand-in, made of wrong arguments, and given a wrong state; and the classes themselves."""
    fields = saved(name=b"K\1", factory=b"K\1", maxlen=b"K\1", items=b"K\1", __class__=b"K\1", __dict__=b"K\1")[2:-1]
    states = [fields, b"K\1", b"N" + fields + b"\x86", fields + fields + b"\x86", b")", b"}"]
    arguments = [
        b")", b"K\1\x85", b"K\1" * 2 + b"\x86", row(*[b"K\1"] * 5), b"]\x85", b"]]\x86", b"}\x85", b"N]\x86",
        number(1 << 62) + b"\x85", b"J\xff\xff\xff\x7f\x85", name_of("a", "b") + b"\x85", text("f4") + b"\x85",
        text("O8") + b"\x85", text("V99999999") + b"\x85", tensor() + b"\x88}\x87", row(b"N", row(number(1 << 61))),
    ]  # fmt: skip
    for module, name in NAMED:
        named, parts = name_of(module, name), []
        for state in states:
            parts += [named + state + b"b", named + b")R" + state + b"b", named + b")\x81" + state + b"b"]
        for given in arguments:
            parts += [named + given + b"R", named + given + b"\x81"]
            parts += [named + given + b"R" + state + b"b" for state in states[:2]]
        for part in parts[len(name) % 7 :: 7 if STRIDE > 1 else 1]:
            (tmp_path / "x.pt").write_bytes(archive(saved(x=part, w=tensor())))
            with bounded(), contextlib.suppress(SnapshotError):
                shown(Snapshot(tmp_path / "x.pt").read_object("0"))
    assert torch.equal(attack(tmp_path, archive(saved(w=tensor())))["w"], torch.tensor([1.0, 2, 3, 4]))


# Tensors

LIES = {
    "long": {"shape": (5,)},
    "behind": {"offset": 1},
    "far behind": {"offset": 1 << 62},
    "negative offset": {"offset": -1},
    "huge": {"shape": (1 << 40,)},
    "negative": {"shape": (-4,)},
    "backwards": {"strides": (-1,)},
    "steps": {"shape": (2,), "strides": ((1 << 60) - 1,)},
    "dimensions": {"shape": (4, 1), "strides": (1,)},
    "no storage": {"key": "9"},
    "elsewhere": {"key": "../../x"},
    "no dtype": {"function": "_rebuild_tensor_v3"},
    "unknown storage": {"kind": "FancyStorage"},
}


@pytest.mark.parametrize("what", LIES)
def test_torch_file_tensors_with_false_metadata_are_refused_when_opened(tmp_path, what):
    (tmp_path / "x.pt").write_bytes(archive(saved(w=tensor(**LIES[what]))))
    live = StateDict(w=torch.zeros(4))
    for verb in (lambda s: s.get_manifest(), lambda s: s.restore({"s": live}), lambda s: s.verify()):
        with bounded(), pytest.raises(SnapshotError):
            verb(Snapshot(tmp_path / "x.pt"))
    assert not live["w"].any()


def test_torch_file_expanded_views_that_fill_memory_are_refused(tmp_path):
    for shape, strides in (((1 << 33,), (0,)), ((1 << 20, 1 << 20), (0, 0)), ((1 << 59, 1 << 59, 0), (1, 1, 1))):
        (tmp_path / "x.pt").write_bytes(archive(saved(w=tensor(shape, strides))))
        with bounded(), pytest.raises(CorruptSnapshotError):
            Snapshot(tmp_path / "x.pt").read_object("0/w")
    many = {f"w{index}": tensor((1 << 24 | index,), (0,)) for index in range(200)}
    (tmp_path / "x.pt").write_bytes(archive(saved(**many)))
    with bounded(2 << 30), pytest.raises(CorruptSnapshotError, match="memory"):
        Snapshot(tmp_path / "x.pt").read_object("0")


# Archives


def directory(content):
    """Where the directory of an archive begins, and where each of its items does."""
    begin = struct.unpack_from("<L", content, len(content) - 6)[0]
    items, at = [], begin
    while content[at : at + 4] == b"PK\1\2":
        items.append(at)
        name, extra, comment = struct.unpack_from("<3H", content, at + 28)
        at += 46 + name + extra + comment
    return begin, items


def test_zip_directories_with_false_values_are_refused(tmp_path):
    good = archive(saved(w=tensor()))
    _, items = directory(good)
    lies = []
    for item in items:
        for at, size in ((10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)):
            for value in (0, 30, 0xFFFE, 0xFFFFFFFF, len(good) - 60):
                made = bytearray(good)
                made[item + at : item + at + size] = (value & (256**size - 1)).to_bytes(size, "little")
                lies.append(bytes(made))
    end = len(good) - 22
    for at, size in ((4, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)):
        for value in (0, 1, 0xFFFF, 0xFFFFFFFF, len(good)):
            made = bytearray(good)
            made[end + at : end + at + size] = (value & (256**size - 1)).to_bytes(size, "little")
            lies.append(bytes(made))
    lies += [good[:-cut] for cut in range(1, 23, 3)] + [good + b"x" * 7, b"PK\3\4" + good, good[40:]]
    right = torch.tensor([1.0, 2, 3, 4])
    for number_of, lie in enumerate(lies):
        found = attack(tmp_path, lie)
        if found is not None and "w" in found and not equal(found["w"], right):
            assert not Snapshot(tmp_path / "x.pt").verify(), number_of


def test_zip_members_that_are_duplicated_or_overlap_are_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert attack(tmp_path, archive(saved(w=tensor()), [*FLOATS, *FLOATS])) is None
    # each tensor is another view of one long member, that the directory names a thousand times
    content = bytearray(archive(saved(w=tensor()), [("data/0", bytes(1 << 20))]))
    begin, items = directory(content)
    item = bytes(content[items[-1] : len(content) - 22])
    names = [b"a/data/%x" % index for index in range(1000)]
    listed = b"".join(item[:28] + struct.pack("<H", len(name)) + item[30:46] + name for name in names)
    first = bytes(content[begin : items[-1]])
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1001, 1001, len(first + listed), begin, 0)
    with bounded():
        (tmp_path / "x.pt").write_bytes(bytes(content[:begin]) + first + listed + end)
        exercise(tmp_path / "x.pt")


def test_zip_deflate_bombs_are_not_decompressed(tmp_path):
    zeros = bytes(64 << 20)
    content = archive(saved(w=tensor()), [("data/0", zeros)], zipfile.ZIP_DEFLATED)
    with bounded(200 << 20):
        assert torch.equal(Snapshot(_put(tmp_path, content)).read_object("0/w"), torch.zeros(4))
    lies = archive(b"}." + zeros, FLOATS, zipfile.ZIP_DEFLATED)  # its pickle is
    _, items = directory(lies)
    made = bytearray(lies)
    made[items[0] + 24 : items[0] + 28] = struct.pack("<L", 10)
    with bounded(60 << 20), pytest.raises(CorruptSnapshotError):
        Snapshot(_put(tmp_path, bytes(made))).get_manifest()


def _put(folder, content):
    (folder / "x.pt").write_bytes(content)
    return folder / "x.pt"


def test_dcp_zstd_bomb_is_not_decompressed(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.compress(bytes(400 << 20))
    for value in (torch.ones(4), 7):
        folder = tmp_path / type(value).__name__
        dcp.save({"m": {"x": value}}, checkpoint_id=folder, **ALONE)
        for info in (metadata := _metadata(folder)).storage_data.values():
            info.offset, info.length, info.transform_descriptors = 0, len(bomb), ["stream.zstd/1"]
        _replace(folder, metadata)
        (folder / "__0_0.distcp").write_bytes(bomb)
        with bounded(1 << 30), pytest.raises(SnapshotError):
            Snapshot(folder).read_object("0/m/x")


# DCP


def _metadata(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def _replace(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _chunk(metadata, name, sizes=None, offsets=None):
    described = metadata.state_dict_metadata[name]
    chunk = described.chunks[0]
    made = type(chunk)(torch.Size(offsets or chunk.offsets), torch.Size(sizes or chunk.sizes))
    return described, made


def overlapping(metadata):
    described, other = _chunk(metadata, "m.w", offsets=(1, 0))
    described.chunks.append(other)
    index = next(each for each in metadata.storage_data if each.fqn == "m.w")
    metadata.storage_data[type(index)("m.w", torch.Size((1, 0)))] = metadata.storage_data[index]


def hole(metadata):
    metadata.state_dict_metadata["m.w"].size = torch.Size((6, 4))


def outside(metadata):
    metadata.state_dict_metadata["m.w"].size = torch.Size((2, 4))


def other_shape(metadata):
    described, chunk = _chunk(metadata, "m.w", sizes=(4, 3))
    described.size, described.chunks = torch.Size((4, 3)), [chunk]


def other_dtype(metadata):
    metadata.state_dict_metadata["m.w"].properties.dtype = torch.int32


def huge(metadata):
    described, chunk = _chunk(metadata, "m.w", sizes=(1 << 40, 1 << 18))
    described.size, described.chunks = torch.Size((1 << 40, 1 << 18)), [chunk]


def _info(metadata):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "m.w")


def behind(metadata):
    _info(metadata).length += 1 << 40


def far(metadata):
    _info(metadata).offset = 1 << 61


def negative(metadata):
    _info(metadata).offset = -1


def elsewhere(metadata):
    _info(metadata).relative_path = "../x/__0_0.distcp"


def absolute(metadata):
    _info(metadata).relative_path = "/etc/passwd"


def url(metadata):
    _info(metadata).relative_path = "file:///etc/passwd"


def missing(metadata):
    _info(metadata).relative_path = "__9_9.distcp"


def unknown_transform(metadata):
    _info(metadata).transform_descriptors = ["stream.rot13/1"]


def not_stored(metadata):
    metadata.storage_data.clear()


@pytest.mark.parametrize(
    "change",
    [
        overlapping, hole, outside, other_shape, other_dtype, huge, behind, far, negative, elsewhere, absolute, url,
        missing, unknown_transform, not_stored,
    ],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_dcp_metadata_with_false_boxes_is_refused_before_restore_changes_anything(tmp_path, change):
    dcp.save({"m": {"w": torch.ones(3, 4), "n": 3}}, checkpoint_id=tmp_path, **ALONE)
    metadata = _metadata(tmp_path)
    change(metadata)
    _replace(tmp_path, metadata)
    shape = tuple(metadata.state_dict_metadata["m.w"].size)
    live = StateDict(w=torch.zeros(shape if change is not huge else (3, 4)), n=None)
    with bounded(), pytest.raises((CorruptSnapshotError, UnsupportedFormatError)):
        Snapshot(tmp_path).read_object("0/m/w")
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(tmp_path).restore({"m": live})
    assert not live["w"].any()
    with bounded(), contextlib.suppress(SnapshotError):
        assert not Snapshot(tmp_path).verify()


def test_dcp_impossible_nesting_of_names_is_refused(tmp_path):
    dcp.save({"m": {"w": torch.ones(3), "n": 3}}, checkpoint_id=tmp_path, **ALONE)
    good = _metadata(tmp_path)
    long = ("m",) * 399
    for w, n in (
        (("m", 1 << 60), ("m", 0)), (("m",), ("m", "n")), (("m", "n"), ("m",)), (("m", "w"), ("m", "w")), ((), ("n",)),
        (("m", -1), ("m", 0)), (("m", 10**8), ("m", 1)), ((True, "w"), ("m", "n")), ((1.5,), ("m",)), (long, long[:-1]),
        ((long * 100), ("n",)), ([], {}), (None, 3), (("m", "w"), ("m", "w", 0)), (("1", 0), (1, 0)), (("",), ("", "")),
    ):  # fmt: skip
        good.planner_data = {"m.w": w, "m.n": n}
        _replace(tmp_path, good)
        with bounded():
            exercise(tmp_path)
        with bounded(), contextlib.suppress(SnapshotError):
            assert len(repr(Snapshot(tmp_path).get_manifest())) < 1_000_000


def test_dcp_link_to_another_file_is_read_or_refused(tmp_path):
    """A folder may hold links, as a user may make them; what they lead to is read as what it should be, or refused."""
    dcp.save({"m": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "c", **ALONE)
    (tmp_path / "c" / "__0_0.distcp").unlink()
    (tmp_path / "c" / "__0_0.distcp").symlink_to("/proc/self/environ")
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(tmp_path / "c").read_object("0/m/w")
    (tmp_path / "c" / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "c" / "__0_0.distcp")
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(tmp_path / "c").read_object("0/m/w")


# torchsnapshot


def manifest(entries, world=1):
    return {"version": "0.1.0", "world_size": world, "manifest": entries}


def entry(**more):
    return {
        "type": "Tensor", "location": "0/m/w", "serializer": "buffer_protocol", "dtype": "torch.float32", "shape": [4],
        "replicated": False, "byte_range": None,
    } | more  # fmt: skip


def of(one, **more):
    return manifest({"0/m": {"type": "dict", "keys": ["w"]}, "0/m/w": one, **more})


SHARDS = [{"offsets": [0], "sizes": [4], "tensor": entry()}]
HOSTILE = {
    "outside": of(entry(location="../../etc/passwd")),
    "absolute": of(entry(location="/etc/passwd")),
    "url": of(entry(location="s3://a/b")),
    "no text": of(entry(location=["0/m/w"])),
    "huge": of(entry(shape=[1 << 40])),
    "huge twice": of(entry(shape=[1 << 59, 1 << 59])),
    "negative": of(entry(shape=[-4])),
    "bool": of(entry(shape=[True, 4])),
    "float": of(entry(shape=[4.0])),
    "range": of(entry(byte_range=[0, 1 << 62])),
    "backwards": of(entry(byte_range=[16, 0])),
    "short range": of(entry(byte_range=[0, 15])),
    "one number": of(entry(byte_range=[0])),
    "dtype": of(entry(dtype="torch.os")),
    "serializer": of(entry(serializer="pickle")),
    "type": of({"type": "hologram"}),
    "no type": of({}),
    "list": of([]),
    "none": of(None),
    "no shards": of({"type": "ShardedTensor", "shards": []}),
    "overlap": of({"type": "ShardedTensor", "shards": [*SHARDS, {"offsets": [2], "sizes": [4], "tensor": entry()}]}),
    "hole": of({"type": "ShardedTensor", "shards": [{"offsets": [4], "sizes": [4], "tensor": entry()}]}),
    "far": of({"type": "ShardedTensor", "shards": [{"offsets": [1 << 59], "sizes": [4], "tensor": entry()}]}),
    "dimensions": of(
        {"type": "ShardedTensor", "shards": [*SHARDS, {"offsets": [4, 0], "sizes": [4, 1], "tensor": entry()}]}
    ),
    "other dtypes": of(
        {
            "type": "ShardedTensor",
            "shards": [*SHARDS, {**SHARDS[0], "offsets": [4], "tensor": entry(dtype="torch.int8")}],
        }
    ),
    "chunks": of({"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [1 << 50], "chunks": SHARDS}),
    "float text": of({"type": "float", "serialized_value": "AAAA", "replicated": False, "readable": None}),
    "int text": of({"type": "int", "serialized_value": "9" * 100_000, "replicated": False, "readable": None}),
    "bool text": of({"type": "bool", "serialized_value": "yes", "replicated": False, "readable": None}),
    "bytes text": of({"type": "bytes", "serialized_value": "?", "replicated": False, "readable": None}),
    "rank": manifest({"7/m": {"type": "dict", "keys": []}}),
    "negative rank": manifest({"-1/m": {"type": "dict", "keys": []}}),
    "no rank": manifest({"m": {"type": "dict", "keys": []}}),
    "world": {**manifest({}), "world_size": "3"},
    "no world": {**manifest({}), "world_size": 0},
    "manifest": {**manifest({}), "manifest": []},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_torchsnapshot_hostile_manifests_are_refused(tmp_path, what):
    (tmp_path / "0" / "m").mkdir(parents=True)
    (tmp_path / "0" / "m" / "w").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(HOSTILE[what]))
    live = StateDict(w=torch.zeros(4))
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(tmp_path).restore({"m": live})
    assert not live["w"].any()
    with bounded():
        exercise(tmp_path, "m", "0/m")


def test_torchsnapshot_unusual_but_valid_manifests_are_read(tmp_path):
    (tmp_path / "0" / "m").mkdir(parents=True)
    (tmp_path / "0" / "m" / "w").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    twice = {"type": "ShardedTensor", "shards": [*SHARDS, *SHARDS]}
    for one in (entry(), entry(byte_range=[0, 16]), {"type": "ShardedTensor", "shards": SHARDS}):
        (tmp_path / ".snapshot_metadata").write_text(json.dumps(of(one)))
        assert torch.equal(Snapshot(tmp_path).read_object("0/m/w"), torch.tensor([1.0, 2, 3, 4]))
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(of(twice)))
    with bounded():
        exercise(tmp_path, "m", "0/m")


YAML = b"version: 0.1.0\nworld_size: 1\nmanifest:\n"
TEXTS = {
    "aliases": b"a0: &a0 [x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 30))
    + YAML + b"  {}\n",
    "merge": b"a: &a {x: 1}\n" + YAML + b"  0/m:\n    <<: *a\n",
    "python": YAML + b"  0/m: !!python/object/apply:os.system ['touch ran']\n",
    "tag": YAML + b"  0/m: !x y\n",
    "nested": YAML + b"  0/m: " + b"[" * 50_000 + b"]" * 50_000,
    "nested maps": YAML + b"  0/m: " + b"{a: " * 5_000 + b"}" * 5_000,
    "nested blocks": YAML + b"".join(b" " * (2 + i) + b"a:\n" for i in range(2_000)),
    "documents": YAML + b"  {}\n---\n" + YAML + b"  {}\n",
    "keys": YAML + b"  ? [1, 2]\n  : x\n",
    "number": YAML.replace(b"1\n", b"1" * 100_000 + b"\n") + b"  {}\n",
    "sexagesimal": YAML.replace(b"1\n", b"1" + b":59" * 50_000 + b"\n") + b"  {}\n",
    "date": YAML + b"  0/m: 2020-99-99\n",
    "binary": YAML + b"  0/m: !!binary '?'\n",
    "json": b'{"version": "", "world_size": 1, "manifest": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "zeros": b"\0" * 1000 + YAML,
    "utf-16": ("\ufeff" + YAML.decode()).encode("utf-16-le"),
}  # fmt: skip


@pytest.mark.timeout(30, func_only=True)
@pytest.mark.parametrize("what", TEXTS)
def test_torchsnapshot_hostile_yaml_is_refused(tmp_path, what):
    pytest.importorskip("yaml")
    (tmp_path / ".snapshot_metadata").write_bytes(TEXTS[what])
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(tmp_path).restore({"m": StateDict(w=torch.zeros(4))})
    assert not (tmp_path / "ran").exists()


def test_torch_file_checksum_of_the_pickle_is_verified(tmp_path):
    content = archive(saved(n=b"K\x07"))
    at = content.index(b"K\x07")
    found = attack(tmp_path, content[:at] + b"K\x08" + content[at + 2 :])
    assert found is None
    with pytest.raises(CorruptSnapshotError, match="checksum"):
        Snapshot(tmp_path / "x.pt").get_manifest()
    assert zlib.crc32(b"") == 0
