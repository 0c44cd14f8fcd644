"""Conversions in the company of others: of several ranks, over what stands there, by storages that cannot rename."""

import collections
import json
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import ModelState, RestoreError, Snapshot, SnapshotExistsError, StateDict, Target, load
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.storages.memory import MemoryStorage
from snapshot.testing import faulty, recording
from snapshot_merge import merge
from tests.helpers.states import expect_equal
from tests.transform.plain_storage import Plain


def _held(mesh, rank, fill):
    whole = torch.arange(30.0).view(10, 3) * fill
    return {
        "same": torch.full((3,), 5.0 * fill),
        "own": torch.full((2,), float(rank + 1) * fill),
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        f"only{rank}": rank * fill,
        "list": [torch.ones(1) * fill, 2 * fill],
    }


def _taken(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    Snapshot.take(path, {"m": StateDict(_held(mesh, dist.get_rank(), 1))}, replicated=["m/same", "m/list/0"])


def _back(path, names, new):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    held = _held(mesh, rank, 0)
    state = StateDict({new.get(name, name): held[name] for name in names if name in held})
    Snapshot(path).restore({"m": state})
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in dict(state).items()
    }


def _expected(rank):
    return {
        "same": torch.full((3,), 5.0), "own": torch.full((2,), float(rank + 1)),
        "sharded": torch.arange(30.0).view(10, 3), f"only{rank}": rank, "list": [torch.ones(1), 2],
    }  # fmt: skip


def test_convert_of_all_ranks_keeps_selected_and_replicated_values(two, tmp_path):
    two.run(_taken, tmp_path / "s")
    cases = {
        "all": ({}, ["same", "own", "sharded", "only0", "only1", "list"], {}),
        "select": ({"select": ["m/same", "m/own", "m/sharded"]}, ["same", "own", "sharded"], {}),
        "exclude": ({"exclude": ["m/only*", "m/list"]}, ["same", "own", "sharded"], {}),
        "dict": (
            {"rename": {"m/sharded": "m/x", "m/only0": "m/y", "m/same": "m/z"}},
            ["same", "own", "sharded", "only0", "only1", "list"],
            {"sharded": "x", "only0": "y", "same": "z"},
        ),
        "function": (
            {"rename": lambda path: "m/x" if path == "m/sharded" else path},
            ["same", "own", "sharded", "only0", "only1", "list"],
            {"sharded": "x"},
        ),
    }
    for name, (how, names, new) in cases.items():
        Snapshot(tmp_path / "s").convert(tmp_path / name, **how)
        assert Snapshot(tmp_path / name).verify(), name
        for rank, found in enumerate(two.run(_back, tmp_path / name, names, new)):
            expected = {new.get(k, k): v for k, v in _expected(rank).items() if k in names}
            expect_equal(
                {key: found[key] for key in sorted(found)}, {key: expected[key] for key in sorted(expected)}, name
            )
    report = Snapshot(tmp_path / "s").convert(Target(tmp_path / "one.pt", "torch"))
    assert any("1/m/own" in line for line in report.left_out)
    assert torch.load(tmp_path / "one.pt")["m"]["sharded"].equal(torch.arange(30.0).view(10, 3))
    with pytest.raises(RestoreError, match="did you mean"):
        Snapshot(tmp_path / "s").convert(tmp_path / "typo", rename={"m/shared": "m/x"})


@pytest.mark.parametrize("rename", [{"m/l/0": "m/z"}, {"m/l/2": "m/l/9"}, {"m/a": "m/l/3"}])
def test_convert_rename_cannot_change_the_length_of_a_sequence(tmp_path, rename):
    state = StateDict(a=torch.ones(1), l=[torch.ones(1), torch.ones(2), {"q": 3}])
    Snapshot.take(tmp_path / "s", {"m": state})
    with pytest.raises(RestoreError, match="sequence"):
        Snapshot(tmp_path / "s").convert(tmp_path / "t", rename=rename)
    assert not (tmp_path / "t").exists()


@pytest.fixture
def cannot_rename(monkeypatch):
    monkeypatch.setattr(MemoryStorage, "capabilities", Plain.capabilities)


@pytest.mark.parametrize(("to", "more"), [("dcp", {}), ("safetensors", {"shard_bytes": 40_000_000})])
def test_convert_overwrite_that_fails_without_renames_leaves_no_mixture(tmp_path, cannot_rename, to, more):
    old = {"a": torch.zeros(9_000_000), "b": torch.zeros(9_000_000)}
    new = {name: tensor + 1 for name, tensor in old.items()}
    Snapshot.take(tmp_path / "old", {"m": StateDict(old)})
    Snapshot.take(tmp_path / "new", {"m": StateDict(new)})
    url = f"memory://mixture/{to}"
    Snapshot(tmp_path / "old").convert(Target(url, to, **more))
    last = "*00002-of*" if to == "safetensors" else "*_1.distcp"
    with faulty(on="finish", path=last, error=OSError(5, "broken")), pytest.raises(Exception, match="broken"):
        Snapshot(tmp_path / "new").convert(Target(f"faulty+{url}", to, overwrite=True, **more))
    if to == "dcp":
        assert not Snapshot(url).exists()
    else:
        with pytest.raises(UnsupportedFormatError, match="no index"):
            Snapshot(url).get_manifest()
    Snapshot(tmp_path / "new").convert(Target(url, to, overwrite=True, **more))
    name = "0/b" if to == "safetensors" else "0/m/b"
    assert Snapshot(url).read_object(name, box=[slice(0, 9)]).all()


def test_convert_overwrite_with_fewer_files_deletes_the_old_ones(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict({f"w{i}": torch.ones(1000) * i for i in range(6)})})
    Snapshot(tmp_path / "s").convert(Target(tmp_path / "hf", "safetensors", shard_bytes=4000))
    assert len(os.listdir(tmp_path / "hf")) == 7
    (tmp_path / "hf" / "config.json").write_text("{}")
    stale = tmp_path / "hf" / ".convert-0123456789ab-0"
    stale.write_bytes(b"x")
    os.utime(stale, (time.time() - 90_000,) * 2)
    (tmp_path / "hf" / ".convert-0123456789ab-1").write_bytes(b"of one that runs")
    Snapshot(tmp_path / "s").convert(Target(tmp_path / "hf", "safetensors", overwrite=True))
    assert sorted(os.listdir(tmp_path / "hf")) == [".convert-0123456789ab-1", "config.json", "model.safetensors"]
    assert Snapshot(tmp_path / "hf").read_object("0/w3").eq(3).all()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # DCP of torch 2.10
def test_convert_never_leaves_two_checkpoints_in_one_folder(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(3))})
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"m": {"w": torch.zeros(3)}}, checkpoint_id=tmp_path / "d")
    snapshot = Snapshot(tmp_path / "s")
    for to in ("snapshot", "safetensors"):
        with pytest.raises(SnapshotExistsError):
            snapshot.convert(Target(tmp_path / "d", to, overwrite=True))
    for to in ("dcp", "safetensors"):
        Snapshot(tmp_path / "d").convert(tmp_path / "own")
        with pytest.raises(SnapshotExistsError, match="another format"):
            Snapshot(tmp_path / "d").convert(Target(tmp_path / "own", to, overwrite=True))
        Snapshot(tmp_path / "own").delete()
    with pytest.raises(SnapshotExistsError, match=r"torch\.distributed\.checkpoint"):
        Snapshot.take(tmp_path / "d", {"m": StateDict(w=torch.ones(3))})
    with pytest.raises(SnapshotExistsError, match="another library"):
        Snapshot(tmp_path / "d").delete()
    assert not Snapshot(tmp_path / "d").read_object("0/m/w").any()


def test_convert_of_a_bare_state_dict_adds_no_stateful_names(tmp_path):
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    save_file(dict(model.state_dict()), tmp_path / "b.safetensors")
    for source in ("bare.pt", "b.safetensors"):
        Snapshot(tmp_path / source).convert(Target(tmp_path / "s", overwrite=True))
        fresh = nn.Linear(3, 2)
        Snapshot(tmp_path / "s").restore({"net": fresh})
        expect_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    for number, value in enumerate([[torch.ones(2), 3], {1: torch.ones(2), "1": 2}, (1, 2)]):
        torch.save(value, tmp_path / f"{number}.pt")
        Snapshot(tmp_path / f"{number}.pt").convert(tmp_path / f"s{number}")
        expect_equal(Snapshot(tmp_path / f"s{number}").read_object("0"), value)
        Snapshot(tmp_path / f"s{number}").convert(Target(tmp_path / f"again{number}.pt", "torch"))
        expect_equal(torch.load(tmp_path / f"again{number}.pt"), value)
    torch.save(torch.arange(3), tmp_path / "t.pt")
    Snapshot(tmp_path / "t.pt").convert(Target(tmp_path / "u.pt", "torch"))
    assert torch.load(tmp_path / "u.pt").equal(torch.arange(3))
    Snapshot.take(tmp_path / "users", {"s": StateDict(a=1)}, metadata={"snapshot.root": "mine"})
    assert Snapshot(tmp_path / "users").read_object("0") == {"s": {"a": 1}}


def test_convert_does_not_follow_links_out_of_a_folder(tmp_path):
    (tmp_path / "secret").write_bytes(b"do not read me!!")
    folder = tmp_path / "ts"
    (folder / "0").mkdir(parents=True)
    entry = {
        "type": "Tensor", "location": "0/x", "serializer": "buffer_protocol", "dtype": "torch.uint8", "shape": [16],
        "replicated": False, "byte_range": None,
    }  # fmt: skip
    document = {
        "version": "0.1.0",
        "world_size": 1,
        "manifest": {"0/s": {"type": "dict", "keys": ["x"]}, "0/s/x": entry},
    }
    (folder / ".snapshot_metadata").write_text(json.dumps(document))
    os.symlink(tmp_path / "secret", folder / "0" / "x")
    with pytest.raises(UnsafeObjectError, match="out of the folder"):
        Snapshot(folder).read_object("0/s/x")
    (folder / "0" / "x").unlink()
    (folder / "0" / "y").write_bytes(b"inside is right.")
    os.symlink("y", folder / "0" / "x")
    assert bytes(Snapshot(folder).read_object("0/s/x")) == b"inside is right."
    save_file({"w": torch.ones(2)}, tmp_path / "blob")
    os.symlink(tmp_path / "blob", tmp_path / "model.safetensors")  # as Hugging Face's cache has them
    assert Snapshot(tmp_path / "model.safetensors").read_object("0/w").all()


def test_convert_reads_a_transposed_tensor_few_times(tmp_path):
    wide = torch.randn(3000, 2000)
    torch.save({"t": wide.t()}, tmp_path / "t.pt")
    for to, name in (("snapshot", "s"), ("safetensors", "t.safetensors"), ("dcp", "d"), ("torch", "u.pt")):
        with recording() as log:
            Snapshot(f"recording+file://{tmp_path}/t.pt").convert(
                Target(tmp_path / name, to), memory_budget_bytes=16 << 20, verify=False
            )
        assert log.nbytes("read_into") < 2 * wide.nbytes, to
        found = Snapshot(tmp_path / name).read_object("0/t")
        assert found.equal(wide.t())
    assert load_file(tmp_path / "t.safetensors")["t"].equal(wide.t())


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"memory_budget_bytes": 0}, ValueError),
        ({"dtype": "bfloat16"}, TypeError),
        ({"dtype": torch.int32}, TypeError),
        ({"select": "m/w"}, TypeError),
    ],
)
def test_convert_refuses_invalid_arguments(tmp_path, how, error):
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(3))})
    with pytest.raises(error):
        Snapshot(tmp_path / "s").convert(tmp_path / "t", **how)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"shard_bytes": 0}, ValueError, "shard_bytes must be above 0"),
        ({"to": "zip"}, ValueError, "to must be one of"),
        ({"compression": "auto"}, ValueError, "compression must be None or 'zstd'"),
        ({"compression": "lz4"}, ValueError, "compression must be"),
        ({"storage_options": [1]}, TypeError, "storage_options must be a mapping"),
        ({"url": 3}, TypeError, "url must be a path or a URL"),
    ],
)
def test_target_refuses_invalid_arguments(how, error, text):
    with pytest.raises(error, match=text):
        Target(**{"url": "t", **how})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("t", "snapshot"),
        ("step-1.5", "snapshot"),
        ("m.safetensors", "safetensors"),
        ("M.PT", "torch"),
        ("m.pth", "torch"),
    ],
)
def test_target_format_follows_from_the_suffix(tmp_path, name, expected):
    assert Target(tmp_path / name).format == expected
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(3))})
    report = Snapshot(tmp_path / "s").convert(tmp_path / name)
    assert report.format == expected
    assert load(tmp_path / name)["w"].equal(torch.ones(3))


def test_target_with_an_unknown_suffix_names_the_formats(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(3))})
    with pytest.raises(
        ValueError, match=r"the suffix must be one of .*\.pt, \.pth, \.safetensors, got '\.bin'; or pass to="
    ) as error:
        Snapshot(tmp_path / "s").convert(tmp_path / "m.bin")
    assert "'dcp'" in str(error.value)
    assert os.listdir(tmp_path) == ["s"]


def test_target_with_an_unknown_suffix_raises_before_the_source_is_opened(tmp_path):
    with pytest.raises(ValueError, match="the suffix must be"):
        Snapshot(tmp_path / "absent").convert(tmp_path / "m.bin")
    with pytest.raises(ValueError, match="the suffix must be"):
        merge([tmp_path / "absent", tmp_path / "too"], tmp_path / "m.bin")


def test_target_with_an_upper_case_suffix_is_one_file(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(3))}).convert(tmp_path / "M.SAFETENSORS")
    assert (tmp_path / "M.SAFETENSORS").is_file()


def test_copy_refuses_a_target_with_another_format(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(3))})
    with pytest.raises(ValueError, match="to must be None for a copy"):
        Snapshot(tmp_path / "s").copy(Target(tmp_path / "t", "dcp"))
    with pytest.raises(ValueError, match="shard_bytes cannot be set for a copy"):
        Snapshot(tmp_path / "s").copy(Target(tmp_path / "t", shard_bytes=5))
    assert os.listdir(tmp_path) == ["s"]


def test_convert_to_dcp_refuses_names_that_become_equal(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})})
    with pytest.raises(RestoreError, match="rename one of them"):
        Snapshot(tmp_path / "s").convert(Target(tmp_path / "d", "dcp"))


def test_exists_is_false_for_files_that_are_no_checkpoint(tmp_path):
    (tmp_path / "text").write_text("some text that is no checkpoint")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("text", "empty", "none"):
        assert not Snapshot(tmp_path / name).exists()
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    assert Snapshot(tmp_path / "x.pt").exists()
    with pytest.raises(SnapshotExistsError, match="another library"):
        Snapshot(tmp_path / "x.pt").delete()
    assert Snapshot(tmp_path / "x.pt").exists()


def test_convert_reads_many_objects_together(tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"s": {f"n{i}": i for i in range(500)}}, checkpoint_id=tmp_path / "d")
    with recording() as log:
        Snapshot(f"recording+file://{tmp_path}/d").convert(tmp_path / "s", verify=False)
    assert len(log.of("read_into")) < 50
    assert Snapshot(tmp_path / "s").read_object("0/s/n321") == 321


def test_convert_keeps_weights_of_another_format_in_the_folder(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict({f"w{i}": torch.ones(1000) * i for i in range(6)})})
    snapshot = Snapshot(tmp_path / "s")
    snapshot.convert(Target(tmp_path / "hf", "safetensors", shard_bytes=8000))
    before = set(os.listdir(tmp_path / "hf"))
    for _ in range(2):
        snapshot.convert(Target(tmp_path / "hf", "dcp", overwrite=True))
    assert before < set(os.listdir(tmp_path / "hf"))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), torch.optim.AdamW])
def test_convert_to_dcp_and_back_of_an_optimizer_without_state(tmp_path, make):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    bare = torch.optim.SGD(model.parameters(), lr=0.3)
    states = {
        "d": {"model": model.state_dict(), "optim": optimizer.state_dict()},
        "e": {"train": ModelState(model, bare)},
    }
    for name, state in states.items():
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(state, checkpoint_id=tmp_path / name)
    fresh = nn.Linear(3, 2)
    again = make(fresh.parameters())
    again.param_groups[0]["lr"] = 0.7
    Snapshot(tmp_path / "d").restore({"model": fresh, "optim": again})
    assert again.state_dict() == optimizer.state_dict()
    third = nn.Linear(3, 2)
    plain = torch.optim.SGD(third.parameters(), lr=0.9)
    Snapshot(tmp_path / "e").restore({"train": ModelState(third, plain)})
    assert plain.param_groups[0]["lr"] == 0.3
    expect_equal(dict(third.state_dict()), dict(model.state_dict()))


def test_convert_rename_must_lead_to_containers(tmp_path):
    Snapshot.take(tmp_path / "s", {"p": StateDict(w=torch.ones(1)), "q": StateDict(z=torch.ones(2))})
    for to in ("snapshot", "torch", "dcp"):
        with pytest.raises(RestoreError, match="which is not a container"):
            Snapshot(tmp_path / "s").convert(Target(tmp_path / "t", to), rename={"q/z": "p/w/z"})
    with pytest.raises(RestoreError, match="selection is empty"):
        Snapshot(tmp_path / "s").convert(tmp_path / "t", select=["p/**"], exclude=["p/**"])
    assert not (tmp_path / "t").exists()


def test_convert_of_a_flat_state_keeps_order_and_types(tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(2), "step": 3, "z": torch.zeros(1)}, checkpoint_id=tmp_path / "d")
    Snapshot(tmp_path / "d").convert(tmp_path / "s")
    held = StateDict()
    Snapshot(tmp_path / "s").restore({"x": held})
    assert list(held) == list(Snapshot(tmp_path / "d").read_object("0"))
    torch.save(collections.defaultdict(list, {"a": torch.ones(2)}), tmp_path / "x.pt")
    Snapshot(tmp_path / "x.pt").convert(tmp_path / "t")
    found = Snapshot(tmp_path / "t").read_object("0")
    assert type(found) is collections.defaultdict
    assert found.default_factory is list


def test_convert_without_renames_refuses_to_overwrite_its_source(cannot_rename):
    Snapshot.take("memory://here/s", {"m": StateDict(w=torch.ones(3))})
    Snapshot("memory://here/s").convert(Target("memory://here/hf", "safetensors"))
    with pytest.raises(ValueError, match="holds the source file"):
        Snapshot("memory://here/hf/model.safetensors").convert(
            Target("memory://here/hf", "safetensors", overwrite=True), dtype=torch.bfloat16
        )
    assert Snapshot("memory://here/hf").read_object("0/w").all()


def test_take_and_convert_ignore_a_folder_named_like_a_dcp_file(tmp_path):
    (tmp_path / "s" / ".metadata").mkdir(parents=True)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(3))})
    assert Snapshot(tmp_path / "s").verify()
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert not Snapshot(tmp_path).exists()
