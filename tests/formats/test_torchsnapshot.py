"""Snapshots that torchsnapshot wrote, the released version and its last nightly: read as it reads them."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import CorruptSnapshotError, RNGState, Snapshot, StateDict
from snapshot.errors import UnsafeObjectError
from tests.formats.torchsnapshot_states import everything
from tests.helpers.states import bits, expect_equal

NIGHTLY = Path(os.environ.get("SNAPSHOT_TEST_NIGHTLY", Path.home() / ".cache/snapshot-tests/nightly"))


def theirs():
    """The library. What it warns of when it is imported, and when it looks into storages, concerns nobody here."""
    pytest.importorskip("torchsnapshot")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchsnapshot
    return torchsnapshot


def take(path, app_state, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs().Snapshot.take(str(path), app_state, **options)


@pytest.fixture(params=[True, False], ids=["slabs", "files"])
def taken(request, tmp_path):
    """A snapshot of everything; what it restores itself is what it was given."""
    library, state = theirs(), everything()
    from torchsnapshot import knobs

    with knobs.override_max_chunk_size_bytes(4096), knobs.override_is_batching_disabled(not request.param):
        take(tmp_path / "s", {"m": library.StateDict(**state), "rng": library.RNGState()})
    return tmp_path / "s", state


def test_torchsnapshot_every_entry_type_is_read(taken):
    path, state = taken
    snapshot = Snapshot(path)
    kinds = {entry["type"] for entry in json.loads((path / ".snapshot_metadata").read_text())["manifest"].values()}
    assert kinds == {
        "list", "dict", "OrderedDict", "int", "str", "bool", "bytes", "float", "Tensor", "ChunkedTensor", "object",
    }  # fmt: skip
    expect_equal(snapshot.read_object("0/m"), state)
    live = StateDict({name: each if name == "set" else None for name, each in state.items()})
    snapshot.restore({"m": live})
    expect_equal(dict(live), state)
    assert snapshot.metadata.format == "torchsnapshot"
    assert snapshot.verify()
    assert (path / "batched").exists() == any("batched" in e for e in map(str, path.rglob("*")))


def test_torchsnapshot_restore_equals_that_of_torchsnapshot(taken):
    path, state = taken
    library = theirs()
    blank = {name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else each for name, each in state.items()}
    blank["dtypes"] = {name: torch.zeros_like(each) for name, each in state["dtypes"].items()}
    other = library.StateDict(**blank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.Snapshot(str(path)).restore({"m": other})
    live = StateDict(everything())
    Snapshot(path).restore({"m": live})
    expect_equal(dict(live), dict(other))


def test_torchsnapshot_box_of_a_chunked_tensor_and_of_a_slab(taken):
    path, state = taken
    snapshot = Snapshot(path)
    assert len(snapshot.get_manifest()["0/m/big"].pieces()) == 5
    box = [slice(15, 45), slice(3, 5)]
    assert torch.equal(snapshot.read_object("0/m/big", box=box), state["big"][15:45, 3:5])
    assert torch.equal(snapshot.read_object("0/m/view", box=[slice(2, 3)]), state["view"][2:3])
    assert torch.equal(snapshot.read_object("0/m/keys/2/x"), torch.ones(1))
    assert snapshot.read_object("0/m/keys/a%2Fb") == "slash"


def test_torchsnapshot_rng_state_is_restored(taken):
    path, _ = taken
    state = theirs().RNGState().state_dict()["rng_state"]
    Snapshot(path).restore({"rng": RNGState()})
    saved = torch.get_rng_state()
    first = torch.rand(3)
    torch.manual_seed(99)
    assert not torch.equal(torch.get_rng_state(), saved)
    report = Snapshot(path).restore({"rng": RNGState()})
    assert not report.unexpected
    assert torch.equal(torch.rand(3), first)
    assert state.shape == saved.shape


def test_torchsnapshot_yaml_manifest_is_read(taken):
    yaml = pytest.importorskip("yaml")
    theirs()
    from torchsnapshot.manifest import SnapshotMetadata

    path, state = taken
    document = json.loads((path / ".snapshot_metadata").read_text())
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    (path / ".snapshot_metadata").write_text(text)
    assert SnapshotMetadata.from_yaml(text).manifest.keys() == document["manifest"].keys()
    expect_equal(Snapshot(path).read_object("0/m"), state)


def test_torchsnapshot_quantised_tensors_need_allow_pickle(tmp_path):
    library = theirs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 3, torch.qint8)
        take(tmp_path / "s", {"m": library.StateDict(q=q, w=torch.ones(2))})
        live = StateDict(q=None, w=None)
        Snapshot(tmp_path / "s", allow_pickle=True).restore({"m": live})
        assert torch.equal(live["q"].int_repr(), q.int_repr())
        assert live["q"].q_scale() == q.q_scale()
    assert Snapshot(tmp_path / "s").read_object("0/m/w").all()


class Odd:
    def __init__(self):
        self.x = 1


def test_torchsnapshot_objects_need_allow_pickle(tmp_path):
    library = theirs()
    take(tmp_path / "s", {"m": library.StateDict(odd=Odd(), w=torch.ones(2))})
    live = StateDict(odd=None, w=torch.zeros(2))
    with pytest.raises(UnsafeObjectError):
        Snapshot(tmp_path / "s").restore({"m": live})
    assert not live["w"].any()


class Leaf:
    """A stateful whose state dict is no container."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


@pytest.mark.parametrize("value", [torch.arange(3), (1, 2)], ids=["tensor", "tuple"])
def test_torchsnapshot_state_dict_that_is_a_leaf_is_read(tmp_path, value):
    take(tmp_path / "s", {"x": Leaf(value)})
    expect_equal(Snapshot(tmp_path / "s").read_object("0/x"), value)


def test_torchsnapshot_missing_or_short_file_is_named(taken):
    path, _ = taken
    file = max(
        (each for each in path.rglob("*") if each.is_file() and each.name[0] != "."), key=lambda f: f.stat().st_size
    )
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert not Snapshot(path).verify()
    with pytest.raises(CorruptSnapshotError, match=str(file.relative_to(path))):
        Snapshot(path).read_object("0/m")
    file.unlink()
    with pytest.raises(CorruptSnapshotError, match="missing"):
        Snapshot(path).restore({"m": StateDict(everything())})


# Ranks


def _sharded(tensor, cuts, blank=False):
    """A ShardedTensor of a rank's rows."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardMetadata, init_from_local_shards

    rank = dist.get_rank()
    begin, end = cuts[rank], cuts[rank + 1]
    local = tensor[begin:end].clone()
    if blank:
        local.zero_()
    described = ShardMetadata([begin, 0], [end - begin, tensor.shape[1]], f"rank:{rank}/cpu")
    return init_from_local_shards([Shard(local, described)], list(tensor.shape))


def _app(cuts, blank=False):
    torch.manual_seed(0)
    whole, shared = torch.randn(10, 3), torch.randn(4, 4)
    rank = dist.get_rank()
    return (
        {
            "sharded": _sharded(whole, cuts, blank),
            "shared": torch.zeros_like(shared) if blank else shared,
            "own": torch.full((2,), 0.0 if blank else float(rank)),
            "rank": None if blank else rank,
        },
        whole,
        shared,
    )


def _write(folder):
    library = theirs()
    from torchsnapshot import knobs

    state, _, _ = _app((0, 4, 10))
    with knobs.override_max_shard_size_bytes(24):  # so that shards are cut further
        take(folder, {"m": library.StateDict(**state)}, replicated=["m/shared"])


def _read_by_two(folder):
    library = theirs()
    state, whole, shared = _app((0, 7, 10), blank=True)
    live = StateDict(**state)
    Snapshot(folder).restore({"m": live})
    rank = dist.get_rank()
    assert torch.equal(live["sharded"].local_shards()[0].tensor, whole[(0, 7, 10)[rank] : (0, 7, 10)[rank + 1]])
    assert torch.equal(live["shared"], shared)
    assert live["own"].tolist() == [rank, rank]
    assert live["rank"] == rank
    other = library.StateDict(**_app((0, 7, 10), blank=True)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.Snapshot(folder).restore({"m": other})
    assert torch.equal(other["sharded"].local_shards()[0].tensor, live["sharded"].local_shards()[0].tensor)
    assert bits(other["own"]) == bits(live["own"])


def test_torchsnapshot_shards_of_two_ranks_restore_into_other_shards(two, tmp_path):
    theirs()
    two.run(_write, str(tmp_path / "s"))
    two.run(_read_by_two, str(tmp_path / "s"))
    torch.manual_seed(0)
    whole, shared = torch.randn(10, 3), torch.randn(4, 4)
    snapshot = Snapshot(tmp_path / "s")
    assert len(snapshot.get_manifest()["0/m/sharded"].pieces()) > 2
    assert torch.equal(snapshot.read_object("0/m/sharded"), whole)
    assert torch.equal(snapshot.read_object("0/m/sharded", box=[slice(3, 8), 1]), whole[3:8, 1])
    assert snapshot.read_object("1/m/rank") == 1
    live = StateDict(sharded=torch.zeros(10, 3), shared=torch.zeros(4, 4), own=torch.ones(2), rank=None)
    snapshot.restore({"m": live})
    expect_equal(dict(live), {"sharded": whole, "shared": shared, "own": torch.zeros(2), "rank": 0})
    assert snapshot.verify()


def _read_from_one(folder):
    live = StateDict(w=torch.zeros(4, 4), n=None)
    Snapshot(folder).restore({"m": live})
    assert live["w"].all()
    assert live["n"] == 3


def test_torchsnapshot_of_one_rank_restores_on_two(two, tmp_path):
    library = theirs()
    take(tmp_path / "s", {"m": library.StateDict(w=torch.ones(4, 4), n=3)})
    _read_from_one(str(tmp_path / "s"))
    snapshot = Snapshot(tmp_path / "s")
    assert snapshot.metadata.world_size == 1


# The nightly


ON_NIGHTLY = """
import sys, warnings
warnings.simplefilter("ignore")
folder, nightly, root = sys.argv[1:]
sys.path[:0] = [nightly, root]
import torch, torch.distributed as dist
import torchsnapshot
assert torchsnapshot.__file__.startswith(nightly), torchsnapshot.__file__
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
from torchsnapshot import knobs
from tests.formats.torchsnapshot_states import everything
dist.init_process_group("gloo", store=dist.FileStore(folder + ".store", 1), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
state = everything()
with knobs.override_max_chunk_size_bytes(4096):
    torchsnapshot.Snapshot.take(folder, {"m": torchsnapshot.StateDict(**state), "rng": torchsnapshot.RNGState()})
d = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0), Shard(1)])
try:
    torchsnapshot.Snapshot.take(folder + ".d", {"m": torchsnapshot.StateDict(d=d)})
    print("with DTensor")
except Exception as error:
    print("without DTensor:", type(error).__name__, error)
dist.destroy_process_group()
"""


def test_torchsnapshot_nightly_snapshots_are_read(tmp_path, warm):
    theirs()
    if not (NIGHTLY / "torchsnapshot").is_dir():
        pytest.skip(f"there is no torchsnapshot-nightly in {NIGHTLY}: pip install --no-deps --target it")
    printed = warm.run(ON_NIGHTLY, tmp_path / "s", NIGHTLY, Path(__file__).parents[2])
    expect_equal(Snapshot(tmp_path / "s").read_object("0/m"), everything())
    assert Snapshot(tmp_path / "s").verify()
    print(printed)
    if "with DTensor" in printed:
        assert torch.equal(Snapshot(tmp_path / "s.d").read_object("0/m/d"), torch.arange(24.0).view(6, 4))
        live = StateDict(d=torch.zeros(6, 4))
        Snapshot(tmp_path / "s.d").restore({"m": live})
        assert torch.equal(live["d"], torch.arange(24.0).view(6, 4))
