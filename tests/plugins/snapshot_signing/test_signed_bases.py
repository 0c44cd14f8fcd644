"""Signed takes that share files with earlier snapshots, or leave tensors to them."""

import pytest
import torch

from snapshot import (
    CorruptSnapshotError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot.errors import SignatureError
from snapshot.save.base_files import Comparer
from snapshot.testing import Log, tapped
from snapshot_tiers import Near
from tests.helpers.states import flip
from tests.helpers.weight_folders import Adapted


def state(changed):
    """A tensor that changes, a frozen one, and others."""
    frozen = torch.nn.Linear(700, 1000, bias=False).requires_grad_(False)
    frozen.weight.fill_(3.0)
    return {
        "frozen": frozen,
        "s": StateDict(
            kept=torch.arange(800_000, dtype=torch.float32), changed=torch.full((300_000,), float(changed)), n=changed
        ),
    }


def frozen_file(path):
    """The file that has the tensor that all takes share."""
    return path / Snapshot(path)._manifest.open().manifest["0/frozen/weight"].location


def shared(path):
    """The data files that the last take shared."""
    return [path / name for name, file in Snapshot(path)._manifest.open().files.items() if file.origin]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_signature_covers_files_shared_with_a_base(tmp_path, secret, public, compression):
    one, two = tmp_path / "one", tmp_path / "two"
    Snapshot.take(one, state(1), base=[], options=TakeOptions(sign=secret, compression=compression))
    taken = Snapshot.take(two, state(2), base=one, options=TakeOptions(sign=secret, compression=compression))
    assert taken.report.shared_files
    assert Snapshot(two, key=public).verify()
    Snapshot(one).delete()
    assert Snapshot(two, key=public).verify()
    for file in shared(two):
        flip(file, -9)
        assert not Snapshot(two, key=public).verify()
        flip(file, -9)


def test_signed_base_hashes_are_used_without_reading_the_file(tmp_path, secret, public):
    one = f"watched+file://{tmp_path}/one"
    log = Log()
    with tapped("watched", log):
        Snapshot.take(one, state(1), base=[], options=TakeOptions(sign=secret))
        for number, base in enumerate((one, one), 2):
            log.operations.clear()
            Snapshot.take(
                f"watched+file://{tmp_path}/{number}", state(number), base=base, options=TakeOptions(sign=secret)
            )
            assert sum(each.nbytes for each in log.of("read_into", "*.safetensors")) == 0
            assert Snapshot(tmp_path / f"{number}", key=public).verify()


def keyed(path, key):
    return Snapshot(path, key=key)


def unkeyed(path, key):
    return path


@pytest.mark.parametrize("base", [unkeyed, keyed])
def test_signed_base_bytes_changed_since_are_not_signed_again(tmp_path, secret, public, monkeypatch, base):
    """The signed hashes of the base are used, so a change is found even if the take's sample of the file misses it."""
    monkeypatch.setattr(Comparer, "is_sound", lambda self, match: True)
    one, two = tmp_path / "one", tmp_path / "two"
    Snapshot.take(one, state(1), base=[], options=TakeOptions(sign=secret))
    flip(frozen_file(one), -9)
    assert Snapshot.take(two, state(2), base=base(one, public), options=TakeOptions(sign=secret)).report.shared_files
    assert any("not the signed ones" in fault for fault in Snapshot(two, key=public).verify().faults)


def test_signed_base_with_a_damaged_sample_is_written_again(tmp_path, secret, public):
    one, two = tmp_path / "one", tmp_path / "two"
    Snapshot.take(one, state(1), base=[], options=TakeOptions(sign=secret))
    flip(frozen_file(one), -9)
    report = Snapshot.take(two, state(2), base=one, options=TakeOptions(sign=secret, read_back=True)).report
    assert any("not the signed ones" in note for note in report.notes)
    assert Snapshot(two, key=public).verify()


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("how", ["never signed", "removed", "by another key", "damaged"])
def test_base_files_not_covered_by_a_signature_of_the_key_are_written_again(
    tmp_path, secret, public, stranger, compression, how
):
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    key = {"never signed": None, "by another key": stranger}.get(how, secret)
    Snapshot.take(one, state(1), base=[], options=TakeOptions(sign=key, compression=compression))
    if how == "removed":
        next((one / "data").glob("*.signature")).unlink()
    if how == "damaged":
        flip(next((one / "data").glob("*.signature")), -9)
    flip(frozen_file(one), -9)
    taken = Snapshot.take(two, state(2), base=one, options=TakeOptions(sign=secret, compression=compression))
    assert not taken.report.shared_files
    assert not shared(two)
    assert "no file is shared with the base, since this take's key does not sign it" in taken.report.notes[0]
    assert Snapshot(two, key=public).verify()
    assert Snapshot.take(
        three, state(3), base=two, options=TakeOptions(sign=secret, compression=compression)
    ).report.shared_files
    assert Snapshot(three, key=public).verify()


def test_base_signed_by_another_key_is_shared_if_that_key_is_given(tmp_path, secret, public, stranger):
    one, two = tmp_path / "one", tmp_path / "two"
    Snapshot.take(one, state(1), base=[], options=TakeOptions(sign=stranger))
    theirs = Snapshot(one, key=stranger.public_key())
    assert Snapshot.take(two, state(2), base=theirs, options=TakeOptions(sign=secret)).report.shared_files
    assert Snapshot(two, key=public).verify()


def test_base_with_a_key_must_be_signed(tmp_path, secret, public):
    one = tmp_path / "one"
    Snapshot.take(one, state(1), base=[])
    report = Snapshot.take(
        tmp_path / "two", state(2), base=Snapshot(one, key=public), options=TakeOptions(sign=secret)
    ).report
    assert not report.shared_files
    assert "is not signed" in report.notes[0]
    Snapshot(one).sign(secret)
    assert Snapshot.take(
        tmp_path / "three", state(2), base=Snapshot(one, key=public), options=TakeOptions(sign=secret)
    ).report.shared_files
    assert Snapshot(tmp_path / "three", key=public).verify()


def test_only_trainable_base_must_be_signed_if_a_key_is_given(tmp_path, secret, public):
    one, two = tmp_path / "one", tmp_path / "two"
    Snapshot.take(one, state(1))
    Snapshot.take(two, state(2), base=one, options=TakeOptions(only="trainable", sign=secret))
    assert Snapshot(two, key=public).verify().in_base
    live = state(0)
    live["frozen"].weight.data.zero_()
    with pytest.raises(SignatureError, match="is not signed"):
        Snapshot(two, key=public).restore(live, options=RestoreOptions(base=one))
    assert not live["frozen"].weight.any()
    Snapshot(one).sign(secret)
    Snapshot(two, key=public).restore(live, options=RestoreOptions(base=one))
    assert live["frozen"].weight.eq(3).all()
    assert live["s"]["n"] == 2
    flip(frozen_file(one), -9)
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        Snapshot(two, key=public).restore(live, options=RestoreOptions(base=one, verify=False))


def test_only_trainable_signed_take_leaves_frozen_parameters_to_a_folder_of_weights(tmp_path, secret, public):
    """The folder has no signature, so no byte of it is read with a key: the application must have the values."""
    run = Adapted(tmp_path / "weights")
    first = run.take(tmp_path / "one", tmp_path / "weights", sign=secret)
    second = run.take(tmp_path / "two", tmp_path / "one", sign=secret)
    for made in (first, second):
        assert made.report.omitted_bytes == run.frozen_bytes
        verified = Snapshot(made.path, key=public).verify()
        assert verified
        assert verified.in_base == 6
        Snapshot(made.path, key=public).restore(run.state)
        value = run.pretrained[0].bias.clone()
        run.pretrained[0].bias.data.zero_()
        with pytest.raises(SnapshotError, match="with a key, no other format is read"):
            Snapshot(made.path, key=public).restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
        assert not run.pretrained[0].bias.any()
        Snapshot(made.path).restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
        assert run.pretrained[0].bias.equal(value)


def test_manager_signs_each_step_and_restores_signed_steps(tmp_path, secret, public):
    with SnapshotManager(tmp_path / "run", incremental=True, signals=()) as manager:
        for step in (1, 2, 3):
            manager.take(step, state(step), options=TakeOptions(sign=secret))
        manager.async_take(4, state(4)).wait()
        live = state(0)
        assert manager.restore_latest(live, key=public) == 3  # step 4 is not signed
        assert live["s"]["n"] == 3
        flip(frozen_file(tmp_path / "run" / "step-3"), -9)
        assert manager.restore_latest(live, key=public) == 2
        assert live["s"]["n"] == 2


def test_near_folders_refuse_keys(tmp_path, secret, public):
    (tmp_path / "near").mkdir()
    with SnapshotManager(
        tmp_path / "run", near=Near(tmp_path / "near", upload=None, replicas=0), signals=()
    ) as manager:
        with pytest.raises(ValueError, match="sign cannot be combined with near folders"):
            manager.take(1, state(1), options=TakeOptions(sign=secret))
        manager.take(2, state(2))
        with pytest.raises(ValueError, match="key must be None for near steps"):
            manager.restore_latest(state(0), key=public)
