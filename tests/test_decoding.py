"""Small files of JSON, msgpack and YAML that are damaged or hostile: one kind of error, and no work for nothing."""

import contextlib
import re
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, RestoreError, Snapshot, StateDict, TensorMap
from snapshot.cli import main
from snapshot.decoding import decode_json, decode_json_of_python, decode_msgpack, decode_yaml
from snapshot.errors import SnapshotError
from snapshot.io.url import read_options
from snapshot.manifest import document
from snapshot.manifest.document import decode_head
from snapshot.transform import verify
from snapshot_publish import Publisher
from snapshot_publish.store import ClaimFile, decode_index
from snapshot_publish.subscriber import Marker

# One function for each format


@given(data=st.binary(max_size=40), kind=st.sampled_from([dict[str, int], list[str], ClaimFile, Marker]))
def test_decode_json_and_msgpack_of_any_bytes_raise_one_error(data, kind):
    for decode in (decode_json, decode_msgpack):
        with contextlib.suppress(CorruptSnapshotError):
            decode(data, kind, "here")


@pytest.mark.parametrize("decode", [decode_json, decode_msgpack])
def test_decode_json_and_msgpack_of_invalid_utf_8_raise_corrupt_snapshot_error(decode):
    with pytest.raises(CorruptSnapshotError, match="here"):
        decode(b'"\xff"' if decode is decode_json else b"\xa1\xff", str, "here")


def test_decode_json_refuses_deep_nesting():
    with pytest.raises(CorruptSnapshotError):
        decode_json(b"[" * 100_000, list, "here")


def test_decode_json_of_python_accepts_infinity():
    assert decode_json_of_python(b'{"loss": Infinity}', "here") == {"loss": float("inf")}
    for damaged in (b"{", b"[" * 100_000, b'"\xff"', b""):
        with pytest.raises(CorruptSnapshotError, match="here"):
            decode_json_of_python(damaged, "here")


FILES = {
    "index": (lambda data: decode_index(data, 1, "here"), None),
    "marker": (lambda data: decode_json(data, Marker, "here"), None),
    "claim": (
        lambda data: decode_json(data, ClaimFile, "here"),
        msgspec.json.encode(ClaimFile("é publisher", "attempt")),
    ),
    "manifest": (lambda data: document.decode_document(data, "here"), None),
    "head": (lambda data: decode_head(data, "here"), None),
}


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """The bytes of a small file of each kind."""
    folder = tmp_path_factory.mktemp("small")
    Publisher(folder / "store").publish(1, {"é weight": torch.zeros(10)}).wait()
    from snapshot_publish import Subscriber

    pulled = Subscriber(folder / "store", folder / "local").pull()
    Snapshot.take(folder / "s", {"s": StateDict(**{"é": 1})}, metadata={"note": "ü"})
    manifest = (folder / "s/.snapshot_metadata").read_bytes()
    marker = next(path for path in Path(pulled).iterdir() if path.name.startswith(".")).read_bytes()
    index = (Path(pulled) / "model.safetensors.index.json").read_bytes()
    return {"index": index, "marker": marker, "claim": FILES["claim"][1], "manifest": manifest, "head": manifest}


@pytest.mark.parametrize("name", FILES)
def test_decode_of_a_flipped_bit_raises_snapshot_error(name, small_files):
    read, data = FILES[name][0], small_files[name]
    read(data)
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with contextlib.suppress(SnapshotError):
            read(bytes(flipped))


USERS_OF_JSON = re.compile(
    r"snapshot/(decoding|cli/arguments|io/url)\.py|plugins/snapshot_bench/.*"
    r"|plugins/(snapshot_health/report_verb|snapshot_objectstore/gcs|snapshot_scan/contents|snapshot_worker/client)\.py"
)
"""Modules that decode what a user, a server or this process itself has just written, with errors of their own, or that
must see a file as another reader does."""


def test_decode_functions_are_used_for_all_files():
    """Each reader that calls msgspec itself would have to know its errors."""
    root = Path(document.__file__).parents[2]
    direct = re.compile(r"msgspec\.(json|msgpack)\.(decode|Decoder)|json\.loads?\(|yaml\.(safe_)?load")
    found = {
        name
        for path in (*root.glob("snapshot/**/*.py"), *root.glob("plugins/**/*.py"))
        if not USERS_OF_JSON.fullmatch(name := path.relative_to(root).as_posix()) and direct.search(path.read_text())
    }
    assert found == set()


# YAML


def aliases(depth=9):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)]
    return "\n".join([*lines, f"rules: *a{depth - 1}"])


def test_decode_yaml_refuses_aliases_with_a_short_message(tmp_path):
    (tmp_path / "map.yaml").write_text(aliases())
    with pytest.raises(ValueError, match="YAML aliases") as caught:
        TensorMap.load(str(tmp_path / "map.yaml"))
    assert len(str(caught.value)) < 500
    (tmp_path / "options.yaml").write_text(aliases())
    with pytest.raises(ValueError, match="YAML aliases"):
        read_options(str(tmp_path / "options.yaml"))
    with pytest.raises(CorruptSnapshotError, match="YAML aliases"):
        decode_yaml(aliases(), "here")


def test_decode_yaml_error_names_the_line_and_shows_no_secret():
    with pytest.raises(CorruptSnapshotError, match=r"here: not YAML \(line 2\)") as caught:
        decode_yaml("a: 1\nkey: secret: [\n", "here")
    assert "secret" not in str(caught.value)


def test_decode_yaml_creates_no_objects():
    with pytest.raises(CorruptSnapshotError):
        decode_yaml("!!python/object/apply:os.system [echo]", "here")


# A wrong number of ranks


@pytest.fixture(params=[10**6, 2**31 - 1, 2**62])
def crowded(request, tmp_path):
    """A snapshot of one rank whose manifest claims very many."""
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3), n=1)})
    path = tmp_path / "s/.snapshot_metadata"
    found = document.decode_document(path.read_bytes(), "here")
    path.write_bytes(document.encode(msgspec.structs.replace(found, world_size=request.param)))
    return tmp_path / "s"


def test_verify_of_a_manifest_with_many_ranks_builds_few_views(crowded, monkeypatch):
    views = []
    real = verify.make_rank_view
    monkeypatch.setattr(verify, "make_rank_view", lambda *given: views.append(given[1]) or real(*given))
    assert Snapshot(crowded).verify()
    assert views[0] == 0
    assert len(views) <= verify.MOST_VIEWS // verify.EMPTY_VIEW + 1


def test_read_object_and_diff_of_a_manifest_with_many_ranks_are_quick(crowded, tmp_path, capsys):
    snapshot = Snapshot(crowded)
    assert snapshot.read_object("s/x").sum() == 3
    assert snapshot.read_object("0/s/n") == 1
    with pytest.raises(RestoreError, match="not found"):
        snapshot.read_object("s/missing")
    assert Snapshot.diff(crowded, crowded).same
    assert snapshot.copy(tmp_path / "copy")
    live = StateDict(x=torch.zeros(3), n=0)
    snapshot.restore({"s": live})
    assert live["n"] == 1
    for verb in (["ls"], ["show", "s/x"], ["verify", "--quick"], ["report", "-o", str(tmp_path / "page.html")]):
        name, *more = verb
        assert main([name, str(crowded), *more]) == 0, verb
    assert (tmp_path / "page.html").stat().st_size < 1 << 20
    capsys.readouterr()


class Sampler(StateDict):
    def reshard_state_dict(self, states, rank, world):
        return states[0]


def test_reshardable_state_of_too_many_ranks_is_refused(crowded):
    with pytest.raises(RestoreError, match="ranks cannot be redistributed"):
        Snapshot(crowded).restore({"s": Sampler(x=torch.zeros(3), n=0)})


def test_cli_ls_json_of_a_manifest_with_many_ranks_is_small(crowded, capsys):
    assert main(["ls", str(crowded), "--json"]) == 0
    assert len(capsys.readouterr().out) < 10_000
