"""Snapshots that somebody made to do harm: only our errors come out of them, soon, and in little memory."""

import collections
import contextlib
import io
import json
import random
import struct
import sys
import warnings
import zipfile

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, RestoreOptions, Snapshot, SnapshotError, StateDict
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.formats.pickled_objects import load_object
from snapshot.manifest.document import METADATA, decode_document
from snapshot.testing import recording
from tests.hostile.hostile_snapshots import (
    ROOM,
    Live,
    bounded,
    changed,
    contents,
    document_of,
    encoded,
    exercise,
    nested,
    rich,
    sign,
    spoil,
    store,
)

URL = "memory://rich/s"
MANIFEST = f"rich/s/{METADATA}"


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Prototype layouts and pickled values warn; that is not what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def base(one_thread):
    """The manifest of a good snapshot with every kind of entry, which a test may replace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot.take(URL, rich(), overwrite=True)
    return document_of("rich/s")


def attack(document, base=None, note=""):
    """Sign a manifest, put it in place, and do all that a user may do."""
    store(MANIFEST, sign(document if isinstance(document, bytes) else encoded(document)))
    with bounded():
        return exercise(URL, changed(document, base) if base else (), note)


def test_hostile_test_base_snapshot_is_read_by_every_verb(base):
    kinds = {entry["type"] for entry in base["manifest"].values()}
    assert len(kinds) >= 37
    assert exercise(URL, list(base["manifest"])) > len(base["manifest"])
    assert Snapshot(URL).verify()


def test_manifest_with_random_changes_raises_an_error_of_the_library(base):
    read = 0
    for seed in range(100):
        document = spoil(base, random.Random(seed))
        read += attack(document, base, seed) > 6
    assert read  # some changes are no harm


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.booleans())
def test_manifest_of_any_bytes_is_refused(data, signed):
    with pytest.raises(SnapshotError):
        decode_document(sign(data + b"}") if signed else data, "here")


@pytest.fixture(scope="module")
def few():
    """The body of the manifest of a snapshot at memory://few. Examples overwrite its manifest, and none takes it."""
    Snapshot.take("memory://few", {"s": StateDict(a=torch.ones(3), b={1: "x"}, c=2.5, d=(1,))}, overwrite=True)
    return encoded(document_of("few"))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))  # the soak does it for minutes
@given(data=st.data())
def test_manifest_with_other_bytes_somewhere_raises_an_error_of_the_library(few, data):
    body = few
    at, length = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(0, 20))
    new = data.draw(st.binary(max_size=10) | st.sampled_from([b"1e400", b"-1", b'"', b"[[[[", b"null", b"9" * 20]))
    store(f"few/{METADATA}", sign(body[:at] + new + body[at + length :] + b"}"))
    live = {"s": StateDict(a=torch.zeros(3), b=None, c=None, d=None)}
    for verb in (
        lambda: Snapshot("memory://few").restore(live),
        lambda: Snapshot("memory://few").verify(),
        lambda: Snapshot("memory://few").get_state_dict_for_key("s"),
    ):
        with bounded(), contextlib.suppress(SnapshotError):
            verb()


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 60], [1 << 30, 1 << 30], [1 << 60, 0], [1 << 62, 1 << 62], [0, 1 << 63], [1] * 5000, [-1, -6], [1 << 70],
        [-1],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["tensor", "sharded", "array", "sparse"])
def test_manifest_with_huge_shapes_is_refused(base, name, shape):
    entry = base["manifest"][f"0/state/{name}"]
    for each in [entry, *entry.get("parts", {}).values(), entry.get("data", {})]:
        each["shape"] = shape
    for shard in entry.get("shards", ()):
        shard["sizes"] = shard["tensor"]["shape"] = shape
    attack(base)
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(URL).read_object(f"0/state/{name}")
    with bounded(), pytest.raises(SnapshotError):
        Snapshot(URL).read_object(f"0/state/{name}", box=[slice(0, 1)] * len(shape))


def test_manifest_with_huge_lengths_is_refused(base):
    """Containers, files, headers, parts and tables that are said to be longer than anything."""
    entries = base["manifest"]
    for holder, key in [
        *((entries["0/state/boxes"], "length"), (entries["0/state/boxes/3"], "maxlen")),
        *((file, key) for file in base["files"].values() for key in ("size", "header") if key in file),
    ]:
        for number in (1 << 60, 1 << 63, 1 << 64, -1):
            kept, holder[key] = holder.get(key), number
            for world in (1, 2):
                attack({**base, "world_size": world})
            holder[key] = kept
    part = {"location": "data/x-0.json", "size": 1 << 60, "digest": "xxh3:" + "0" * 32, "ranks": [0], "count": 1 << 60}
    for ranks in ([0], [], [1 << 60], [-1]):
        attack({**base, "parts": [{**part, "ranks": ranks}]})


def test_manifest_bytes_claimed_by_many_values_are_refused(base):
    """A megabyte of file that a few kilobytes of manifest read again and again would fill any memory."""
    long = torch.zeros(1 << 22, dtype=torch.uint8)
    Snapshot.take("memory://claims", {"s": StateDict(x=long)}, overwrite=True)
    document = document_of("claims")
    entry = document["manifest"]["0/s/x"]
    begin, end = entry["byte_range"]
    bare = {name: value for name, value in entry.items() if name not in ("digest", "blocks")}
    shapes = [{**entry, "shape": [1] * i + [1 << 22]} for i in range(2000)]
    ranges = [{**bare, "byte_range": [begin + i, end], "shape": [end - begin - i]} for i in range(2000)]
    for entries in (shapes, ranges):
        manifest = {"0/s": {"type": "dict", "keys": [f"x{i}" for i in range(2000)]}}
        manifest |= {f"0/s/x{i}": each for i, each in enumerate(entries)}
        store(f"claims/{METADATA}", sign(msgspec.json.encode({**document, "manifest": manifest})))
        for verb in (
            lambda: Snapshot("memory://claims").get_state_dict_for_key("s"),
            lambda: Snapshot("memory://claims").read_object("0/s"),
            lambda: Snapshot("memory://claims").restore({"s": StateDict()}),
        ):
            with bounded(), pytest.raises(CorruptSnapshotError, match="also belong to other values"):
                verb()
    with bounded():
        assert "belong to two things" in str(Snapshot("memory://claims").verify())


def test_manifest_with_deep_nesting_is_refused_soon(base):
    body = msgspec.json.encode({**base, "metadata": "HERE"})
    for depth in (510, 900, 10_000, 1_000_000):
        for brackets in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
            attack(body.replace(b'"HERE"', b'{"a":' + brackets + b"}"))
            with bounded(), pytest.raises(SnapshotError):
                str(Snapshot(URL).metadata)
    for field, place in (("mesh", "0/state/sharded"), ("dtype", "0/state/records"), ("params", "0/state/sparse")):
        document = {**base, "manifest": {**base["manifest"]}}
        document["manifest"][place] = {**document["manifest"][place], field: nested(900)}
        attack(document)


def test_take_of_ten_thousand_nested_dicts_is_refused(base, tmp_path):
    deep = value = {}
    for _ in range(10_000):
        value["k"] = {}
        value = value["k"]
    with pytest.raises((TypeError, ValueError, SnapshotError), match="deep"):
        Snapshot.take(tmp_path / "s", {"s": StateDict(deep=deep)})
    assert not (tmp_path / "s").exists()
    while deep:  # one by one: Python would need a stack as deep to drop all at once
        deep = deep["k"]
    entries = {"0/s" + "/k" * n: {"type": "dict", "keys": ["k"]} for n in range(2_000)}
    entries["0/s" + "/k" * 2_000] = {"type": "dict", "keys": []}
    store(MANIFEST, sign(msgspec.json.encode({**base, "manifest": entries})))
    with bounded():
        for verb in (
            lambda: Snapshot(URL).restore({"s": StateDict()}),
            lambda: Snapshot(URL).get_state_dict_for_key("s"),
        ):
            with pytest.raises(CorruptSnapshotError, match="deep"):
                verb()


@pytest.mark.timeout(30)
def test_manifest_with_empty_names_is_refused(base):
    one, none = {"type": "tuple", "length": 1}, {"type": "list", "length": 0}
    for entries in ({"0/": one, "0//0": none}, {"0/": one, "0//0": {**none, "type": "set"}}, {"0": one, "0/0": none}):
        attack({**base, "manifest": entries, "files": {}})
        with bounded(), contextlib.suppress(SnapshotError):
            assert Snapshot(URL).get_state_dict_for_key("") in (([],), (set(),))
        with bounded(), contextlib.suppress(SnapshotError):
            Snapshot(URL).restore({"": Live()})


def test_take_metadata_with_deep_nesting_is_refused(tmp_path):
    with pytest.raises(TypeError, match="at most 500 levels"):
        Snapshot.take(tmp_path / "s", {"s": StateDict(x=1)}, metadata={"a": nested(600)})
    assert not (tmp_path / "s").exists()
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=1)}, metadata={"a": nested(300), "b": "[" * 5000})
    assert Snapshot(tmp_path / "s").metadata.metadata["a"] == nested(300)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "01", "0x10", "1_000", "+1", ".5", "--1"])
def test_manifest_with_nan_or_infinity_is_refused(base, text):
    body = msgspec.json.encode({**base, "world_size": 987654, "metadata": {}})
    for spoilt in (
        body.replace(b"987654", text.encode()),
        body.replace(b'"metadata":{}', b'"metadata":{"a":%s}' % text.encode()),
    ):
        assert spoilt != body
        store(MANIFEST, sign(spoilt.replace(b"987654", b"1")))
        with bounded(), pytest.raises(SnapshotError):
            str(Snapshot(URL).metadata)


@pytest.mark.parametrize("metadata", ["[1]", "7", '{"a":' * 600 + "1" + "}" * 600])
def test_restore_does_not_fail_by_metadata_that_is_no_mapping_or_nests_too_deep(metadata):
    live = {"s": StateDict(x=torch.ones(3))}
    Snapshot.take(URL, live, overwrite=True)
    body = msgspec.json.encode({**document_of("rich/s"), "metadata": msgspec.Raw(metadata.encode())})
    store(MANIFEST, sign(body))
    live["s"]["x"].zero_()
    with bounded():
        Snapshot(URL).restore(live)
    assert torch.equal(live["s"]["x"], torch.ones(3))
    with bounded(), pytest.raises(CorruptSnapshotError, match="metadata"):
        str(Snapshot(URL).metadata)


@pytest.mark.parametrize("where", ["top", "files", "manifest", "entry"])
def test_manifest_with_duplicate_keys_is_refused(base, where):
    body = encoded(base)
    first = next(iter(base["manifest"]))
    key, value = {
        "top": ("world_size", base["world_size"]),
        "files": (next(iter(base["files"])), next(iter(base["files"].values()))),
        "manifest": (first, base["manifest"][first]),
        "entry": ("dtype", "float32"),
    }[where]
    one = f'"{key}":{json.dumps(value, separators=(",", ":"))}'.encode()
    assert one in body
    store(MANIFEST, sign(body.replace(one, one + b"," + one, 1)))
    with pytest.raises(CorruptSnapshotError, match="canonical"):
        Snapshot(URL).verify()


def test_manifest_with_unknown_types_is_refused(base):
    for change in (
        {"manifest": {**base["manifest"], "0/state/new": {"type": "hologram", "location": "x"}}},
        {
            "manifest": {
                **base["manifest"],
                "0/state/tensor": {**base["manifest"]["0/state/tensor"], "compressed": "zstd"},
            }
        },
        {"compression": "zstd"},
    ):
        store(MANIFEST, sign(msgspec.json.encode({**base, **change})))
        with pytest.raises(UnsupportedFormatError, match="install a newer version"):
            Snapshot(URL).get_manifest()


def test_manifest_larger_than_snapshot_manifest_bytes_is_not_read(base, monkeypatch):
    monkeypatch.setenv("SNAPSHOT_MANIFEST_BYTES", "1000")
    with pytest.raises(SnapshotError, match="1,000 allowed"):
        Snapshot(URL).get_manifest()


def test_take_does_not_commit_a_manifest_larger_than_snapshot_manifest_bytes(tmp_path, monkeypatch):
    held = {"s": StateDict({f"w{i}": torch.ones(2) for i in range(40)})}
    Snapshot.take(tmp_path / "a", held)
    monkeypatch.setenv("SNAPSHOT_MANIFEST_BYTES", "3000")
    for save in (Snapshot.take, lambda *given: Snapshot.async_take(*given).wait()):
        with pytest.raises(SnapshotError, match="at most 3,000: raise SNAPSHOT_MANIFEST_BYTES"):
            save(tmp_path / "b", held)
        assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    monkeypatch.setenv("SNAPSHOT_MANIFEST_BYTES", "100000")
    Snapshot.take(tmp_path / "b", held)
    assert Snapshot(tmp_path / "b").verify()


def test_take_of_too_many_tensors_is_refused_before_it_writes_data(tmp_path, monkeypatch):
    held = {"s": StateDict({f"w{i}": torch.ones(2) for i in range(40)})}
    Snapshot.take(tmp_path / "a", held)
    nbytes = (tmp_path / "a" / ".snapshot_metadata").stat().st_size
    monkeypatch.setenv("SNAPSHOT_MANIFEST_BYTES", str(nbytes * 3 // 4))
    with recording() as log, pytest.raises(SnapshotError, match="raise SNAPSHOT_MANIFEST_BYTES"):
        Snapshot.take(f"recording+file://{tmp_path}/b", held)
    assert not log.of("create")


# Objects


class Harm:
    """Would run when it is unpickled."""

    ran = False

    def __init__(self, function, *arguments):
        self.what = function, arguments

    def __reduce__(self):
        return self.what


def harm():
    Harm.ran = True
    return "harm"


def with_pickle(tmp_path, data):
    """A snapshot of an object whose pickle is replaced by another one, with right digests."""
    from snapshot.tensors.digest import digest_range

    with pytest.warns(UserWarning, match="pickles"):
        Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3), odd=collections.UserDict(a=1))}, overwrite=True)
    path = tmp_path / "s" / METADATA
    document = msgspec.json.decode(path.read_bytes())
    del document["digest"]
    entry = document["manifest"]["0/s/odd"]
    (tmp_path / "s" / entry["location"]).write_bytes(data)
    document["files"][entry["location"]]["size"] = len(data)
    entry |= {"byte_range": [0, len(data)], "digest": digest_range(data)}
    path.write_bytes(sign(msgspec.json.encode(document)))
    return tmp_path / "s"


def pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_malicious_pickle_does_not_run(tmp_path):
    path = with_pickle(tmp_path, pickled(Harm(harm)))
    live = {"s": StateDict(x=torch.zeros(3), odd="mine")}
    report = Snapshot(path).verify()
    assert report.ok  # its bytes are what was written: that they mean harm is not for a digest to find
    for verb in (
        lambda: Snapshot(path).restore(live),
        lambda: Snapshot(path).restore(live, strict=False, options=RestoreOptions(atomic=True, verify=False)),
        lambda: Snapshot(path).read_object("0/s/odd"),
        lambda: Snapshot(path).read_object("0/s"),
        lambda: Snapshot(path).get_state_dict_for_key("s"),
    ):
        with pytest.raises(UnsafeObjectError, match=r"s/odd.*allow_pickle=True"):
            verb()
    Snapshot(path).get_manifest()
    Snapshot(path).restore({"s": StateDict(x=torch.zeros(3), odd=1)}, select=["s/x"])
    assert not Harm.ran
    assert live["s"]["odd"] == "mine"
    assert not live["s"]["x"].any()
    assert Snapshot(path, allow_pickle=True).read_object("0/s/odd") == "harm"
    assert Harm.ran
    Harm.ran = False


def test_allow_pickle_must_be_a_keyword_argument():
    with pytest.raises(TypeError):
        Snapshot("memory://x", None, None, True)


def deflated(data):
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as held, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for each in held.infolist():
            made.writestr(each.filename, held.read(each))
    return out.getvalue()


def overlapping(data):
    """Many names for one member's bytes: a small archive that is read as a large one."""
    with zipfile.ZipFile(io.BytesIO(data)) as held:
        members = held.infolist()
    out = io.BytesIO(data)
    made = zipfile.ZipFile(out, "a")
    longest = max(members, key=lambda each: each.file_size)
    for i in range(500):
        twin = zipfile.ZipInfo(f"{longest.filename}{i}")
        for name in ("header_offset", "CRC", "compress_size", "file_size", "create_version", "extract_version"):
            setattr(twin, name, getattr(longest, name))
        made.filelist.append(twin)
    made._didModify = True
    made.close()
    return out.getvalue()


@pytest.mark.parametrize("allow", [False, True])
def test_pickle_archives_that_are_zip_bombs_are_refused(tmp_path, allow):
    zeros = pickled(torch.zeros(1 << 24))
    for bomb in (deflated(zeros), deflated(pickled(slice(2))), overlapping(pickled(torch.zeros(1000)))):
        assert len(bomb) < 1 << 20
        path = with_pickle(tmp_path, bomb)
        with bounded(ROOM // 16), pytest.raises(CorruptSnapshotError, match="archive"):
            Snapshot(path, allow_pickle=allow).read_object("0/s/odd")


@pytest.mark.parametrize("size", [1 << 34, 1 << 40, 1 << 62])
def test_pickles_that_allocate_much_memory_are_refused(tmp_path, size):
    path = with_pickle(tmp_path, pickled(Harm(bytearray, size)))
    with bounded(), pytest.raises(CorruptSnapshotError, match="bytearray"):
        Snapshot(path).read_object("0/s/odd")


def test_pickles_with_bytearrays_and_large_numbers_are_read(tmp_path):
    value = {
        "a": bytearray(b"xyz"),
        "b": bytearray(),
        "c": 1 << 80,
        "d": torch.ones(1).expand(1 << 40),
        "e": slice(1 << 60),
    }
    path = with_pickle(tmp_path, pickled({k: v for k, v in value.items() if k != "e"}))
    read = Snapshot(path).read_object("0/s/odd")
    assert (read["a"], read["b"], read["c"], read["d"].shape) == (b"xyz", b"", 1 << 80, (1 << 40,))


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_pickles_of_any_bytes_raise_an_error_of_the_library(data):
    good = pickled({"a": torch.ones(2), "b": bytearray(b"x"), "c": [1, {2}]})
    at = data.draw(st.integers(0, len(good) - 1))
    new = data.draw(st.binary(max_size=6))
    spoilt = good[:at] + new + good[at + data.draw(st.integers(0, 6)) :]
    with bounded(), contextlib.suppress(SnapshotError):
        load_object("odd", bytearray(spoilt), "torch_save", "slice", allow_pickle=False)


def test_tensor_subclass_module_that_is_not_imported_stays_so(base):
    entry = base["manifest"]["0/state/tensor"]
    entry["extra"] = {"subclass": "this.Module"}
    assert "this" not in sys.modules  # it would print
    store(MANIFEST, sign(encoded(base)))
    with pytest.warns(UserWarning, match="not imported"):
        Snapshot(URL).read_object("0/state/tensor")
    for name in ("os.system", "builtins.eval", "subprocess.Popen", "torch.load", "snapshot.Snapshot"):
        entry["extra"] = {"subclass": name}
        store(MANIFEST, sign(encoded(base)))
        with pytest.warns(UserWarning, match="not imported"):
            assert type(Snapshot(URL).read_object("0/state/tensor")) is torch.Tensor
    assert "this" not in sys.modules


# What was found by attacking it


def takes_little(path, *, allow=False):
    """An object that is not read, and for which hardly any memory is taken."""
    with bounded(ROOM // 4), pytest.raises((CorruptSnapshotError, UnsafeObjectError)):
        Snapshot(path, allow_pickle=allow).read_object("0/s/odd")


def archived(data):
    """A pickle's bytes in an archive of torch's."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pickled(1))) as held, zipfile.ZipFile(out, "w") as made:
        for each in held.infolist():
            made.writestr(each.filename, data if each.filename.endswith("data.pkl") else held.read(each))
    return out.getvalue()


def test_pickle_bytearray_opcode_uses_little_memory(tmp_path):
    takes_little(with_pickle(tmp_path, archived(b"\x80\x05\x96" + struct.pack("<Q", 4 << 30) + b".")))


def test_pickle_bytearray_by_another_function_uses_little_memory(tmp_path):
    nested_call = Harm(torch._tensor._rebuild_from_type_v2, bytearray, bytearray, (4 << 30,), {})
    twice = Harm(
        torch._tensor._rebuild_from_type_v2, torch._tensor._rebuild_from_type_v2, torch.Tensor,
        (bytearray, bytearray, (4 << 30,), {}), {},
    )  # fmt: skip
    for harm_ in (nested_call, twice):
        takes_little(with_pickle(tmp_path, pickled(harm_)))


def test_pickle_archives_that_two_readers_read_differently_use_little_memory(tmp_path):
    legacy = io.BytesIO()
    torch.save(Harm(bytearray, 4 << 30), legacy, _use_new_zipfile_serialization=False)
    takes_little(with_pickle(tmp_path, legacy.getvalue() + pickled(1)))
    bomb, small = deflated(pickled(torch.zeros(1 << 24))), pickled(1)
    takes_little(with_pickle(tmp_path, bomb + small))
    for comment in (b"x", small):
        out = io.BytesIO(small)
        with zipfile.ZipFile(out, "a") as made:
            made.comment = comment
        takes_little(with_pickle(tmp_path, out.getvalue()))


class Newly(tuple):
    """An object whose pickle calls something that it has made."""

    def __new__(cls, *items, k=None):
        return super().__new__(cls, items)

    def __getnewargs_ex__(self):
        return tuple(self), {"k": 1}


def test_allow_pickle_reads_any_object(tmp_path):
    path = with_pickle(tmp_path, pickled(Newly(1, 2)))
    assert Snapshot(path, allow_pickle=True).read_object("0/s/odd") == (1, 2)
    with pytest.raises(UnsafeObjectError, match="allow_pickle"):
        Snapshot(path).read_object("0/s/odd")


def test_pickle_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = pickled({"a": torch.ones(3), "b": bytearray(b"x")})
    finally:
        torch.serialization.set_crc32_options(before)
    assert Snapshot(with_pickle(tmp_path, data)).read_object("0/s/odd")["b"] == b"x"


def test_manifest_paths_without_containers_are_limited_in_depth(base):
    base["manifest"]["0/" + "a/" * 60_000 + "b"] = {"type": "int", "serialized_value": "1"}
    store(MANIFEST, sign(encoded(base)))
    for rename in ({"state/x": "state/y"}, lambda path: path):
        with bounded(), pytest.raises(CorruptSnapshotError, match="deep"):
            Snapshot(URL).restore({"state": Live()}, rename=rename)


def test_manifest_boxes_that_are_slow_to_compare_are_refused(base):
    boxes, begin = [], 0
    for n in range(1500):  # each pair of bars crosses the middle of the next
        boxes += [((n, n), (1, 3000 - n)), ((n + 1, n), (3000 - n, 1))]
    entry = base["manifest"]["0/state/sharded"]
    shard = entry["shards"][0]["tensor"]
    location, (begin, _) = shard["location"], shard["byte_range"]
    base["files"][location]["size"] = 1 << 40
    entry["shape"] = [3001, 3001]
    entry["shards"] = []
    for offsets, sizes in boxes:
        count = sizes[0] * sizes[1]
        piece = {**shard, "shape": sizes, "byte_range": [begin, begin + 4 * count]}
        entry["shards"].append({"offsets": offsets, "sizes": sizes, "tensor": piece})
    store(MANIFEST, sign(encoded(base)))
    with bounded(), pytest.raises(CorruptSnapshotError):
        Snapshot(URL).read_object("0/state/sharded")


def test_manifest_part_that_is_named_twice_is_refused(base):
    part = {"location": "data/x-0.json", "size": 1, "digest": "xxh3:" + "0" * 32, "ranks": [0], "count": 1}
    store(MANIFEST, sign(encoded({**base, "parts": [part, part]})))
    with pytest.raises(CorruptSnapshotError, match="twice"):
        Snapshot(URL).verify()


@pytest.mark.parametrize("place", ["state", "param_groups", "param_groups/0/params/0", "state/0", "state/0/step"])
def test_restore_of_invalid_optimizer_state_raises_an_error_of_the_library(place):
    app = {key: value for key, value in rich().items() if key != "state"}
    Snapshot.take("memory://wrong", app, overwrite=True)
    document = document_of("wrong")
    entries = {p: e for p, e in document["manifest"].items() if not p.startswith(f"0/optimizer/{place}/")}
    entries[f"0/optimizer/{place}"] = {"type": "list", "length": 0}
    store(f"wrong/{METADATA}", sign(encoded({**document, "manifest": entries})))
    live = {key: value for key, value in rich().items() if key != "state"}
    with contextlib.suppress(SnapshotError):
        Snapshot("memory://wrong").restore(live)


def test_manifest_ranks_must_be_plain_numbers(base):
    for number in ("9" * 5000, "\u0660", "00", "+1", " 1"):
        document = {
            **base,
            "world_size": 3,
            "manifest": {**base["manifest"], f"{number}/state/a": {"type": "int", "serialized_value": "1"}},
        }
        store(MANIFEST, sign(encoded(document)))
        with pytest.raises(CorruptSnapshotError, match="must begin with a rank"):
            Snapshot(URL).get_state_dict_for_key("state")


def test_manifest_keys_whose_hashes_collide_are_refused(base):
    step = (1 << 61) - 1
    keys = [{"int": hex(step * n)} for n in range(8, 20_008)]
    manifest = {"0/s": {"type": "dict", "keys": keys}}
    manifest |= {f"0/s/{step * n}": {"type": "NoneType", "serialized_value": "None"} for n in range(8, 20_008)}
    store(MANIFEST, sign(encoded({**base, "manifest": manifest})))
    with bounded(), pytest.raises(CorruptSnapshotError, match="too many hash collisions"):
        Snapshot(URL).get_state_dict_for_key("s")


def test_manifest_keys_with_few_hashes_are_read():
    odd = {1 << i: i for i in range(3000)} | {2.0**-i: i for i in range(1, 1000)}
    Snapshot.take("memory://odd", {"s": StateDict(odd=odd)}, overwrite=True)
    assert Snapshot("memory://odd").get_state_dict_for_key("s")["odd"] == odd
    assert Snapshot("memory://odd").verify()


def test_verify_finds_containers_with_missing_members(base):
    del base["manifest"]["0/state/tensor"]
    store(MANIFEST, sign(encoded(base)))
    assert "its containers must have" in str(Snapshot(URL).verify())


def test_tensor_subclass_that_a_module_creates_on_access_is_not_looked_up(base):
    before = set(sys.modules)
    base["manifest"]["0/state/tensor"]["extra"] = {"subclass": "torch._inductor"}
    store(MANIFEST, sign(encoded(base)))
    with pytest.warns(UserWarning, match="not imported"):
        Snapshot(URL).read_object("0/state/tensor")
    assert not [name for name in set(sys.modules) - before if name.startswith("torch._inductor")]


# What others read

ODD_NAMES = ["__metadata__", '"', "\\", "\0", "[0:1]", "%5B", "\ud800", "a/b"]


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(ODD_NAMES), st.integers(0, 3)))
def test_safetensors_library_reads_data_files_with_any_names(names):
    Snapshot.take(
        "memory://names", {"s": StateDict({k: torch.full((n,), n) for k, n in names.items()})}, overwrite=True
    )
    found = []
    for path, data in contents().items():
        if path.startswith("names/data/") and path.endswith(".safetensors"):
            found += safetensors.torch.load(data).values()
    assert sorted(len(each) for each in found) == sorted(names.values())
    assert all((each == len(each)).all() for each in found)
