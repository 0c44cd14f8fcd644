"""Any checkpoint in any other format: what comes out is what their own libraries read, equal to the bit."""

import itertools
import json
import os
import re
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.serialization import config

from snapshot import (
    CorruptSnapshotError,
    RestoreError,
    RNGState,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    StateDict,
    Target,
)
from snapshot.cli import main
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.testing import Tap, faulty, tapped
from snapshot.text import size_text
from tests.helpers.foreign_states import state, with_numpy
from tests.helpers.states import expect_equal
from tests.helpers.versions import ALONE


@pytest.fixture
def taken(tmp_path):
    """A snapshot of ours, and what it holds."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 300)).sum().backward()
    optimizer.step()
    more = state() | {"numpy": with_numpy()}
    app = {"model": model, "optimizer": optimizer, "more": StateDict(more)}
    Snapshot.take(tmp_path / "taken", app | {"rng": RNGState()})
    return Snapshot(tmp_path / "taken"), {key: each.state_dict() for key, each in app.items()}


@st.composite
def _states(draw):
    """States of tensors that torch.save places in the order of the pickle, and of others."""
    kinds = ["plain", "empty", "sparse", "tied", "channels", "scalar"]
    tied = torch.arange(5.0)

    def tensor(kind):
        made = torch.rand(draw(st.integers(1, 70)))
        return {
            "plain": made,
            "empty": torch.empty(0, 3),
            "sparse": torch.eye(3).to_sparse(),
            "tied": tied,
            "channels": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
        }[kind]

    def level(depth):
        names = draw(st.lists(st.text("abz/0", min_size=1, max_size=3), min_size=1, max_size=5, unique=True))
        return {
            name: level(depth - 1) if depth and draw(st.booleans()) else tensor(draw(st.sampled_from(kinds)))
            for name in names
        }

    return level(2)


@settings(max_examples=40, deadline=None)
@given(_states())
def test_torch_load_calculate_storage_offsets_reads_a_converted_file(state):
    if not hasattr(config.load, "calculate_storage_offsets"):
        pytest.skip("this torch does not compute offsets")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Snapshot.take(f"{folder}/s", {"s": StateDict(state)})
        Snapshot(f"{folder}/s").convert(f"{folder}/s.pt")
        expected = Snapshot(f"{folder}/s").read_object("0")
        patch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
        with config.patch({"load.calculate_storage_offsets": True}):
            for options in ({}, {"mmap": True}):
                expect_equal(_dense(torch.load(f"{folder}/s.pt", weights_only=False, **options)), _dense(expected))
        meta = torch.load(f"{folder}/s.pt", weights_only=False, map_location="meta")
        data = Path(folder, "s.pt").read_bytes()
        for name, each in _tensors(meta):
            begin = each.untyped_storage()._checkpoint_offset
            held = dict(_tensors(expected))[name].contiguous()
            if not held.is_contiguous() or each.stride() != held.stride() or not each.numel():
                continue
            assert data[begin : begin + held.nbytes] == held.numpy().tobytes(), name


def _dense(value):
    return {name: _dense(each) for name, each in value.items()} if isinstance(value, dict) else value.to_dense()


def _tensors(value, path=()):
    if isinstance(value, torch.Tensor):
        return [(path, value)] if value.layout == torch.strided else []
    return [found for name, each in value.items() for found in _tensors(each, (*path, name))]


def test_convert_to_torch_and_back(taken, tmp_path):
    snapshot, held = taken
    report = snapshot.convert(Target(tmp_path / "out.pt", "torch"))
    assert report.files == ("out.pt",)
    assert not report.left_out
    expected = snapshot.read_object("0")
    for options in ({}, {"mmap": True}):
        expect_equal(torch.load(tmp_path / "out.pt", weights_only=False, **options), expected)
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)
    assert loaded["more"]["tied"]["a"].data_ptr() == loaded["more"]["tied"]["b"].data_ptr()
    assert loaded["more"]["views"]["channels"].is_contiguous(memory_format=torch.channels_last)
    assert Snapshot(tmp_path / "out.pt").verify()
    Snapshot(tmp_path / "out.pt").convert(tmp_path / "again")
    again = Snapshot(tmp_path / "again")
    assert again.verify()
    expect_equal(again.read_object("0"), expected)
    expect_equal(again.read_object("0")["model"], held["model"])


def test_convert_of_a_run_through_every_format(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    Snapshot.take(tmp_path / "0", {"model": model, "optimizer": optimizer})
    steps = itertools.pairwise(["snapshot", "torch", "dcp", "snapshot", "dcp", "torch", "snapshot"])
    for number, (_, to) in enumerate(steps):
        Snapshot(tmp_path / str(number)).convert(Target(tmp_path / str(number + 1), to))
    last = max(int(name) for name in os.listdir(tmp_path))
    fresh = nn.Linear(30, 20)
    again = torch.optim.Adam(fresh.parameters(), lr=0.7)
    Snapshot(tmp_path / str(last)).restore({"model": fresh, "optimizer": again})
    expect_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    expect_equal(again.state_dict(), optimizer.state_dict())


def test_convert_to_safetensors_and_to_a_hugging_face_folder(taken, tmp_path):
    snapshot, held = taken
    report = snapshot.convert(Target(tmp_path / "m.safetensors", "safetensors"), select=["model/**"])
    expect_equal(dict(sorted(load_file(tmp_path / "m.safetensors").items())), dict(sorted(held["model"].items())))
    assert report.tensors == len(held["model"])
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    report = snapshot.convert(
        Target(tmp_path / "hf", "safetensors", shard_bytes=400_000), select=["model", "optimizer"], exclude=["**/step"]
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "model.0.weight" in index["weight_map"]
    assert "optimizer.state.0.exp_avg" in index["weight_map"]
    assert any("optimizer/param_groups/0/lr: a float" in line for line in report.left_out)
    for name, file in index["weight_map"].items():
        loaded = load_file(tmp_path / "hf" / file)[name]
        key, _, rest = name.partition(".")
        expect_equal(loaded, snapshot.read_object(f"0/{key}/{rest if key == 'model' else rest.replace('.', '/')}"))
    snapshot.convert(Target(tmp_path / "one", "safetensors"), select=["model"])
    assert sorted(os.listdir(tmp_path / "one")) == ["model.safetensors"]


def test_convert_dtype_and_rename(taken, tmp_path):
    snapshot, held = taken
    snapshot.convert(
        Target(tmp_path / "h.safetensors", "safetensors"),
        select=["model"],
        exclude=["model/1.num_batches_tracked"],
        rename={"model/0.weight": "model/body"},
        dtype=torch.bfloat16,
    )
    loaded = load_file(tmp_path / "h.safetensors")
    assert torch.equal(loaded["body"], held["model"]["0.weight"].bfloat16())
    assert "0.weight" not in loaded
    snapshot.convert(tmp_path / "half", dtype=torch.float16, select=["model"])
    assert Snapshot(tmp_path / "half").get_manifest()["0/model/0.weight"].dtype == "float16"
    assert Snapshot(tmp_path / "half").get_manifest()["0/model/1.num_batches_tracked"].dtype == "int64"


def test_convert_refuses_what_the_format_cannot_store_before_writing(taken, tmp_path):
    snapshot, _ = taken
    with pytest.raises(UnsupportedFormatError, match="complex64"):
        snapshot.convert(Target(tmp_path / "x.safetensors", "safetensors"))
    Snapshot.take(tmp_path / "n", {"s": StateDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})})
    with pytest.raises(RestoreError, match="would both be named"):
        Snapshot(tmp_path / "n").convert(Target(tmp_path / "x.safetensors", "safetensors"))
    with pytest.raises(RestoreError, match="matches nothing"):
        snapshot.convert(Target(tmp_path / "x.safetensors", "safetensors"), select=["modle/**"])
    with pytest.raises(ValueError, match="must be one of"):
        snapshot.convert(Target(tmp_path / "x", "onnx"))
    with pytest.raises(ValueError, match="destination is the source"):
        snapshot.convert(snapshot.path)
    Snapshot.take(tmp_path / "sparse", {"s": StateDict(x=torch.eye(3).to_sparse())})
    with pytest.raises(UnsupportedFormatError, match="tensors of several parts"):
        Snapshot(tmp_path / "sparse").convert(Target(tmp_path / "x", "dcp"))
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("to", ["snapshot", "safetensors", "torch", "dcp"])
def test_convert_replaces_nothing_without_overwrite(tmp_path, to):
    Snapshot.take(tmp_path / "a", {"m": StateDict(w=torch.ones(3))})
    Snapshot.take(tmp_path / "b", {"m": StateDict(w=torch.zeros(3))})
    target = tmp_path / {"torch": "t.pt", "safetensors": "t.safetensors"}.get(to, "t")
    Snapshot(tmp_path / "a").convert(Target(target, to))
    with pytest.raises(SnapshotExistsError):
        Snapshot(tmp_path / "b").convert(Target(target, to))
    name = "0/w" if to == "safetensors" else "0/m/w"
    assert Snapshot(target).read_object(name).all()
    Snapshot(tmp_path / "b").convert(Target(target, to, overwrite=True))
    assert not Snapshot(target).read_object(name).any()
    assert not [each for each in os.listdir(tmp_path) if each.startswith(".convert")]


ASKED_FOR = {
    "create": ["snapshot", "safetensors", "torch", "dcp"],
    "write": ["snapshot", "safetensors", "torch", "dcp"],
    "finish": ["snapshot", "safetensors", "torch", "dcp"],
    "put": ["snapshot", "dcp"],
    "rename": ["safetensors", "torch", "dcp"],
}
"""The formats whose conversion calls an operation of the storage."""


@pytest.mark.parametrize(("operation", "to"), [(name, to) for name, formats in ASKED_FOR.items() for to in formats])
def test_convert_to_a_failing_storage_keeps_the_old_file(tmp_path, to, operation):
    Snapshot.take(tmp_path / "a", {"m": StateDict(w=torch.ones(100_000), n=3)})
    folder = tmp_path / "out"
    name = {"torch": "/t.pt", "safetensors": "/t.safetensors"}.get(to, "")
    Snapshot(tmp_path / "a").convert(Target(f"{folder}{name}", to))
    before = Snapshot(f"{folder}{name}").read_object("0")
    with (
        faulty(on=operation, error=OSError(28, "No space left on device")),
        pytest.raises(Exception, match="No space"),
    ):
        Snapshot(tmp_path / "a").convert(Target(f"faulty+file://{folder}{name}", to, overwrite=True))
    left = [each for each in os.listdir(folder) if each.startswith((".convert", ".take"))]
    assert not left
    if (to, operation) not in (("dcp", "put"), ("dcp", "rename")):  # its marker is gone before its files are replaced
        expect_equal(Snapshot(f"{folder}{name}").read_object("0"), before)
    else:
        assert not Snapshot(f"{folder}{name}").exists()


def test_convert_refuses_damaged_sources(tmp_path):
    torch.save({"w": torch.zeros(100_000)}, tmp_path / "x.pt")
    content = bytearray((tmp_path / "x.pt").read_bytes())
    content[200_000] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CorruptSnapshotError, match="crc32"):
        Snapshot(tmp_path / "x.pt").convert(tmp_path / "y")
    assert not (tmp_path / "y").exists()
    Snapshot(tmp_path / "x.pt").convert(tmp_path / "y", verify=False)
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.zeros(100_000))})
    (file,) = (tmp_path / "s" / "data").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[200_000] ^= 1
    file.write_bytes(content)
    for to, name in (("torch", "z.pt"), ("snapshot", "z"), ("dcp", "z"), ("safetensors", "z.safetensors")):
        with pytest.raises(CorruptSnapshotError, match="xxh3"):
            Snapshot(tmp_path / "s").convert(Target(tmp_path / name, to))
        assert not (tmp_path / name).exists()


class Custom:
    pass


def test_convert_never_runs_a_pickle(tmp_path):
    torch.save({"w": torch.ones(2), "o": Custom()}, tmp_path / "x.pt")
    with pytest.raises(UnsafeObjectError, match="exclude"):
        Snapshot(tmp_path / "x.pt").convert(tmp_path / "y")
    Snapshot(tmp_path / "x.pt").convert(tmp_path / "y", exclude=["o"])
    assert list(Snapshot(tmp_path / "y").read_object("0")) == ["w"]


def test_convert_to_dcp_is_read_by_dcp(tmp_path):
    held = {
        "model": {f"l{i}": torch.randn(50, 20 + i) for i in range(5)} | {"bf": torch.ones(3, dtype=torch.bfloat16)},
        "step": 7,
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        "list": [torch.ones(2), torch.zeros(3)],
        "scalar": torch.tensor(2.0),
    }
    Snapshot.take(tmp_path / "s", {key: StateDict({"v": each}) for key, each in held.items()})
    Snapshot(tmp_path / "s").convert(Target(tmp_path / "d", "dcp"))
    wanted = {
        "model": {"v": {name: torch.zeros_like(each) for name, each in held["model"].items()}},
        "step": {"v": 0},
        "groups": {"v": [{"lr": 0.0, "betas": (0.0, 0.0)}]},
        "list": {"v": [torch.zeros(2), torch.ones(3)]},
        "scalar": {"v": torch.tensor(0.0)},
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, checkpoint_id=tmp_path / "d", **ALONE)
    expect_equal({key: each["v"] for key, each in wanted.items()}, held)
    assert Snapshot(tmp_path / "d").verify()


def test_cli_convert(tmp_path, capsys):
    save_file({"w": torch.randn(4, 4)}, tmp_path / "w.safetensors")
    assert main(["convert", str(tmp_path / "w.safetensors"), str(tmp_path / "w.pt"), "--dtype", "bfloat16"]) == 0
    size = (tmp_path / "w.pt").stat().st_size
    assert f"1 tensor, {size_text(size)} to torch" in capsys.readouterr().out
    assert torch.load(tmp_path / "w.pt")["w"].dtype is torch.bfloat16
    arguments = ["convert", str(tmp_path / "w.pt"), str(tmp_path / "s"), "--rename", "w=v", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 1
    assert list(Snapshot(tmp_path / "s").read_object("0")) == ["v"]
    assert main(arguments) == 2
    assert "a snapshot exists already" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "t")]) == 2
    assert main(["convert", str(tmp_path / "s"), str(tmp_path / "t"), "--dtype", "int8"]) == 2


@pytest.mark.parametrize("name", ["x.bin", "x.ckpt", "x.v2", "deep/er.dcp"])
def test_cli_convert_to_an_unknown_suffix_asks_for_a_format(tmp_path, capsys, name):
    save_file({"w": torch.randn(4, 4)}, tmp_path / "w.safetensors")
    arguments = ["convert", str(tmp_path / "w.safetensors"), str(tmp_path / name)]
    assert main(arguments) == 2
    assert re.search(r"or pass --to \{(\S+,)?dcp,(\S+,)?safetensors,snapshot,torch(,\S+)?\}$", capsys.readouterr().err)
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert main([*arguments, "--to", "torch"]) == 0
    assert torch.load(tmp_path / name)["w"].shape == (4, 4)


@pytest.mark.parametrize("name", ["x", "step-1.5", ".hidden", "a.b/x"])
def test_cli_convert_to_a_path_without_suffix_writes_a_snapshot(tmp_path, name):
    save_file({"w": torch.randn(4, 4)}, tmp_path / "w.safetensors")
    assert main(["convert", str(tmp_path / "w.safetensors"), str(tmp_path / name)]) == 0
    assert Snapshot(tmp_path / name).metadata.format == "snapshot/1"


MEASURE = """
import sys
from snapshot import Snapshot, Target

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))

source, target, to, budget = sys.argv[1:]
Snapshot("memory://warm/x").exists()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the most that was resident is what is resident now
before = resident("VmHWM")
Snapshot(source).convert(Target(target, to, durable=False), memory_budget_bytes=int(budget))
print((resident("VmHWM") - before) // 1024)
"""


@pytest.mark.slow
def test_convert_memory_stays_within_memory_budget_bytes(tmp_path, warm):
    floats = torch.zeros(96 << 18)
    torch.save({"a": floats.view(4096, -1), "b": floats[: 8 << 20].clone().view(1024, -1).t()}, tmp_path / "x.pt")
    for to, name in (("snapshot", "s"), ("torch", "t.pt"), ("dcp", "d"), ("safetensors", "s.safetensors")):
        extra = int(warm.run(MEASURE, tmp_path / "x.pt", tmp_path / name, to, 32 << 20))
        assert extra < 32 + 64, to
        expect_equal(Snapshot(tmp_path / name).read_object("0/a", box=[5]), floats.view(4096, -1)[5])


@pytest.mark.parametrize("in_place", [False, True])
def test_convert_raises_if_the_source_is_replaced_during_it(tmp_path, in_place):
    class Swap(Tap):
        long = 0

        async def before(self, operation):
            self.long += operation.name == "read_into" and (operation.nbytes or 0) > 100_000
            if self.long == 2 and (tmp_path / "new").exists():
                if in_place:
                    (tmp_path / "from.safetensors").write_bytes((tmp_path / "new").read_bytes())
                (tmp_path / "new").replace(tmp_path / ("gone" if in_place else "from.safetensors"))

    for value, name in enumerate(("from.safetensors", "new")):
        save_file({f"w{n}": torch.full((3_000_000,), float(value)) for n in range(3)}, tmp_path / name)
    source = Snapshot(f"swapped+file://{tmp_path}/from.safetensors")
    with tapped("swapped", Swap()), pytest.raises(SnapshotError, match="was replaced while it was read"):
        source.convert(Target(tmp_path / "made", durable=False))
    assert not Snapshot(tmp_path / "made").exists()
    assert not list(tmp_path.glob("made/data/*"))


def test_convert_of_one_value_keeps_whether_it_was_in_a_dict(tmp_path):
    for name, saved in {"dict": {"value": torch.ones(3)}, "bare": torch.ones(3), "list": [torch.ones(3)]}.items():
        torch.save(saved, tmp_path / f"{name}.pt")
        Snapshot(tmp_path / f"{name}.pt").convert(tmp_path / f"{name}-2.pt")
        found = torch.load(tmp_path / f"{name}-2.pt", weights_only=True)
        assert type(found) is type(saved)
        assert repr(found) == repr(saved)
