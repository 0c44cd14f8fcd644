"""Real files of other libraries, in `foreign_files.zip`: each is opened or named, and none is called corrupt.

`write_foreign_files.py` wrote them, with these libraries: torch 1.0 to 2.13, NumPy, h5py, Keras, gguf, ONNX, zarr,
joblib, scikit-learn, Flax, Orbax, TensorFlow, Stable-Baselines3, PEFT and DeepSpeed.
"""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, SnapshotNotFoundError, StateDict
from snapshot.errors import UnsupportedFormatError
from snapshot.formats.foreign import UnknownFormatError
from tests.formats.hugging_face_folders import write
from tests.helpers.versions import ALONE

ARCHIVE = Path(__file__).with_name("foreign_files.zip")
NAMES = [name for name in zipfile.ZipFile(ARCHIVE).namelist() if not name.endswith("/")]
FOLDERS = sorted({str(parent) for name in NAMES for parent in Path(name).parents} - {"."})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    zipfile.ZipFile(ARCHIVE).extractall(folder)
    return folder


NAMED = {
    "array.npy": "a NumPy array (npy)",
    "arrays.npz": "a NumPy archive (npz)",
    "compressed.npz": "a NumPy archive (npz)",
    "weights.h5": "an HDF5 file",
    "model.weights.h5": "an HDF5 file",
    "model.joblib": "a bare pickle",
    "sklearn.pkl": "a bare pickle",
    "program.pt2": "a program of torch.export",
    "script.pt": "a TorchScript program",
    "torch/torch-1.0.1.pt": "a bare pickle, as written by torch.save before torch 1.6",
    "torch/torch-1.5.1.pt": "a bare pickle, as written by torch.save before torch 1.6",
    "torch/script-1.0.1.pt": "a TorchScript program",
    "torch/script-1.12.1.pt": "a TorchScript program",
}


@pytest.mark.parametrize("name", NAMED)
def test_unsupported_format_is_named(files, name):
    with pytest.raises(UnsupportedFormatError) as caught:
        Snapshot(files / name).get_manifest()
    assert str(caught.value).startswith(f"{files / name}: {NAMED[name]}")
    assert not isinstance(caught.value, UnknownFormatError)
    assert not Snapshot(files / name).exists()


@pytest.mark.parametrize("name", [*NAMES, *FOLDERS])
def test_unsupported_format_error_never_calls_an_intact_file_corrupt(files, name):
    opened = Snapshot(files / name)
    if opened.exists():
        assert opened.verify()
    else:
        with pytest.raises((UnsupportedFormatError, SnapshotNotFoundError)):
            opened.get_manifest()


@pytest.mark.parametrize("version", ["1.6.0", "1.12.1"])
def test_torch_file_of_old_torch_versions_is_read(files, version):
    expected = torch.arange(6.0).view(2, 3)
    live = StateDict(model={}, optimizer={}, epoch=0)
    Snapshot(files / "torch" / f"torch-{version}.pt").restore({"s": live})
    model = live["model"]
    assert torch.equal(model["a.weight"], expected)
    assert torch.equal(model["a.t"], expected.t())
    assert model["tied"].data_ptr() == model["a.weight"].data_ptr()
    assert model["n"].tolist() == [1, 2]
    assert live["epoch"] == 3


def test_peft_adapters_are_opened(files):
    for folder in ("peft", "peft_bin"):
        found = Snapshot(files / folder).read_object("0")
        assert [tuple(each.shape) for each in found.values()] == [(1, 4), (4, 1)]


@pytest.mark.parametrize("folder", ["orbax_plain"])
def test_orbax_run_folder_error_names_its_steps(files, folder):
    step = {"orbax_plain": "5"}[folder]
    with pytest.raises(SnapshotNotFoundError, match=f"of a run, with the steps {step}; open .*/{folder}/{step}$"):
        Snapshot(files / folder).get_manifest()


def test_unfinished_torchsnapshot_rank_folders_are_not_steps(tmp_path):
    for name in ("0", "1", "replicated"):
        (tmp_path / name).mkdir()
    with pytest.raises(SnapshotNotFoundError, match="no snapshot found, or it was never committed"):
        Snapshot(tmp_path).get_manifest()


def test_snapshot_not_found_error_for_a_run_names_the_newest_committed_steps(tmp_path):
    for step in range(1, 12):
        Snapshot.take(tmp_path / f"step-{step}", {"s": StateDict(a=step)})
    (tmp_path / "step-11" / ".snapshot_metadata").unlink()
    with pytest.raises(SnapshotNotFoundError) as caught:
        Snapshot(tmp_path).get_manifest()
    assert str(caught.value) == (
        f"{tmp_path}: no snapshot found: the folder is of a run, with the steps step-6, step-7, step-8, step-9, "
        f"step-10 (and 5 before); open one of them, such as {tmp_path}/step-10"
    )
    assert not Snapshot(tmp_path).exists()


FOUND = {
    "lightning": (["epoch=1-step=9.ckpt", "epoch=1-step=10.ckpt"], r"the files .*, which may be .*step=10\.ckpt$"),
    "trainer": (["checkpoint-9/x", "checkpoint-10/x"], r"the steps checkpoint-9, checkpoint-10; open .*checkpoint-10$"),
    "megatron": (["iter_0000010/x", "latest_checkpointed_iteration.txt"], "the steps iter_0000010;"),
    "cache": (["snapshots/abc/x", "blobs/y"], "is a model in Hugging Face's cache; open .*: snapshots/abc"),
    "diffusers": (["model_index.json", "unet/x", "vae/x"], "is a pipeline of diffusers; open .*: unet, vae"),
}
"""Folders whose subfolders or files can be opened. An object store has no empty folders."""


@pytest.mark.parametrize("what", FOUND)
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_snapshot_not_found_error_names_what_can_be_opened_in_the_folder(tmp_path, scheme, what):
    names, expected = FOUND[what]
    with pytest.raises(
        SnapshotNotFoundError, match=f"no snapshot found: the folder (has |is of a run, with )?{expected}"
    ):
        Snapshot(placed(tmp_path, scheme, what, names)).get_manifest()


UNREAD = {
    "optimizer": (["zero_pp_rank_0_mp_rank_00_optim_states.pt"], "a part of a checkpoint of DeepSpeed"),
    "zarr": (["metadata.json", "common.pt", "model.w/.zarray"], "Megatron-core in zarr"),
    "llama": (["consolidated.00.pth", "consolidated.01.pth", "params.json"], "parts of one of Meta's models"),
}
"""Folders that are recognised by names alone, as these libraries document them."""


@pytest.mark.parametrize("what", UNREAD)
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_unsupported_format_of_a_folder_is_recognised_by_file_names(tmp_path, scheme, what):
    names, expected = UNREAD[what]
    with pytest.raises(UnsupportedFormatError, match=expected):
        Snapshot(placed(tmp_path, scheme, what, names)).get_manifest()


def placed(folder, scheme, what, names):
    """Write files, and return their folder's URL."""
    from snapshot.io.loop import run
    from snapshot.io.registry import open_storage
    from snapshot.io.storage import URL, Context

    url = str(folder) if scheme == "file" else f"memory://unread/{what}"
    storage = open_storage(URL.parse(url), {}, Context())
    for name in names:
        run(storage.put(name, b"x"))
    return url


HEADS = {
    "pointer.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer"),
    "page.bin": (b"<!DOCTYPE html><html>", "an HTML page"),
    "x.pt.gz": (b"\x1f\x8b\x08", "compressed as a whole"),
    "x.zst": (b"\x28\xb5\x2f\xfd\x00", "compressed as a whole"),
    "x.tar": (b"a.txt".ljust(257, b"\0") + b"ustar", "a tar file; unpack it"),
    ".metadata": (b"\x80\x02}.", "a part of a DCP checkpoint; open its folder"),
    ".snapshot_metadata": (b'{"format":', "the manifest of a snapshot; open its folder"),
}


@pytest.mark.parametrize("name", HEADS)
def test_unsupported_format_of_a_file_is_recognised_by_its_first_bytes(tmp_path, name):
    head, expected = HEADS[name]
    (tmp_path / name).write_bytes(head)
    with pytest.raises(UnsupportedFormatError, match=f"{name}: {expected}"):
        Snapshot(tmp_path / name).get_manifest()


UNKNOWN = {
    "text": (b"hello, this is not one", "this file is not a checkpoint of any known format"),
    "config.json": (b'{"a": 1}', "this JSON file is not an index of tensors"),
    "empty.pt": (b"", "not a checkpoint of any known format: the file is empty"),
    "zeros.safetensors": (bytes(600), "not a checkpoint of any known format: the file begins with zeros"),
    "cut.safetensors": (b"abcdefghijkl", "not a checkpoint of any known format: it is damaged, or its name is wrong"),
    "x.zip": (None, "a zip archive, but not of torch.save; unpack it"),
    "commented.zip": (None, "a zip archive, but not of torch.save; unpack it"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_format_file_is_not_called_corrupt(tmp_path, name):
    content, expected = UNKNOWN[name]
    if content is None:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("a/b.txt", "x")
            archive.writestr("b/b.txt", "x")
            archive.comment = b"a comment" * name.startswith("commented")
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedFormatError, match=expected):
        Snapshot(tmp_path / name).get_manifest()
    assert not Snapshot(tmp_path / name).exists()


def test_torch_file_that_is_a_damaged_archive_is_corrupt(tmp_path):
    write(tmp_path, 1)
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    place = content.rindex(b"/data.pkl")
    for name, data in {
        "cut.pt": content[: len(content) // 2],
        "renamed.pt": content[:place] + b"/dbta.pkl" + content[place + 9 :],
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorruptSnapshotError, match="not a torch archive"):
            Snapshot(tmp_path / name).get_manifest()


def test_dcp_single_file_is_refused_and_the_folder_named(tmp_path):
    dcp.save({"a": torch.ones(3), "b": torch.ones(4, 4), "c": 3}, checkpoint_id=tmp_path, **ALONE)
    assert Snapshot(tmp_path).exists()
    for name in ("__0_0.distcp", ".metadata"):
        with pytest.raises(UnsupportedFormatError, match="DCP checkpoint; open its folder"):
            Snapshot(tmp_path / name).get_manifest()


def test_take_beside_files_of_other_libraries(files, tmp_path):
    shutil.copytree(files / "tf_checkpoint", tmp_path / "s")
    Snapshot.take(tmp_path / "s", {"s": StateDict(a=1)})
    assert Snapshot(tmp_path / "s").read_object("0/s/a") == 1


def test_torch_file_objects_that_only_a_pickle_creates_leave_the_rest_readable(tmp_path):
    cycle = []
    cycle.append(cycle)
    torch.save({"cycle": cycle, "attribute": Attribute(), "again": Again(), "w": torch.ones(2)}, tmp_path / "x.pt")
    opened = Snapshot(tmp_path / "x.pt")
    assert torch.equal(opened.read_object("0/w"), torch.ones(2))
    for name in ("cycle/0", "attribute", "again"):
        with pytest.raises(SnapshotError, match=f"0/{name}: a"):
            opened.read_object(f"0/{name}")


class Attribute:
    """A class that is pickled as torch's ShardedTensor is: by a function that returns its class."""

    class Inner:
        pass

    def __reduce__(self):
        return getattr, (Attribute, "Inner")


class Again:
    """A class whose pickle calls what `functools.partial` returns."""

    def __new__(cls, *, value=1):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"value": 2}
