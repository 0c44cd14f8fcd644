"""Compressed snapshots with damage at every byte, and manifests that claim what no file has."""

import msgspec
import numpy as np
import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.errors import UnsupportedFormatError
from snapshot.manifest.document import METADATA, decode_document
from snapshot.storages import memory
from snapshot.tensors.digest import digest_range
from snapshot.tensors.split_zstd import encode_table
from tests.hostile.damaged_snapshot import flipped
from tests.hostile.hostile_snapshots import bounded, contents, sign, store


def state():
    generator = torch.Generator().manual_seed(5)
    return {
        "s": StateDict(
            weight=(torch.randn(60, 40, generator=generator) * 0.02).bfloat16(),
            moment=torch.zeros(500),
            some=torch.randn(300, generator=generator),
            ids=torch.arange(100),
            text="x" * 100,
        )
    }


@pytest.fixture(scope="module")
def arrays():
    """The files of a compressed snapshot in memory, whose bytes can be changed in place."""
    Snapshot.take("memory://packed", state(), overwrite=True, options=TakeOptions(compression="zstd"))
    files = memory._tree.get().files
    for path in [path for path in files if path.startswith("packed/")]:
        files[path] = memory._File(np.array(files[path].content))
    return {path.removeprefix("packed/"): file.content for path, file in files.items() if path.startswith("packed/")}


def test_compressed_snapshot_under_test_is_compressed_and_verifies(arrays):
    document = Snapshot("memory://packed")._manifest.open()
    assert sum(file.packed is not None for file in document.files.values()) == 1
    assert Snapshot("memory://packed").verify()


@pytest.mark.slow
def test_compressed_snapshot_verify_finds_flipped_bytes_of_every_file(arrays):
    """Every byte of headers, tables and manifest, and every seventh of the values."""
    met = 0
    for path, array in arrays.items():
        ends = 700 if len(array) > 2_000 and path != METADATA else len(array)
        for at in sorted({*range(ends), *range(0, len(array), 7), *range(len(array) - ends, len(array))}):
            with flipped(array, at):
                if path == METADATA:
                    with pytest.raises(SnapshotError):
                        decode_document(array.tobytes(), "here")
                else:
                    assert not Snapshot("memory://packed").verify(), (path, at)
            met += 1
    assert met > 4_000
    assert Snapshot("memory://packed").verify()


def test_compressed_snapshot_damage_is_never_returned_as_a_value(arrays):
    right = state()["s"]
    for path, array in arrays.items():
        if path == METADATA:
            continue
        for at in range(0, len(array), 41):
            with flipped(array, at):
                try:
                    found = Snapshot("memory://packed").get_state_dict_for_key("s")
                except CorruptSnapshotError:
                    continue
                for name, value in right.items():
                    assert torch.equal(found[name], value) if name != "text" else found[name] == value


def test_compressed_file_without_its_end_is_corrupt(arrays):
    Snapshot.take("memory://short", state(), overwrite=True, options=TakeOptions(compression="zstd"))
    for path, data in list(contents().items()):
        if path.startswith("short/data"):
            for left in (0, 1, len(data) // 2, len(data) - 1):
                store(path, data[:left])
                assert not Snapshot("memory://short").verify()
                with pytest.raises(SnapshotError):
                    Snapshot("memory://short").get_state_dict_for_key("s")
            store(path, data)
    assert Snapshot("memory://short").verify()
    Snapshot("memory://short").delete()


def rewritten(change):
    """Store a snapshot whose manifest was changed by hand, and return its URL."""
    Snapshot.take("memory://forged", state(), overwrite=True, options=TakeOptions(compression="zstd"))
    document = msgspec.json.decode(contents()[f"forged/{METADATA}"])
    del document["digest"]
    (location,) = [name for name, file in document["files"].items() if "packed" in file]
    change(document, document["files"][location], location)
    store(f"forged/{METADATA}", sign(msgspec.json.encode(document)))
    return "memory://forged"


def huge(document, file, location):
    file["size"] = 1 << 50


def no_table(document, file, location):
    file["packed"]["index"][0] = "data/000000000000-0-9.bin"


def outside(document, file, location):
    file["packed"]["index"][2] = 1 << 40


def half_a_record(document, file, location):
    file["packed"]["index"][2] -= 8


def empty_table(document, file, location):
    file["packed"]["index"][2] = file["packed"]["index"][1]


def long_table(document, file, location):
    name, begin, _ = file["packed"]["index"]
    document["files"][name]["size"] = 1 << 40
    file["packed"]["index"][2] = begin + (1 << 30)


def in_itself(document, file, location):
    file["packed"]["index"] = [location, file["header"], file["header"] + 16]


def other_codec(document, file, location):
    file["packed"]["codec"] = "lzma"


def older_format(document, file, location):
    document["format"] = "snapshot/1"


def newer_format(document, file, location):
    document["format"] = "snapshot/3"


def not_compressed(document, file, location):
    del file["packed"]


@pytest.mark.parametrize(
    "change",
    [
        huge,
        no_table,
        outside,
        half_a_record,
        empty_table,
        long_table,
        in_itself,
        other_codec,
        older_format,
        newer_format,
        not_compressed,
    ],
    ids=lambda change: change.__name__,
)
def test_compressed_manifest_with_false_claims_is_refused_before_reading(change):
    url = rewritten(change)
    with bounded(), pytest.raises((CorruptSnapshotError, UnsupportedFormatError)):
        Snapshot(url).get_state_dict_for_key("s")


def test_compressed_small_file_cannot_claim_a_huge_tensor():
    """A forged table, with its digest, for 2 TiB of zeros in a few thousand bytes."""

    def bomb(document, file, location):
        table = encode_table([(4096, 0, 0, 0), *[(1, 1 << 18, 1, 0)] * 4096])
        path = next(name for name in document["files"] if name.endswith(".bin"))
        store(f"forged/{path}", table)
        document["files"][path]["size"] = len(table)
        file["size"] = 4096 << 18
        file["packed"] |= {"size": 8192, "index": [path, 0, len(table)], "index_digest": digest_range(table)}
        entry = document["manifest"]["0/s/moment"]
        entry["byte_range"] = [file["header"], 4096 << 18]
        entry["shape"] = [((4096 << 18) - file["header"]) // 4]

    with bounded(), pytest.raises(CorruptSnapshotError, match="cannot be stored in"):
        Snapshot(rewritten(bomb)).read_object("0/s/moment")


def test_compressed_forged_table_of_the_right_size_is_refused():
    def lie(document, file, location):
        packed = file["packed"]
        path, begin, end = packed["index"]
        held = bytearray(contents()[f"forged/{path}"])
        table = np.frombuffer(held, "<u4")[begin // 4 : end // 4].reshape(-1, 4).copy()
        table[1, 0] += 8
        table[2, 0] -= 8
        held[begin:end] = table.tobytes()
        store(f"forged/{path}", held)
        packed["index_digest"] = digest_range(table.tobytes())

    url = rewritten(lie)
    with pytest.raises(CorruptSnapshotError):
        Snapshot(url).get_state_dict_for_key("s")
    assert not Snapshot(url).verify()
