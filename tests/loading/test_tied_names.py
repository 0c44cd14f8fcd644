"""A name that a checkpoint lacks is restored if its live tensor is also that of a name that the checkpoint has."""

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from snapshot import ModelState, RestoreError, RestoreOptions, Snapshot, StateDict, Target
from tests.helpers.arguments import for_restore
from tests.helpers.versions import ALONE


class Tied(nn.Module):
    def __init__(self, *, tied=True, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.scale = nn.Parameter(torch.rand(3))
        if tied:
            self.head.weight = self.embed.weight


@pytest.fixture(params=["embed.weight", "head.weight"])
def saved(request, tmp_path):
    """A file with one of the two names."""
    state = Tied().state_dict()
    save_file({name: state[name] for name in ("scale", request.param)}, tmp_path / "model.safetensors")
    return tmp_path


def saved_name(saved):
    return next(name for name in Snapshot(saved).read_object("0") if name != "scale")


def test_tied_name_missing_in_the_checkpoint_is_restored_with_its_tensor(saved):
    live = Tied(seed=1)
    report = Snapshot(saved).restore({"model": live})
    assert torch.equal(live.head.weight, Tied().embed.weight)
    assert live.head.weight is live.embed.weight
    assert report.restored == 2
    assert not report.missing
    assert not report.lines


def test_tied_name_is_not_reported_as_missing_with_strict_false(saved):
    assert not Snapshot(saved).restore({"model": Tied(seed=1)}, strict=False).missing


def test_names_that_are_not_tied_are_reported_as_missing(saved):
    live = Tied(tied=False, seed=1)
    before = {name: each.clone() for name, each in live.state_dict().items()}
    with pytest.raises(RestoreError, match="is in the application, not in the snapshot"):
        Snapshot(saved).restore({"model": live})
    assert all(torch.equal(each, before[name]) for name, each in live.state_dict().items())


def test_tied_names_are_not_views_of_the_same_memory(saved):
    live = Tied(tied=False, seed=1)
    flat = live.embed.weight.data.view(-1)
    live.head.weight = nn.Parameter(flat[:10].view(2, 5))
    with pytest.raises(RestoreError, match="is in the application, not in the snapshot"):
        Snapshot(saved).restore({"model": live})


def test_tied_name_that_is_excluded_restores_no_other(saved):
    name = saved_name(saved)
    with pytest.raises(RestoreError, match="is in the application, not in the snapshot"):
        Snapshot(saved).restore({"model": Tied(seed=1)}, options=RestoreOptions(exclude=[f"model/{name}"]))


@pytest.mark.parametrize("kind", ["atomic", "cast", "snapshot", "rename"])
def test_tied_name_is_restored_with_atomic_cast_rename_and_other_options(saved, tmp_path, kind):
    live, options, place = Tied(seed=1), {}, saved
    if kind == "cast":
        live, options = live.double(), {"cast": "same_kind"}
    elif kind == "atomic":
        options = {"atomic": True}
    elif kind == "snapshot":
        place = tmp_path / "s"
        Snapshot(saved).convert(place)
    else:
        name = saved_name(saved)
        Snapshot(saved).convert(Target(tmp_path / "r.safetensors", "safetensors"), rename={name: f"x.{name}"})
        place, options = tmp_path / "r.safetensors", {"rename": {f"model/x.{name}": f"model/{name}"}}
    Snapshot(place).restore({"model": live}, **for_restore(**options))
    assert torch.equal(live.head.weight, Tied().embed.weight.to(live.head.weight.dtype))


def test_tied_name_in_a_model_state_is_restored(tmp_path):
    live = Tied()
    torch.save({"model": {"embed.weight": live.embed.weight.detach().clone(), "scale": live.scale}}, tmp_path / "x.pt")
    other = Tied(seed=1)
    Snapshot(tmp_path / "x.pt").restore({"train": ModelState(other)})
    assert torch.equal(other.head.weight, live.embed.weight)
    apart = Tied(tied=False, seed=1)
    with pytest.raises(RestoreError, match=r"train/model/head\.weight: is in the application"):
        Snapshot(tmp_path / "x.pt").restore({"train": ModelState(apart)})


def written(folder, kind, state):
    """Write both names, as each format does."""
    state = {name: each.detach().clone() for name, each in state.items()}
    if kind == "dcp":
        dcp.save({"model": state}, checkpoint_id=folder / "dcp", **ALONE)
        return folder / "dcp"
    if kind == "safetensors":
        save_file({f"{name}": each for name, each in state.items()}, folder / "x.safetensors")
        return folder / "x.safetensors"
    torch.save({"model": state}, folder / "x.pt")
    return folder / "x.pt"


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        *itertools.product(["module", "model state", "double", "named model"], ["dcp", "torch"]),
        ("module", "safetensors"),  # which has no names of statefuls
    ],
)
def test_tied_names_both_in_the_checkpoint_with_equal_bytes_are_restored(tmp_path, monkeypatch, kind, of):
    monkeypatch.setattr("snapshot.loading.live.COMPARED", 4)  # in several parts
    path, live = written(tmp_path, kind, Tied().state_dict()), Tied(seed=1)
    options = {"cast": "same_kind"} if of == "double" else {}
    live = live.double() if of == "double" else live
    if of == "model state":
        live = ModelState(live)
        options["rename"] = {"model": "model/model"}
    report = Snapshot(path).restore({"model": live}, **for_restore(**options))
    model = live.model if of == "model state" else live
    assert torch.equal(model.head.weight, Tied().embed.weight.to(model.head.weight.dtype))
    assert model.head.weight is model.embed.weight
    assert report.restored == 3


@pytest.mark.parametrize("kind", ["dcp", "safetensors", "torch"])
def test_tied_names_both_in_the_checkpoint_with_different_bytes_raise(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("snapshot.loading.live.COMPARED", 4)
    state = Tied().state_dict()
    state["head.weight"] = state["head.weight"].clone()
    state["head.weight"][4, 2] += 1
    path, live = written(tmp_path, kind, state), Tied(seed=1)
    before = live.embed.weight.detach().clone()
    expected = (
        r"model/embed\.weight and model/head\.weight: share memory in the application, but differ in the snapshot"
    )
    with pytest.raises(RestoreError, match=expected):
        Snapshot(path).restore({"model": live})
    assert torch.equal(live.embed.weight, before)
    Snapshot(path).restore({"model": live}, options=RestoreOptions(exclude=["model/head.weight"]))
    assert torch.equal(live.head.weight, Tied().embed.weight)


def test_tied_names_that_share_a_storage_are_read_once(tmp_path):
    torch.save(Tied().state_dict(), tmp_path / "both.pt")
    live = Tied(seed=1)
    Snapshot(tmp_path / "both.pt").restore({"model": live})
    assert torch.equal(live.head.weight, Tied().embed.weight)


def test_tied_parameters_without_memory_are_recognised_by_the_module(tmp_path):
    save_file({"embed.weight": torch.empty(0, 3), "scale": torch.ones(3)}, tmp_path / "empty.safetensors")
    live = Tied()
    live.embed = nn.Embedding(0, 3, dtype=torch.float32)
    live.head.weight = live.embed.weight
    Snapshot(tmp_path / "empty.safetensors").restore({"model": live})
    live.head.weight = nn.Parameter(torch.empty(0, 3))
    with pytest.raises(RestoreError, match="is in the application, not in the snapshot"):
        Snapshot(tmp_path / "empty.safetensors").restore({"model": live})


def test_tied_names_are_not_recognised_for_lazy_parameters(tmp_path):
    save_file({"embed.weight": torch.ones(5, 3)}, tmp_path / "lazy.safetensors")
    live = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.LazyLinear(5, bias=False)})
    with pytest.raises(RestoreError, match=r"head\.weight: is in the application, not in the snapshot"):
        Snapshot(tmp_path / "lazy.safetensors").restore({"model": live})


def test_state_dict_keeps_tied_keys_that_the_checkpoint_lacks(saved):
    held = torch.ones(5, 3)
    live = StateDict(**{"embed.weight": held, "head.weight": held, "epoch": 3})
    Snapshot(saved).restore({"s": live})
    assert live["epoch"] == 3
    assert torch.equal(live["embed.weight"], Tied().embed.weight)


@pytest.mark.parametrize("view", ["conj", "_neg_view"])
def test_tied_name_is_not_a_conj_or_neg_view(tmp_path, view):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            base = torch.zeros(4, dtype=torch.complex64 if view == "conj" else torch.float32)
            self.register_buffer("a", base)
            self.register_buffer("b", base.conj() if view == "conj" else torch._neg_view(base))

    one = torch.full((4,), 1 + 2j) if view == "conj" else torch.full((4,), 3.0)
    torch.save({"a": one, "b": one.clone()}, tmp_path / "model.pt")
    with pytest.raises(RestoreError):
        Snapshot(tmp_path / "model.pt").restore({"m": Both()})
