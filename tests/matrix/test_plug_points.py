"""The script that looks at the plug points of frameworks, with releases that are written here."""

import tarfile
import zipfile

import pytest

from tests.matrix import plug_points
from tests.matrix.plug_points import POINTS, PlugPoint, Release, main, moved

POINT = PlugPoint(
    "framework", "framework/engine.py", "Engine", {"save": ("path", "step"), "wait": (), "load": None}, "x"
)
AS_KNOWN = """
class Engine(Base):
    def save(self, path, step, *, extra=None): ...
    async def wait(self): ...
    def load(self, anything): ...
"""


@pytest.fixture
def release(tmp_path):
    """Return a function that packs a release with some files."""

    def pack(files, kind="whl"):
        path = tmp_path / f"framework-9.1.0{'-py3-none-any.whl' if kind == 'whl' else '.tar.gz'}"
        if kind == "whl":
            with zipfile.ZipFile(path, "w") as made:
                for name, text in files.items():
                    made.writestr(name, text)
        else:
            with tarfile.open(path, "w:gz") as made:
                for name, text in files.items():
                    (tmp_path / "file").write_text(text)
                    made.add(tmp_path / "file", f"framework-9.1.0/{name}")
        return Release(path)

    return pack


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_plug_points_of_a_known_release_have_not_moved(release, kind):
    found = release({"framework/engine.py": AS_KNOWN}, kind)
    assert found.version == "9.1.0"
    assert moved(found, POINT) == []


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"framework/engine.py": AS_KNOWN.replace("path, step, *", "folder, step, *")},
            "framework 9.1.0: framework/engine.py: Engine.save takes (folder, step, extra) now, and "
            "snapshot_trainers.x knows (path, step).",
        ),
        (
            {"framework/engine.py": AS_KNOWN.replace("wait(self)", "wait(self, timeout)")},
            "framework 9.1.0: framework/engine.py: Engine.wait takes (timeout) now, and snapshot_trainers.x knows ().",
        ),
        (
            {"framework/engine.py": AS_KNOWN.replace("load", "read")},
            "framework 9.1.0: framework/engine.py has no Engine.load, which snapshot_trainers.x uses.",
        ),
        (
            {"framework/engine.py": "", "framework/new/engines.py": AS_KNOWN},
            "framework 9.1.0: framework/engine.py has no Engine, which snapshot_trainers.x uses: it is in "
            "framework/new/engines.py now.",
        ),
        (
            {"framework/other.py": ""},
            "framework 9.1.0: framework/engine.py does not exist, which had Engine, which snapshot_trainers.x uses: no "
            "file of the release has it.",
        ),
    ],
)
def test_plug_points_that_moved_are_reported(release, files, sentence):
    assert moved(release(files), POINT) == [sentence]


def test_plug_points_of_module_functions_and_parameter_counts(release):
    found = release({"framework/engine.py": "def save(path, step=None): ...\n"})
    assert moved(found, PlugPoint("framework", "framework/engine.py", "", {"save": 2}, "x")) == []
    (sentence,) = moved(found, PlugPoint("framework", "framework/engine.py", "", {"save": 3}, "x"))
    assert sentence.endswith("save takes (path, step) now, and snapshot_trainers.x knows 3 parameters.")


def test_plug_points_exit_status_reports_a_move(monkeypatch, release, tmp_path, capsys):
    release({"framework/engine.py": AS_KNOWN.replace("save", "store")}).close()
    (made,) = tmp_path.glob("*.whl")
    monkeypatch.setattr(plug_points, "POINTS", (POINT,))
    monkeypatch.setattr(plug_points, "download", lambda package, folder: made)
    assert main([]) == 1
    assert "has no Engine.save" in capsys.readouterr().out
    monkeypatch.setattr(plug_points, "download", lambda package, folder: "no matching distribution")
    assert main([]) == 2
    assert capsys.readouterr().out == "framework could not be had: no matching distribution\n"


def test_plug_points_list_each_adapter():
    assert {point.adapter for point in POINTS} >= {"transformers", "torchtitan", "torchft", "verl", "skyrl", "vllm"}
    assert all(point.functions for point in POINTS)
