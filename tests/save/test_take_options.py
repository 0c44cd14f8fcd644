"""The options of a take: wrong ones, and which of two goes before the other."""

import dataclasses
import json

import pytest
import torch

from snapshot import (
    RestoreError,
    RestoreOptions,
    Snapshot,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot.io.url import URL
from snapshot.save.take_options import TakeRequest


@pytest.mark.parametrize(
    ("name", "wrong"), [("staging", "later"), ("worker", "fork"), ("when_busy", "drop"), ("read_back", 1.5)]
)
def test_take_options_error_names_the_invalid_argument_and_its_choices(name, wrong):
    with pytest.raises(ValueError, match=rf"{name} must be .*got {wrong!r}"):
        Snapshot.take("memory://wrong", {}, options=TakeOptions(**{name: wrong}))


def test_take_options_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TakeOptions().durable = False


@pytest.mark.parametrize(("given", "share"), [(True, 1.0), (False, 0.0), (0.25, 0.25)])
def test_take_options_read_back_is_a_share(given, share):
    assert TakeOptions(read_back=given).read_back_share == share


@pytest.mark.parametrize("metadata", [[], ["a"], [("step", 3)], "ab", 3, ()])
def test_take_metadata_must_be_a_mapping(metadata):
    with pytest.raises(TypeError, match=f"metadata must be a mapping, got {type(metadata).__name__}"):
        TakeRequest(metadata=metadata)


def test_take_metadata_is_encoded_at_once_or_refused():
    assert json.loads(bytes(TakeRequest(metadata={"step": 3}).metadata_json)) == {"step": 3}
    with pytest.raises((TypeError, ValueError)):
        TakeRequest(metadata={"model": object()})


def test_take_options_base_is_a_path_or_a_snapshot():
    with pytest.raises(TypeError, match=r"base must be .* got URL"):
        Snapshot.take("memory://wrong", {}, base=URL.parse("memory://base"))


def test_take_argument_of_the_call_goes_before_the_option(tmp_path):
    state, options = {"s": StateDict(x=torch.ones(2))}, TakeOptions(prepare=lambda path, tensor, tracing: tensor * 3)
    Snapshot.take(tmp_path / "a", state, options=options)
    assert Snapshot(tmp_path / "a").read_object("s/x").tolist() == [3, 3]
    prepare = lambda path, tensor, tracing: tensor * 2  # noqa: E731
    Snapshot.async_take(tmp_path / "b", state, _custom_tensor_prepare_func=prepare, options=options).wait()
    assert Snapshot(tmp_path / "b").read_object("s/x").tolist() == [2, 2]


def test_restore_argument_of_the_call_goes_before_the_option(tmp_path):
    snapshot = Snapshot.take(tmp_path / "a", {"s": StateDict(x=1), "t": StateDict(x=1)})
    lenient = RestoreOptions(strict=False, unused="error", select=["s/none"])
    with pytest.raises(RestoreError, match="'s/none' matches nothing"):
        snapshot.restore({"s": StateDict(x=0)}, options=lenient)
    with pytest.raises(RestoreError, match="unused is 'error'"):
        snapshot.restore({"s": StateDict(x=0)}, select=(), options=lenient)
    assert snapshot.restore({"s": StateDict(x=0)}, select=(), unused="ignore", options=lenient).restored == 1
    with pytest.raises(RestoreError, match="the snapshot has no such key"):
        snapshot.restore({"u": StateDict(x=0)}, True, select=(), unused="ignore", options=lenient)


@pytest.mark.parametrize("verb", ["take", "async_take", "plan"])
def test_take_with_an_option_as_argument_shows_the_spelling(verb):
    state = {"s": StateDict(x=1)}
    given = (state,) if verb == "plan" else ("memory://wrong", state)
    with pytest.raises(TypeError, match=r"has no argument 'durable': pass options=TakeOptions\(durable=\.\.\.\)"):
        getattr(Snapshot, verb)(*given, durable=False)
    with pytest.raises(TypeError, match=r"options must be TakeOptions\(\.\.\.\), got \{'durable': False\}"):
        getattr(Snapshot, verb)(*given, options={"durable": False})


def test_restore_with_an_option_as_argument_shows_the_spelling():
    snapshot = Snapshot.take("memory://wrong", {"s": StateDict(x=1)}, overwrite=True)
    with pytest.raises(TypeError, match=r"has no argument 'cast': pass options=RestoreOptions\(cast=\.\.\.\)"):
        snapshot.restore({"s": StateDict(x=0)}, cast="any")
    with pytest.raises(TypeError, match=r"options must be RestoreOptions\(\.\.\.\), got TakeOptions"):
        snapshot.restore({"s": StateDict(x=0)}, options=TakeOptions())


def test_manager_options_are_those_of_all_takes_and_restores(tmp_path):
    given = TakeOptions(exclude=["s/y"])
    lenient = RestoreOptions(strict=False)
    with SnapshotManager(tmp_path, signals=(), take_options=given, restore_options=lenient) as manager:
        manager.take(1, {"s": StateDict(x=1, y=2)})
        manager.async_take(2, {"s": StateDict(x=1, y=2)}).wait()
        manager.take(3, {"s": StateDict(x=1, y=2)}, options=TakeOptions())
        assert ["0/s/y" in manager.snapshot(step).get_manifest() for step in (1, 2, 3)] == [False, False, True]
        assert manager.restore_latest({"s": StateDict(x=0), "more": StateDict(x=0)}) == 3
        with pytest.raises(RestoreError, match="more: the snapshot has no such key"):
            manager.restore_latest({"s": StateDict(x=0), "more": StateDict(x=0)}, options=RestoreOptions())


@pytest.mark.parametrize(
    ("name", "value"), [("strict", "no"), ("select", "s/**"), ("exclude", None), ("base", 3), ("cast", "somehow")]
)
def test_restore_options_error_names_the_invalid_argument(name, value):
    snapshot = Snapshot.take("memory://wrong", {"s": StateDict(x=1)}, overwrite=True)
    with pytest.raises((TypeError, ValueError), match=f"{name} must be .*, got "):
        snapshot.restore({"s": StateDict(x=0)}, options=RestoreOptions(**{name: value}))


def test_manager_with_an_option_as_argument_shows_the_spelling(tmp_path):
    with pytest.raises(TypeError, match=r"no argument 'durable': pass take_options=TakeOptions\(durable=\.\.\.\)"):
        SnapshotManager(tmp_path, durable=False)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"take_options": TakeOptions(staging="later")}, ValueError),
        ({"restore_options": RestoreOptions(cast="somehow")}, ValueError),
        ({"take_options": RestoreOptions()}, TypeError),
        ({"restore_options": {"strict": False}}, TypeError),
    ],
)
def test_manager_with_wrong_options_raises_when_it_is_made(tmp_path, wrong, error):
    with pytest.raises(error, match="must be"):
        SnapshotManager(tmp_path, signals=(), **wrong)
