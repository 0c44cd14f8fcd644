"""Which parts of a large manifest a restore reads: those of the ranks that had the boxes it needs."""

import contextlib
import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from snapshot import CorruptSnapshotError, RestoreError, RestoreOptions, Sharded, Snapshot, SnapshotError, StateDict
from snapshot.io import host_share
from snapshot.io.registry import open_storage, register
from snapshot.io.url import URL
from snapshot.manifest import document, parts
from snapshot.testing.storages import Log, TappedStorage, recording

ROWS = 24


@contextlib.contextmanager
def small_manifests():
    usual, document.IN_ONE = document.IN_ONE, 10
    try:
        yield
    finally:
        document.IN_ONE = usual


def values():
    return {f"w{i}": torch.arange(float(ROWS * (i + 2))).view(ROWS, i + 2) + i for i in range(6)}


def state(mesh, placements, scale=1.0):
    whole = {name: value * scale for name, value in values().items()}
    return StateDict({name: distribute_tensor(value, mesh, placements) for name, value in whole.items()})


def _save(path, shape):
    mesh = init_device_mesh("cpu", shape)
    placements = [Replicate()] * (len(shape) - 1) + [Shard(0)]
    with small_manifests():
        Snapshot.take(path, {"s": state(mesh, placements)})


@contextlib.contextmanager
def host(shared=None):
    """The host's folder for temporary files: ranks with the same one hand on what they read. By default, one's own."""
    with contextlib.nullcontext(shared) if shared else tempfile.TemporaryDirectory() as folder:
        usual, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = usual


def _restore(path, shape, dim=0, shared=None):
    """The parts that this rank read, and its count of looks at data files."""
    with host(shared):
        return _restored(path, shape, dim)


def _restored(path, shape, dim):
    mesh = init_device_mesh("cpu", shape)
    live = state(mesh, [Replicate()] * (len(shape) - 1) + [Shard(dim)], 0.0)
    with recording() as log:
        Snapshot(f"recording+file://{path}").restore({"s": live})
    for name, value in values().items():
        assert live[name].full_tensor().equal(value), name
    return sorted(Path(each.path).name.partition("-")[2] for each in log.of("get", "data/*")), len(log.of("stat"))


def test_manifest_parts_read_by_a_restore_into_the_same_layout_are_those_of_the_rank(four, folder):
    four.run(_save, f"{folder}/s", (4,))
    found = four.run(_restore, f"{folder}/s", (4,))
    assert [parts for parts, _ in found] == [[f"{rank}.json"] for rank in range(4)]
    assert [stats for _, stats in found] == [1] * 4


def test_manifest_parts_read_by_a_restore_of_replicas_are_those_of_possible_writers(four, folder):
    four.run(_save, f"{folder}/s", (2, 2))
    found = four.run(_restore, f"{folder}/s", (2, 2))
    for rank, (read, stats) in enumerate(found):
        assert set(read) <= {f"{rank % 2}.json", f"{rank % 2 + 2}.json"}
        assert stats <= 2


def test_manifest_parts_read_by_a_restore_into_another_layout_are_those_of_its_boxes(four, two, folder):
    four.run(_save, f"{folder}/s", (4,))
    low, high = two.run(_restore, f"{folder}/s", (2,))
    assert low[0] == ["0.json", "1.json"]
    assert high[0] == ["1.json", "2.json", "3.json"]  # its own number's first
    for read, _ in four.run(_restore, f"{folder}/s", (4,), 1):  # columns meet all rows
        assert read == [f"{rank}.json" for rank in range(4)]


def test_manifest_parts_are_shared_by_ranks_of_a_host(four, folder):
    four.run(_save, f"{folder}/s", (4,))
    found = four.run(_restore, f"{folder}/s", (4,), 1, folder)  # columns meet all rows
    assert sorted(part for read, _ in found for part in read) == [f"{rank}.json" for rank in range(4)]
    assert not list(Path(folder).glob(f"{host_share.PREFIX}*"))


def _restore_manifest(path, spoilt):
    """The reads of the main document by this rank, if what others hand on is damaged."""
    rank = dist.get_rank()
    usual = Path.write_bytes

    def write(self, data):
        return usual(self, data[:-9] + bytes(9) if spoilt else data)

    Path.write_bytes = write
    try:
        live = StateDict(x=torch.zeros(5), n=0)
        with recording() as log:
            Snapshot(f"recording+file://{path}").restore({"s": live})
    finally:
        Path.write_bytes = usual
    assert live["x"].eq(3).all()
    assert live["n"] == 7, rank
    return len(log.of("get", ".snapshot_metadata"))


@pytest.mark.parametrize("spoilt", [False, True])
def test_manifest_is_shared_and_verified_by_ranks_of_a_host(four, folder, spoilt):
    Snapshot.take(f"{folder}/s", {"s": StateDict(x=torch.full((5,), 3.0), n=7)})
    assert four.run(_restore_manifest, f"{folder}/s", spoilt) == ([1] * 4 if spoilt else [1, 0, 0, 0])


def test_manifest_parts_read_on_more_ranks_are_those_of_their_boxes(four, two, folder):
    two.run(_save, f"{folder}/s", (2,))
    found = four.run(_restore, f"{folder}/s", (4,))
    assert [parts for parts, _ in found] == [["0.json"]] + [["0.json", "1.json"]] * 3


def _mislead(path, wrong):
    """Save with placements in the manifest that are not those of the boxes."""
    from snapshot.manifest import entries

    mesh = init_device_mesh("cpu", (4,))
    usual = entries.DTensorEntry

    def lying(dtype, shape, shards, mesh, placements):
        return usual(dtype, shape, shards, mesh, wrong)

    entries.DTensorEntry = lying
    try:
        with small_manifests():
            Snapshot.take(path, {"s": state(mesh, [Shard(0)])})
    finally:
        entries.DTensorEntry = usual


@pytest.mark.parametrize("wrong", [["S(1)"], ["S(9)"], ["R"], ["R", "S(0)"], ["?"], ["_S(0,7)"], [], None])
def test_manifest_part_placements_are_only_a_hint(four, two, folder, wrong):
    four.run(_mislead, f"{folder}/s", wrong)
    two.run(_restore, f"{folder}/s", (2,))  # right in any case


def _boxes(path, ranks):
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, each = torch.arange(2.0 * ROWS).view(ROWS, 2), ROWS // world
    mine = slice(rank * each, rank * each + each)
    held = {f"x{i}": Sharded(whole[mine] + i, (ROWS, 2), (rank * each, 0)) for i in range(12)}
    if world == ranks:
        with small_manifests():
            Snapshot.take(path, {"s": StateDict(held)})
    live = StateDict({name: Sharded(torch.zeros(each, 2), (ROWS, 2), (rank * each, 0)) for name in held})
    Snapshot(path).restore({"s": live})
    assert all(live[name].tensor.equal(value.tensor) for name, value in held.items())


def test_manifest_parts_are_all_read_for_boxes_without_placements(four, two, folder):
    four.run(_boxes, f"{folder}/s", 4)
    two.run(_boxes, f"{folder}/s", 4)


class Remote(TappedStorage):
    """A storage of files for which each look is a request."""

    log = Log()

    def __init__(self, url, options, context):
        super().__init__(open_storage(URL.parse(url.reveal().partition("+")[2]), options, context), self.log)

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, blocking=False, local=False)


def _replicas(path, lost):
    """The names of the data files that this rank looked at; what it raised, and what it has then."""
    register("remote+", Remote)
    values = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(8)}
    if not Path(path).exists():
        Snapshot.take(path, {"s": StateDict(values)}, replicated=["**"])
    live = StateDict({name: torch.zeros_like(value) for name, value in values.items()})
    Remote.log.clear()
    if lost and dist.get_rank() == 0:
        sorted(Path(path, "data").glob("*.safetensors"))[-1].unlink()
    dist.barrier()
    with pytest.raises(SnapshotError, match="is missing") if lost else contextlib.nullcontext():
        Snapshot(f"remote+file://{path}").restore({"s": live}, options=RestoreOptions(read_once=False))
    assert all(live[name].eq(0 if lost else value).all() for name, value in values.items())
    return [each.path for each in Remote.log.of("stat", "data/*")]


def test_stat_of_data_files_is_shared_by_ranks_that_need_the_same_files(four, folder):
    four.run(_replicas, f"{folder}/s", False)
    looks = [path for paths in four.run(_replicas, f"{folder}/s", False) for path in paths]
    files = [f"data/{path.name}" for path in Path(folder, "s", "data").glob("*.safetensors")]
    assert len(files) >= 4
    assert sorted(looks) == sorted(files)
    four.run(_replicas, f"{folder}/s", True)  # one is lost, and no rank writes to a live tensor


def _take_remote(path):
    """The parts of the manifest that this rank stored and read while it took a snapshot of a remote storage."""
    register("remote+", Remote)
    rank = dist.get_rank()
    Remote.log.clear()
    many = {f"k{i}": rank for i in range(3000 if rank == 1 else 3)}
    state = {"s": StateDict(mine=torch.full((3,), float(rank)), **many)}
    Snapshot.take(f"remote+file://{path}", state)
    state["s"]["mine"].zero_()
    Snapshot(path).restore(state)
    assert state["s"]["mine"].eq(rank).all()
    return [
        Path(each.path).name.partition("-")[2]
        for name in ("create", "put", "get")
        for each in Remote.log.of(name, "data/*.json")
    ]


def test_manifest_parts_that_are_short_are_sent_to_the_leader_through_the_store(four, folder):
    leader, long, short, last = four.run(_take_remote, f"{folder}/s")
    assert (long, short, last) == (["1-0.json"], [], ["3-0.json"])
    assert sorted(leader) == ["1-0.json", "3-0.json"]
    assert not list(Path(folder, "s", "data").glob("*.json"))


def _different(path):
    """Each rank restores another part of what was saved, from a remote storage."""
    register("remote+", Remote)
    rank, world = dist.get_rank(), dist.get_world_size()
    values = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(8)}
    Snapshot.take(path, {"s": StateDict(values)}, replicated=["**"])
    live = StateDict({name: torch.zeros_like(value) for name, value in values.items()})
    Remote.log.clear()
    chosen = [f"s/w{i}" for i in range(8) if i % world == rank] if rank else ["s/**"]
    Snapshot(f"remote+file://{path}").restore({"s": live}, select=chosen)
    assert all(live[name].eq(value if f"s/{name}" in chosen or not rank else 0).all() for name, value in values.items())
    return len(Remote.log.of("stat", "data/*"))


def test_stat_of_data_files_is_not_shared_by_ranks_that_need_different_files(two, folder):
    assert all(looks > 0 for looks in two.run(_different, f"{folder}/s"))


@contextlib.contextmanager
def indexed_manifests():
    """Parts of every length have an index, of short segments."""
    usual = parts.INDEXED, parts.SEGMENT
    parts.INDEXED, parts.SEGMENT = 0, 400
    try:
        with small_manifests():
            yield
    finally:
        parts.INDEXED, parts.SEGMENT = usual


def tall(rank=0):
    return StateDict(
        layers={f"l{i}": {"w": torch.full((5,), float(i)), "n": i} for i in range(50)},
        rank=rank,
        many=list(range(1500)),
    )


def _save_indexed(path, shape):
    mesh = init_device_mesh("cpu", shape)
    held = state(mesh, [Shard(0)]) | {"own": torch.full((3,), float(dist.get_rank()))}
    with indexed_manifests():
        Snapshot.take(path, {"s": StateDict(held), "t": tall(dist.get_rank())})


def _read(path, name, **options):
    """An object, and the bytes of each file of the manifest that were read for it."""
    with recording() as log:
        found = Snapshot(f"recording+file://{path}").read_object(name, **options)
    return found, [*log.of("get", "data/*.json"), *log.of("read_into", "data/*.json")]


def test_manifest_index_finds_one_object_of_a_long_manifest(tmp_path):
    with indexed_manifests():
        Snapshot.take(tmp_path / "s", {"t": tall()})
    for name in ("0/t/layers/l7/w", "t/layers/l7/w"):
        found, reads = _read(tmp_path / "s", name)
        assert found.eq(7).all()
        assert [each.name for each in reads] == ["read_into"] * len(reads)
        assert 2 <= len(reads) <= 4
    assert _read(tmp_path / "s", "t/layers/l7")[0]["n"] == 7
    assert len(_read(tmp_path / "s", "t/layers")[0]) == 50
    assert _read(tmp_path / "s", "t/many/7")[0] == 7  # in a tree of plain values
    assert _read(tmp_path / "s", "t")[0]["rank"] == 0
    with pytest.raises(RestoreError, match=r"l7/x.*did you mean"):
        _read(tmp_path / "s", "t/layers/l7/x")
    assert list(_read(tmp_path / "s", "0")[0]) == ["t"]
    snapshot = Snapshot(tmp_path / "s")
    assert [snapshot.read_object(f"t/layers/l{i}/n") for i in range(50)] == list(range(50))
    assert snapshot.verify()


def test_manifest_indexes_find_objects_of_many_ranks(four, folder):
    four.run(_save_indexed, f"{folder}/s", (4,))
    for name, value in values().items():
        found, reads = _read(f"{folder}/s", f"s/{name}")
        assert found.equal(value)
        assert {each.name for each in reads} == {"read_into"}
        assert _read(f"{folder}/s", f"2/s/{name}", box=[slice(3, 9)])[0].equal(value[3:9])
    assert _read(f"{folder}/s", "3/s/own")[0].eq(3).all()
    assert _read(f"{folder}/s", "2/t/rank")[0] == 2
    assert _read(f"{folder}/s", "2/t/layers/l3")[0]["n"] == 3
    with pytest.raises(RestoreError, match="needs a rank"):
        _read(f"{folder}/s", "s/own")
    with indexed_manifests():
        Snapshot(f"{folder}/s").copy(f"{folder}/c")
    found, reads = _read(f"{folder}/c", "s/w3")
    assert found.equal(values()["w3"])
    assert {each.name for each in reads} == {"read_into"}
    assert Snapshot(f"{folder}/c").verify()


@pytest.mark.parametrize("where", ["index", "segment", "missing"])
def test_manifest_index_or_segment_that_is_damaged_is_an_error(tmp_path, where):
    with indexed_manifests():
        Snapshot.take(tmp_path / "s", {"t": tall()})
    [path] = (tmp_path / "s" / "data").glob("*.json")
    data = bytearray(path.read_bytes())
    at = data.index(b'"numbers"') if where == "index" else data.index(b'"0/t/layers/l7/n"') + 20
    data[at + 3] ^= 1
    path.unlink()
    if where != "missing":
        path.write_bytes(data)
    with pytest.raises(CorruptSnapshotError, match="missing" if where == "missing" else f"{where}.*digest"):
        Snapshot(tmp_path / "s").read_object("t/layers/l7/n")


def test_manifest_index_reads_numeric_keys_like_a_manifest_without_one(tmp_path):
    app = {"0": StateDict(a=torch.ones(3)), "t": tall()}
    with indexed_manifests():
        Snapshot.take(tmp_path / "s", app)
    whole = Snapshot(tmp_path / "s")
    whole.get_manifest()
    for name in ("0", "0/0", "0/t/rank", "0/0/a"):
        expected, found = whole.read_object(name), Snapshot(tmp_path / "s").read_object(name)
        assert str(found) == str(expected)
