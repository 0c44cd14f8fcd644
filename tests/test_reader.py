"""The reader in docs/reader.py reads all snapshots of the corpus, notices damage, and raises only its own error."""

import ast
import copy
import json
import random
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import xxhash

from snapshot import Snapshot, StateDict
from snapshot.tensors.digest import digest_range
from snapshot.tensors.memory import BY_NAME
from tests.corpus.__main__ import METADATA, SNAPSHOTS, folders
from tests.corpus.requirements import skip_if_older
from tests.helpers.format_reader import PATH, reader

MOST_LINES = 300
ALLOWED = {"numpy", "xxhash", "zstandard"}
IN_BASE = {"frozen/trainable", "weights/trainable"}

RECORD = np.dtype([("stored", "<u4"), ("length", "<u4"), ("sum", "<u8")])


def leaves(snapshot):
    """Return the names of what the reader reads: not those of containers."""
    entries = snapshot.entries.items()
    return [name for name, entry in entries if not (isinstance(entry, dict) and entry.keys() & {"keys", "length"})]


def contents(folder):
    """Return all that the reader reads of a snapshot, or the errors instead."""
    snapshot = reader.Snapshot(folder)
    found = {}
    for name in leaves(snapshot):
        try:
            found[name] = comparable(snapshot.read(name))
        except reader.FormatError as error:
            found[name] = error
    return found


def comparable(value):
    kind, data = value
    if isinstance(data, dict):
        return kind, {name: (each.dtype.str, each.shape, each.tobytes()) for name, each in data.items()}
    return (kind, data.dtype.str, data.shape, data.tobytes()) if isinstance(data, np.ndarray) else (kind, repr(data))


def bytes_of(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


# The file itself


def test_reader_py_is_short_and_imports_neither_torch_nor_snapshot():
    text = PATH.read_text()
    assert len(text.splitlines()) < MOST_LINES
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names <= ALLOWED


def test_reader_py_knows_all_dtypes():
    assert set(BY_NAME) <= set(reader.DTYPES)
    assert {name: np.dtype(reader.DTYPES[name]).itemsize for name in BY_NAME} == {
        name: dtype.itemsize for name, dtype in BY_NAME.items()
    }


# The corpus


@pytest.mark.parametrize("name", folders())
def test_reader_py_reads_the_corpus_like_the_library(name):
    skip_if_older(name)
    folder = SNAPSHOTS / name
    snapshot, library = reader.Snapshot(folder), Snapshot(folder)
    for path in leaves(snapshot):
        entry = snapshot.entries[path]
        kind = entry["type"]
        if name in IN_BASE and snapshot.files.get(entry.get("location"), {}).get("in_base"):
            with pytest.raises(reader.FormatError, match="must be in this snapshot, got a file of its base"):
                snapshot.read(path)
            continue
        dtype, found = snapshot.read(path)
        if kind == "object":
            assert digest_of(found) == entry["digest"]
            assert dtype == entry["obj_type"]
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some types of tensors have a note of torch's
            expected = library.read_object(path)
        if kind == "TensorParts":
            assert set(found) == set(entry["parts"])
            compare_parts(entry["kind"], found, expected)
        elif isinstance(expected, torch.Tensor):
            assert BY_NAME[dtype] == expected.dtype
            assert found.shape == expected.shape
            assert found.tobytes() == bytes_of(expected)
        elif kind == "ndarray":
            compare_arrays(found, expected)
        elif kind in ("int", "str", "bool", "bytes", "float", "complex", "NoneType"):
            assert type(found) is type(expected)
            assert repr(found) == repr(expected)
        else:
            assert found == entry["serialized_value"]


def digest_of(data):
    return reader.digest_range(data)[0]


def compare_parts(kind, found, expected):
    if kind == "Generator":
        assert found["state"].tobytes() == bytes_of(expected.get_state())
    elif kind == "sparse_coo":
        assert found["indices"].tobytes() == bytes_of(expected._indices())
        assert found["values"].tobytes() == bytes_of(expected._values())
    elif kind.startswith("sparse"):
        assert {name: data.tobytes() for name, data in found.items()} == {
            name: bytes_of(getattr(expected, name)()) for name in found
        }
    else:
        assert found["integers"].tobytes() == bytes_of(expected.int_repr())


def compare_arrays(found, expected):
    assert found.shape == np.shape(expected)
    assert found.tobytes() == np.asarray(expected).tobytes()
    assert found.dtype == np.asarray(expected).dtype


# The command


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(PATH), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_reader_py_command_lists_prints_and_saves(tmp_path):
    listed = run(SNAPSHOTS / "tensors")
    assert "0/shapes/deep Tensor float32 [2, 1, 3, 1, 2]" in listed.stdout.splitlines()
    shown = run(SNAPSHOTS / "two_ranks", "0/model/uneven")
    assert shown.stdout.startswith("float32\n[[ 0.  1.  2.]\n")
    saved = run(SNAPSHOTS / "compressed/first", "0/model/half", "-o", tmp_path / "half.npy")
    assert saved.returncode == 0, saved.stderr
    assert np.load(tmp_path / "half.npy").dtype == np.uint16
    assert run(SNAPSHOTS / "values", "--verify").returncode == 0
    assert run(SNAPSHOTS / "values", "0/flat/float").stdout == "float\n0.1\n"


def test_reader_py_command_explains_errors(tmp_path):
    missing = run(tmp_path)
    assert missing.returncode == 1
    assert missing.stderr == f"{tmp_path}/.snapshot_metadata must be a file of at most 1 GiB, got another, or none\n"
    assert run(SNAPSHOTS / "tensors", "0/x").stderr == "the name must be one of the list, got 0/x\n"
    container = run(SNAPSHOTS / "tensors", "0/shapes").stderr
    assert container == "0/shapes must be a tensor or a value, got a dict: read the names below it\n"
    value = run(SNAPSHOTS / "values", "0/flat/int", "-o", tmp_path / "x.npy").stderr
    assert value == "0/flat/int must be a tensor, got int\n"
    assert run(SNAPSHOTS / "signed/plain").stderr == "this reader does not check the signature\n"


# Damage


def copy_of(name, folder):
    shutil.copytree(SNAPSHOTS / name, folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["tensors", "long_tensors", "values", "newest_parts", "compressed/first"])
def test_reader_py_notices_a_flipped_byte_or_does_not_use_it(name, tmp_path):
    """Return the original contents or an error, for a byte anywhere. No damage of a manifest is ever ignored."""
    folder = copy_of(name, tmp_path)
    expected = contents(folder)
    chance = random.Random(name)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        noticed = 0
        places = {0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(25))}
        for place in places:
            damaged = bytearray(data)
            damaged[place] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            try:
                found = contents(folder)
            except reader.FormatError:
                noticed += 1
                continue
            errors = {key: value for key, value in found.items() if isinstance(value, reader.FormatError)}
            assert found == expected | errors
            noticed += bool(errors)
        path.write_bytes(data)
        packed = name.startswith("compressed") and path.suffix == ".safetensors"  # the stored header is not used
        assert noticed == len(places) or packed, path
        assert noticed > len(places) // 3, path


@pytest.mark.parametrize("name", ["tensors", "newest_parts", "compressed/first"])
def test_reader_py_notices_a_missing_or_longer_file(name, tmp_path):
    folder = copy_of(name, tmp_path)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for changed in (data + b"\0", data[:-1], b""):
            path.write_bytes(changed)
            with pytest.raises(reader.FormatError):
                raise_first(folder)
        path.unlink()
        with pytest.raises(reader.FormatError):
            raise_first(folder)
        path.write_bytes(data)


def raise_first(folder):
    for each in contents(folder).values():
        if isinstance(each, reader.FormatError):
            raise each


# Hostile files


NONSENSE = [
    None,
    True,
    -1,
    0,
    1,
    2.5,
    1 << 40,
    1 << 70,
    "",
    "0",
    "../../x",
    "data/../x",
    [],
    [[]],
    {},
    {"type": "Tensor"},
]


def places_of(value, path=()):
    """Yield the path of each value inside a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield (*path, key)
        yield from places_of(each, (*path, key))


def spoiled(document, chance):
    """Return a copy of a document in which one to three values are others, or missing."""
    document = json.loads(json.dumps(document))
    for _ in range(chance.randrange(1, 4)):
        *above, last = chance.choice(list(places_of(document)))
        holder = document
        for key in above:
            holder = holder[key]
        if chance.random() < 0.2:
            del holder[last]
        elif chance.random() < 0.2:
            other = document
            for key in chance.choice(list(places_of(document))):
                other = other[key]
            holder[last] = json.loads(json.dumps(other))
        else:
            holder[last] = copy.deepcopy(chance.choice(NONSENSE))
    return document


def sealed(document):
    """Return the bytes of a document, with the digest that belongs to it."""
    body = json.dumps({key: value for key, value in document.items() if key != "digest"}, separators=(",", ":"))[:-1]
    return b'%s,"digest":"%s"}' % (body.encode(), digest_range(body.encode()).encode())


@pytest.mark.parametrize("name", ["arrays", "composed", "two_ranks", "values", "long_tensors", "compressed/first"])
def test_reader_py_hostile_manifests_raise_only_format_error(name, tmp_path):
    folder = copy_of(name, tmp_path)
    document = json.loads((folder / METADATA).read_text())
    chance = random.Random(name)
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of some texts of dtypes
        for _ in range(120):
            (folder / METADATA).write_bytes(sealed(spoiled(document, chance)))
            try:
                refused += any(isinstance(each, reader.FormatError) for each in contents(folder).values())
                reader.main([str(folder)])
            except reader.FormatError:
                refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"format":"snapshot/1"}', b"[1]", b"9" * 10_000, b'"x"', b"\xff",
     b'{"format":"snapshot/1","format":"snapshot/1"}', b'{"format":"snapshot/4"}', b'{"format":NaN}'],
    ids=range(12),
)  # fmt: skip
def test_reader_py_refuses_a_document_that_is_not_a_manifest(data, tmp_path):
    for body in (data, b'%s,"digest":"%s"}' % (data[:-1], digest_range(data[:-1]).encode())):
        (tmp_path / METADATA).write_bytes(body)
        with pytest.raises(reader.FormatError):
            reader.Snapshot(tmp_path)


def test_reader_py_refuses_a_small_file_that_claims_a_large_tensor(tmp_path):
    folder = copy_of("two_ranks", tmp_path)
    document = json.loads((folder / METADATA).read_text())
    entry = document["manifest"]["0/model/even"]
    [box, _] = entry["shards"]
    entry["shape"] = [4 << 20, 3]
    entry["shards"] = [{**box, "offsets": [4 * number, 0]} for number in range(1 << 10)]
    (folder / METADATA).write_bytes(sealed(document))
    with pytest.raises(reader.FormatError, match="at most 8540 bytes"):
        reader.Snapshot(folder).read("0/model/even")


def test_reader_py_refuses_overlapping_boxes_and_gaps(tmp_path):
    folder = copy_of("two_ranks", tmp_path)
    text = (folder / METADATA).read_text()
    for offsets, error in (([3, 0], "overlap"), ([5, 0], "a box must be in"), ([-4, 0], "a box must be in")):
        document = json.loads(text)
        document["manifest"]["0/model/even"]["shards"][1]["offsets"] = offsets
        (folder / METADATA).write_bytes(sealed(document))
        with pytest.raises(reader.FormatError, match=error):
            reader.Snapshot(folder).read("0/model/even")
    document = json.loads(text)
    del document["manifest"]["0/model/even"]["shards"][1]
    (folder / METADATA).write_bytes(sealed(document))
    with pytest.raises(reader.FormatError, match="must be filled by its boxes, got 12 of 24 elements"):
        reader.Snapshot(folder).read("0/model/even")


def test_reader_py_hostile_tables_and_blocks_raise_only_format_error(tmp_path):
    """Damage a compressed file or its table, and give both the digests and sums that belong to them."""
    folder = copy_of("compressed/first", tmp_path)
    document = json.loads((folder / METADATA).read_text())
    [(location, file)] = [(name, each) for name, each in document["files"].items() if "packed" in each]
    index, begin, end = file["packed"]["index"]
    stored, binary = (folder / location).read_bytes(), (folder / index).read_bytes()
    chance = random.Random(1)
    refused = 0
    for _ in range(150):
        data, table = bytearray(stored), np.frombuffer(binary[begin:end], RECORD).copy()
        if chance.random() < 0.5:
            row, field = chance.randrange(len(table)), chance.choice(["stored", "length", "sum"])
            table[field][row] = chance.choice([0, 1, int(table[field][row]) ^ 1 << chance.randrange(32), (1 << 32) - 1])
        else:
            place = chance.randrange(4096, 4096 + 4 * 1024)
            data[place] ^= 1 << chance.randrange(8)
            for row, place in enumerate(np.cumsum(table["stored"], dtype=np.int64).tolist()):
                part = data[place - int(table["stored"][row]) : place]
                table["sum"][row] = xxhash.xxh3_64_intdigest(part)
        (folder / location).write_bytes(data)
        (folder / index).write_bytes(binary[:begin] + table.tobytes() + binary[end:])
        file["packed"]["index_digest"] = digest_range(table.tobytes())
        (folder / METADATA).write_bytes(sealed(document))
        refused += any(isinstance(each, reader.FormatError) for each in contents(folder).values())
    assert refused > 100


def test_reader_py_does_not_read_a_file_outside_of_the_folder(tmp_path):
    folder = copy_of("tensors", tmp_path)
    document = json.loads((folder / METADATA).read_text())
    [location] = document["files"]
    shutil.copy(folder / location, tmp_path / "outside.bin")
    for name in ("../outside.bin", str(tmp_path / "outside.bin"), "data/../../outside.bin"):
        changed = json.loads(json.dumps(document).replace(location, name))
        (folder / METADATA).write_bytes(sealed(changed))
        with pytest.raises(reader.FormatError, match="a location must be"):
            reader.Snapshot(folder).read("0/shapes/one")


def test_reader_py_prints_no_control_characters(tmp_path, capsys):
    folder = copy_of("tensors", tmp_path)
    document = json.loads((folder / METADATA).read_text())
    document["manifest"]["0/\x1b[2J"] = {"type": "str", "serialized_value": "\x1b]0;x\x07"}
    (folder / METADATA).write_bytes(sealed(document))
    reader.main([str(folder)])
    reader.main([str(folder), "0/\x1b[2J"])
    assert "\x1b" not in capsys.readouterr().out


def test_reader_py_prints_no_control_characters_of_a_string_array(tmp_path, capsys):
    Snapshot.take(tmp_path / "x", {"s": StateDict(v=np.array("\x1b[2J"))})
    reader.main([str(tmp_path / "x"), "0/s/v"])
    assert capsys.readouterr().out == "<U4\n\\x1b[2J\n"


@pytest.mark.parametrize("dtype", ["|O", [["a", "|O"]], [["a", [["b", "<i4"], ["c", "|O"]]], ["d", "<i4"]]], ids=str)
def test_reader_py_refuses_object_dtypes(tmp_path, dtype):
    """NumPy follows such pointers, so the bytes of an attacker would be read as objects of Python."""
    Snapshot.take(tmp_path / "x", {"s": StateDict(v=np.zeros(16, "<i8"))})
    document = json.loads((tmp_path / "x" / METADATA).read_text())
    itemsize = 16 if len(dtype) == 2 and not isinstance(dtype, str) else 8
    document["manifest"]["0/s/v"].update(dtype=dtype, shape=[128 // itemsize])
    (tmp_path / "x" / METADATA).write_bytes(sealed(document))
    with pytest.raises(reader.FormatError, match="without objects"):
        reader.Snapshot(tmp_path / "x").read("0/s/v")
