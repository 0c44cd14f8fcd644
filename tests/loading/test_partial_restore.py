"""Restoring a part: what is not asked for stays as it is, what cannot work is known before anything is touched."""

import collections

import numpy as np
import pytest
import torch

from snapshot import RestoreError, RestoreOptions, Sharded, Snapshot, StateDict
from tests.helpers.arguments import for_restore

URL = "memory://partial"


def take(**values):
    return Snapshot.take(URL, {"s": StateDict(**values)}, overwrite=True)


@pytest.mark.parametrize("how", [{"select": ["s/x"]}, {"exclude": ["s/hist", "s/d", "s/empty"]}])
def test_select_and_exclude_leave_other_values_unchanged(how):
    take(x=1, hist=[1, 2], d={"a": 1}, empty={})
    live = StateDict(x=0, hist=[7, 8, 9], d={"b": 2}, extra=5, empty={"c": 3})
    report = Snapshot(URL).restore({"s": live}, **for_restore(**how))
    assert dict(live) == {"x": 1, "hist": [7, 8, 9], "d": {"b": 2}, "extra": 5, "empty": {"c": 3}}
    assert {line.path for line in report.skipped} == {"s/hist/0", "s/hist/1", "s/d/a", "s/empty"}


def test_select_of_parts_of_containers():
    take(d={"a": 1, "b": {"c": 2, "d": 3}}, pair=(1, torch.ones(2)))
    live = StateDict(d={"a": 0, "b": collections.OrderedDict(c=0, d=0, e=0)}, pair=(0, torch.zeros(2)))
    Snapshot(URL).restore({"s": live}, select=["s/d/b/c", "s/pair/1"])
    assert live["d"] == {"a": 0, "b": {"c": 2, "d": 0, "e": 0}}
    assert live["pair"][0] == 0
    assert live["pair"][1].tolist() == [1, 1]


def test_select_of_a_part_of_a_sequence_of_another_length_raises_before_changes():
    take(a=torch.ones(3), hist=[1, 2])
    live = StateDict(a=torch.zeros(3), hist=[])
    with pytest.raises(RestoreError, match="s/hist: a partial restore needs"):
        Snapshot(URL).restore({"s": live}, select=["s/a", "s/hist/0"])
    assert live["a"].sum() == 0


def test_exclude_of_optimizer_state_keeps_it():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    Snapshot.take(URL, {"o": optimizer}, overwrite=True)
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.warns(UserWarning, match="'o/stat' matches nothing"):
        Snapshot(URL).restore({"o": optimizer}, select=["o/param_groups"], options=RestoreOptions(exclude=["o/stat"]))
    assert optimizer.state[weight]["exp_avg"].abs().sum() > 0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_select_that_matches_nothing_raises():
    take(x=1)
    with pytest.raises(RestoreError, match="'s/typo' matches nothing"):
        Snapshot(URL).restore({"s": StateDict(x=0)}, select=["s/typo"])


def test_rename_keeps_the_type_of_keys():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    a.grad = torch.full((2,), 3.0)
    optimizer.step()
    Snapshot.take(URL, {"o": optimizer, "s": StateDict(d={1: "x"})}, overwrite=True)
    fresh = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    state = StateDict()
    Snapshot(URL).restore({"o": fresh, "s": state}, rename={"o/state/0": "o/state/1", "s/d/1": "s/d/2"})
    assert fresh.state[b]["momentum_buffer"].tolist() == [3, 3]
    assert a not in fresh.state
    assert state["d"] == {2: "x"}


def test_restore_checks_the_kinds_of_module_entries_before_changing_anything():
    class Odd(torch.nn.Linear):
        def __init__(self, value):
            super().__init__(2, 2)
            self.value = value

        def state_dict(self, *args, **kwargs):
            return {**super().state_dict(*args, **kwargs), "odd": self.value}

    for value in (3, "x", {"a": torch.ones(2)}, [torch.ones(2)], np.ones(3), torch.eye(3).to_sparse()):
        Snapshot.take(URL, {"m": Odd(value)}, overwrite=True)
        live = Odd(torch.zeros(2))
        before = live.weight.detach().clone()
        with pytest.raises(RestoreError, match="m/odd"):
            Snapshot(URL).restore({"m": live})
        assert torch.equal(live.weight, before)


def test_restore_of_invalid_optimizer_state_raises_before_changing_anything():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    Snapshot.take(URL, {"o": StateDict(state={0: {"momentum_buffer": torch.zeros(3)}})}, overwrite=True)
    with pytest.raises(RestoreError, match="no optimizer's parameter groups"):
        Snapshot(URL).restore({"o": optimizer})
    assert optimizer.state[weight]["momentum_buffer"].sum() == 3


def test_restore_keeps_the_dtype_of_nested_optimizer_state():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"hist": [torch.full((2,), 0.1)], "d": {"x": torch.full((2,), 0.1)}, "n": 3}
    Snapshot.take(URL, {"o": optimizer}, overwrite=True)
    fresh = torch.optim.SGD([weight], lr=0.1)
    Snapshot(URL).restore({"o": fresh})
    assert fresh.state[weight]["hist"][0].dtype == torch.float32
    assert torch.equal(fresh.state[weight]["d"]["x"], torch.full((2,), 0.1))


def test_restore_of_param_groups_with_a_shared_tensor_learning_rate():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": torch.tensor(0.1)}, {"params": [weights[1]], "lr": torch.tensor(0.2)}]
    Snapshot.take(URL, {"o": torch.optim.Adam(groups)}, overwrite=True)
    fresh = torch.optim.Adam([{"params": [weight]} for weight in weights], lr=torch.tensor(0.5))
    Snapshot(URL).restore({"o": fresh})
    assert [group["lr"].item() for group in fresh.param_groups] == pytest.approx([0.1, 0.2])


def test_restore_into_tensors_without_memory_or_with_shared_elements():
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    windows = torch.zeros(5).as_strided((3, 3), (1, 1))
    take(freed=torch.arange(1000.0), windows=torch.arange(9.0).view(3, 3))
    live = StateDict(freed=freed, windows=windows)
    report = Snapshot(URL).restore({"s": live})
    assert torch.equal(live["freed"], torch.arange(1000.0))
    assert torch.equal(live["windows"], torch.arange(9.0).view(3, 3))
    assert {line.path for line in report.replaced} == {"s/freed", "s/windows"}
    with pytest.raises(RestoreError, match="overlapping elements"):
        Snapshot(URL).read_object("0/s/windows", torch.zeros(5).as_strided((3, 3), (1, 1)))


def test_restore_into_a_matrix_and_its_column_that_were_separate_raises():
    take(full=torch.zeros(4, 4), col=torch.ones(4))
    base = torch.full((4, 4), 7.0)
    with pytest.raises(RestoreError, match="share memory"):
        Snapshot(URL).restore({"s": StateDict(full=base, col=base[:, 0])})
    assert base.eq(7).all()


def test_restore_of_equal_bytes_into_one_memory():
    weight = torch.nn.Parameter(torch.arange(6.0))
    state = {"m": torch.nn.ParameterDict({"w": weight}), "s": StateDict(w=weight)}
    Snapshot.take(URL, state, overwrite=True)
    with torch.no_grad():
        weight.zero_()
    Snapshot(URL).restore(state)
    assert torch.equal(weight.detach(), torch.arange(6.0))


def test_read_object_refuses_a_read_only_array():
    take(n=np.arange(3))
    frozen = bytes(24)
    with pytest.raises(RestoreError, match="must be writable"):
        Snapshot(URL).read_object("0/s/n", np.frombuffer(frozen, np.int64))
    assert frozen == bytes(24)


def test_read_object_fills_a_structured_array():
    array = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    take(n=array)
    out = np.zeros(1, dtype=array.dtype)
    assert Snapshot(URL).read_object("0/s/n", out) is out
    assert out.tolist() == array.tolist()


def test_restore_replaces_and_reports_a_tensor_saved_as_a_parameter():
    take(p=torch.nn.Parameter(torch.ones(2)), n=3)
    live = StateDict(p=torch.zeros(2), n=torch.zeros(1))
    report = Snapshot(URL).restore({"s": live})
    assert type(live["p"]) is torch.nn.Parameter
    assert live["n"] == 3
    assert {line.path for line in report.replaced} == {"s/p", "s/n"}


def test_take_metadata_refuses_infinity():
    with pytest.raises(TypeError, match="JSON"):
        Snapshot.take(URL, {"s": StateDict()}, overwrite=True, metadata={"loss": float("inf")})


def test_restore_ignores_a_default_device():
    snapshot = take(t=torch.arange(6.0).view(2, 3), a=np.zeros((0, 2)))
    with torch.device("meta"):
        assert snapshot.read_object("0/s/t", box=[0]).tolist() == [0, 1, 2]
        assert snapshot.get_state_dict_for_key("s")["a"].shape == (0, 2)
        assert snapshot.read_object("0/s/t").tolist() == [[0, 1, 2], [3, 4, 5]]


def box_of(rows, begin=0, dtype=torch.float32, shape=(4, 3)):
    tensor = torch.full((rows, shape[1]), -1.0).to(dtype)
    return Sharded(tensor, global_shape=shape, offsets=(begin, 0))


def test_sharded_tensor_of_another_shape_is_an_error_or_left_unchanged():
    url, saved = "memory://sharded-misfit", torch.arange(12.0).view(4, 3)
    Snapshot.take(url, {"s": StateDict(x=saved, y=saved + 1)}, overwrite=True)
    for live, text in (
        (box_of(5, shape=(5, 3)), r"the snapshot has \[4, 3\], the application \[5, 3\]"),
        (box_of(4, dtype=torch.float64), "float64"),
        (Sharded(torch.empty(2, 3, device="meta"), global_shape=(4, 3), offsets=(0, 0)), "meta device"),
        (Sharded(torch.zeros(1, 3).expand(2, 3), global_shape=(4, 3), offsets=(0, 0)), "overlapping"),
    ):
        other = torch.zeros(4, 3)
        with pytest.raises(RestoreError, match=rf"s/x: .*{text}"):
            Snapshot(url).restore({"s": StateDict(x=live, y=other)})
        assert not other.any()
    live, other = box_of(5, shape=(5, 3)), torch.zeros(4, 3)
    report = Snapshot(url).restore(
        {"s": StateDict(x=live, y=other)}, strict=False, options=RestoreOptions(mismatched="skip")
    )
    assert live.tensor.eq(-1).all()
    assert torch.equal(other, saved + 1)
    assert [each.path for each in report.skipped] == ["s/x"]
    assert report.restored == 1


@pytest.mark.parametrize(("rows", "begin"), [(4, 0), (2, 0), (2, 2), (1, 3)])
def test_sharded_tensor_takes_its_box_of_a_whole_one(rows, begin):
    url, saved = "memory://sharded-box", torch.arange(12.0).view(4, 3)
    Snapshot.take(url, {"s": StateDict(x=saved)}, overwrite=True)
    live = box_of(rows, begin)
    report = Snapshot(url).restore({"s": StateDict(x=live)})
    assert torch.equal(live.tensor, saved[begin : begin + rows])
    assert [str(each).partition(":")[2] for each in report.resharded] == ([] if rows == 4 else [" from one tensor"])
