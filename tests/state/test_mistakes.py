"""What is passed by mistake: each error says what to pass instead, and nothing is written."""

import difflib
import logging
import traceback
from types import SimpleNamespace

import pytest
import torch

from snapshot import (
    RestoreError,
    RNGState,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    SnapshotManager,
    SnapshotNotFoundError,
    StateDict,
)
from snapshot.formats import mistakes


def model():
    return torch.nn.Linear(2, 2)


def optimizer():
    return torch.optim.SGD(model().parameters(), lr=0.1)


class Loaded:
    pass


VALUES = {
    "module": (lambda: model().state_dict(), "pass the module itself, not its state_dict()"),
    "optimizer": (lambda: optimizer().state_dict(), "pass the optimizer itself, not its state_dict()"),
    "tensors": (lambda: dict(model().state_dict()), "wrap the dict: StateDict(the_dict); if it is the state_dict() of"),
    "dict": (lambda: {"epoch": 1}, "wrap the dict: StateDict(the_dict)"),
    "empty dict": (dict, "wrap the dict: StateDict(the_dict)"),
    "int": (lambda: 3, "wrap plain values: StateDict(it=...)"),
    "tensor": (lambda: torch.zeros(2), "wrap plain values: StateDict(it=...)"),
    "none": (lambda: None, "wrap plain values: StateDict(it=...)"),
    "loader": (lambda: torch.utils.data.DataLoader([1]), "pass torchdata's StatefulDataLoader, or LoaderState(loader)"),
    "generator": (torch.Generator, "wrap it: StateDict(it=...), or pass RNGState()"),
    "class": (lambda: RNGState, "pass an object of it: RNGState(...)"),
    "object": (Loaded, "give the class both methods, or wrap its values: StateDict(it=...)"),
}


@pytest.mark.parametrize("what", VALUES)
def test_app_state_error_says_what_to_pass_for_each_value(tmp_path, what):
    make, advice = VALUES[what]
    wanted = advice.replace("(", r"\(").replace(")", r"\)").replace("...", r"\.\.\.")
    for take in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(TypeError, match=rf"app_state\['it'\] is .*{wanted}"):
            take(tmp_path / "s", {"it": make(), "rng": RNGState()})
    with pytest.raises(TypeError, match=wanted):
        Snapshot(tmp_path / "s").restore({"it": make()})
    assert not (tmp_path / "s").exists()


def test_app_state_error_for_a_key_that_is_no_name_has_a_keyword_that_is_one():
    with pytest.raises(TypeError, match=r"StateDict\(value=\.\.\.\)"):
        Snapshot.take("memory://mistakes/key", {"my step": 3})


def test_swapped_arguments_are_called_swapped(tmp_path):
    app_state = {"state": StateDict(step=1)}
    for take in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(TypeError, match=r"got a str; the path comes first: take\(path, app_state\)"):
            take(app_state, str(tmp_path / "s"))
    with pytest.raises(TypeError, match=r"got a Linear; give it a name, as in \{'model': model\}"):
        Snapshot.take(tmp_path / "s", model())
    with SnapshotManager(tmp_path / "run", signals=()) as manager:
        for take in (manager.take, manager.async_take):
            with pytest.raises(TypeError, match=r"got a dict; the step comes first: take\(step, app_state\)"):
                take(app_state, 1)
            with pytest.raises(TypeError, match="step must be an integer, got '1'"):
                take("1", app_state)
        assert manager.steps() == []


def test_globs_that_are_no_list_of_strings_are_called_so(tmp_path):
    for wrong in ([3], 3, "model/**"):
        with pytest.raises(TypeError, match="must be a list of globs, got"):
            Snapshot.take(tmp_path / "s", {"state": StateDict(step=1)}, replicated=wrong)


def lines_of(error):
    return "".join(traceback.format_exception(error)).splitlines()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_path_with_a_typo_names_what_is_beside_it_in_a_short_traceback(tmp_path, scheme):
    root = tmp_path if scheme == "file" else "memory://mistakes/run"
    for step in (1, 2, 10):
        Snapshot.take(f"{root}/step-{step}", {"state": StateDict(step=step)})
    wrong = Snapshot(f"{root}/stpe-1")
    live = {"state": StateDict(step=0)}
    for use in (lambda: wrong.restore(live), wrong.get_manifest, wrong.verify, lambda: wrong.read_object("0/state")):
        with pytest.raises(SnapshotNotFoundError) as caught:
            use()
        assert str(caught.value) == (
            f"{root}/stpe-1: no snapshot found: nothing exists there; {root} has step-1, step-2, step-10; did you mean "
            f"{root}/step-1?"
        )
        assert caught.value.__cause__ is None
        assert len(lines_of(caught.value)) < 12
    assert live["state"]["step"] == 0


def test_path_below_a_folder_that_does_not_exist_or_is_empty_says_so(tmp_path):
    with pytest.raises(SnapshotNotFoundError, match=r"/x/y: no snapshot found: nothing exists there$"):
        Snapshot(tmp_path / "x" / "y").get_manifest()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SnapshotNotFoundError, match=r"/empty: no snapshot found: the folder is empty$"):
        Snapshot(tmp_path / "empty").get_manifest()


def test_errors_that_say_all_have_short_tracebacks_and_keep_their_causes(tmp_path):
    snapshot = Snapshot.take(tmp_path / "s", {"m": model()})
    with pytest.raises(SnapshotExistsError) as caught:
        Snapshot.take(tmp_path / "s", {"m": model()})
    assert len(lines_of(caught.value)) < 12
    with pytest.raises(RestoreError) as caught:
        snapshot.restore({"m": torch.nn.Linear(3, 2)})
    assert len(lines_of(caught.value)) < 15

    class Refuses(StateDict):
        def load_state_dict(self, state_dict):
            raise ZeroDivisionError("mine")

    Snapshot.take(tmp_path / "r", {"r": Refuses(a=1)})
    with pytest.raises(ZeroDivisionError) as caught:
        Snapshot(tmp_path / "r").restore({"r": Refuses(a=2)})
    assert "load_state_dict" in "".join(lines_of(caught.value))


def test_root_without_steps_is_logged_as_a_new_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, "snapshot")
    with SnapshotManager(tmp_path / "rnu", signals=()) as manager:
        assert manager.restore_latest({"state": StateDict(step=0)}) is None
    assert f"{tmp_path}/rnu: nothing to restore: there are no steps, so this is a new run" in caplog.messages


def test_step_as_the_root_is_no_new_run(tmp_path):
    state = {"state": StateDict(step=0)}
    with SnapshotManager(tmp_path / "run", signals=()) as manager:
        manager.take(1, state)
    with (
        SnapshotManager(tmp_path / "run/step-1", signals=()) as manager,
        pytest.raises(SnapshotError, match="is a snap"),
    ):
        manager.restore_latest(state)


def test_scaler_that_was_saved_disabled_is_refused_before_anything_is_written(tmp_path):
    def scaler(enabled):
        return torch.amp.GradScaler("cpu", enabled=enabled)

    saved, live = model(), model()
    before = live.weight.clone()
    Snapshot.take(tmp_path / "off", {"model": saved, "scaler": scaler(False)})
    off = Snapshot(tmp_path / "off")
    with pytest.raises(RestoreError, match="scaler: was saved by a disabled GradScaler, and this one is enabled"):
        off.restore({"model": live, "scaler": scaler(True)})
    assert torch.equal(live.weight, before)
    off.restore({"model": live, "scaler": scaler(False)})
    assert torch.equal(live.weight, saved.weight)
    on = scaler(True)
    on.load_state_dict({**on.state_dict(), "scale": 128.0, "_growth_tracker": 7})
    Snapshot.take(tmp_path / "on", {"scaler": on})
    again = scaler(True)
    Snapshot(tmp_path / "on").restore({"scaler": again})
    assert again.state_dict() == on.state_dict()
    Snapshot(tmp_path / "on").restore({"scaler": scaler(False)})  # torch's disabled one takes nothing


class Opens:
    """An object whose state_dict and load_state_dict open a snapshot that is not there."""

    def __init__(self, path):
        self.path = path

    def state_dict(self):
        return {} if self.path is None else Snapshot(self.path).get_manifest()

    def load_state_dict(self, state):
        try:
            state["phase"]
        except KeyError:
            Snapshot("memory://nothing").get_manifest()


def frames_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_traceback_keeps_the_frames_of_the_application(tmp_path):
    with pytest.raises(SnapshotNotFoundError) as caught:
        Snapshot.take(tmp_path / "s", {"curriculum": Opens("memory://nothing")})
    assert "state_dict" in frames_of(caught.value)
    made = Snapshot.take(tmp_path / "s", {"curriculum": Opens(None)})
    with pytest.raises(SnapshotNotFoundError) as caught:
        made.restore({"curriculum": Opens(None)})
    assert "load_state_dict" in frames_of(caught.value)
    assert isinstance(caught.value.__context__, KeyError)


def test_traceback_keeps_the_error_that_the_application_handles(tmp_path):
    def resume():
        try:
            raise RuntimeError("the node is gone")
        except RuntimeError:
            Snapshot(tmp_path / "missing").restore({"progress": StateDict(step=1)})

    with pytest.raises(SnapshotNotFoundError) as caught:
        resume()
    assert str(caught.value.__context__) == "the node is gone"
    assert not caught.value.__suppress_context__
    assert len(frames_of(caught.value)) <= 4


def test_a_mistyped_path_in_a_large_folder_is_compared_with_few_names(tmp_path, monkeypatch):
    compared = []

    def find(name, names, **options):
        compared.append(len(names))
        return difflib.get_close_matches(name, names, **options)

    monkeypatch.setattr(mistakes, "difflib", SimpleNamespace(get_close_matches=find))
    for number in range(3000):
        (tmp_path / f"finetune{number:04}.log").touch()
    (tmp_path / "fine\x1btune-3").touch()
    Snapshot.take(tmp_path / "finetune-3", {"progress": StateDict(step=1)})
    with pytest.raises(SnapshotNotFoundError, match=r"did you mean .*/finetune-3\?$"):
        Snapshot(tmp_path / "finetnue-3").get_manifest()
    assert compared == [mistakes.COMPARED]


def test_a_link_to_nothing_is_not_named_as_what_was_meant(tmp_path):
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    with pytest.raises(SnapshotNotFoundError) as caught:
        Snapshot(tmp_path / "latest").get_manifest()
    assert "did you mean" not in str(caught.value)
