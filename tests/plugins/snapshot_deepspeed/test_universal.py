"""DeepSpeed's universal format as a target. `resume_in_deepspeed.py` resumes from it in DeepSpeed."""

import os
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from snapshot import ModelState, RestoreOptions, Snapshot, SnapshotExistsError, StateDict, Target
from snapshot.cli import main
from snapshot.errors import UnsupportedFormatError
from snapshot.storages.memory import MemoryStorage
from snapshot.testing import faulty
from snapshot_deepspeed.universal_target import _is_optimizer
from tests.helpers.states import expect_equal
from tests.plugins.snapshot_deepspeed.deepspeed_archive import ARCHIVE, READ, expected_of
from tests.plugins.snapshot_deepspeed.write_deepspeed_files import Model, make_groups
from tests.transform.plain_storage import Plain

TO = "deepspeed-universal"
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    zipfile.ZipFile(ARCHIVE).extractall(folder)
    return folder


def trained(dtype=torch.float32):
    """Return a model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(make_groups(model), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(0, 6, (2, 3))).float().square().sum().backward()
        optimizer.step()
    return model, optimizer


def parts(shape=(2, 3), step=2.0, **more):
    """Return the state of a model and its optimizer with two parameters in two groups, as plain dicts."""
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name in ("a", "b")}
    state = {
        name: {"step": torch.tensor(step), **{key: torch.rand(shape) for key in (*MOMENTS, *more)}} for name in weights
    }
    groups = [{"params": [name], "lr": torch.tensor(0.5), "betas": (0.9, 0.99)} for name in weights]
    return weights, {"state": state, "param_groups": groups}


def take(path, weights, optimizer, **more):
    app_state = {"model": StateDict(weights), "optim": StateDict(optimizer), **more}
    Snapshot.take(path, {key: value for key, value in app_state.items() if value is not None})
    return Snapshot(path)


# What is read back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convert_to_deepspeed_universal_of_a_model_state_is_read_back(tmp_path, dtype):
    model, optimizer = trained(dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    app_state = {"train": ModelState(model, optimizer), "lr_scheduler": scheduler, "more": StateDict(epoch=3)}
    Snapshot.take(tmp_path / "s", app_state)
    report = Snapshot(tmp_path / "s").convert(Target(tmp_path / "u", TO))
    assert not report.left_out
    assert report.files[-1] == "latest_universal"
    assert (tmp_path / "u" / "latest_universal").read_text() == "global_step2_universal"
    again = Snapshot(tmp_path / "u")
    assert again.verify()
    found = again.read_object("0")
    expect_equal(dict(found["module"]), {name: each.detach() for name, each in model.state_dict().items()})
    assert found["module"]["head.weight"] is found["module"]["embed.weight"]
    names = {each: name for name, each in model.named_parameters()}
    for each, state in optimizer.state.items():
        held = found["optim"]["state"][names[each]]
        assert held.keys() == state.keys()
        expect_equal(held, {key: state[key] for key in held})
        expect_equal(found["model"][names[each]], each.detach().float())
    groups = optimizer.state_dict()["param_groups"]
    for group, held in zip(groups, found["optim"]["param_groups"], strict=True):
        assert {**held, "params": None} == {**group, "params": None}
    assert found["optim"]["param_groups"][1]["params"] == ["norm.weight", "norm.bias"]
    assert (found["global_steps"], found["more"], found["lr_scheduler"]["last_epoch"]) == (2, {"epoch": 3}, 0)

    fresh = Model().to(dtype)
    other = torch.optim.AdamW(make_groups(fresh), lr=7.0)
    again.restore({"t": ModelState(fresh, other)}, unused="ignore", options=RestoreOptions(cast="same_kind"))
    expect_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    expect_equal(other.state_dict()["state"][3]["exp_avg"], optimizer.state_dict()["state"][3]["exp_avg"])


def test_convert_to_deepspeed_universal_writes_what_deepspeed_loads(tmp_path):
    model, optimizer = trained()
    Snapshot.take(tmp_path / "s", {"t": ModelState(model, optimizer)})
    Snapshot(tmp_path / "s").convert(Target(tmp_path / "u", TO))
    folder = tmp_path / "u" / "global_step2_universal"
    states = optimizer.state[model.out.weight]
    parameter = {each.stem: torch.load(each) for each in (folder / "zero" / "out.weight").iterdir()}
    assert sorted(parameter) == ["exp_avg", "exp_avg_sq", "fp32", "step"]
    assert parameter["step"] == states["step"]
    expect_equal(parameter["fp32"], {"param": model.out.weight.detach(), "cat_dim": 0})
    expect_equal(parameter["exp_avg"], {"param": states["exp_avg"], "cat_dim": 0})
    shared = torch.load(folder / "zero" / "optimizer_state.pt")
    assert [group["weight_decay"] for group in shared["param_groups"]] == [0.01, 0.0]
    assert shared["ds_version"]
    assert shared["optimizer_state_dict"]["state"][0]["step"] == 2
    assert shared["optimizer_state_dict"]["param_groups"] == shared["param_groups"]
    heads = [torch.load(folder / f"{prefix}mp_rank_00_model_states.pt") for prefix in ("", "zero_pp_rank_0_")]
    expect_equal(dict(heads[0].pop("module")), dict(model.state_dict()))
    assert heads[0] == heads[1]
    assert heads[0]["param_shapes"][1] == {"norm.weight": torch.Size([7]), "norm.bias": torch.Size([7])}
    assert heads[0]["shared_params"] == {"head.weight": "embed.weight"}
    assert (heads[0]["global_steps"], heads[0]["skipped_steps"]) == (2, 0)
    assert (heads[0]["dp_world_size"], heads[0]["mp_world_size"]) == (1, 1)


@pytest.mark.parametrize("name", READ)
def test_convert_of_a_deepspeed_checkpoint_to_deepspeed_universal(files, tmp_path, name):
    before, expected = Snapshot(files / name).read_object("0"), expected_of(files, name)
    report = Snapshot(files / name).convert(Target(tmp_path / "u", TO))
    assert "zero: DeepSpeed has its own value of this name" in report.left_out
    found = Snapshot(tmp_path / "u").read_object("0")
    for key, state in {key: each for key, each in expected["states"].items() if "exp_avg" in each}.items():
        expect_equal(found["model"][key], state["fp32"].detach().view_as(found["model"][key]))
        assert all(torch.equal(found["optim"]["state"][key][each].flatten(), state[each].flatten()) for each in MOMENTS)
    assert found["optim"]["param_groups"] == before["optim"]["param_groups"]
    expect_equal(dict(found["module"]), dict(before.get("module", before["model"])))
    for key in ("epoch", "note", "lr_scheduler", "global_steps", "global_samples"):
        assert found[key] == before[key]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # DCP of torch 2.10
def test_convert_of_a_dcp_checkpoint_to_deepspeed_universal(tmp_path):
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"app": {"model": weights, "optim": states}, "epoch": 3}, checkpoint_id=tmp_path / "d")
    Snapshot(tmp_path / "d").convert(Target(tmp_path / "u", TO))
    found = Snapshot(tmp_path / "u").read_object("0")
    assert len(states["state"]) == 4
    for name, state in states["state"].items():
        expect_equal(found["model"][name], weights[name].detach())
        expect_equal(found["optim"]["state"][name], {key: state[key] for key in found["optim"]["state"][name]})
    assert found["optim"]["param_groups"] == states["param_groups"]
    assert found["epoch"] == 3


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@settings(max_examples=20)
@given(
    data=st.data(),
    parameters=st.dictionaries(st.text("abc.0é ", min_size=1, max_size=6), st.tuples(SHAPES, DTYPES), min_size=1),
)
def test_convert_to_deepspeed_universal_of_any_parameters_is_read_back(tmp_path_factory, data, parameters):
    names = [name for name in parameters if name not in (".", "..")]
    if not names:
        return
    weights = {name: torch.randn(parameters[name][0]).to(parameters[name][1]) for name in names}
    state = {name: {"step": 7, **{key: torch.rand_like(weights[name]) for key in MOMENTS}} for name in names}
    cut = data.draw(st.integers(0, len(names) - 1))
    groups = [{"params": each, "lr": 0.5} for each in (names[:cut], names[cut:]) if each]
    url = f"memory://{tmp_path_factory.mktemp('any').name}"
    snapshot = take(f"{url}/s", weights, {"state": state, "param_groups": groups})
    snapshot.convert(Target(f"{url}/u", TO))
    found = Snapshot(f"{url}/u").read_object("0")
    for name, weight in weights.items():
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        expect_equal(found["model"][name], weight.to(wide))
        expect_equal(found["optim"]["state"][name], {key: state[name][key] for key in found["optim"]["state"][name]})
        expect_equal(found["module"][name], weight)
    assert found["optim"]["param_groups"] == groups


def test_convert_to_deepspeed_universal_writes_contiguous_tensors(tmp_path):
    weights, optimizer = parts(max_exp_avg_sq=1)
    weights["a"] = torch.arange(6.0).view(3, 2).t()
    take(tmp_path / "s", weights, optimizer).convert(Target(tmp_path / "u", TO))
    folder = tmp_path / "u" / "global_step2_universal" / "zero" / "a"
    weight = torch.load(folder / "fp32.pt")["param"]
    assert weight.is_contiguous()
    assert torch.equal(weight, weights["a"])
    assert torch.equal(torch.load(folder / "max_exp_avg_sq.pt")["param"], optimizer["state"]["a"]["max_exp_avg_sq"])
    found = torch.load(folder.parent / "optimizer_state.pt")
    assert found["param_groups"][0] == {"params": [0], "lr": torch.tensor(0.5), "betas": (0.9, 0.99)}


def test_convert_to_deepspeed_universal_keeps_other_values_of_the_model(tmp_path):
    weights, optimizer = parts()
    sparse = torch.tensor([[0.0, 2.0]]).to_sparse()
    take(tmp_path / "s", {**weights, "sparse": sparse, "_extra_state": {"x": 1}}, optimizer).convert(
        Target(tmp_path / "u", TO)
    )
    module = torch.load(tmp_path / "u" / "global_step2_universal" / "mp_rank_00_model_states.pt")["module"]
    assert torch.equal(module["sparse"].to_dense(), sparse.to_dense())
    assert module["_extra_state"] == {"x": 1}
    expect_equal(module["a"], weights["a"])


# Several ranks


def _take_sharded(path):
    torch.manual_seed(0)
    sharded = fully_shard(Model(), mesh=init_device_mesh("cpu", (2,)))
    other = torch.optim.AdamW(make_groups(sharded), lr=1e-3)
    sharded(torch.arange(4).view(2, 2)).square().sum().backward()
    other.step()
    Snapshot.take(path, {"t": ModelState(sharded, other)})
    moments = {
        name: other.state[each]["exp_avg"].full_tensor()
        for name, each in sharded.named_parameters()
        if each in other.state
    }
    weights = {name: each.full_tensor() for name, each in sharded.named_parameters()}
    return {name: each.detach() for name, each in weights.items()}, moments


def _convert(path, target):
    return Snapshot(path).convert(Target(target, TO), ranks=True).files


def test_convert_to_deepspeed_universal_of_shards_by_two_ranks(two, tmp_path):
    weights, moments = two.run(_take_sharded, str(tmp_path / "s"))[0]
    first, second = two.run(_convert, str(tmp_path / "s"), str(tmp_path / "u"))
    assert first == second
    found = Snapshot(tmp_path / "u").read_object("0")
    assert len(moments) == 4
    for name, moment in moments.items():
        expect_equal(found["optim"]["state"][name]["exp_avg"], moment)
    for name, weight in weights.items():
        expect_equal(found["model"][name], weight)


# Errors


def _number(optimizer):
    optimizer["state"] = dict(enumerate(optimizer["state"].values()))
    for number, group in enumerate(optimizer["param_groups"]):
        group["params"] = [number]


def _rename(weights, optimizer, name):
    weights[name] = weights.pop("a")
    optimizer["state"][name] = optimizer["state"].pop("a")
    optimizer["param_groups"][0]["params"] = [name]


def _join(optimizer):
    optimizer["param_groups"] = [{"params": ["a", "b"]}]
    optimizer["state"]["b"]["step"] = torch.tensor(3.0)


WRONG = {
    "numbers": (lambda w, o: _number(o), "must have names for DeepSpeed, as ModelState saves them, got numbers"),
    "folder": (lambda w, o: _rename(w, o, "../a"), r"names of parameters must be those of folders:\s+'\.\./a'"),
    "here": (lambda w, o: _rename(w, o, ".."), r"names of parameters must be those of folders"),
    "file": (lambda w, o: _rename(w, o, "optimizer_state.pt"), r"names of parameters must be those of folders"),
    "twice": (lambda w, o: o["param_groups"].append(o["param_groups"][0]), "must have each parameter once"),
    "no groups": (lambda w, o: o.pop("param_groups"), "must have one optimizer.* has none"),
    "no model": (lambda w, o: w.pop("a"), "a model beside optim must have the optimizer's parameters; none does"),
    "no state": (lambda w, o: o["state"].pop("a"), "step, exp_avg and exp_avg_sq of each parameter.*\n.*a: no state"),
    "momentum": (lambda w, o: o["state"].update(a={"momentum_buffer": w["a"]}), "a: momentum_buffer"),
    "shape": (lambda w, o: o["state"]["a"].update(exp_avg_row=torch.ones(3)), "a: exp_avg_row"),
    "integers": (lambda w, o: w.update(a=torch.ones(2, 3, dtype=torch.int64)), r"a: torch\.int64"),
    "steps": (lambda w, o: _join(o), r"one step for DeepSpeed, which is 2\.0 in group 0, got:\n.*b: 3\.0"),
    "text": (lambda w, o: o["state"]["a"].update(step="3"), "the step of a must be a number"),
    "other": (lambda w, o: (_join(o), o["state"]["b"].update(step="x")), "the step of b must be a number"),
    "complex": (lambda w, o: o["state"]["b"].update(step=torch.tensor(2 + 1j)), "the step of b must be a number"),
    "vast": (lambda w, o: o["state"]["b"].update(step=10**400), "the step of b must be a number"),
    "endless": (lambda w, o: o["state"]["a"].update(step=torch.tensor(float("nan"))), "the step of a must be a number"),
    "long": (lambda w, o: o["param_groups"][0].update(lr=torch.ones(2)), "must be of one element"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_convert_to_deepspeed_universal_refuses_what_it_cannot_resume(tmp_path, what):
    change, text = WRONG[what]
    weights, optimizer = parts()
    change(weights, optimizer)
    snapshot = take(tmp_path / "s", weights, optimizer)
    with pytest.raises(UnsupportedFormatError, match=f"(?s){text}"):
        snapshot.convert(Target(tmp_path / "u", TO))
    assert not (tmp_path / "u").exists()


def test_convert_to_deepspeed_universal_select_chooses_model_and_optimizer(tmp_path):
    weights, optimizer = parts()
    other = {name: each + 1 for name, each in weights.items()}
    for name in ("gan", "net"):
        app_state = {
            "one": StateDict({name: weights, "ema": other, "optim": optimizer}),
            "two": StateDict({name: other, "optim": optimizer}),
        }
        Snapshot.take(tmp_path / name, app_state)
    snapshot = Snapshot(tmp_path / "net")
    with pytest.raises(UnsupportedFormatError, match=r"has several; exclude all but one:\s+one/optim\s+two/optim"):
        snapshot.convert(Target(tmp_path / "u", TO))
    with pytest.raises(UnsupportedFormatError, match=r"several do; exclude all but one, or name it model:\s+net\s+ema"):
        snapshot.convert(Target(tmp_path / "u", TO), exclude=["two/**"])
    snapshot.convert(Target(tmp_path / "u", TO), exclude=["two/**"], rename={"one/net": "one/model"})
    found = Snapshot(tmp_path / "u").read_object("0")
    expect_equal(found["model"]["a"], weights["a"])
    expect_equal(found["one"]["ema"]["a"], other["a"])
    with pytest.raises(ValueError, match="dtype must be None for to='deepspeed-universal'"):
        snapshot.convert(Target(tmp_path / "v", TO), dtype=torch.bfloat16, exclude=["two/**"])


# The folder


@pytest.mark.parametrize("operation", ["create", "write", "finish", "put", "rename"])
def test_convert_to_deepspeed_universal_on_a_failing_storage_looks_incomplete(tmp_path, operation):
    snapshot, folder = take(tmp_path / "s", *parts()), tmp_path / "u"
    with (
        faulty(on=operation, error=OSError(28, "No space left on device")),
        pytest.raises(Exception, match="No space"),
    ):
        snapshot.convert(Target(f"faulty+file://{folder}", TO))
    assert not list(folder.glob("**/.convert*"))
    assert not (folder / "latest_universal").exists()
    assert not list(folder.glob("*/zero/optimizer_state.pt"))
    snapshot.convert(Target(folder, TO, overwrite=True))
    assert Snapshot(folder).verify()


def test_convert_to_deepspeed_universal_overwrite_deletes_only_the_same_step(tmp_path):
    folder = tmp_path / "u"
    take(tmp_path / "s1", *parts(step=1.0)).convert(Target(folder, TO))
    take(tmp_path / "s2", *parts(max_exp_avg_sq=1)).convert(Target(folder, TO, overwrite=True))
    new = take(tmp_path / "s3", *parts(shape=(3,)))
    with pytest.raises(SnapshotExistsError, match="exists already"):
        new.convert(Target(folder, TO))
    new.convert(Target(folder, TO, overwrite=True))
    assert sorted(os.listdir(folder / "global_step2_universal" / "zero" / "a")) == [
        "exp_avg.pt",
        "exp_avg_sq.pt",
        "fp32.pt",
        "step.pt",
    ]
    assert Snapshot(folder).read_object("0/optim/state/a/exp_avg").shape == (3,)
    assert Snapshot(folder / "global_step1_universal").read_object("0/optim/state/a/step") == 1
    (folder / "latest").write_text("step2")
    with pytest.raises(SnapshotExistsError, match="another format"):
        new.convert(Target(folder, TO, overwrite=True))


def test_convert_to_deepspeed_universal_failed_overwrite_cannot_be_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryStorage, "capabilities", Plain.capabilities)
    url = f"memory://universal/{tmp_path.name}"
    take(tmp_path / "a", *parts()).convert(Target(url, TO))
    new = take(tmp_path / "b", *parts(shape=(4,)))
    broken = OSError(5, "broken")
    with faulty(on="finish", path="*exp_avg.pt", error=broken), pytest.raises(Exception, match="broken"):
        new.convert(Target(f"faulty+{url}", TO, overwrite=True))
    assert not Snapshot(url).exists()
    new.convert(Target(url, TO, overwrite=True))
    assert Snapshot(url).read_object("0/model/a").shape == (4,)


def test_cli_convert_to_deepspeed_universal(tmp_path, capsys):
    weights, optimizer = parts()
    take(tmp_path / "s", weights, optimizer)
    assert main(["convert", str(tmp_path / "s"), str(tmp_path / "u"), "--to", TO]) == 0
    assert "to deepspeed-universal in" in capsys.readouterr().out
    expect_equal(Snapshot(tmp_path / "u").read_object("0/model/b"), weights["b"])


MEASURE = """
import sys
from snapshot import Snapshot, Target

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))

source, target, budget = sys.argv[1:]
Snapshot("memory://warm/x").exists()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the most that was resident is what is resident now
before = resident("VmHWM")
Snapshot(source).convert(Target(target, "deepspeed-universal", durable=False), memory_budget_bytes=int(budget))
print((resident("VmHWM") - before) // 1024)
"""


@pytest.mark.slow
def test_convert_to_deepspeed_universal_memory_stays_within_memory_budget_bytes(tmp_path, warm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        take(tmp_path / "s", *parts(shape=(16 << 20,)))
    assert int(warm.run(MEASURE, tmp_path / "s", tmp_path / "u", 32 << 20)) < 32 + 64
    assert Snapshot(tmp_path / "u").read_object("0/model/a", box=[5]) == Snapshot(tmp_path / "s").read_object(
        "0/model/a", box=[5]
    )


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ({"state": {}, "param_groups": [{"params": [0]}]}, True),
        ({"state": {}, "param_groups": [{"params": [0]}, {"params": []}]}, False),
        ({"state": {}, "param_groups": [{"params": []}, {"params": [0]}]}, False),
        ({"state": {}, "param_groups": [{"params": [0]}, {"lr": 1}]}, False),
        ({"state": {}, "param_groups": [{"params": [0]}, 3]}, False),
        ({"state": {}, "param_groups": {}}, False),
        ({"state": [], "param_groups": [{"params": [0]}]}, False),
        ([], False),
    ],
)
def test_is_optimizer_needs_parameters_in_each_group(value, is_one):
    assert _is_optimizer(value) == is_one
