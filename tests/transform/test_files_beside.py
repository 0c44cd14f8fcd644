"""`Target(files=...)`: a folder of weights gets the small files that other libraries need to load it."""

import json

import pytest
import torch
import torch.distributed as dist

from snapshot import Snapshot, SnapshotExistsError, StateDict, Target, load
from snapshot.cli import main
from snapshot.errors import CorruptSnapshotError
from snapshot_merge import merge


@pytest.fixture
def taken(tmp_path):
    state = {"model": StateDict({f"w{n}": torch.full((64,), float(n)) for n in range(4)})}
    return Snapshot.take(tmp_path / "taken", state)


@pytest.fixture
def beside(tmp_path):
    folder = tmp_path / "beside"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", ".hidden"):
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "folder").mkdir()
    return folder


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_convert_copies_the_small_files_of_a_folder(taken, beside, tmp_path):
    report = taken.convert(Target(tmp_path / "hf", "safetensors", files=beside))
    assert names(tmp_path / "hf") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "hf" / "config.json").read_bytes() == (beside / "config.json").read_bytes()
    assert report.files == ("model.safetensors", "config.json", "tokenizer.json")
    assert report.nbytes == (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert len(load(tmp_path / "hf")) == 4


def test_convert_writes_given_contents_and_shards_with_an_index(taken, tmp_path):
    target = Target(tmp_path / "hf", "safetensors", files={"config.json": b"{}"}, shard_bytes=600)
    taken.convert(target)
    found = names(tmp_path / "hf")
    assert "config.json" in found
    assert "model.safetensors.index.json" in found
    assert len(found) > 3


def test_convert_replaces_files_only_with_overwrite(taken, beside, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("mine")
    with pytest.raises(SnapshotExistsError, match=r"config\.json: exists already"):
        taken.convert(Target(tmp_path / "hf", "safetensors", files=beside))
    assert names(tmp_path / "hf") == ["config.json"]
    assert (tmp_path / "hf" / "config.json").read_text() == "mine"
    taken.convert(Target(tmp_path / "hf", "safetensors", files=beside, overwrite=True))
    taken.convert(Target(tmp_path / "hf", "safetensors", files={"config.json": b"new"}, overwrite=True))
    assert (tmp_path / "hf" / "config.json").read_bytes() == b"new"


def test_files_that_are_wrong_are_refused_before_anything_is_written(taken, tmp_path):
    for wrong, error, text in [
        ({"model.bin": b""}, ValueError, "must not have weights"),
        ({"../x": b""}, CorruptSnapshotError, "must be a plain name"),
        ({"config.json": "text"}, TypeError, "must be bytes by name"),
        (3, TypeError, "must be a local folder, or contents by name, got 3"),
    ]:
        with pytest.raises(error, match=text):
            Target(tmp_path / "hf", "safetensors", files=wrong)
    for target in (
        Target(tmp_path / "snapshot", files={"config.json": b""}),
        Target(tmp_path / "model.safetensors", files={"config.json": b""}),
        Target(tmp_path / "model.pt", files={"config.json": b""}),
    ):
        with pytest.raises(ValueError, match=r"files must be None for .*, which is not a folder of another format"):
            taken.convert(target)
    with pytest.raises(ValueError, match="files must be None for a copy"):
        taken.copy(Target(tmp_path / "copy", files={"config.json": b""}))
    with pytest.raises(ValueError, match="files must be None for"):
        merge([taken, taken], Target(tmp_path / "merged", files={"config.json": b""}))
    with pytest.raises(ValueError, match="files must be a local folder, got"):
        taken.convert(Target(tmp_path / "hf", "safetensors", files=tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"files must not have '__0_0\.distcp', which to='dcp' writes"):
        taken.convert(Target(tmp_path / "dcp", "dcp", files={"__0_0.distcp": b""}))
    assert names(tmp_path) == ["taken"]


def test_cli_convert_and_merge_take_the_files_of_a_folder(taken, beside, tmp_path, capsys):
    to = ["--to", "safetensors", "--files", str(beside)]
    assert main(["convert", str(taken.path), str(tmp_path / "hf"), *to]) == 0
    assert main(["merge", str(taken.path), str(taken.path), "-o", str(tmp_path / "merged"), *to]) == 0
    assert (
        names(tmp_path / "hf") == names(tmp_path / "merged") == ["config.json", "model.safetensors", "tokenizer.json"]
    )


def test_merge_into_a_folder_that_transformers_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    for name in ("one", "two"):
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    sources = [tmp_path / "one", tmp_path / "two"]
    merge(sources, Target(tmp_path / "soup", "safetensors", files=tmp_path / "one"))
    made = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "soup").state_dict()
    halves = [transformers.GPT2LMHeadModel.from_pretrained(each).state_dict() for each in sources]
    for name, tensor in made.items():
        assert torch.equal(tensor, (halves[0][name] + halves[1][name]) / 2), name


def _convert(path, folder, files):
    Snapshot.take(
        path, {"model": StateDict({f"w{n}": torch.full((64,), float(n)) for n in range(4)})}, replicated=["**"]
    )
    mine = files if dist.get_rank() == 0 else f"{files}-of-another-host"  # only rank 0 reads it
    report = Snapshot(path).convert(Target(folder, "safetensors", files=mine, shard_bytes=600), ranks=True)
    return report.nbytes, sorted(report.files)


def test_convert_on_two_ranks_copies_the_files_once(two, beside, tmp_path):
    one, other = two.run(_convert, tmp_path / "both", tmp_path / "hf", beside)
    assert one == other
    assert {"config.json", "tokenizer.json"} < set(names(tmp_path / "hf"))
    assert len(load(tmp_path / "hf")) == 4
