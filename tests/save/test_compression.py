"""Compressed snapshots are the same snapshots, in fewer bytes."""

import errno
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import msgspec
import pytest
import safetensors
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotExistsError, StateDict, StorageError, TakeOptions, Target
from snapshot.errors import MissingExtraError
from snapshot.io.arena import arena
from snapshot.io.url import URL
from snapshot.manifest.document import FORMAT, PACKED_FORMAT
from snapshot.plan.layout import Extent, FilePlan, cut_file
from snapshot.save import pace
from snapshot.save.digests import FileDigests
from snapshot.state.flatten import Flattened
from snapshot.tensors import split_zstd
from snapshot.tensors.digest import BLOCK, RunningDigest, digest_range
from snapshot.tensors.memory import BY_NAME
from snapshot.testing import faulty, recording
from tests.helpers.arguments import for_restore, for_take
from tests.helpers.noted import noted
from tests.helpers.states import bits, equal

MiB = 1 << 20


@pytest.fixture(autouse=True)
def all_memory_is_given_back():
    yield
    assert " 0 in use" in repr(arena())


def weights(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def state(rows=700):
    """Tensors of a training step: several blocks each, small ones, and other objects."""
    return {
        "s": StateDict(
            weight=weights(rows, 1024, dtype=torch.bfloat16),
            master=weights(rows, 1024, seed=1),
            moment=weights(rows, 1024, seed=2) ** 2,
            biases=[weights(33, seed=n) for n in range(40)],
            ids=torch.arange(9000),
            strided=weights(300, 400).t(),
            name="run",
        )
    }


def blank(like):
    return {
        "s": StateDict(
            {
                name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
                for name, value in like["s"].items()
            }
        )
    }


def expect_same(path, app, **given):
    live = blank(app)
    Snapshot(path).restore(live, **for_restore(**given))
    for name, value in app["s"].items():
        assert equal(value, live["s"][name]), name
    new = Snapshot(path).get_state_dict_for_key("s")
    for name, value in app["s"].items():
        assert equal(value, new[name]), name
    assert Snapshot(path).verify()


def nbytes(path):
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


WAYS = {
    "take": lambda path, app, **given: Snapshot.take(path, app, **for_take(**given)),
    "async": lambda path, app, **given: Snapshot.async_take(path, app, **for_take(**given)).wait(),
    "overlapped": lambda path, app, **given: Snapshot.async_take(
        path, app, **for_take(staging="overlapped", **given)
    ).wait(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, 16 * MiB, 1 * MiB])
def test_compression_restores_exactly_with_fewer_bytes(tmp_path, way, budget):
    app = state()
    Snapshot.take(tmp_path / "raw", app)
    WAYS[way](tmp_path / "z", app, compression="zstd", memory_budget_bytes=budget)
    expect_same(tmp_path / "z", app)
    assert nbytes(tmp_path / "raw") / nbytes(tmp_path / "z") > 1.2
    assert Snapshot(tmp_path / "z").metadata.format == PACKED_FORMAT
    assert Snapshot(tmp_path / "z").metadata.nbytes == nbytes(tmp_path / "z" / "data")
    assert not Snapshot.diff(tmp_path / "raw", tmp_path / "z")
    assert not Snapshot.diff(tmp_path / "z", tmp_path / "raw", values=True)


@pytest.mark.parametrize("url", ["memory://compressed", "recording+memory://compressed"])
def test_compression_on_storages_with_threads_or_on_the_loop(url):
    app = state(200)
    with recording():
        Snapshot.take(url, app, overwrite=True, options=TakeOptions(compression="zstd"))
        expect_same(url, app)
        Snapshot(url).delete()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_compression_of_every_dtype_and_size_is_exact(tmp_path, name):
    dtype = BY_NAME[name]
    counts = [0, 1, *(BLOCK // dtype.itemsize + by for by in (-1, 0, 1)), 2 * BLOCK // dtype.itemsize + 3]
    tensors = {}
    for count in counts:
        noise = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        if dtype == torch.bool:
            noise &= 1
        tensors[f"noise{count}"] = noise.view(dtype)
        tensors[f"zeros{count}"] = torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype)
    app = {"s": StateDict(tensors)}
    Snapshot.take(tmp_path / "s", app, options=TakeOptions(compression="zstd"))
    new = Snapshot(tmp_path / "s").get_state_dict_for_key("s")
    for key, value in tensors.items():
        assert new[key].dtype == dtype
        assert bits(new[key]) == bits(value), key
    assert Snapshot(tmp_path / "s").verify()


def test_compression_stores_incompressible_tensors_plain(tmp_path):
    app = {"s": StateDict(noise=torch.randint(0, 256, (3 * MiB,), dtype=torch.uint8))}
    Snapshot.take(tmp_path / "s", app, options=TakeOptions(compression="zstd"))
    metadata = Snapshot(tmp_path / "s").metadata
    assert metadata.format == FORMAT
    (name,) = [each for each in metadata.files if each.endswith("safetensors")]
    with safetensors.safe_open(tmp_path / "s" / name, "pt") as file:
        assert torch.equal(file.get_tensor("s/noise"), app["s"]["noise"])
    assert Snapshot(tmp_path / "s").verify()


@pytest.mark.parametrize("zeros", [0, 1, 300, 3500, 4096, 4119, 4200, 4400, 9000])
def test_compression_stores_a_file_plain_if_it_gains_less_than_its_table(tmp_path, zeros):
    noise = torch.randint(0, 256, (600_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    app = {"s": StateDict(noise=noise, zeros=torch.zeros(zeros, dtype=torch.uint8))}
    Snapshot.take(tmp_path / "raw", app)
    Snapshot.take(tmp_path / "s", app, options=TakeOptions(compression="zstd"))
    raw, packed = (Snapshot(tmp_path / name).metadata for name in ("raw", "s"))
    assert packed.nbytes < raw.nbytes if zeros == 9000 else packed.nbytes <= raw.nbytes
    assert (packed.format == PACKED_FORMAT) == (packed.nbytes < raw.nbytes)
    assert not Snapshot.diff(tmp_path / "raw", tmp_path / "s")
    assert Snapshot(tmp_path / "s").verify()
    held = Snapshot(tmp_path / "s").get_state_dict_for_key("s")
    assert torch.equal(held["noise"], noise)
    assert torch.equal(held["zeros"], app["s"]["zeros"])


def test_compressed_files_are_not_readable_as_plain_safetensors(tmp_path):
    Snapshot.take(tmp_path / "s", state(), options=TakeOptions(compression="zstd"))
    seen = 0
    for name in os.listdir(tmp_path / "s" / "data"):
        if name.endswith("safetensors"):
            with safetensors.safe_open(tmp_path / "s" / "data" / name, "pt") as file:
                assert list(file.keys()) == ["data[split+zstd]"]
                assert file.get_tensor("data[split+zstd]").dtype == torch.uint8
                assert "compressed" in file.metadata()["snapshot"]
            seen += 1
    assert seen
    head = (tmp_path / "s" / ".snapshot_metadata").read_bytes()[:24]
    assert head.startswith(b'{"format":"snapshot/2",')


# Parts


def test_compressed_row_reads_two_blocks_and_the_table(tmp_path):
    app = {"s": StateDict(long=weights(40_000, 300))}
    Snapshot.take(tmp_path / "s", app, options=TakeOptions(compression="zstd"))
    with recording() as log:
        view = Snapshot(f"recording+file://{tmp_path}/s")
        row = view.read_object("0/s/long", box=(slice(12_345, 12_346),))
    assert equal(row, app["s"]["long"][12_345:12_346])
    reads = [each for each in log.operations if each.name == "read_into" and each.path.endswith("safetensors")]
    assert sum(each.nbytes for each in reads) <= 2 * BLOCK + 4096
    assert sum(each.nbytes for each in log.operations if each.path.endswith(".bin")) < 64 << 10


@pytest.mark.parametrize("seed", range(8))
def test_compressed_box_equals_that_of_the_whole_tensor(tmp_path, seed):
    chance = torch.Generator().manual_seed(seed)
    whole = weights(900, 70, 13, seed=seed)
    Snapshot.take(
        tmp_path / "s", {"s": StateDict(t=whole)}, options=TakeOptions(compression="zstd", memory_budget_bytes=4 * MiB)
    )
    for _ in range(6):
        low = [int(torch.randint(0, size, (), generator=chance)) for size in whole.shape]
        length = [
            int(torch.randint(1, size - at + 1, (), generator=chance))
            for at, size in zip(low, whole.shape, strict=True)
        ]
        box = tuple(slice(at, at + n) for at, n in zip(low, length, strict=True))
        assert equal(Snapshot(tmp_path / "s").read_object("0/s/t", box=box), whole[box])


# Copies and conversions


def test_compressed_snapshot_is_copied_and_converted(tmp_path):
    app = state()
    Snapshot.take(tmp_path / "raw", app, metadata={"a": 1})
    Snapshot.take(tmp_path / "z", app, options=TakeOptions(compression="zstd"))
    Snapshot(tmp_path / "z").copy(tmp_path / "bytes")
    assert nbytes(tmp_path / "bytes") == pytest.approx(nbytes(tmp_path / "z"), rel=0.01)
    Snapshot(tmp_path / "raw").copy(Target(tmp_path / "small", compression="zstd"))
    assert noted(Snapshot(tmp_path / "small").metadata.metadata) == {"a": 1}
    Snapshot(tmp_path / "z").convert(Target(tmp_path / "small2", compression="zstd"), memory_budget_bytes=16 * MiB)
    Snapshot(tmp_path / "z").convert(tmp_path / "plain")
    for name, form in (("bytes", 2), ("small", 2), ("small2", 2), ("plain", 1)):
        assert Snapshot(tmp_path / name).metadata.format == f"snapshot/{form}"
        expect_same(tmp_path / name, app)
        assert not Snapshot.diff(tmp_path / "raw", tmp_path / name)
    Snapshot(tmp_path / "z").convert(Target(tmp_path / "z.safetensors", "safetensors"), select=["s/weight"])
    Snapshot(tmp_path / "z").copy(tmp_path / "part", select=["s/weight"])
    for place in ("z.safetensors", "part"):
        assert equal(Snapshot(tmp_path / place).get_manifest() and read_weight(tmp_path / place), app["s"]["weight"])
    with pytest.raises(ValueError, match="no other library reads"):
        Snapshot(tmp_path / "z").convert(Target(tmp_path / "no", "dcp", compression="zstd"))


def read_weight(path):
    snapshot = Snapshot(path)
    (name,) = [name for name in snapshot.get_manifest() if name.endswith("weight")]
    return snapshot.read_object(name.partition("/")[2])


def test_compressed_copy_of_damaged_data_is_not_committed(tmp_path):
    Snapshot.take(tmp_path / "z", state(), options=TakeOptions(compression="zstd"))
    (name,) = [name for name in os.listdir(tmp_path / "z" / "data") if name.endswith("safetensors")]
    with open(tmp_path / "z" / "data" / name, "r+b") as file:
        file.seek(300_000)
        file.write(bytes([file.read(1)[0] ^ 1]))
    with pytest.raises(CorruptSnapshotError, match="digest must be"):
        Snapshot(tmp_path / "z").copy(tmp_path / "no")
    assert not Snapshot(tmp_path / "no").exists()


# Based takes


@pytest.mark.parametrize(("first", "then"), [("zstd", None), (None, "zstd"), ("zstd", "zstd")])
def test_base_and_take_may_differ_in_compression(tmp_path, first, then):
    app = {"s": StateDict(frozen=weights(2000, 512), step=weights(600, 512, seed=1))}
    for parameter in ("frozen",):
        app["s"][parameter].requires_grad_(False)
    base = Snapshot.take(tmp_path / "a", app, options=TakeOptions(compression=first))
    later = Snapshot.take(tmp_path / "b", app, base=base, options=TakeOptions(compression=then))
    assert later.report.shared_files >= 1
    assert later.report.written_bytes < 100_000
    assert Snapshot(tmp_path / "b").metadata.format == Snapshot(tmp_path / "a").metadata.format
    Snapshot(tmp_path / "a").delete()  # its tables are gone, too
    expect_same(tmp_path / "b", app)
    app["s"]["step"] += 1
    third = Snapshot.take(tmp_path / "c", app, base=later, options=TakeOptions(compression=then))
    Snapshot(tmp_path / "b").delete()
    expect_same(tmp_path / "c", app)
    assert third.report.written_bytes > 0


def test_base_with_a_damaged_compression_table_is_not_shared(tmp_path):
    app = {"s": StateDict(frozen=weights(2000, 512))}
    base = Snapshot.take(tmp_path / "a", app, options=TakeOptions(compression="zstd"))
    document = base._manifest.open()
    (packed,) = [file.packed for file in document.files.values() if file.packed is not None]
    with open(tmp_path / "a" / packed.index[0], "r+b") as file:
        file.seek(packed.index[1] + 3)
        file.write(b"\xff")
    later = Snapshot.take(tmp_path / "b", app, base=tmp_path / "a")
    assert later.report.shared_files == 0
    expect_same(tmp_path / "b", app)


# Faults


@pytest.mark.parametrize("way", ["take", "async"])
@pytest.mark.parametrize("on", ["create", "write", "finish"])
def test_compressed_take_that_fails_leaves_no_files(tmp_path, way, on):
    app = state()
    for nth in (1, 2):
        full = OSError(errno.ENOSPC, "No space left on device")
        with (
            faulty(on=on, path="*.safetensors", nth=nth, error=full),
            pytest.raises(StorageError, match="No space left"),
        ):
            WAYS[way](f"faulty+file://{tmp_path}/s", app, compression="zstd", memory_budget_bytes=4 * MiB)
        assert not [name for _, _, names in os.walk(tmp_path / "s") for name in names]
    WAYS[way](tmp_path / "s", app, compression="zstd")
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(tmp_path / "s", app, options=TakeOptions(compression="zstd"))


def test_compressed_take_with_read_back_reads_the_stored_bytes(tmp_path):
    app = state()
    Snapshot.take(tmp_path / "s", app, options=TakeOptions(compression="zstd", read_back=True))
    expect_same(tmp_path / "s", app)
    for flip in (9, 70_000):  # the header of the stored file, and a block
        with (
            faulty(on="write", path="*.safetensors", flip=flip),
            pytest.raises(Exception, match="nothing was committed"),
        ):
            Snapshot.take(f"faulty+file://{tmp_path}/no", app, options=TakeOptions(compression="zstd", read_back=True))
        assert not Snapshot(tmp_path / "no").exists()


def test_compressed_read_that_is_damaged_once_is_repeated():
    app = state(300)
    Snapshot.take("memory://once", app, overwrite=True, options=TakeOptions(compression="zstd"))
    for path in ("*.safetensors", "*.bin"):
        with faulty(on="read_into", path=path, nth=1, flip=5000):
            expect_same("faulty+memory://once", app)
    Snapshot("memory://once").delete()


@pytest.mark.parametrize("value", ["lz4", True, 1, ""])
def test_compression_refuses_unknown_values(tmp_path, value):
    with pytest.raises(ValueError, match="compression must be None, 'zstd' or 'auto'"):
        Snapshot.take(tmp_path / "s", state(1), options=TakeOptions(compression=value))
    assert not (tmp_path / "s").exists()


def test_compression_without_zstandard_raises_missing_extra_error(tmp_path):
    code = f"""
        import sys
        sys.modules["zstandard"] = None
        import torch
        from snapshot import Snapshot, StateDict, TakeOptions, Target
        from snapshot.errors import MissingExtraError
        app = {{"s": StateDict(x=torch.ones(3))}}
        Snapshot.take({str(tmp_path / "raw")!r}, app)
        for call in (
            lambda: Snapshot.take({str(tmp_path / "s")!r}, app, options=TakeOptions(compression="zstd")),
            lambda: Snapshot.async_take({str(tmp_path / "s")!r}, app, options=TakeOptions(compression="auto")),
            lambda: Snapshot({str(tmp_path / "raw")!r}).copy(Target({str(tmp_path / "s")!r}, compression="zstd")),
            lambda: Snapshot({str(tmp_path / "z")!r}).restore(app),
        ):
            try:
                call()
            except MissingExtraError as error:
                assert "install the extra 'zstd'" in str(error), error
            else:
                raise AssertionError(call)
    """
    Snapshot.take(tmp_path / "z", state(100), options=TakeOptions(compression="zstd"))
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert not (tmp_path / "s").exists()
    assert issubclass(MissingExtraError, ImportError)


IN_A_BUDGET = """
import sys
import torch
from snapshot import RestoreOptions, Snapshot, StateDict, TakeOptions, Target

MiB = 1 << 20

def grown(work):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest resident size begins anew
    before = resident()
    work()
    return resident() - before

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

folder, budget = sys.argv[1], int(sys.argv[2]) * MiB
app = {"s": StateDict({str(n): torch.randn(32 * MiB // 4) for n in range(4)})}
warm = {"s": StateDict(x=torch.randn(MiB))}
Snapshot.take(f"{folder}/warm", warm, options=TakeOptions(compression="zstd", memory_budget_bytes=MiB))
Snapshot(f"{folder}/warm").restore(warm, options=RestoreOptions(memory_budget_bytes=MiB))
for work in (
    lambda: Snapshot.take(f"{folder}/s", app, options=TakeOptions(compression="zstd", memory_budget_bytes=budget)),
    lambda: Snapshot(f"{folder}/s").restore(app, options=RestoreOptions(memory_budget_bytes=budget)),
    lambda: Snapshot(f"{folder}/s").verify(memory_budget_bytes=budget),
    lambda: Snapshot(f"{folder}/s").copy(Target(f"{folder}/t", compression="zstd"), memory_budget_bytes=budget),
):
    assert grown(work) <= budget + 16 * MiB, work
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="only Linux tells the highest resident size")
@pytest.mark.parametrize("budget", [16, 48])
def test_compression_memory_stays_within_memory_budget_bytes(tmp_path, budget):
    subprocess.run([sys.executable, "-c", IN_A_BUDGET, str(tmp_path), str(budget)], check=True)


# How fast takes are, and which way is chosen


def test_pace_measures_each_way_twice_and_then_keeps_the_faster():
    place = pace._Place()
    assert place.link() == 0
    assert [place.choose() for _ in range(3)] == [True, False, True]
    place.note(100.0, 50.0, packed=False)
    place.note(90.0, 30.0, packed=True)
    assert place.link() == 50
    chosen = [place.choose() for _ in range(4, 70)]
    assert [number for number, each in enumerate(chosen, 4) if each] == [8, 16, 32, 64]
    for _ in range(3):
        place.note(300.0, 30.0, packed=True)
    chosen = [place.choose() for _ in range(70, 140)]
    assert [number for number, each in enumerate(chosen, 70) if not each] == [128]
    for _ in range(3):
        place.note(40.0, 5.0, packed=True)
    assert not place.choose(), "only the last three count"


def test_pace_tries_again_without_compression_if_a_compressed_take_was_much_faster():
    for speed, again in ((151.0, True), (150.0, False), (100.0, False)):
        place = pace._Place()
        place.takes = 20
        place.note(10.0, 5.0, packed=False)
        place.note(100.0, 50.0, packed=True)
        place.note(speed, 50.0, packed=True)
        assert place.choose() is not again
        assert place.choose()
    place = pace._Place()
    place.takes = 20
    assert not place.choose(), "no compressed take was measured"
    place.note(10.0, 5.0, packed=False)
    assert not place.choose()


class Encoder:
    """A codec that halves what it gets."""

    def __init__(self):
        self.encoded = []

    def encode(self, data, kind, out):
        self.encoded.append(bytes(data))
        return len(data) // 2


def leaf_of(tensor):
    flat = Flattened()
    flat.add("s", {"x": tensor})
    return flat.leaves[0]


def test_sample_takes_blocks_evenly_over_all_bytes(monkeypatch):
    codec = Encoder()
    monkeypatch.setattr(split_zstd, "thread_codec", lambda: codec)
    monkeypatch.setattr(pace, "BLOCK", 8)
    monkeypatch.setattr(split_zstd, "kind_of", lambda dtype: dtype)
    values = torch.arange(32, dtype=torch.int32)
    found = pace.sample([leaf_of(values[:8].clone()), leaf_of(values[8:].clone())])
    firsts = [int.from_bytes(each[:4], "little") for each in codec.encoded]
    assert firsts == [2, 2, 6, 10, 14, 18, 22, 26, 30]
    assert {len(each) for each in codec.encoded} == {8}
    assert found.ratio == 2.0
    assert found.speed > 0
    codec.encoded.clear()
    found = pace.sample([leaf_of(values[:1].clone())])
    assert [len(each) for each in codec.encoded] == [4] * 9
    assert pace.sample([]) == pace.SampledSpeed(1.0, 0.0)


@pytest.mark.parametrize(("offset", "begin"), [(0, 0), (3, 0), (4, 4), (9, 8), (31, 24), (100, 24)])
@pytest.mark.parametrize("plain", [True, False])
def test_block_of_a_tensor_is_whole_elements(offset, begin, plain, monkeypatch):
    monkeypatch.setattr(pace, "BLOCK", 8)
    values = torch.arange(8, dtype=torch.int32)
    leaf = leaf_of(values)
    assert leaf.plain
    if not plain:
        leaf = msgspec.structs.replace(leaf, plain=False)
    assert bytes(pace._block_of(leaf, offset)) == values.numpy().tobytes()[begin : begin + 8]
    if not plain:
        leaf = msgspec.structs.replace(leaf, tensor=torch.arange(16, dtype=torch.int32)[::2])
        assert pace._block_of(leaf, 0) is None


# Digests of files whose parts arrive in order


@pytest.mark.parametrize("part", [1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_file_digests_are_those_of_whole_extents(part):
    lengths = [0, 10, BLOCK, 5, BLOCK + 1, 0, 2 * BLOCK + 7, 1]
    header, data = b"h" * 24, os.urandom(sum(lengths))
    extents, at = [], len(header)
    for number, length in enumerate(lengths):
        extents.append(Extent(number, at, at + length))
        at += length
    file, whole = FilePlan(header, tuple(extents), at), header + data
    known = {3: ("known", b""), 4: ("other", b"table")}
    for given in (None, known):
        found, expected = FileDigests(file, given), []
        for extent in extents:
            running = RunningDigest()
            running.update(memoryview(whole)[extent.begin : extent.end])
            digest, table = running.finish()
            short = extent.end - extent.begin <= BLOCK
            expected.append((digest_range(whole[extent.begin : extent.end]) if short else digest, table))
        expected = [(given or {}).get(number, each) for number, each in enumerate(expected)]
        wrong = [(f"{digest}x", table) for digest, table in expected]
        for each in cut_file(file, part):
            inside = [(max(x.begin, each.begin), min(x.end, each.end)) for x in extents[each.first : each.last]]
            found.digest_part(each, [whole[begin:end] for begin, end in inside])
            assert found.agree_with(expected)
            done = [x.end <= each.end or (given and number in given) for number, x in enumerate(extents)]
            assert found.has(each) is all(done[each.first : each.last])
        assert found.digests == [digest for digest, _ in expected]
        assert found.tables == {number: table for number, (_, table) in enumerate(expected) if table}
        assert found.finish_tree() is None
        found._compared = 0
        assert not found.agree_with(wrong)


@pytest.mark.parametrize(
    ("nbytes", "seconds", "link"),
    [
        (pace.SHORTEST, 2.0, pace.SHORTEST / 4),
        (pace.SHORTEST - 1, 2.0, None),
        (pace.SHORTEST, 0.0, None),
    ],
)
def test_note_speed_remembers_long_takes(nbytes, seconds, link, tmp_path, monkeypatch):
    places = {}
    monkeypatch.setattr(pace, "_places", SimpleNamespace(get=lambda: places))
    session = SimpleNamespace(url=URL.parse("s3://bucket/run/step-1"))
    pace.note_speed(session, nbytes, seconds, stored=nbytes // 2, packed=True)
    if link is None:
        assert places == {}
        return
    [place] = places.values()
    assert place.link() == link
    assert list(place.speeds[True]) == [nbytes / seconds]
    other = SimpleNamespace(url=URL.parse("s3://bucket/another"))
    pace.note_speed(other, nbytes, seconds, stored=nbytes, packed=False)
    assert list(places.values()) == [place], "one place for a bucket"
    assert place.link() == 2 * link
