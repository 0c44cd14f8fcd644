"""Whenever an export or its removal is killed, it is complete or not there, for all who read it."""

import subprocess
import sys

import pytest

from tests.helpers.trees import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.deadly]
KILLED = """
import os, shutil, signal, sys, traceback
from dataclasses import replace
from pathlib import Path
import torch
from safetensors.torch import load_file
from snapshot import Snapshot, StateDict
from snapshot.io.url import URL
from snapshot.manager.root import Root
from snapshot_export import KeptExport
from snapshot_export.export_folders import MADE_OF, ExportFolders

scheme, folder = sys.argv[1], Path(sys.argv[2])
made, record = folder / "step-1-hf", folder / "step-1-hf" / MADE_OF
WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.listdir", "os.scandir")

def call(work, number=0):
    '''Call in a fork, and kill it before its call of the system with a number. Return how it ended.'''
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    calls = 0
    def look(name, arguments):
        nonlocal calls
        if name in WATCHED and any(str(folder) in str(each) for each in arguments[:2]):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

def is_complete():
    '''Tell whether the export is there, as a reader finds it.'''
    if not made.exists() if scheme == "file" else not record.exists() or record.read_text() != "the save id":
        return False
    assert record.read_text() == "the save id"
    assert (made / "config.json").read_text() == "{}"
    found = {name: each for file in made.glob("*.safetensors") for name, each in load_file(file).items()}
    assert found.keys() == state.keys() and all(found[name].equal(state[name]) for name in state), sorted(found)
    assert len(list(made.glob("*.json"))) == 1 + several
    return True

def exports():
    return ExportFolders(Root(URL.parse(f"{scheme}://{folder}"), None), "hf")

def export():
    target = replace(KeptExport(files={"config.json": b"{}"}).target(), shard_bytes=600 if several else 1 << 30)
    exports().export(target, {"select": ["model/**"]}, 1, "the save id")

def clean():
    exports().remove_leftovers()

def remove():
    exports().remove(1)

state = {f"w{number}": torch.full((64,), float(number)) for number in range(4)}
take = lambda: Snapshot.take(folder / "step-1", {"model": StateDict(state), "more": StateDict(x=torch.ones(9))})
assert call(take) == 0
for several in (False, True):
    kills = 0
    while (code := call(export, kills + 1)) == -signal.SIGKILL:
        kills += 1
        complete = is_complete()
        if kills % 2 and scheme == "file":  # else the next one finds the leftovers
            complete and call(remove)
            assert call(clean) == 0
            assert {each.name for each in folder.iterdir()} == {"step-1"}
        elif scheme == "file" and complete:
            assert call(remove) == 0
    assert code == 0 and is_complete() and kills > 15, (code, kills)
    print(scheme, "sharded" if several else "whole", "export killed", kills, "times")
    kills = 0
    while (code := call(remove, kills + 1)) == -signal.SIGKILL:
        kills += 1
        if not is_complete():
            assert call(clean) == 0
            if not made.exists():
                assert call(export) == 0
            elif kills % 2:
                assert call(remove) == 0 and call(export) == 0
    assert code == 0 and kills > 3, (code, kills)
    print(scheme, "sharded" if several else "whole", "removal killed", kills, "times")
    assert call(clean) == 0
    if scheme != "file" and made.exists():  # stores of objects have no folders, nor files that are renamed later
        assert not [each.name for each in made.iterdir() if each.suffix != ".tmp"]
        shutil.rmtree(made)
    assert {each.name for each in folder.iterdir()} == {"step-1"}, list(folder.iterdir())
"""


@pytest.mark.parametrize("scheme", ["file", "fsspec+local"])
def test_killed_exports_and_removals_are_complete_or_not_there(scheme, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, scheme, tmp_path],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=390,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-4000:]


REMOVED = """
import shutil, sys
from pathlib import Path
import torch
from snapshot import Snapshot, SnapshotError, StateDict
from snapshot.io.url import URL
from snapshot.manager.root import Root
from snapshot_export import KeptExport
from snapshot_export.export_folders import MADE_OF, ExportFolders

folder = Path(sys.argv[1])
aside = folder / ".export-step-1-safetensors"
removals = []

def remove(name, arguments):
    ends = name == "open" and f"/{MADE_OF}" in str(arguments[0]) and (aside / "model.safetensors").exists()
    if ends and not removals:
        removals.append(name)
        shutil.rmtree(aside)

Snapshot.take(folder / "step-1", {"model": StateDict(weight=torch.ones(9))})
sys.addaudithook(remove)
try:
    ExportFolders(Root(URL.parse(str(folder)), None), "safetensors").export(KeptExport().target(), {}, 1, "the save id")
except SnapshotError as error:
    print(error)
assert removals
assert not (folder / "step-1-safetensors").exists()
"""


def test_export_whose_folder_is_removed_at_its_end_is_not_published(tmp_path):
    """As by a manager of a job that was started again, while the process of the first one has not ended yet."""
    command = [sys.executable, "-c", REMOVED, tmp_path]
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "was removed meanwhile" in ended.stdout


BETWEEN = """
import sys, threading
from pathlib import Path
import torch
from snapshot import Snapshot, StateDict
from snapshot.io.url import URL
from snapshot.manager.root import Root
from snapshot_export import KeptExport
from snapshot_export.export_folders import ExportFolders

folder = Path(sys.argv[1])
made = folder / "step-1-safetensors"
exports = ExportFolders(Root(URL.parse(str(folder)), None), "safetensors")
begun, over = threading.Event(), threading.Event()

def other():
    exports.remove_leftovers()
    begun.set()

remover = threading.Thread(target=other)

def hook(name, arguments):
    if name == "os.rename" and str(arguments[1]) == str(made):
        remover.start()
        begun.wait()
    if name == "os.remove" and threading.current_thread() is remover:
        begun.set()
        over.wait()

Snapshot.take(folder / "step-1", {"model": StateDict(weight=torch.ones(9))})
sys.addaudithook(hook)
try:
    exports.export(KeptExport().target(), {}, 1, "the save id")
except OSError as error:
    print(error)
over.set()
remover.join()
assert not made.exists(), list(made.iterdir())
exports.remove_leftovers()
assert [each.name for each in folder.iterdir()] == ["step-1"]
"""


def test_export_whose_removal_has_just_begun_is_not_published(tmp_path):
    """As above, but between the last look at the files and the rename."""
    command = [sys.executable, "-c", BETWEEN, tmp_path]
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert ended.returncode == 0, ended.stderr[-4000:]
