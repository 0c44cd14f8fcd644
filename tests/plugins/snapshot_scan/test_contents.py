"""`snapshot scan` of files of all kinds: by their contents, whatever their names."""

import warnings
import zlib

import pytest
import torch

from snapshot_scan.contents import MOST_INFLATED, Examination, Region, of_bytes
from tests.plugins.snapshot_scan.hostile_files import HIDDEN, SAFE, SUSPICIOUS, zipped
from tests.plugins.snapshot_scan.hostile_pickles import headed, named


def findings(file, data):
    examination = Examination(file)
    examination.examine(of_bytes(data))
    return [each for each in examination.findings if each.verdict != "harmless"]


@pytest.mark.parametrize("file", HIDDEN)
def test_scan_finds_what_a_file_hides(file):
    found = findings(file, HIDDEN[file])
    assert "runs code" in {each.verdict for each in found}


@pytest.mark.parametrize("file", SUSPICIOUS)
def test_scan_finds_what_is_suspicious(file):
    data, rule = SUSPICIOUS[file]
    assert rule in {each.rule for each in findings(file, data)}


@pytest.mark.parametrize("file", SAFE)
def test_scan_finds_nothing_in_a_safe_file(file):
    assert findings(file, SAFE[file]) == []


@pytest.mark.parametrize("zip_format", [True, False])
def test_scan_of_torch_files_finds_only_unknown_classes(tmp_path, zip_format):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    path = tmp_path / "model.pt"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "dtype": torch.bfloat16}
    torch.save(state, path, _use_new_zipfile_serialization=zip_format)
    assert findings("model.pt", path.read_bytes()) == []
    torch.save(model, path, _use_new_zipfile_serialization=zip_format)
    found = findings("model.pt", path.read_bytes())
    assert {each.verdict for each in found} == {"unknown"}
    assert {each.name for each in found} - {None} == {"torch.nn.modules.linear.Linear"}


def test_scan_names_torchscript(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "model.pt")
    assert "TorchScript code" in {each.text for each in findings("model.pt", (tmp_path / "model.pt").read_bytes())}


def test_scan_reads_little_of_a_large_archive():
    """Members with tensors are not read as a whole."""
    data = zipped([("m/data.pkl", headed(named("a", "b") + b".")), ("m/data/0", bytes(8 << 20))])
    read = []

    def source(begin, count):
        read.append(count)
        return data[begin : begin + count]

    examination = Examination("model.pt")
    examination.examine(Region(source, len(data)))
    assert [each.text for each in examination.findings] == ["names a.b"]
    assert sum(read) < 1 << 20


def test_scan_limits_the_decompressed_bytes_of_a_file(monkeypatch):
    monkeypatch.setattr("snapshot_scan.contents.MOST_INFLATED", 1 << 20)
    bomb = zlib.compress(bytes(300 << 10))
    data = zipped([(f"{number}.z", bomb) for number in range(9)])
    assert "limit" in {each.rule for each in findings("bombs.zip", data)}
    assert MOST_INFLATED == 1 << 30


def test_scan_limits_the_members_of_a_file(monkeypatch):
    monkeypatch.setattr("snapshot_scan.contents.MOST_CONTENTS", 20)
    inner = zipped([(str(number), b"") for number in range(9)])
    found = findings("many.zip", zipped([(str(number), inner) for number in range(9)]))
    assert [(each.member, each.text) for each in found] == [("", "more than 20 members")]


def test_scan_of_hdf5_names_lambda_layers(tmp_path):
    h5py = pytest.importorskip("h5py")
    from tests.plugins.snapshot_scan.hostile_files import KERAS

    for config, rules in ((KERAS, {"model"}), ("{}", set())):
        with h5py.File(tmp_path / "model.h5", "w") as file:
            file.attrs["model_config"] = config
        assert {each.rule for each in findings("model.h5", (tmp_path / "model.h5").read_bytes())} == rules
