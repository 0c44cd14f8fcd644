"""Manifests that refer to a folder of weights, changed to do harm: no byte outside of the folder is read."""

import copy
import random
import resource
import shutil

import msgspec
import pytest
import torch

from snapshot import RestoreOptions, Snapshot, SnapshotError
from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.manifest.document import METADATA
from tests.helpers.weight_folders import Adapted
from tests.hostile.hostile_snapshots import bounded, encoded, sign, spoil


@pytest.fixture
def good(tmp_path):
    """A run with a good snapshot whose base is a folder of weights, its manifest, and a file beside the folder."""
    run = Adapted(tmp_path / "weights", files=2)
    run.take(tmp_path / "s", tmp_path / "weights")
    for name in ("weights/model-00001-of-00002.safetensors", "weights/model-00002-of-00002.safetensors"):
        (tmp_path / name.rpartition("/")[2]).write_bytes((tmp_path / name).read_bytes())
    document = msgspec.json.decode((tmp_path / "s" / METADATA).read_bytes())
    del document["digest"]
    return run, document


def store(path, document):
    (path / METADATA).write_bytes(sign(encoded(document)))


def exercise(run, path):
    """Do with a snapshot what a user may do. Return the errors of the library. Any other error is raised."""
    snapshot = Snapshot(path / "s")
    for name in ("copy", "later"):
        shutil.rmtree(path / name, ignore_errors=True)
    verbs = [
        snapshot.verify,
        snapshot.get_manifest,
        lambda: snapshot.metadata,
        lambda: snapshot.read_object("model/pretrained.0.weight"),
        lambda: snapshot.read_object("model/head.weight"),
        lambda: snapshot.copy(path / "copy"),
        lambda: Snapshot.diff(path / "s", path / "other"),
        lambda: snapshot.restore(run.state),
        lambda: snapshot.restore(run.state, options=RestoreOptions(base=path / "weights")),
        lambda: run.take(path / "later", path / "s", read_back=True),
    ]
    errors = []
    for verb in verbs:
        try:
            verb()
        except SnapshotError as error:
            errors.append(error)
    return errors


def in_base(document):
    """The files of the base, by location."""
    return {location: file for location, file in document["files"].items() if file.get("in_base")}


@pytest.mark.parametrize(
    "name",
    [
        "../model-00001-of-00002.safetensors",
        "x/../../model-00001-of-00002.safetensors",
        "/etc/passwd",
        "/etc/passwd.safetensors",
        "./model-00001-of-00002.safetensors",
        "a//model.safetensors",
        "..\\model.safetensors",
        "model.safetensors\0",
        "config.json",
        "pytorch_model.bin",
        "",
        ".safetensors",
    ],
)
def test_manifest_with_a_file_outside_of_its_folder_of_weights_is_refused(good, tmp_path, name):
    run, document = good
    next(iter(in_base(document).values()))["name"] = name
    store(tmp_path / "s", document)
    values = run.values()
    errors = exercise(run, tmp_path)
    assert len(errors) >= 9
    assert all(isinstance(error, (CorruptSnapshotError, UnsupportedFormatError)) for error in errors)
    assert run.has(values)
    assert not (tmp_path / "copy").exists()


def rename_base(document):
    document["base"]["format"] = "pickle"


def forget_format(document):
    del document["base"]["format"]


def forget_names(document):
    for file in in_base(document).values():
        del file["name"]


def name_own_file(document):
    location = next(location for location, file in document["files"].items() if not file.get("in_base"))
    document["files"][location]["name"] = "model.safetensors"


def claim_own_file(document):
    location = next(location for location, file in document["files"].items() if not file.get("in_base"))
    document["files"][location]["in_base"] = True


def older_format(document):
    document["format"] = "snapshot/1"


def own_id(document):
    document["base"]["save_id"] = document["save_id"]


def long_header(document):
    for file in in_base(document).values():
        file["header"] = file["size"] + 1


def negative_size(document):
    for file in in_base(document).values():
        file["size"] = -1


def no_header_digest(document):
    for file in in_base(document).values():
        del file["header_digest"]


def weight(document):
    return document["manifest"]["0/model/pretrained.0.weight"]


def range_outside(document):
    weight(document)["byte_range"] = [each + (1 << 40) for each in weight(document)["byte_range"]]


def range_in_header(document):
    begin, end = weight(document)["byte_range"]
    weight(document)["byte_range"] = [0, end - begin]


def other_shape(document):
    weight(document)["shape"] = [1 << 20, 1 << 20]


def no_table(document):
    del weight(document)["blocks"]


def table_in_base(document):
    weight(document)["blocks"][0] = weight(document)["location"]


REFUSED_AT_ONCE = [
    rename_base,
    forget_format,
    forget_names,
    name_own_file,
    claim_own_file,
    older_format,
    own_id,
    long_header,
    negative_size,
    no_header_digest,
]
REFUSED_BY_READERS = [range_outside, range_in_header, other_shape, no_table]


@pytest.mark.parametrize("change", REFUSED_AT_ONCE)
def test_manifest_with_a_wrong_description_of_its_folder_of_weights_is_refused(good, tmp_path, change):
    run, document = good
    change(document)
    store(tmp_path / "s", document)
    values = run.values()
    with pytest.raises((CorruptSnapshotError, UnsupportedFormatError)):
        Snapshot(tmp_path / "s").get_manifest()
    exercise(run, tmp_path)
    assert run.has(values)


@pytest.mark.parametrize("change", [*REFUSED_BY_READERS, table_in_base])
def test_manifest_with_a_wrong_place_in_its_folder_of_weights_is_refused(good, tmp_path, change):
    run, document = good
    change(document)
    store(tmp_path / "s", document)
    assert not Snapshot(tmp_path / "s").verify()
    run.spoil()
    for base in (None, tmp_path / "weights"):
        with pytest.raises(SnapshotError), bounded():
            Snapshot(tmp_path / "s").restore(run.state, options=RestoreOptions(base=base))
        assert run.is_spoilt()


def test_manifest_with_a_huge_file_in_its_folder_of_weights_takes_no_memory(good, tmp_path):
    """A size that the folder does not have is found before memory is taken for it."""
    run, document = good
    for file in in_base(document).values():
        file["size"] = 1 << 50
        file["header"] = 1 << 20
    store(tmp_path / "s", document)
    run.spoil()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with bounded():
        exercise(run, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (256 << 10)
    assert run.is_spoilt()


def test_manifest_with_random_changes_of_its_folder_of_weights_raises_an_error_of_the_library(good, tmp_path):
    run, document = good
    Snapshot.take(tmp_path / "other", run.state)
    failed = 0
    for seed in range(25):
        store(tmp_path / "s", spoil(copy.deepcopy(document), random.Random(seed)))
        with bounded():
            failed += bool(exercise(run, tmp_path))
    assert failed > 12


def test_restore_reads_no_file_that_a_link_in_a_folder_of_weights_leads_out_to_with_other_bytes(good, tmp_path):
    """A link may be Hugging Face's cache, so it is followed. What it leads to must have the digests of the manifest."""
    run, _ = good
    file = tmp_path / "weights" / "model-00001-of-00002.safetensors"
    file.unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(256)) * 4000)
    file.symlink_to(secret)
    run.spoil()
    with pytest.raises(SnapshotError):
        Snapshot(tmp_path / "s").restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert run.is_spoilt()
    file.unlink()
    file.symlink_to(tmp_path / file.name)
    Snapshot(tmp_path / "s").restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert not run.is_spoilt()
    assert torch.isfinite(run.head.weight).all()
