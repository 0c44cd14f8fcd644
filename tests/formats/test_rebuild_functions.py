"""Whatever torch's functions that rebuild tensors are given, a value is that of torch.load, or it is refused."""

import collections
import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from snapshot import Snapshot, StateDict, Target
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from tests.helpers.foreign_states import repacked
from tests.helpers.states import bits, expect_equal

LONG = 300_000


def with_bits():
    """Tensors that are conjugate or negative views, long and short, of every dtype that has them."""
    torch.manual_seed(0)
    base = torch.rand(6, 5, dtype=torch.cfloat)
    held = {f"conj {dtype}": torch.rand(3, dtype=dtype).conj() for dtype in (torch.cfloat, torch.cdouble)}
    half = torch.view_as_complex(torch.rand(4, 2, dtype=torch.half))
    return held | {
        "conj half": half.conj(),
        "neg": torch.rand(3, dtype=torch.cfloat).conj().imag,
        "neg double": torch.rand(3, dtype=torch.cdouble).conj().imag,
        "both": torch._neg_view(torch.rand(4, dtype=torch.cfloat).conj()),
        "plain": base,
        "conj": base.conj(),
        "turned": base.mH,
        "turned neg": base.clone().mH.imag,
        "long": torch.rand(LONG, dtype=torch.cfloat).conj(),
        "long neg": torch.rand(LONG, dtype=torch.cdouble).conj().imag,
        "windows": torch.rand(10, dtype=torch.cfloat).as_strided((8, 3), (1, 1)).conj(),
        "nan": torch.tensor([complex(float("nan"), -0.0), complex(-0.0, float("inf"))]).conj(),
    }


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_torch_file_conj_and_neg_views_are_read(tmp_path, method):
    held = with_bits()
    torch.save(held, tmp_path / "a.pt")
    repacked(tmp_path / "a.pt", tmp_path / "b.pt", method)
    snapshot = Snapshot(tmp_path / "b.pt")
    expect_equal(snapshot.read_object("0"), held)
    live = StateDict({name: torch.zeros_like(each) for name, each in held.items()})
    snapshot.restore({"all": live})
    expect_equal(dict(live), held)
    for name, tensor in held.items():
        assert bits(snapshot.read_object(f"0/{name}", box=[slice(1, 3)])) == bits(tensor[1:3]), name
    for to in ("snapshot", "torch", "dcp"):
        snapshot.convert(Target(tmp_path / to, to))
        expect_equal(Snapshot(tmp_path / to).read_object("0"), held)
    assert not Snapshot.diff(tmp_path / "snapshot", tmp_path / "b.pt").changed


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_torch_file_of_the_other_byte_order_is_read(tmp_path, method):
    held = {"short": torch.rand(7), "long": torch.rand(LONG), "whole": torch.arange(5, dtype=torch.int32)}
    held["neg"] = torch.rand(40, dtype=torch.cfloat).conj().imag
    torch.save(held, tmp_path / "a.pt")
    repacked(tmp_path / "a.pt", tmp_path / "b.pt", method, swap=True)
    expect_equal(Snapshot(tmp_path / "b.pt").read_object("0"), held)


def test_dcp_conj_and_neg_views_are_read(tmp_path):
    held = with_bits()
    objects = {"objects": (held["conj"], held["neg"], np.arange(3))}  # which torch's careful reader refuses
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(held | objects, checkpoint_id=tmp_path / "d")
    found = Snapshot(tmp_path / "d").read_object("0")
    expect_equal([bits(each) for each in found.pop("objects")[:2]], [bits(held["conj"]), bits(held["neg"])])
    expect_equal(found, held)


class Rebuilds:
    """Pickled as a call of a function of torch's with these arguments, and a state."""

    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) + ((state,) if state is not None else ())

    def __reduce__(self):
        return self.parts


class StoragePickler(pickle.Pickler):
    def persistent_id(self, each):
        return ("storage", torch.FloatStorage, "0", "cpu", each.numel()) if isinstance(each, torch.Tensor) else None


def saved(path, value, **named):
    """A file of torch.save whose pickle holds this, and whose storages are those of `named`."""
    torch.save(named, path)
    with zipfile.ZipFile(path) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    made = io.BytesIO()
    StoragePickler(made, protocol=2).dump({"w": value})
    data = next(name for name in members if name.endswith("data.pkl"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, made.getvalue() if name == data else content)


def _function(name):
    return getattr(torch._utils, f"_rebuild_{name}")


NONE = collections.OrderedDict()


@pytest.mark.parametrize(
    "make",
    [
        lambda w: Rebuilds(_function("tensor_v2"), w, 0, (3,), (1,), False, NONE, {"unknown": True}),
        lambda w: Rebuilds(_function("tensor_v2"), w, 0, (3,), (1,), False, NONE, {"conj": True}),
        lambda w: Rebuilds(_function("tensor_v2"), w, 0, (3,), (1,), False, NONE, "conj"),
        lambda w: Rebuilds(_function("tensor_v2"), w, 0, (3,), (1,), False, NONE, None, 1),
        lambda w: Rebuilds(_function("tensor_v2"), w, 0, (3,), (1,), False, NONE, state=(w, 1, (2,), (1,))),
        lambda w: Rebuilds(_function("tensor"), w, 0, (3,), (1,), True),
        lambda w: Rebuilds(_function("tensor_v3"), w, 0, (3,), (1,), False, NONE, torch.int32, {"neg": True}),
        lambda w: Rebuilds(
            _function("parameter"), Rebuilds(_function("tensor"), w, 0, (3,), (1,)), True, NONE, state={"a": 1}
        ),
    ],
)
def test_torch_file_unknown_rebuild_functions_are_refused(tmp_path, make):
    w = torch.arange(4.0)
    saved(tmp_path / "x.pt", make(w), w=w)
    with pytest.raises(UnsafeObjectError):
        Snapshot(tmp_path / "x.pt").read_object("0")


def test_torch_file_numpy_array_subclasses_are_refused(tmp_path):
    for number, value in enumerate([np.array([1, 2]).view(np.recarray), np.ma.masked_array([1, 2], [True, False])]):
        torch.save({"a": value}, tmp_path / f"{number}.pt")
        with pytest.raises(UnsafeObjectError):
            Snapshot(tmp_path / f"{number}.pt").read_object("0/a")


class Named:
    """Created with arguments by name, which protocol 4 has an opcode for."""

    def __new__(cls, *, size):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"size": 3}


def test_torch_file_object_created_with_keyword_arguments_leaves_the_rest_readable(tmp_path):
    torch.save({"w": torch.arange(3.0), "o": Named(size=3)}, tmp_path / "x.pt", pickle_protocol=4)
    assert torch.equal(Snapshot(tmp_path / "x.pt").read_object("0/w"), torch.arange(3.0))
    with pytest.raises(UnsafeObjectError, match="Named"):
        Snapshot(tmp_path / "x.pt").read_object("0/o")


def test_torch_file_with_an_unknown_class_is_unsupported_and_named(tmp_path):
    w = torch.arange(4.0)
    saved(tmp_path / "x.pt", w, w=w)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, content in members.items():
            other = content.replace(b"ctorch\nFloatStorage\n", b"ctorch.hpu\nFloatStorage\n")
            archive.writestr(name, other if name.endswith("data.pkl") else content)
    with pytest.raises(UnsupportedFormatError, match=r"torch\.hpu\.FloatStorage"):
        Snapshot(tmp_path / "x.pt").read_object("0")
