"""What a format cannot hold is an error or a line of the report, whatever container it is in."""

import collections
import json
import pickle
import struct

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as m

from snapshot import CorruptSnapshotError, Snapshot, StateDict, Target
from snapshot.errors import UnsupportedFormatError
from tests.helpers.states import expect_equal
from tests.helpers.versions import ALONE


def load_dcp(folder, wanted):
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, checkpoint_id=folder, **ALONE)
    return wanted


def in_containers():
    tied = torch.arange(6.0)
    return {
        "tuple": (torch.ones(3), 5, (torch.zeros(2, dtype=torch.bfloat16), [torch.arange(4)])),
        "deque": collections.deque([torch.full((2, 3), 7.0), "x"], maxlen=5),
        "list": [(torch.ones(2), {"below": torch.zeros(3)}), torch.ones(1)],
        "tied": (tied, tied),
        "turned": (torch.arange(12.0).view(3, 4).t(), torch.empty(0, 3), nn.Parameter(torch.ones(2))),
        "long": (torch.arange(3 << 20, dtype=torch.float32),),
    }


def emptied(value):
    """What is to be filled: DCP replaces a tuple as a whole."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    return [emptied(each) for each in value] if type(value) is list else ()


def test_convert_to_dcp_keeps_tensors_in_tuples_and_deques(tmp_path):
    held = in_containers()
    Snapshot.take(tmp_path / "s", {"m": StateDict(held)})
    report = Snapshot(tmp_path / "s").convert(Target(tmp_path / "d", "dcp"), memory_budget_bytes=16 << 20)
    assert not report.left_out
    assert not report.changed
    assert report.tensors == 12  # those that are tied are one
    wanted = {"m": {name: emptied(each) for name, each in held.items()}}
    expect_equal(load_dcp(tmp_path / "d", wanted)["m"], in_containers())
    assert wanted["m"]["tied"][0].data_ptr() == wanted["m"]["tied"][1].data_ptr()
    assert Snapshot(tmp_path / "d").verify()
    Snapshot(tmp_path / "d").convert(tmp_path / "again")
    expect_equal(Snapshot(tmp_path / "again").read_object("0/m"), held)


def test_convert_to_dcp_reports_what_it_changes(tmp_path):
    state = StateDict(
        ordered=collections.OrderedDict(a=torch.ones(1)),
        counted=collections.Counter("aab"),
        numbered={1: torch.ones(1), "2": 2},
        empty={},
        inside=[torch.ones(1), {}],
        weight=nn.Parameter(torch.ones(2)),
        wanted=torch.ones(2, requires_grad=True),
        turned=torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        big=np.arange(3, dtype=">i4"),
    )
    Snapshot.take(tmp_path / "s", {"m": state})
    report = Snapshot(tmp_path / "s").convert(Target(tmp_path / "d", "dcp"))
    assert sorted(report.left_out) == ["m/empty: the empty dict", "m/inside/1: the empty dict"]
    assert sorted(report.changed) == [
        "m/big: the array of >i4 becomes one of <i4",
        "m/counted: the Counter becomes a dict",
        "m/numbered: its keys become strings",
        "m/ordered: the OrderedDict becomes a dict",
        "m/turned: the memory layout becomes contiguous",
        "m/wanted: requires_grad is not kept",
        "m/weight: the torch.nn.parameter.Parameter becomes a plain tensor",
    ]
    assert "7 changed" in str(report)
    torch.save((torch.ones(2), 3), tmp_path / "t.pt")
    report = Snapshot(tmp_path / "t.pt").convert(Target(tmp_path / "e", "dcp"))
    assert report.changed == ("the state: the tuple becomes the value of a dict, under 'value'",)
    expect_equal(Snapshot(tmp_path / "e").read_object("0/value"), (torch.ones(2), 3))


@pytest.mark.parametrize("to", ["snapshot", "safetensors", "torch", "dcp"])
def test_convert_refuses_expanded_tensors_that_would_fill_the_disk(tmp_path, to):
    torch.save({"a": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "one.pt")
    torch.save({f"{n}": torch.zeros(1).expand((64 << 20) + n) for n in range(5)}, tmp_path / "several.pt")
    torch.save({"a": torch.arange(3.0).view(3, 1).expand(3, 1000)}, tmp_path / "honest.pt")
    for name in ("one", "several"):
        with pytest.raises(CorruptSnapshotError, match="select="):
            Snapshot(tmp_path / f"{name}.pt").convert(Target(tmp_path / name / "x", to))
        assert not (tmp_path / name).exists()
    report = Snapshot(tmp_path / "honest.pt").convert(Target(tmp_path / "honest" / "x", to))
    assert 12_000 <= report.nbytes < 17_000


class Named(torch.Tensor):
    """A tensor whose class is all that is special about it."""


def test_convert_to_torch_and_safetensors_reports_what_it_changes(tmp_path):
    state = StateDict(
        named=torch.ones(2).as_subclass(Named),
        weight=nn.Parameter(torch.ones(2)),
        wanted=torch.ones(2, requires_grad=True),
        turned=torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        big=np.arange(3, dtype=">f8"),
        fields=np.zeros(2, [("a", ">i4")]),
    )
    Snapshot.take(tmp_path / "s", {"m": state})
    report = Snapshot(tmp_path / "s").convert(Target(tmp_path / "t.pt", "torch"))
    name = f"{Named.__module__}.Named"
    assert sorted(report.changed) == [
        "m/big: the array of >f8 becomes one of <f8",
        f"m/named: the {name} becomes a plain tensor",
    ]
    found = torch.load(tmp_path / "t.pt", weights_only=False)["m"]
    assert found["big"].dtype == "<f8"
    assert found["fields"].dtype == state["fields"].dtype
    assert type(found["named"]) is torch.Tensor
    report = Snapshot(tmp_path / "s").convert(Target(tmp_path / "t.safetensors", "safetensors"))
    assert sorted(report.left_out) == ["m/big: a ndarray", "m/fields: a ndarray"]
    assert sorted(report.changed) == [
        f"m/named: the {name} becomes a plain tensor",
        "m/turned: the memory layout becomes contiguous",
        "m/wanted: requires_grad is not kept",
        "m/weight: the torch.nn.parameter.Parameter becomes a plain tensor",
    ]


def test_convert_to_dcp_refuses_dtypes_that_dcp_cannot_load(tmp_path):
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.arange(4, dtype=torch.uint8).view(torch.int4), x=1)})
    with pytest.raises(UnsupportedFormatError, match=r"m/w: int4"):
        Snapshot(tmp_path / "s").convert(Target(tmp_path / "d", "dcp"))
    Snapshot(tmp_path / "s").convert(Target(tmp_path / "d", "dcp"), exclude=["m/w"])
    assert load_dcp(tmp_path / "d", {"m": {"x": 0}}) == {"m": {"x": 1}}


@pytest.mark.parametrize("to", ["snapshot", "safetensors", "torch", "dcp"])
def test_convert_of_impossible_shapes_raises_an_error_of_the_library(tmp_path, to):
    shape = [2**62, 2**62, 0]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    tensor = m.TensorStorageMetadata(m.TensorProperties(dtype=torch.float32), torch.Size([1 << 59, 1 << 59, 0]), [])
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(m.Metadata({"w": tensor}, {}, {})))
    for name in ("a.safetensors", "d"):
        for verb in (
            lambda snapshot: snapshot.convert(Target(tmp_path / "x" / "y", to)),
            lambda snapshot: snapshot.read_object("0/w"),
            lambda snapshot: snapshot.restore({"m": StateDict(w=torch.zeros(3, 0))}),
        ):
            with pytest.raises(CorruptSnapshotError, match="invalid shape"):
                verb(Snapshot(tmp_path / name))
        assert not (tmp_path / "x").exists()


def shared():
    base = torch.arange(12.0)
    square = torch.arange(16.0).view(4, 4)
    return {
        "all": base,
        "same": base,
        "tail": base[1:],
        "turned": base.view(3, 4).t(),
        "inside": (base[2:5], base[2:5]),
        "left": square[:, :2],
        "right": square[:, 2:],
        "apart": torch.ones(3),
    }


def test_convert_reports_shared_memory_that_becomes_separate(tmp_path):
    torch.save(shared(), tmp_path / "x.pt")
    views = {
        "tail: the memory that it shares with all becomes its own",
        "turned: the memory that it shares with all becomes its own",
        "inside/0: the memory that it shares with all becomes its own",
    }
    tie = "same: the memory that it shares with all becomes its own"
    inside = "inside/1: the memory that it shares with inside/0 becomes its own"
    expected = {"snapshot": views, "torch": views, "dcp": views | {tie}, "safetensors": views | {tie, inside}}
    for to, lines in expected.items():
        report = Snapshot(tmp_path / "x.pt").convert(Target(tmp_path / to / "x", to))
        found = {line.removeprefix("0/") for line in report.changed if "memory that" in line}
        assert found == {line.replace("with ", "with 0/") if to == "snapshot" else line for line in lines}, to
    found = Snapshot(tmp_path / "snapshot" / "x").read_object("0")
    assert found["all"].data_ptr() == found["same"].data_ptr()
    assert found["tail"].untyped_storage().data_ptr() != found["all"].untyped_storage().data_ptr()


def test_take_logs_shared_memory_once(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="snapshot"):
        for step in range(3):
            Snapshot.take(tmp_path / f"{step}", {"logged": StateDict(shared())})
    (line,) = [record.getMessage() for record in caplog.records if "stored separately" in record.getMessage()]
    for name in ("tail", "turned", "inside/0"):
        assert f"logged/{name} shares memory with logged/all" in line
    for name in ("same", "inside/1", "left", "right", "apart"):
        assert f"logged/{name} shares" not in line
