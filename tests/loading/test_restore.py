"""Restore: in place, only what is asked for, all checks before the first live tensor is touched."""

import random
import warnings

import numpy as np
import pytest
import torch

from snapshot import RestoreError, RestoreOptions, RNGState, Snapshot, SnapshotNotFoundError, StateDict
from tests.helpers.arguments import for_take
from tests.helpers.states import equal

URL = "memory://restore"


def take(state, **options):
    return Snapshot.take(URL, state, **for_take(overwrite=True, **options))


def model(hidden=4, dtype=torch.float32):
    return torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.Linear(hidden, 2)).to(dtype)


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_restore_fills_a_module_in_place():
    net = model()
    saved = weights(net)
    take({"net": net})
    parameters = list(net.parameters())
    for parameter in parameters:
        torch.nn.init.zeros_(parameter)
    report = Snapshot(URL).restore({"net": net})
    assert equal(weights(net), saved)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert report.restored == 4
    assert not report.lines
    assert "restored 4 entries" in str(report)


def test_restore_of_a_subset_of_keys():
    net, progress = model(), StateDict(step=3)
    take({"net": net, "progress": progress})
    progress["step"] = 9
    saved = weights(net)
    with torch.no_grad():
        net[0].weight.zero_()
    Snapshot(URL).restore({"progress": progress})
    assert progress["step"] == 3
    assert not equal(weights(net), saved)


def test_restore_error_for_an_unknown_key_lists_the_known_keys():
    take({"net": model(), "progress": StateDict()})
    with pytest.raises(RestoreError, match="progress"):
        Snapshot(URL).restore({"progres": StateDict()})


def test_restore_of_a_missing_snapshot_raises_not_found():
    with pytest.raises(SnapshotNotFoundError, match="no snapshot found"):
        Snapshot("memory://nowhere").restore({"net": model()})
    with pytest.raises(FileNotFoundError):
        Snapshot("memory://nowhere").get_manifest()
    assert not Snapshot("memory://nowhere").exists()


def test_restore_error_lists_all_mismatches_and_changes_nothing():
    take({"net": model(4), "other": model(4)})
    net, other = model(5), model(4, torch.float64)
    before, other_before = weights(net), weights(other)
    with pytest.raises(RestoreError) as raised:
        Snapshot(URL).restore({"net": net, "other": other})
    assert equal(weights(net), before)
    assert equal(weights(other), other_before)
    text = str(raised.value)
    assert "net/0.weight: the snapshot has [4, 3], the application [5, 3]" in text
    assert "other/0.weight: the snapshot has float32, the application float64" in text
    assert "cast=" in text
    assert len(raised.value.mismatches) == 3 + 4


def test_restore_strict_lists_missing_and_unexpected_names():
    take({"net": torch.nn.Linear(3, 4)})
    live = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False))
    with pytest.raises(RestoreError) as raised:
        Snapshot(URL).restore({"net": live})
    assert sorted(raised.value.mismatches) == [
        "net/0.weight: is in the application, not in the snapshot",
        "net/bias: is in the snapshot, not in the application",
        "net/weight: is in the snapshot, not in the application",
    ]


def test_restore_strict_false_restores_what_matches_and_reports_the_rest():
    saved = torch.nn.Linear(3, 4)
    take({"net": saved})
    live = torch.nn.Linear(3, 4, bias=False)
    live.register_buffer("extra", torch.ones(2))
    report = Snapshot(URL).restore({"net": live}, strict=False)
    assert torch.equal(live.weight, saved.weight)
    assert [line.path for line in report.missing] == ["net/extra"]
    assert [line.path for line in report.unexpected] == ["net/bias"]
    assert "missing" in str(report)


@pytest.mark.parametrize(("cast", "saved", "live", "works"), [
    ("same_kind", torch.float32, torch.bfloat16, True),
    ("same_kind", torch.bfloat16, torch.float64, True),
    ("same_kind", torch.float32, torch.int64, False),
    ("any", torch.float32, torch.int64, True),
    ("error", torch.float32, torch.bfloat16, False),
])  # fmt: skip
def test_restore_cast_options(cast, saved, live, works):
    values = torch.tensor([1.5, -2.25, 1e5]).to(saved)
    source, target = torch.nn.Module(), torch.nn.Module()
    source.register_buffer("x", values)
    target.register_buffer("x", torch.zeros(3, dtype=live))
    take({"m": source})
    if works:
        report = Snapshot(URL).restore({"m": target}, options=RestoreOptions(cast=cast))
        assert torch.equal(target.x, values.to(live))
        assert [line.path for line in report.cast] == ["m/x"]
    else:
        with pytest.raises(RestoreError, match="m/x: the snapshot has"):
            Snapshot(URL).restore({"m": target}, options=RestoreOptions(cast=cast))
        assert target.x.sum() == 0


def test_restore_cast_with_an_unknown_value_raises():
    take({"net": model()})
    with pytest.raises(ValueError, match="'same_kind'"):
        Snapshot(URL).restore({"net": model()}, options=RestoreOptions(cast="all"))


@pytest.mark.parametrize("exact", [False, True])
def test_restore_exact_drops_state_dict_keys_that_the_snapshot_lacks(exact, caplog):
    kept = torch.zeros(3)
    state = StateDict(a=1, t=torch.ones(3), gone=torch.ones(2), nested={"x": [torch.ones(1), 2]})
    take({"s": state})
    live = StateDict(a=5, t=kept, added=7, nested={"x": [torch.zeros(1), 9, 9]}, gone=torch.zeros(5))
    inner = live["nested"]["x"][0]
    report = Snapshot(URL).restore({"s": live}, options=RestoreOptions(exact=exact))
    assert sorted(live) == ["a", *(["added"] if not exact else []), "gone", "nested", "t"]
    assert [str(line) for line in report.kept] == ([] if exact else ["kept       s/added: the snapshot lacks it"])
    assert ("s/added" in caplog.text) is not exact
    assert live["t"] is kept
    assert kept.tolist() == [1, 1, 1]
    assert live["nested"]["x"][0] is inner
    assert inner.item() == 1
    assert live["nested"]["x"][1:] == [2]
    assert [(line.path, line.kind) for line in report if line.kind not in ("kept", "removed")] == [
        ("s/gone", "replaced")
    ]
    assert [line.path for line in report.removed] == (["s/added"] if exact else [])


def test_restore_select_and_exclude():
    state = {"net": model(), "progress": StateDict(step=1, best=2.0)}
    take(state)
    net, progress = model(), StateDict(step=10, best=20.0)
    bias = net[0].bias.detach().clone()
    report = Snapshot(URL).restore(
        {"net": net, "progress": progress},
        select=["net/*weight", "progress"],
        options=RestoreOptions(exclude=["**/best"]),
    )
    assert torch.equal(net[0].weight, state["net"][0].weight)
    assert torch.equal(net[0].bias, bias)
    assert dict(progress) == {"step": 1, "best": 20.0}
    assert {line.path for line in report.skipped} == {"net/0.bias", "net/1.bias", "progress/best"}


def test_restore_does_not_load_a_key_of_which_nothing_is_selected():
    class Loud(StateDict):
        def load_state_dict(self, state_dict):
            raise AssertionError

    take({"a": StateDict(x=1), "b": StateDict(x=1)})
    live = {"a": StateDict(x=2), "b": Loud(x=2)}
    Snapshot(URL).restore(live, select=["a/**"])
    assert live["a"]["x"] == 1


def test_restore_rename_with_a_dict_and_a_function():
    net = torch.nn.Linear(3, 4)
    take({"net": net, "s": StateDict(old={"x": 1, "y": torch.ones(2)}, z=3)})
    live = torch.nn.Sequential(torch.nn.Linear(3, 4))
    state = StateDict()
    report = Snapshot(URL).restore(
        {"model": live, "s": state},
        rename={"net": "model", "net/weight": "model/0.weight", "net/bias": "model/0.bias", "s/old": "s/new"},
    )  # fmt: skip
    assert torch.equal(live[0].weight, net.weight)
    assert state["new"]["x"] == 1
    assert list(state) == ["new", "z"]
    assert report.restored == 5
    again = torch.nn.Sequential(torch.nn.Linear(3, 4))
    Snapshot(URL).restore({"net": again}, rename=lambda path: path.replace("net/", "net/0."))
    assert torch.equal(again[0].weight, net.weight)


def test_restore_rename_errors():
    take({"s": StateDict(a=1, b=2)})
    with pytest.raises(RestoreError, match="two entries the name 's/b'"):
        Snapshot(URL).restore({"s": StateDict()}, rename={"s/a": "s/b"})
    with pytest.raises(RestoreError, match="did you mean 's/a'"):
        Snapshot(URL).restore({"s": StateDict()}, rename={"s/aa": "s/c"})


def test_restore_of_two_entries_into_one_memory_raises():
    take({"s": StateDict(a=torch.ones(10), b=torch.zeros(10))})
    shared = torch.full((10,), 7.0)
    for live in (StateDict(a=shared, b=shared), StateDict(a=shared, b=shared.view(10))):
        with pytest.raises(RestoreError, match="share memory in the application"):
            Snapshot(URL).restore({"s": live})
    base = torch.full((15,), 7.0)
    with pytest.raises(RestoreError, match="s/a and s/b"):
        Snapshot(URL).restore({"s": StateDict(a=base[:10], b=base[5:])})
    assert shared.eq(7).all()
    assert base.eq(7).all()


def test_restore_of_two_entries_into_one_strided_or_cast_memory_raises():
    take({"s": StateDict(a=torch.ones(4, 4), b=torch.zeros(4, 4))})
    shared = torch.full((4, 4), 7.0).t()
    with pytest.raises(RestoreError, match="share memory in the application"):
        Snapshot(URL).restore({"s": StateDict(a=shared, b=shared)})
    assert shared.eq(7).all()


def test_restore_of_tied_weights_into_tied_and_untied_modules():
    class Tied(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a = torch.nn.Linear(3, 3, bias=False)
            self.b = torch.nn.Linear(3, 3, bias=False)
            if tied:
                self.b.weight = self.a.weight

    saved = Tied(True)
    take({"m": saved})
    for tied in (True, False):
        live = Tied(tied)
        Snapshot(URL).restore({"m": live})
        assert torch.equal(live.a.weight, saved.a.weight)
        assert torch.equal(live.b.weight, saved.a.weight)


def test_restore_finds_optimizer_mismatches_before_changing_anything():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    take({"net": net, "o": optimizer})
    live = model()
    before = weights(live)
    with pytest.raises(RestoreError, match=r"groups of \[4\] parameters, and the optimizer of \[2\]"):
        Snapshot(URL).restore({"net": live, "o": torch.optim.Adam(live[0].parameters())})
    assert equal(weights(live), before)


def test_rng_state_after_restore_equals_that_after_take():
    class Noisy(StateDict):
        def state_dict(self):
            torch.rand(3), np.random.rand(3), random.random()
            return super().state_dict()

        def load_state_dict(self, state_dict):
            torch.rand(5), np.random.rand(5), random.random()
            super().load_state_dict(state_dict)

    def draw():
        return torch.rand(4).tolist(), np.random.rand(4).tolist(), [random.random() for _ in range(4)]

    before = torch.get_rng_state()
    take({"a": Noisy(x=1), "rng": RNGState(), "z": Noisy(x=1)})
    assert torch.equal(torch.get_rng_state(), before)
    after_take = draw()
    Snapshot(URL).restore({"a": Noisy(x=1), "rng": RNGState(), "z": Noisy(x=1)})
    assert draw() == after_take


def test_rng_state_with_a_pending_gaussian():
    np.random.standard_normal(1)
    random.gauss(0, 1)
    take({"rng": RNGState()})
    first = np.random.standard_normal(3).tolist(), random.gauss(0, 1)
    Snapshot(URL).restore({"rng": RNGState()})
    assert (np.random.standard_normal(3).tolist(), random.gauss(0, 1)) == first


def test_rng_state_of_an_absent_device_is_reported():
    class Cluster(RNGState):
        def state_dict(self):
            return super().state_dict() | {"cuda:7": torch.zeros(16, dtype=torch.uint8)}

    take({"rng": Cluster()})
    report = Snapshot(URL).restore({"rng": RNGState()})
    assert [line.path for line in report.skipped] == ["rng/cuda:7"]


def test_take_and_restore_visit_statefuls_in_order_and_rng_state_last():
    seen = []

    class Spy(StateDict):
        def __init__(self, name):
            super().__init__(x=1)
            self.name = name

        def state_dict(self):
            seen.append(self.name)
            return super().state_dict()

        def load_state_dict(self, state_dict):
            seen.append(self.name.upper())
            super().load_state_dict(state_dict)

    class Late(RNGState):
        def load_state_dict(self, state_dict):
            seen.append("RNG")
            return super().load_state_dict(state_dict)

    state = {"c": Spy("c"), "a": Spy("a"), "0rng": Late(), "b": Spy("b")}
    take(state)
    assert seen == ["a", "b", "c", "RNG"]
    seen.clear()
    Snapshot(URL).restore(state)
    assert seen == ["a", "b", "c", "A", "B", "C", "RNG"]


def test_restore_error_in_load_state_dict_names_its_key():
    class Bad(StateDict):
        def load_state_dict(self, state_dict):
            raise KeyError("mine")

    take({"bad": StateDict(x=1)})
    with pytest.raises(KeyError) as raised:
        Snapshot(URL).restore({"bad": Bad(x=2)})
    assert any("'bad'" in note for note in raised.value.__notes__)


def test_take_refuses_a_lazy_module_and_restore_initialises_it():
    net = torch.nn.LazyLinear(2)
    with pytest.raises(Exception, match="net/weight: is not initialised yet"):
        take({"net": net})
    saved = torch.nn.Linear(3, 2)
    take({"net": saved})
    Snapshot(URL).restore({"net": net})
    assert torch.equal(net.weight, saved.weight)
    with pytest.raises(RestoreError, match="to_empty"):
        Snapshot(URL).restore({"net": torch.nn.Linear(3, 2, device="meta")})
    with pytest.raises(Exception, match="meta device"):
        take({"net": torch.nn.Linear(3, 2, device="meta")})


def test_module_extra_state_is_restored():
    class Counting(torch.nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count, "t": torch.full((2,), self.count)}

        def set_extra_state(self, state):
            self.count = state["count"]
            assert state["t"].tolist() == [self.count] * 2

    net = Counting(2, 2)
    net.count = 5
    take({"net": net})
    live = Counting(2, 2)
    Snapshot(URL).restore({"net": live})
    assert live.count == 5


def test_module_with_state_dict_hooks_is_restored():
    net = model()
    net._register_state_dict_hook(lambda m, state, prefix, _: state.update({"extra.x": torch.ones(2)}))
    net.register_load_state_dict_pre_hook(lambda m, state, *_: state.pop("extra.x", None))
    take({"net": net})
    with torch.no_grad():
        net[0].weight.zero_()
    Snapshot(URL).restore({"net": net})
    assert net[0].weight.abs().sum() > 0


def test_restore_of_large_tensors_with_a_small_memory_budget_bytes():
    torch.manual_seed(0)
    big = torch.randn(3000, 1000)
    take({"s": StateDict(big=big, t=big.t(), half=big.to(torch.float16))})
    live = StateDict(
        big=torch.zeros(3000, 1000),
        t=torch.zeros(3000, 1000).t(),
        half=torch.zeros(3000, 1000, dtype=torch.float16).t().contiguous().t(),
    )
    Snapshot(URL).restore({"s": live}, options=RestoreOptions(memory_budget_bytes=16 << 20))
    assert torch.equal(live["big"], big)
    assert torch.equal(live["t"], big.t())
    assert torch.equal(live["half"], big.half())


def test_restore_reads_each_byte_once_and_only_what_is_asked_for():
    take({"a": StateDict(x=torch.randn(100_000)), "b": StateDict(x=torch.randn(100_000), y=torch.randn(1000))})
    report = Snapshot(URL).restore(
        {"a": StateDict(x=torch.zeros(100_000)), "b": StateDict(x=torch.zeros(100_000), y=torch.zeros(1000))}
    )
    assert report.bytes_read == 804_000
    report = Snapshot(URL).restore({"b": StateDict(x=torch.zeros(100_000), y=torch.zeros(1000))})
    assert report.bytes_read <= 404_000


def test_progress_callback_receives_all_bytes():
    seen = []
    take({"s": StateDict(x=torch.randn(1000))}, progress=seen.append)
    assert seen[-1].done == seen[-1].total
    seen.clear()
    Snapshot(URL).restore({"s": StateDict(x=torch.randn(1000))}, progress=seen.append)
    assert seen[-1].done == 4000


def test_restore_in_inference_mode_keeps_autograd_working():
    net = model()
    saved = weights(net)
    take({"net": net})
    with torch.inference_mode():
        Snapshot(URL).restore({"net": net})
    loss = net(torch.randn(2, 3)).sum()
    loss.backward()
    assert equal(weights(net), saved)


def test_take_and_restore_of_a_module_do_not_warn():
    net = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take({"net": net})
        Snapshot(URL).restore({"net": net})


@pytest.mark.parametrize("read_once", ["auto", True, False])
def test_restore_read_once_accepts_each_of_its_values(tmp_path, read_once):
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3))})
    live = StateDict(x=torch.zeros(3))
    Snapshot(tmp_path / "s").restore({"s": live}, options=RestoreOptions(read_once=read_once))
    assert live["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("read_once", ["always", None, 2])
def test_restore_read_once_refuses_another_value(tmp_path, read_once):
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=1)})
    with pytest.raises(ValueError, match="read_once must be"):
        Snapshot(tmp_path / "s").restore({"s": StateDict(x=2)}, options=RestoreOptions(read_once=read_once))
