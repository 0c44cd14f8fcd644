"""Reading back what was written before the commit: what was damaged on its way is never committed."""

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, StateDict, TakeOptions
from snapshot.testing import faulty, recording


def state():
    return {"s": StateDict(big=torch.arange(3 << 20), small=torch.ones(7), text="x" * 2_000_000, n=3)}


def committed(made):
    return made.wait() if hasattr(made, "wait") else made


@pytest.mark.parametrize("verb", ["take", "async_take"])
@pytest.mark.parametrize("on", ["write", "finish"])
@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("path", ["*.safetensors", "*.bin"])
def test_read_back_does_not_commit_a_flipped_bit(tmp_path, verb, on, place, path):
    url = f"{place}://{tmp_path if place == 'file' else 'flipped'}/s"
    fault = {"on": on, "path": path, "flip": 70_000}
    with faulty(**fault):
        committed(getattr(Snapshot, verb)(f"faulty+{url}", state(), overwrite=True))
    assert not Snapshot(url).verify()  # this is what happens without
    with faulty(**fault), pytest.raises(CorruptSnapshotError, match="nothing was committed") as caught:
        committed(
            getattr(Snapshot, verb)(f"faulty+{url}-2", state(), overwrite=True, options=TakeOptions(read_back=True))
        )
    assert caught.value.faults
    assert not Snapshot(f"{url}-2").exists()
    committed(getattr(Snapshot, verb)(f"{url}-2", state(), overwrite=True, options=TakeOptions(read_back=True)))
    assert Snapshot(f"{url}-2").verify()
    Snapshot(f"{url}-2").delete()


def test_read_back_failure_keeps_the_old_snapshot(tmp_path):
    Snapshot.take(tmp_path / "s", state())
    before = Snapshot(tmp_path / "s").metadata.save_id
    with faulty(on="write", path="*.safetensors", flip=9), pytest.raises(CorruptSnapshotError):
        Snapshot.take(f"faulty+file://{tmp_path}/s", state(), overwrite=True, options=TakeOptions(read_back=True))
    assert Snapshot(tmp_path / "s").metadata.save_id == before
    assert Snapshot(tmp_path / "s").verify()


@pytest.mark.parametrize(
    ("share", "least", "most"), [(True, 1.0, 1.05), (1, 1.0, 1.05), (0.3, 0.1, 0.6), (False, 0, 0)]
)
def test_read_back_fraction_reads_that_share(share, least, most):
    app = {"s": StateDict(big=torch.arange(8 << 20))}
    with recording() as log:
        Snapshot.take("recording+memory://share", app, overwrite=True, options=TakeOptions(read_back=share))
    read = sum(each.nbytes for each in log.operations if each.name == "read_into" and each.path.endswith("safetensors"))
    assert least <= read / (64 << 20) <= most


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_read_back_refuses_an_invalid_fraction_before_writing(tmp_path, share):
    with pytest.raises(ValueError, match="read_back must be"):
        Snapshot.take(tmp_path / "s", state(), options=TakeOptions(read_back=share))
    assert not (tmp_path / "s").exists()
