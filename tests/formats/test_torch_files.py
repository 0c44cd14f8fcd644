"""Files of torch.save: what torch.load gives, Snapshot gives, without running a pickle."""

import collections
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from snapshot import CorruptSnapshotError, ModelState, RestoreError, RestoreOptions, Snapshot, StateDict
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.testing import recording
from tests.helpers.foreign_states import repacked, state, with_numpy
from tests.helpers.states import bits, expect_equal


@pytest.fixture
def saved(tmp_path):
    torch.save(state(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_torch_file_is_read_like_torch_load(saved):
    expected = torch.load(saved, weights_only=False)
    snapshot = Snapshot(saved)
    assert snapshot.exists()
    expect_equal(snapshot.read_object("0"), expected)
    live = StateDict()
    snapshot.restore({"everything": live})
    expect_equal(dict(live), expected)
    assert snapshot.metadata.format == "torch.save"


def test_torch_file_numpy_arrays_and_scalars_are_read_without_a_pickle(tmp_path):
    held = with_numpy()
    torch.save(held | {"big": np.arange(3, dtype=">i4")}, tmp_path / "n.pt")
    expect_equal(
        Snapshot(tmp_path / "n.pt").read_object("0"), held | {"big": np.arange(3, dtype="i4")}
    )  # as torch.load has it


def test_torch_file_box_of_a_view_equals_that_of_torch_load(saved):
    expected = torch.load(saved, weights_only=False)["views"]
    snapshot = Snapshot(saved)
    for name, view in expected.items():
        box = [slice(size // 3, size - size // 4) for size in view.shape]
        assert bits(snapshot.read_object(f"0/views/{name}", box=box)) == bits(view[tuple(box)]), name
        out = torch.zeros(view.shape[::-1], dtype=view.dtype).permute(list(range(view.dim()))[::-1])
        assert torch.equal(snapshot.read_object(f"0/views/{name}", out), view), name


def test_torch_file_row_is_read_by_its_range(tmp_path):
    big = torch.arange(4_000_000, dtype=torch.float32).view(4000, 1000)
    torch.save({"w": big, "t": big.t()}, tmp_path / "x.pt")
    with recording() as log:
        snapshot = Snapshot(f"recording+file://{tmp_path}/x.pt")
        assert torch.equal(snapshot.read_object("0/w", box=[17]), big[17])
        assert torch.equal(snapshot.read_object("0/t", box=[slice(None), 17]), big[17])
    assert log.nbytes("read_into") < 2 << 20


def test_torch_file_restores_in_place_with_cast_and_rename(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "c.pt")
    other = nn.ModuleDict({"body": nn.Linear(4, 3).double(), "head": nn.Linear(3, 2).double()})
    held = other["body"].weight.data_ptr()
    names = {f"model/{a}.{p}": f"model/{b}.{p}" for a, b in (("0", "body"), ("1", "head")) for p in ("weight", "bias")}
    report = Snapshot(tmp_path / "c.pt").restore(
        {"model": other}, rename=names, options=RestoreOptions(cast="same_kind")
    )
    assert len(report.cast) == 4
    assert other["body"].weight.data_ptr() == held
    assert torch.equal(other["head"].weight, model[1].weight.double())


def test_torch_file_restores_whole_into_one_stateful_only(tmp_path):
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    other = nn.Linear(3, 2)
    Snapshot(tmp_path / "m.pt").restore({"net": other})
    expect_equal(dict(other.state_dict()), dict(model.state_dict()))
    with pytest.raises(RestoreError, match="has no such key"):
        Snapshot(tmp_path / "m.pt").restore({"net": other, "more": StateDict()})
    with pytest.raises(RestoreError, match=r"net/weight: the snapshot has \[2, 3\], the application \[2, 2\]"):
        Snapshot(tmp_path / "m.pt").restore({"net": nn.Linear(2, 2)})


@pytest.mark.parametrize("value", [torch.arange(5), [torch.ones(2), 3], (1, 2)], ids=["tensor", "list", "tuple"])
def test_torch_file_that_holds_no_dict_is_read(tmp_path, value):
    torch.save(value, tmp_path / "v.pt")
    found = Snapshot(tmp_path / "v.pt").read_object("0" if isinstance(value, (list, tuple)) else "0/value")
    expect_equal(found, value)


def test_torch_file_restores_an_optimizer(tmp_path):
    def stepped():
        torch.manual_seed(0)
        model = nn.Linear(5, 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = stepped()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    fresh = nn.Linear(5, 5)
    again = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    Snapshot(tmp_path / "o.pt").restore({"model": fresh, "optimizer": again})
    expect_equal(again.state_dict(), optimizer.state_dict())


class Custom:
    def __init__(self):
        self.x = torch.ones(2)


def test_torch_file_objects_that_need_a_pickle_are_named_and_the_rest_is_read(tmp_path):
    torch.save({"w": torch.ones(3), "args": Custom(), "odd": {(1, 2): 3}}, tmp_path / "u.pt")
    snapshot = Snapshot(tmp_path / "u.pt")
    assert snapshot.get_manifest()["0/args"].obj_type.endswith(".Custom")
    assert torch.equal(snapshot.read_object("0/w"), torch.ones(3))
    with pytest.raises(UnsafeObjectError, match=r"0/args: a .*Custom is in this file's pickle"):
        snapshot.read_object("0/args")
    live = StateDict(w=torch.zeros(3), args=None, odd=None)
    with pytest.raises(UnsafeObjectError):
        snapshot.restore({"s": live})
    assert not live["w"].any()
    snapshot.restore({"s": live}, options=RestoreOptions(exclude=["s/args", "s/odd"]))
    assert live["w"].all()


def test_torch_file_sparse_and_quantised_tensors_are_refused(tmp_path):
    torch.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(1)}, tmp_path / "s.pt")
    snapshot = Snapshot(tmp_path / "s.pt")
    with pytest.raises(UnsafeObjectError, match=r"0/s: a .*_rebuild_sparse_tensor"):
        snapshot.read_object("0/s")
    assert snapshot.read_object("0/w").all()


@pytest.mark.parametrize("swap", [False, True], ids=["deflated", "big-endian"])
def test_torch_file_compressed_or_big_endian_is_read(tmp_path, swap):
    tensors = {"a": torch.randn(300_000), "b": torch.randn(700, 300).t(), "c": torch.arange(7, dtype=torch.int32)}
    torch.save(tensors, tmp_path / "plain.pt")
    method = zipfile.ZIP_STORED if swap else zipfile.ZIP_DEFLATED
    repacked(tmp_path / "plain.pt", tmp_path / "x.pt", method, swap=swap)
    if swap:
        expect_equal(torch.load(tmp_path / "x.pt"), tensors)
    snapshot = Snapshot(tmp_path / "x.pt")
    expect_equal(snapshot.read_object("0"), tensors)
    assert torch.equal(snapshot.read_object("0/a", box=[slice(250_000, 250_003)]), tensors["a"][250_000:250_003])
    assert torch.equal(snapshot.read_object("0/b", box=[5]), tensors["b"][5])
    live = {name: torch.zeros_like(each) for name, each in tensors.items()}
    snapshot.restore({"s": StateDict(live)}, options=RestoreOptions(memory_budget_bytes=4 << 20))
    expect_equal(live, tensors)
    assert snapshot.verify()


def test_torch_file_verify_finds_a_flipped_byte_and_atomic_changes_nothing(saved):
    content = bytearray(saved.read_bytes())
    entry = Snapshot(saved).get_manifest()["0/long"]
    content[entry.byte_range[0] + 500_000] ^= 4
    saved.write_bytes(content)
    report = Snapshot(saved).verify()
    assert len(report.faults) == 1
    assert "crc32:" in report.faults[0]
    live = StateDict(**{"long": torch.zeros(300_000)})
    with pytest.raises(CorruptSnapshotError, match="crc32"):
        Snapshot(saved).restore({"s": live}, select=["s/long"], options=RestoreOptions(atomic=True))
    assert not live["long"].any()


def test_torch_file_without_checksums_is_unverifiable(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    report = Snapshot(tmp_path / "x.pt").verify()
    assert report
    assert report.unverifiable == 1
    assert "could only be read" in str(report)


def test_torch_file_of_old_torch_or_torchscript_is_refused(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedFormatError, match=r"before torch 1\.6"):
        Snapshot(tmp_path / "legacy.pt").get_manifest()
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:  # as torch.jit.save makes them
        archive.writestr("m/data.pkl", b"\x80\x02}.")
        archive.writestr("m/constants.pkl", b"\x80\x02).")
    with pytest.raises(UnsupportedFormatError, match="TorchScript"):
        Snapshot(tmp_path / "script.pt").get_manifest()
    (tmp_path / "t.tar").write_bytes(b"x".ljust(257, b"\0") + b"ustar" + b"\0" * 600)
    with pytest.raises(UnsupportedFormatError, match="tar"):
        Snapshot(tmp_path / "t.tar").get_manifest()
    (tmp_path / "text").write_text("hello, this is no checkpoint at all")
    with pytest.raises(UnsupportedFormatError, match="not a checkpoint of any known format"):
        Snapshot(tmp_path / "text").get_manifest()


def test_torch_file_is_not_overwritten_or_deleted(saved):
    content = saved.read_bytes()
    with pytest.raises(Exception, match="x"):
        Snapshot(saved).delete()
    with pytest.raises(Exception, match="x"):
        Snapshot.take(saved, {"s": StateDict(a=1)}, overwrite=True)
    assert saved.read_bytes() == content


def test_torch_file_containers_keep_their_type(tmp_path):
    value = {
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], 5),
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "keys": {1: "a", "1": "b", 2.5: "c", None: "d", True and "t": "e"},
        "module": nn.BatchNorm1d(2).state_dict(),
    }
    torch.save(value, tmp_path / "k.pt")
    found = Snapshot(tmp_path / "k.pt").read_object("0")
    expect_equal(
        {name: found[name] for name in value if name != "module"}, {n: v for n, v in value.items() if n != "module"}
    )
    assert found["default"].default_factory is list
    assert found["deque"].maxlen == 5
    assert found["module"]._metadata == value["module"]._metadata


def _trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_torch_file_numbered_optimizer_state_restores_into_model_state(tmp_path):
    model, optimizer = _trained()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}, tmp_path / "x.pt")
    live, other = _trained()
    other.state.clear()
    report = Snapshot(tmp_path / "x.pt").restore({"t": ModelState(live, other)})
    assert [(line.kind, line.path) for line in report] == [("unused", "epoch")]
    for mine, saved in zip(live.parameters(), model.parameters(), strict=True):
        expect_equal(other.state[mine], optimizer.state[saved])
    assert [group["lr"] for group in other.param_groups] == [0.001, 0.5]


def test_torch_file_numbered_optimizer_state_of_other_groups_is_refused(tmp_path):
    model, optimizer = _trained()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(RestoreError, match=r"in groups of \[2, 2\], and the optimizer has \[4\]"):
        Snapshot(tmp_path / "x.pt").restore({"t": ModelState(model, torch.optim.Adam(model.parameters()))})


def test_torch_file_convert_verifies_the_checksums_of_selected_tensors(tmp_path):
    state = {name: torch.full((5 << 20,), value, dtype=torch.uint8) for name, value in (("a", 1), ("b", 2))}
    torch.save(state, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[data.index(bytes([2]) * 1000)] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    snapshot = Snapshot(tmp_path / "x.pt")
    snapshot.convert(tmp_path / "a.safetensors", select=["a"])
    assert torch.equal(Snapshot(tmp_path / "a.safetensors").read_object("0/a"), state["a"])
    for select in (["b"], []):
        with pytest.raises(CorruptSnapshotError, match="data/1"):
            snapshot.convert(tmp_path / "b.safetensors", select=select)
    with pytest.raises(CorruptSnapshotError, match="data/1"):
        snapshot.copy(tmp_path / "copy.pt")
    assert not snapshot.verify()
