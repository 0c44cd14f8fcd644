"""What must work without some plugins, in a copy that lacks them: see `tests/deletable.py`."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import snapshot
from snapshot import Snapshot, SnapshotManager, StateDict, Target, extensions
from snapshot.cli import main as command


def import_all(gone):
    """Import every module that is left; those of trainers may lack their frameworks."""
    assert Path(snapshot.__file__).parents[1].name == "site", f"{snapshot.__file__} is not the copy"
    for name in gone:
        assert importlib.util.find_spec(name) is None, f"{name} is not gone"
    for package in sorted(extensions.own_packages()):
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                cause = error.__cause__ if error.name is None else error
                missing = (getattr(cause, "name", None) or "snapshot").partition(".")[0]
                if missing in {"snapshot", *gone}:
                    raise


def state(value):
    return {"s": StateDict(w=torch.full((100,), float(value)), step=value, name="x")}


def use_core(folder):
    """Use the verbs of the core."""
    Snapshot.take(folder / "a", state(1))
    Snapshot.async_take(folder / "b", state(2)).wait()
    live = state(0)
    Snapshot(folder / "a").restore(live)
    assert live["s"]["w"].eq(1).all()
    assert Snapshot(folder / "b").read_object("0/s/step") == 2
    assert Snapshot(folder / "a").verify().ok
    assert len(Snapshot(folder / "a").get_manifest()) == 4
    Snapshot(folder / "a").copy(folder / "copy")
    assert not Snapshot.diff(folder / "a", folder / "b").same
    Snapshot(folder / "a").convert(Target(folder / "a.safetensors"), select=["s/w"])
    Snapshot(folder / "a").convert(Target(folder / "dcp", "dcp"))
    assert snapshot.load(folder / "a.safetensors")["w"].eq(1).all()
    torch.save({"w": torch.ones(3)}, folder / "t.pt")
    assert snapshot.load(folder / "t.pt")["w"].eq(1).all()
    Snapshot(folder / "copy").delete()
    with SnapshotManager(folder / "run", keep=1, signals=()) as manager:
        for step in (1, 2):
            manager.take(step, state(step))
        assert manager.restore_latest(live) == 2
    for words in (["ls", str(folder / "run")], ["show", str(folder / "a"), "s/w"], ["verify", str(folder / "a")],
                  ["--help"], ["doctor"]):  # fmt: skip
        assert command(words) in (0, 1), words


def rank(number, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=number, world_size=2)
    Snapshot.take(f"{folder}/ranks", state(number), replicated=["s/name"])
    live = state(-1)
    Snapshot(f"{folder}/ranks").restore(live)
    assert live["s"]["step"] == number
    dist.destroy_process_group()


if __name__ == "__main__":
    gone = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        ranks = mp.start_processes(rank, (work,), nprocs=2, join=False, start_method="fork")  # no thread has begun
        child = subprocess.Popen([sys.executable, "-m", "snapshot", "ls", "--help"], stdout=subprocess.DEVNULL)
        import_all(gone)
        use_core(Path(work))
        while not ranks.join():
            pass
        assert child.wait(300) == 0
