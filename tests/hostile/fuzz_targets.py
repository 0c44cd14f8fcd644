"""What a coverage-guided fuzzer runs: `python -m tests.hostile.fuzz_targets NAME [libFuzzer's options]`.

Targets take bytes, and let nothing out but what they should. They do no I/O, so that thousands run in a second.
"""

import contextlib
import io
import json
import random
import re
import sys
import warnings
import zipfile
from pathlib import Path

import atheris

from snapshot.manifest.containers import Container
from tests.helpers.versions import ALONE

with atheris.instrument_imports(include=["snapshot"]):
    from snapshot.errors import SnapshotError
    from snapshot.formats import dcp, hugging_face, packed_tensors, to_entries, torch_save, torchsnapshot
    from snapshot.formats.pickled_objects import load_object
    from snapshot.formats.safe_pickle import evaluate_pickle as load_pickle
    from snapshot.formats.zip_archive import TAIL, find_directory, read_members
    from snapshot.io.loop import run
    from snapshot.io.registry import open_storage
    from snapshot.io.storage import URL, Context, check_path
    from snapshot.loading.left_out import find_uncovered, requests_of
    from snapshot.loading.read_plan import ReadPlan
    from snapshot.manifest.document import SnapshotMetadata, check_tree, copy_manifest, decode_document, find_locations
    from snapshot.manifest.entries import TensorEntry
    from snapshot.manifest.rank_view import group_by_key, make_rank_view
    from snapshot.state.flatten import inflate_tree
    from snapshot.storages import memory

import torch

from snapshot import Snapshot
from tests.hostile.hostile_snapshots import bounded, document_of, encoded, rich, sign, spoil, store

MADE_OF = 1 << 20
"""Bytes of files for which values are made: on storage, a file is as long as its manifest says, or nothing is."""


def manifest(data):
    """All that is done with a manifest before a byte of data is read."""
    with contextlib.suppress(SnapshotError):
        document = decode_document(sign(data), "here")
        copy_manifest(document.manifest)
        with contextlib.suppress(SnapshotError):
            SnapshotMetadata.of(document)
        find_uncovered(document.files, requests_of([document.manifest], document.files, []))
        small = sum(file.size for file in document.files.values()) < MADE_OF
        for rank in {0, 1, document.world_size}:
            view = make_rank_view(document.manifest, rank, document.world_size, rank + 1)
            for key, entries in group_by_key(view.entries).items():
                with contextlib.suppress(SnapshotError):
                    check_tree(key, entries)
                    find_locations(entries, document.files)
                    gather = ReadPlan(document.files)
                    for path, entry in entries.items():
                        if not isinstance(entry, Container) and small:
                            gather.new(path, entry)
                    if small:
                        gather.finish()
                        inflate_tree(key, entries, gather.values)


def pickled(data):
    """An object's bytes, where no pickle was allowed."""
    with contextlib.suppress(SnapshotError):
        load_object("path", bytearray(data), "torch_save", "type", allow_pickle=False)


def url(data):
    """Any text as a path or URL, and as the path of a file."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(ValueError):
        parsed = URL.parse(text)
        assert URL.parse(parsed.reveal()) == parsed
        if parsed.scheme != "file" and re.match(r"[^/@:]+:hUsh@", parsed.location):
            assert ":hUsh" not in str(parsed).partition("@")[0]
    with contextlib.suppress(ValueError):
        assert ".." not in check_path(text).split("/")


PLACE = "fuzzed"
LIMIT = 1 << 20


def _described(name, data, describe):
    """Somebody else's checkpoint, opened; and of what it says is there, all that can be checked without its bytes."""
    store(f"{PLACE}/{name}", data)
    with contextlib.suppress(SnapshotError):
        found = run(describe(open_storage(URL.parse(f"memory://{PLACE}"), {}, Context())))
        copy_manifest(found.manifest)
        group_by_key({path.partition("/")[2]: entry for path, entry in found.manifest.items()})
        find_uncovered(found.files, requests_of([found.manifest], found.files, []))


def dcp_metadata(data):
    """A `.metadata` file."""
    _described(".metadata", data, lambda storage: dcp.describe_checkpoint(storage, data))


def torch_pickle(data):
    """The data.pkl of an archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/data/0", bytes(64))
    archived = file.getvalue()
    _described("x.pt", archived, lambda storage: torch_save.describe_file(storage, "x.pt", len(archived), LIMIT))
    with contextlib.suppress(SnapshotError, to_entries.NotPlainError):
        repr(to_entries.read_plain_value("x", archived))
    with contextlib.suppress(SnapshotError):
        load_pickle(data, "x")


def zip_directory(data):
    """A whole archive of torch's, and one with one tensor in it."""
    _described("x.pt", data, lambda storage: torch_save.describe_file(storage, "x.pt", len(data), LIMIT))
    with contextlib.suppress(SnapshotError, packed_tensors.MoreBytesNeeded):
        entry = TensorEntry("x", (0, len(data)), "float32", (3,), serializer="torch_save")
        found = packed_tensors.find_layout("x", entry, data, data)
        assert 0 <= found.begin <= found.begin + found.nbytes <= len(data)
    with contextlib.suppress(ValueError):
        begin, end = find_directory(data[-TAIL:], len(data))
        read_members(data[begin:end], begin)


def safetensors_header(data):
    """The header of a file of safetensors, and an index."""
    whole = len(data).to_bytes(8, "little") + data + bytes(64)
    _described("x", whole, lambda storage: hugging_face.describe_file(storage, "x", len(whole), LIMIT))
    store(f"{PLACE}/{hugging_face.INDEX}", data)
    with contextlib.suppress(SnapshotError):
        run(
            hugging_face.describe_index(
                open_storage(URL.parse(f"memory://{PLACE}"), {}, Context()), hugging_face.INDEX, LIMIT
            )
        )
    memory._tree.get().files.pop(f"{PLACE}/{hugging_face.INDEX}", None)


def torchsnapshot_manifest(data):
    """A manifest of torchsnapshot, in JSON or YAML."""
    _described(".snapshot_metadata", data, lambda storage: torchsnapshot.describe_snapshot(storage, data))


def _others(name):
    """Small real files of others, or (of torchsnapshot) what it would write."""
    file = io.BytesIO()
    torch.save({"w": torch.ones(2, 3).t(), "n": [1, {"x": 2.5}], "p": torch.nn.Parameter(torch.ones(3))}, file)
    if name == "zip_directory":
        one = io.BytesIO()
        torch.save(torch.ones(3), one)
        return [file.getvalue(), one.getvalue()]
    if name == "torch_pickle":
        return [zipfile.ZipFile(file).read("archive/data.pkl")]
    if name == "safetensors_header":
        item = {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]}
        return [json.dumps({"__metadata__": {"a": "b"}, "w": item}).encode(), b'{"weight_map": {"w": "x"}}']
    if name == "torchsnapshot_manifest":
        tensor = {"type": "Tensor", "location": "b", "serializer": "buffer_protocol", "dtype": "torch.float32",
                  "shape": [4], "replicated": False, "byte_range": [0, 16]}  # fmt: skip
        shards = [{"offsets": [0], "sizes": [4], "tensor": tensor}]
        held = {"0/m": {"type": "dict", "keys": ["w", 1, "s"]}, "0/m/w": tensor,
                "0/m/1": {"type": "float", "serialized_value": "mpmZmZmZuT8=", "replicated": True, "readable": "0.1"},
                "0/m/s": {"type": "ShardedTensor", "shards": shards}}  # fmt: skip
        document = {"version": "0.1.0", "world_size": 1, "manifest": held}
        return [json.dumps(document).encode(), b"version: 0\nworld_size: 1\nmanifest:\n  0/m: {type: dict, keys: []}\n"]
    import tempfile

    from torch.distributed import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"m": {"w": torch.ones(3), "n": 3}}, checkpoint_id=folder, **ALONE)
        return [(Path(folder) / ".metadata").read_bytes()]


def seeds(name):
    """What the fuzzer begins with."""
    if name not in ("manifest", "pickled", "url"):
        return _others(name)
    if name == "manifest":
        Snapshot.take("memory://rich/s", rich())
        document = document_of("rich/s")
        few = {path: entry for path, entry in document["manifest"].items() if path.startswith("0/state/b")}
        return [encoded(document), encoded({**document, "manifest": few}), encoded({**document, "world_size": 4})]
    if name == "pickled":
        made = []
        for value in ({"a": torch.ones(2), "b": bytearray(b"x"), "c": [1, {2}]}, slice(3), [1.5, (None, "x")]):
            file = io.BytesIO()
            torch.save(value, file)
            made.append(file.getvalue())
        return made
    return [
        b"s3://key:hUsh@bucket/a/b?c=d",
        b"file:///a/b",
        b"/a/../b",
        b"simplecache::s3://u:hUsh@b/c",
        b"https://h:80/x?y",
    ]


def mutated(data, most, seed):
    """Half of the time, a change of a manifest that leaves it JSON."""
    if seed % 2:
        with contextlib.suppress(ValueError, RecursionError, IndexError, KeyError, TypeError):
            return encoded(spoil(json.loads(data), random.Random(seed)))[:most]
    return atheris.Mutate(data, most)


if __name__ == "__main__":
    name = sys.argv[1]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    corpus = Path(sys.argv[2])
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (corpus / f"seed-{number}").write_bytes(seed)
    extra = {"custom_mutator": mutated} if name == "manifest" else {}
    options = [f"-artifact_prefix={corpus}/found-", *sys.argv[3:]]
    atheris.Setup([sys.argv[0], *options, str(corpus)], globals()[name], **extra)
    with bounded(4 << 30):
        atheris.Fuzz()
