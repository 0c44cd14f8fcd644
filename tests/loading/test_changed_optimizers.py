"""Optimizers restored into a changed run: other dtypes, another class, fresh or warm, all as torch itself goes on."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn, optim

from snapshot import ModelState, RestoreError, RestoreOptions, Snapshot, StateDict
from snapshot.state.optimizers import _STATE
from tests.helpers.arguments import for_restore
from tests.helpers.states import equal

URL = "memory://optimizers"
PLAIN = {
    "Adadelta": [{}, {"foreach": True}],
    "Adafactor": [{}, {"foreach": True}],
    "Adagrad": [{}, {"foreach": True}, {"fused": True}],
    "Adam": [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}, {"capturable": True}],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}, {"fused": True}, {"capturable": True}],
    "Adamax": [{}, {"foreach": True}, {"capturable": True}],
    "ASGD": [{}, {"foreach": True}, {"capturable": True}],
    "LBFGS": [{}, {"line_search_fn": "strong_wolfe"}],
    "NAdam": [{}, {"foreach": True}, {"capturable": True}],
    "RAdam": [{}, {"foreach": True}, {"capturable": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}, {"foreach": True}, {"capturable": True}],
    "Rprop": [{}, {"foreach": True}, {"capturable": True}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "foreach": True}, {"momentum": 0.9, "fused": True}],
    "SparseAdam": [{}],
    "Muon": [{}],
}
CASES = [(name, options) for name, all_ in PLAIN.items() if hasattr(optim, name) for options in all_]


def named(case):
    return f"{case[0]}-{'-'.join(case[1])}" if case[1] else case[0]


def test_optimizer_state_table_lists_every_optimizer_of_torch():
    classes = {
        name
        for name, value in vars(optim).items()
        if inspect.isclass(value) and issubclass(value, optim.Optimizer) and value is not optim.Optimizer
    }
    assert classes - set(_STATE) == set()
    assert classes - set(PLAIN) == set()


def parameters(dtype, seed=0, *, flat=True):
    generator = torch.Generator().manual_seed(seed)
    net = nn.Module()
    net.weight = nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype))
    if flat:
        net.bias = nn.Parameter(torch.randn(5, generator=generator).to(dtype))
    return net


def made(case, dtype, seed=0):
    name, options = case
    net = parameters(dtype, seed, flat=name != "Muon")
    return net, getattr(optim, name)(net.parameters(), lr=0.05, **options)


def step(net, optimizer, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    grads = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in net.parameters()]

    def closure():
        loss = 0.0
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            if isinstance(optimizer, optim.LBFGS):  # its line search wants a loss that has a least value
                parameter.grad = (parameter - grad).detach()
                loss += float(parameter.grad.double().square().sum() / 2)
            else:
                parameter.grad = grad.to_sparse() if isinstance(optimizer, optim.SparseAdam) else grad.clone()
        return loss

    capturable = [group.get("capturable") for group in optimizer.param_groups]
    for group in optimizer.param_groups:  # which only compiled code and accelerators can run
        if group.get("capturable"):
            group["capturable"] = False
    if isinstance(optimizer, optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    for group, flag in zip(optimizer.param_groups, capturable, strict=True):
        if flag:
            group["capturable"] = flag


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_optimizer_steps_after_restore_equal_those_after_torch_load_state_dict(case, warm, wanted):
    net, optimizer = made(case, torch.float32)
    for number in range(3):
        step(net, optimizer, number)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    Snapshot.take(URL, {"net": net, "optim": optimizer}, overwrite=True)

    theirs, their_optimizer = made(case, wanted, seed=5)
    theirs.load_state_dict(saved[0])
    their_optimizer.load_state_dict(saved[1])
    ours, our_optimizer = made(case, wanted, seed=9)
    for number in range(2 if warm else 0):
        step(ours, our_optimizer, 50 + number)
    report = Snapshot(URL).restore(
        {"net": ours, "optim": our_optimizer},
        options=RestoreOptions(cast="error" if wanted == torch.float32 else "same_kind"),
    )
    assert equal(our_optimizer.state_dict(), their_optimizer.state_dict())
    if wanted == torch.float32:
        assert not report.lines
    fused_here = case[1].get("fused") and wanted != torch.float32  # torch's fused kernels on CPUs want one dtype
    for number in range(3):
        try:
            step(theirs, their_optimizer, 100 + number)
        except RuntimeError:
            assert fused_here or wanted != torch.float32
            return  # torch itself cannot go on in this dtype
        step(ours, our_optimizer, 100 + number)
        assert equal(dict(ours.state_dict()), dict(theirs.state_dict()))
        assert equal(our_optimizer.state_dict(), their_optimizer.state_dict())


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("whole", [False, True], ids=["optimizer", "ModelState"])
def test_optimizer_state_in_another_dtype_than_its_parameter_is_restored_in_it(warm, whole):
    """A bfloat16 model whose moments are float32: torch's own load_state_dict would round them."""
    net = nn.Linear(4, 3).bfloat16()
    optimizer = optim.Adam(net.parameters(), foreach=False)
    net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.rand(state["exp_avg"].shape) + 1e-4
    expected = [state["exp_avg"].clone() for state in optimizer.state.values()]

    def state_of(net, optimizer):
        return {"all": ModelState(net, optimizer)} if whole else {"net": net, "optim": optimizer}

    Snapshot.take(URL, state_of(net, optimizer), overwrite=True)
    other = nn.Linear(4, 3).bfloat16()
    another = optim.Adam(other.parameters(), foreach=False)
    if warm:
        other(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        another.step()
    Snapshot(URL).restore(state_of(other, another))
    found = [state["exp_avg"] for state in another.state.values()]
    assert [each.dtype for each in found] == [torch.float32] * 2
    assert all(map(torch.equal, found, expected))


def trained(cls, dtype=torch.float32, **options):
    net = nn.Linear(4, 3).to(dtype)
    optimizer = cls(net.parameters(), lr=0.1, **options)
    net(torch.ones(1, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_optimizer_dtype_mismatch_is_one_mismatch():
    net, optimizer = trained(optim.AdamW)
    Snapshot.take(URL, {"net": net, "optim": optimizer}, overwrite=True)
    other = nn.Linear(4, 3).bfloat16()
    with pytest.raises(RestoreError) as caught:
        Snapshot(URL).restore({"net": other, "optim": optim.AdamW(other.parameters())})
    (line,) = [each for each in caught.value.mismatches if each.startswith("optim")]
    assert line == (
        "optim: the snapshot has parameters of float32, the application of bfloat16 (2 of them); "
        "allow it with RestoreOptions(cast='same_kind'), or 'any'"
    )


@pytest.mark.parametrize("warm", [False, True])
def test_optimizer_restored_without_its_model_gets_the_saved_dtypes(warm):
    net, optimizer = trained(optim.AdamW)
    Snapshot.take(URL, {"net": net, "optim": optimizer}, overwrite=True)
    _, other = trained(optim.AdamW, torch.bfloat16)
    if not warm:
        other = optim.AdamW(nn.Linear(4, 3).bfloat16().parameters())
    Snapshot(URL).restore({"optim": other})
    assert {state["exp_avg"].dtype for state in other.state.values()} == {torch.float32}


@pytest.fixture
def unrecorded(monkeypatch):
    monkeypatch.setattr("snapshot.save.collect._record_optimizer", lambda *_: None)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("whole", [False, True], ids=["optimizer", "ModelState"])
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (optim.AdamW, optim.SGD, "with exp_avg, exp_avg_sq, step; SGD has momentum_buffer"),
        (
            optim.AdamW,
            optim.RMSprop,
            "with exp_avg, exp_avg_sq, step; RMSprop has grad_avg, momentum_buffer, square_avg",
        ),
        (optim.RMSprop, optim.Adam, "with square_avg, step; Adam has exp_avg, exp_avg_sq, max_exp_avg_sq, step"),
    ],
)
def test_optimizer_of_another_class_is_one_mismatch(first, second, text, whole, warm, recorded, request):
    if not recorded:
        request.getfixturevalue("unrecorded")

    def state_of(net, optimizer):
        return {"optim": ModelState(net, optimizer)} if whole else {"net": net, "optim": optimizer}

    net, optimizer = trained(first)
    Snapshot.take(URL, state_of(net, optimizer), overwrite=True)
    options = {"momentum": 0.9} if second is optim.SGD else {}
    other, another = trained(second, **options)
    if not warm:
        another = second(other.parameters(), lr=0.1, **options)
    before = copy.deepcopy((other.state_dict(), another.state_dict()))
    with pytest.raises(RestoreError) as caught:
        Snapshot(URL).restore(state_of(other, another))
    (line,) = caught.value.mismatches
    assert text in line
    assert (f"saved by {first.__name__} with" in line) is recorded
    assert "strict=False leaves the optimizer unchanged" in line
    assert equal(dict(other.state_dict()), dict(before[0]))
    report = Snapshot(URL).restore(state_of(other, another), strict=False)
    assert text in str(report)
    assert equal(dict(other.state_dict()), dict(net.state_dict()))
    if warm or not whole:  # ModelState makes the state of a fresh optimizer
        assert equal(another.state_dict(), before[1])


def test_optimizer_without_state_is_identified_by_its_options():
    net = nn.Linear(2, 2)
    Snapshot.take(URL, {"optim": optim.AdamW(net.parameters())}, overwrite=True)
    with pytest.raises(RestoreError, match=r"saved by AdamW with the options amsgrad, betas, eps; SGD has dampening"):
        Snapshot(URL).restore({"optim": optim.SGD(net.parameters())})


class FusedAdam(optim.AdamW):
    """Another class that keeps the same."""


@pytest.mark.parametrize("saved", [optim.Adam, FusedAdam])
def test_optimizer_of_another_class_with_equal_state_names_is_reported_as_changed(saved):
    net, optimizer = trained(saved)
    Snapshot.take(URL, {"optim": optimizer}, overwrite=True)
    other = optim.AdamW(net.parameters())
    report = Snapshot(URL).restore({"optim": other})
    (line,) = report.changed
    assert f"saved by {saved.__name__}, restored into AdamW" in str(line)
    expected = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(map(torch.equal, [state["exp_avg"] for state in other.state.values()], expected))


@pytest.mark.parametrize("whole", [False, True], ids=["optimizer", "ModelState"])
def test_optimizer_option_missing_in_the_snapshot_keeps_its_default(whole):
    def state_of(net, optimizer):
        return {"optim": ModelState(net, optimizer)} if whole else {"optim": optimizer}

    net, optimizer = trained(optim.AdamW)
    for group in optimizer.param_groups:
        del group["amsgrad"]  # as an older torch would have had it
    Snapshot.take(URL, state_of(net, optimizer), overwrite=True)
    other, another = trained(optim.AdamW, amsgrad=False)
    report = Snapshot(URL).restore(state_of(other, another))
    base = "optim/optim" if whole else "optim"
    assert [line.path for line in report.kept] == [f"{base}/param_groups/0/amsgrad"]
    assert another.param_groups[0]["amsgrad"] is False
    another.step()


@pytest.mark.parametrize("whole", [False, True], ids=["optimizer", "ModelState"])
def test_mismatched_skip_leaves_a_new_head_with_its_optimizer_state(whole):
    def pair(width):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, width))
        optimizer = optim.AdamW(net.parameters(), lr=0.1)
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return net, optimizer

    def state_of(net, optimizer):
        return {"all": ModelState(net, optimizer)} if whole else {"net": net, "optim": optimizer}

    net, optimizer = pair(2)
    Snapshot.take(URL, state_of(net, optimizer), overwrite=True)
    other, another = pair(5)
    before = copy.deepcopy(other[1].state_dict())
    kept = copy.deepcopy(another.state_dict()["state"][2])
    with pytest.raises(RestoreError, match="mismatched='skip'") as caught:
        Snapshot(URL).restore(state_of(other, another), strict=False)
    assert len(caught.value.mismatches) == 4
    report = Snapshot(URL).restore(state_of(other, another), strict=False, options=RestoreOptions(mismatched="skip"))
    assert len(report.skipped) == 4
    assert equal(dict(other[1].state_dict()), dict(before))
    assert equal(dict(other[0].state_dict()), dict(net[0].state_dict()))
    assert equal(another.state_dict()["state"][2], kept)
    assert equal(another.state_dict()["state"][0], optimizer.state_dict()["state"][0])
    another.step()
    if not whole:
        fresh = optim.AdamW(other.parameters(), lr=0.1)
        Snapshot(URL).restore(state_of(other, fresh), strict=False, options=RestoreOptions(mismatched="skip"))
        assert list(fresh.state_dict()["state"]) == [0, 1]
        fresh.step()


def test_optimizer_with_more_parameters_is_unchanged_with_strict_false():
    net, optimizer = trained(optim.SGD, momentum=0.9)
    Snapshot.take(URL, {"net": net, "optim": optimizer}, overwrite=True)
    grown = nn.Sequential(net, nn.Linear(3, 1))
    another = optim.SGD(grown.parameters(), lr=0.7, momentum=0.9)
    with pytest.raises(RestoreError, match=r"groups of \[2\] parameters, and the optimizer of \[4\]"):
        Snapshot(URL).restore({"optim": another})
    report = Snapshot(URL).restore({"net": net, "optim": another}, strict=False)
    assert "left unchanged" in str(report.skipped[0])
    assert another.param_groups[0]["lr"] == 0.7


def test_state_dict_tensors_named_like_optimizer_state_are_not_cast():
    Snapshot.take(URL, {"s": StateDict(optim={"exp_avg": torch.ones(3, dtype=torch.float64)})}, overwrite=True)
    live = StateDict(optim={"exp_avg": torch.zeros(3)})
    Snapshot(URL).restore({"s": live})
    assert live["optim"]["exp_avg"].dtype == torch.float64


def test_convert_with_dtype_records_the_new_optimizer_dtypes(tmp_path):
    net, optimizer = trained(optim.AdamW)
    Snapshot.take(tmp_path / "s", {"net": net, "optim": optimizer}).convert(tmp_path / "half", dtype=torch.bfloat16)
    other = nn.Linear(4, 3).bfloat16()
    another = optim.AdamW(other.parameters())
    report = Snapshot(tmp_path / "half").restore({"net": other, "optim": another})
    assert not report.lines
    assert {state["exp_avg"].dtype for state in another.state.values()} == {torch.bfloat16}
    other(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    another.step()


@pytest.mark.parametrize("warm", [False, True])
def test_model_state_drops_optimizer_state_missing_in_the_snapshot(warm):
    """The first layer was frozen when it was saved, and has no state: a warm optimizer forgets what it had."""

    def made(frozen):
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        for parameter in net[0].parameters():
            parameter.requires_grad_(not frozen)
        return net, optim.AdamW(net.parameters(), lr=0.1)

    def steps(net, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    net, optimizer = made(frozen=True)
    steps(net, optimizer, 2)
    Snapshot.take(URL, {"all": ModelState(net, optimizer)}, overwrite=True)
    other, another = made(frozen=False)
    steps(other, another, 3 if warm else 0)
    Snapshot(URL).restore({"all": ModelState(other, another)})
    kept = [index for index, parameter in enumerate(other.parameters()) if another.state.get(parameter)]
    assert kept == [2, 3]
    steps(other, another, 1)
    assert [int(another.state[parameter]["step"]) for parameter in other.parameters()] == [1, 1, 3, 3]


def several(split, *classes):
    """A model whose parameters are dealt out to several optimizers."""
    net = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})
    parts = [[net[name].weight for name in names] for names in split]
    optimizers = [cls(part, lr=0.1) for cls, part in zip(classes, parts, strict=True)]
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape)
    for each in optimizers:
        each.step()
    return net, optimizers


@pytest.mark.parametrize("strict", [True, False])
def test_model_state_with_several_optimizers_is_compared_per_parameter(strict):
    net, optimizers = several(["ab", "c"], optim.SGD, optim.AdamW)
    Snapshot.take(URL, {"all": ModelState(net, optimizers)}, overwrite=True)
    for split, classes in ((["a", "bc"], (optim.SGD, optim.AdamW)), (["c", "ab"], (optim.SGD, optim.AdamW))):
        other, others = several(split, *classes)
        before = copy.deepcopy((dict(other.state_dict()), [each.state_dict() for each in others]))
        if strict:
            with pytest.raises(RestoreError, match=r"saved by SGD, AdamW with|parameters are in other groups"):
                Snapshot(URL).restore({"all": ModelState(other, others)})
            assert equal(dict(other.state_dict()), before[0])
        else:
            report = Snapshot(URL).restore({"all": ModelState(other, others)}, strict=False)
            assert "left unchanged" in str(report.skipped[0])
            assert equal(dict(other.state_dict()), dict(net.state_dict()))
        assert equal([each.state_dict() for each in others], before[1])
        for each in others:
            each.step()
    other, others = several(["ab", "c"], optim.SGD, optim.AdamW)
    Snapshot(URL).restore({"all": ModelState(other, others)})
    assert equal([each.state_dict() for each in others], [each.state_dict() for each in optimizers])


def test_model_state_with_other_param_groups_is_a_mismatch():
    def grouped(*sizes):
        net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
        params = iter(net.parameters())
        groups = [
            {"params": [next(params) for _ in range(size)], "lr": 0.1 * (at + 1)} for at, size in enumerate(sizes)
        ]
        return net, optim.AdamW(groups)

    Snapshot.take(URL, {"all": ModelState(*grouped(2, 2))}, overwrite=True)
    for sizes in ((4,), (1, 3), (1, 1, 2)):
        net, optimizer = grouped(*sizes)
        with pytest.raises(RestoreError, match=r"parameters are in other groups: the snapshot has groups of \[2, 2\]"):
            Snapshot(URL).restore({"all": ModelState(net, optimizer)})
    net, optimizer = grouped(2, 2)
    optimizer.param_groups[1]["lr"] = 5.0
    Snapshot(URL).restore({"all": ModelState(net, optimizer)})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize(("there", "here"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("warm", [False, True])
def test_model_state_flatten_optimizer_state_dict_restores_like_nested(there, here, warm):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    def state_of(net, optimizer, flat):
        return {"all": ModelState(net, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))}

    net, optimizer = trained(optim.AdamW, torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = torch.rand(state["exp_avg"].shape) + 1e-4
    Snapshot.take(URL, state_of(net, optimizer, there), overwrite=True)
    other, another = trained(optim.AdamW, torch.bfloat16)
    if not warm:
        another = optim.AdamW(other.parameters(), lr=0.7)
    Snapshot(URL).restore(state_of(other, another, here))
    assert equal(another.state_dict()["state"], optimizer.state_dict()["state"])
    assert another.param_groups[0]["lr"] == 0.1
    third, sgd = trained(optim.SGD, torch.bfloat16, momentum=0.9)
    before = copy.deepcopy(sgd.state_dict())
    with pytest.raises(RestoreError, match="saved by AdamW with exp_avg, exp_avg_sq, step; SGD has momentum_buffer"):
        Snapshot(URL).restore(state_of(third, sgd, here))
    Snapshot(URL).restore(state_of(third, sgd, here), strict=False)
    assert equal(sgd.state_dict(), before)


class Lion(optim.Optimizer):
    """One that is not torch's: it has AdamW's options, and another state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict.fromkeys(("betas", "eps", "weight_decay", "amsgrad"), 0) | {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("ema", torch.zeros_like(parameter)).add_(parameter.grad)


@pytest.mark.parametrize("warm", [False, True])
def test_optimizer_of_another_library_is_reported_or_refused_by_its_state_names(warm):
    net, optimizer = trained(optim.AdamW)
    Snapshot.take(URL, {"optim": optimizer}, overwrite=True)
    _, live = trained(Lion)
    if not warm:
        report = Snapshot(URL).restore({"optim": Lion(net.parameters())})
        assert "which names its state has is not known before its first step" in str(*report.changed)
        return
    with pytest.raises(RestoreError, match="with exp_avg, exp_avg_sq, step; Lion has ema"):
        Snapshot(URL).restore({"optim": live})


class OwnStep(optim.AdamW):
    """One of which it is not known what its step keeps."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("cls", [OwnStep, optim.AdamW])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("key", ["a", "z"], ids=["optimizer first", "model first"])
def test_mismatched_skip_leaves_the_state_of_a_head_in_any_optimizer(cls, warm, key):
    def pair(width):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, width))
        optimizer = cls(net.parameters(), lr=0.1)
        net(torch.ones(1, 3)).sum().backward()
        return net, optimizer

    net, optimizer = pair(2)
    optimizer.step()
    Snapshot.take(URL, {"m": net, key: optimizer}, overwrite=True)
    other, another = pair(5)
    if warm:
        another.step()
    report = Snapshot(URL).restore({"m": other, key: another}, strict=False, options=RestoreOptions(mismatched="skip"))
    assert {line.path for line in report.skipped} == {"m/1.weight", "m/1.bias", f"{key}/state/2", f"{key}/state/3"}
    assert [index for index, each in enumerate(other.parameters()) if another.state.get(each)] == list(
        range(4 if warm else 2)
    )
    another.step()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_model_state_fresh_optimizer_stays_fresh_if_nothing_is_restored(several, flat):
    """Torch takes a step of zeros to make a place for state; training must not go on from there."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        parts = [net[0].parameters(), net[1].parameters()] if several else [net.parameters()]
        return net, [optim.AdamW(part, lr=0.01) for part in parts]

    def trained_for(net, optimizers, steps):
        for _ in range(steps):
            net(torch.ones(1, 3)).square().sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return net.state_dict()

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    expected = trained_for(*made(), 3)
    net, optimizers = made()
    Snapshot.take(URL, {"all": ModelState(net, optimizers, options)}, overwrite=True)
    assert not any(each.state for each in optimizers)
    assert equal(dict(trained_for(net, optimizers, 3)), dict(expected))
    trained_net, trained_optimizers = net, optimizers
    net, optimizers = made()
    report = Snapshot(URL).restore({"all": ModelState(net, optimizers, options)})
    assert not report.lines
    assert not any(each.state for each in optimizers)
    Snapshot.take(URL, {"all": ModelState(trained_net, trained_optimizers, options)}, overwrite=True)
    for given in ({"select": ["all/model/**"]}, {"exclude": ["all/optim"]}):
        net, optimizers = made()
        Snapshot(URL).restore({"all": ModelState(net, optimizers, options)}, **for_restore(**given))
        assert not any(each.state for each in optimizers)
    net, _ = made()
    others = [optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]
    with pytest.raises(RestoreError):
        Snapshot(URL).restore({"all": ModelState(net, others, options)})
    Snapshot(URL).restore({"all": ModelState(net, others, options)}, strict=False)
    assert not any(each.state for each in others)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("then", [False, True])
def test_model_state_restores_the_state_of_frozen_parameters(warm, then):
    net, optimizer = trained(optim.AdamW)
    net.bias.requires_grad_(not then)
    Snapshot.take(URL, {"all": ModelState(net, optimizer)}, overwrite=True)
    other, another = trained(optim.AdamW)
    if not warm:
        another = optim.AdamW(other.parameters(), lr=0.1)
    other.bias.requires_grad_(False)
    Snapshot(URL).restore({"all": ModelState(other, another)})
    assert equal(another.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("flat", [False, True])
def test_rename_function_renames_an_optimizer_once(flat):
    import re

    from torch.distributed.checkpoint.state_dict import StateDictOptions

    def made(seed):
        torch.manual_seed(seed)
        net = nn.ModuleDict({name: nn.Linear(3, 3) for name in "ab"})
        optimizer = optim.AdamW(net.parameters(), lr=0.1)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        return net, optimizer, ModelState(net, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))

    net, optimizer, state = made(0)
    Snapshot.take(URL, {"s": state}, overwrite=True)
    other, another, live = made(1)
    swap = re.compile(r"(?<=[/.])[ab](?=\.)")
    Snapshot(URL).restore({"s": live}, rename=lambda path: swap.sub(lambda found: "ba"["ab".index(found[0])], path))
    for here, there in (("a", "b"), ("b", "a")):
        assert torch.equal(other[here].weight, net[there].weight)
        expected = optimizer.state[net[there].weight]["exp_avg"]
        assert torch.equal(another.state[other[here].weight]["exp_avg"], expected)
