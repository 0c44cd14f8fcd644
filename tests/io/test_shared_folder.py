"""Folders that several processes share, and that the last one deletes."""

import errno
import os
import subprocess
import sys

import pytest

from snapshot.io.shared_folder import SharedFolder, delete_abandoned


def test_shared_folder_is_deleted_by_the_last_process(tmp_path):
    first, second = SharedFolder(tmp_path / "a"), SharedFolder(tmp_path / "a")
    (tmp_path / "a" / "file").write_bytes(b"x")
    first.close()
    first.close()
    assert (tmp_path / "a" / "file").exists()
    second.close()
    assert not (tmp_path / "a").exists()


def test_shared_folder_is_kept_if_a_forked_child_ends(tmp_path):
    code = """
import os, sys
from pathlib import Path
from snapshot.io.shared_folder import SharedFolder, delete_abandoned
held = SharedFolder(Path(sys.argv[1], "a"))
child = os.fork()
if not child:
    held.close()
    sys.exit(0)  # with all that runs at the exit of Python
assert os.waitpid(child, 0)[1] == 0
delete_abandoned(Path(sys.argv[1]), "a")
assert held.path.is_dir()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    assert not list(tmp_path.iterdir())  # the parent has ended


def test_delete_abandoned_deletes_only_abandoned_folders_of_the_prefix(tmp_path):
    used = SharedFolder(tmp_path / "a-1")
    (tmp_path / "a-3").mkdir()  # no process has had it
    child = os.fork()
    if not child:
        held = [SharedFolder(tmp_path / "a-2"), SharedFolder(tmp_path / "b-1")]
        os._exit(0 if len(held) == 2 else 1)  # nothing runs at the exit of Python
    os.waitpid(child, 0)
    delete_abandoned(tmp_path, "a-")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a-1", "a-3", "b-1"]
    used.close()


def test_shared_folder_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(OSError, match="only this user"):
            SharedFolder(tmp_path / name)


def test_shared_folder_without_file_locks_raises_and_closes_its_descriptor(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("snapshot.io.shared_folder.fcntl.flock", refuse)
        with pytest.raises(OSError, match="No locks"):
            SharedFolder(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == before
