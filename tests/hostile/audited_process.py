"""Run as a script, with a folder: does all that a user does, under Python's audit events, and fails if anything but the
writer process is started, unpickled, or written outside of the folder."""

import collections
import os
import sys
import warnings

import pytest
import torch

from snapshot import RNGState, Snapshot, StateDict, TakeOptions
from snapshot.cli import main
from snapshot.errors import UnsafeObjectError

RUNS = {
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "pty.spawn", "pickle.find_class",
    "ctypes.dlopen", "socket.connect", "subprocess.Popen", "shutil.rmtree",
}  # fmt: skip
CHANGES = {
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime",
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

sys.dont_write_bytecode = True  # of a module that no other test has imported yet
root = sys.argv[1]
met = []
watching = False


def hook(event, arguments):
    if not watching:
        return
    if event in RUNS:
        met.append((event, repr(arguments)[:5000]))
    elif event == "open" and not isinstance(arguments[0], int) and arguments[2] & WRITING:
        path = os.fsdecode(arguments[0])
        if not path.startswith((root + "/", "/dev/null")):
            met.append((event, path))
    elif event in CHANGES:
        paths = [os.fsdecode(each) for each in arguments if isinstance(each, (str, bytes))]
        met.extend((event, path) for path in paths if not path.startswith(root))


warnings.simplefilter("ignore")
model = torch.nn.Linear(3, 3)
text = StateDict(x=collections.UserDict(a=1), t="e" * 20_000)
app = {"m": model, "o": torch.optim.Adam(model.parameters()), "r": RNGState(), "s": text}
Snapshot.take(root + "/warm", app)
Snapshot(root + "/warm", allow_pickle=True).restore(app)
sys.addaudithook(hook)

watching = True
Snapshot.take(root + "/s", app)
Snapshot.take(root + "/s", app, overwrite=True)
Snapshot.async_take(root + "/t", app, options=TakeOptions(staging="overlapped")).wait()
taken = Snapshot(root + "/s")
assert taken.verify()
taken.restore({key: app[key] for key in "mor"}, unused="ignore")
with pytest.raises(UnsafeObjectError):
    taken.restore(app)
assert taken.get_manifest()
assert taken.metadata
taken.read_object("0/m/weight")
taken.delete()
assert main(["verify", root + "/t"]) == 0
watching = False
assert not met, met

watching = True
Snapshot.async_take(root + "/u", app, options=TakeOptions(worker="process")).wait()
watching = False
started = [each for each in met if each[0] == "subprocess.Popen"]
assert len(started) == 1, met
assert sys.executable in started[0][1], met
assert "find_spec" in started[0][1], met
assert {each[0] for each in met} <= {"subprocess.Popen", "os.fork", "os.posix_spawn"}, met
