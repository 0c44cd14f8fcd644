"""What a coverage-guided fuzzer runs: `python fuzz_targets.py NAME [libFuzzer's options]`.

Targets take bytes, and let nothing out but what they should. They do no I/O, so that thousands run in a second.
"""

import contextlib
import io
import json
import random
import re
import sys
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["snapshot"]):
    from snapshot.engine.gather import Gather
    from snapshot.engine.verify import _uncovered, _wants
    from snapshot.errors import SnapshotError
    from snapshot.manifest.check import check_tree, locations_of
    from snapshot.manifest.document import copied, decode_document
    from snapshot.manifest.entries import Container
    from snapshot.manifest.view import by_key, rank_view
    from snapshot.metadata import SnapshotMetadata
    from snapshot.state.live import inflate
    from snapshot.storage import URL, check_path
    from snapshot.tensors.objects import load_object

import torch

sys.path.insert(0, str(Path(__file__).parent))
from hostile import bounded, document_of, encoded, rich, sign, spoil

from snapshot import Snapshot

MADE_OF = 1 << 20
"""Bytes of files for which values are made: on storage, a file is as long as its manifest says, or nothing is."""


def manifest(data):
    """All that is done with a manifest before a byte of data is read."""
    with contextlib.suppress(SnapshotError):
        document = decode_document(sign(data), "here")
        copied(document.manifest)
        with contextlib.suppress(SnapshotError):
            SnapshotMetadata.of(document)
        _uncovered(document, _wants(document, [])[0])
        small = sum(file.size for file in document.files.values()) < MADE_OF
        for rank in {0, 1, document.world_size}:
            view = rank_view(document.manifest, rank, document.world_size, rank + 1)
            for key, entries in by_key(view.entries).items():
                with contextlib.suppress(SnapshotError):
                    check_tree(key, entries)
                    locations_of(entries, document.files)
                    gather = Gather(document.files)
                    for path, entry in entries.items():
                        if not isinstance(entry, Container) and small:
                            gather.new(path, entry)
                    if small:
                        gather.finish()
                        inflate(key, entries, gather.values)


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


def seeds(name):
    """What the fuzzer begins with."""
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
