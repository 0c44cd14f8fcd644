"""Entries of typed values that somebody made to do harm: our errors come out of them, soon, and nothing is touched."""

import warnings

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, StateDict
from snapshot.manifest.document import METADATA
from tests.hostile.hostile_snapshots import Color, Config, bounded, document_of, encoded, rich, sign, store

URL = "memory://values/s"
MANIFEST = f"values/s/{METADATA}"
DIGITS = "9" * 1_000_000
BAD = {
    "datetime": [
        "99999-01-01T00:00:00", "2024-13-01T00:00:00", "2024-01-02", "2024-01-02T03:00:00;0;", "2024-01-02T03:00:00;2;",
        "2024-01-02T03:00:00;0;ZoneInfo:../../etc/passwd", "2024-01-02T03:00:00;0;ZoneInfo:/etc/passwd", "2024-W01-1",
        "2024-01-02T03:00:00;0;timezone:9,0,0", "2024-01-02T03:00:00;0;os:x", "2024-01-02T03:00:00;0;ZoneInfo:No/Such",
        "2024-01-02T03:00:00+01:00", DIGITS,
    ],
    "date": ["0000-01-01", "10000-01-01", "20240102", "2024-02-30", "2024-W01-1", DIGITS],
    "time": ["24:00:00", "01:02;0", "01:02;1;x", "1", DIGITS],
    "timedelta": ["1,2", "1,2,3,4", "1000000000,0,0", "0,86400,0", "0,0,-1", f"{DIGITS},0,0", "", "1.5,0,0"],
    "timezone": ["1,0,0:x", "0,86400,0", "x", "", "0,3600,0:" + DIGITS],
    "zone": ["../../../etc/passwd", "", "Europe", "A" * 100, "Europe/" * 5, "No/Such", "tzdata.zoneinfo", DIGITS],
    "path": ["", "Path:a", "os:system", "PurePosixPath", "PurePosixPath:" + DIGITS],
    "uuid": ["", "{00000000-0000-0000-0000-000000000001}", "1" * 32, "urn:uuid:" + "0" * 32, "x" * 36, DIGITS,
        "00000000-0000-0000-0000-000000000001;7"],
    "decimal": ["", "x", "1_000", DIGITS, "1e5", "0x10", "1E+99999999999999999999"],
    "fraction": ["1/0", "2/4", "1/-3", "1", "1/2/3", f"{DIGITS}/3", "1/" + "0x" + "f" * 100_000, "a/b"],
    "range": ["0,1", "0,1,0", "0,1,2,3", "a,b,c", f"0,{DIGITS},1", "0,1.5,1"],
}  # fmt: skip


@pytest.fixture
def base(one_thread):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot.take(URL, {"state": rich()["state"]}, overwrite=True)
    return document_of("values/s")


def refused(document, path, *, error=CorruptSnapshotError):
    """Read it in every way."""
    store(MANIFEST, sign(encoded(document)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = {"state": rich()["state"]}
    live["state"]["tensor"].zero_()
    snapshot = Snapshot(URL)
    for verb in (
        lambda: snapshot.read_object(path),
        lambda: snapshot.get_state_dict_for_key("state"),
        lambda: Snapshot(URL, allow_pickle=True).restore(live),
    ):
        with bounded(), pytest.raises(error) as raised:
            verb()
        assert len(str(raised.value)) < 1000
    assert not live["state"].given
    assert not live["state"]["tensor"].any()


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_typed_value_with_invalid_text_is_refused(base, name, text):
    base["manifest"][f"0/state/typed/{name}"]["serialized_value"] = text
    refused(
        base, f"0/state/typed/{name}", error=SnapshotError if name in ("zone", "datetime") else CorruptSnapshotError
    )


@pytest.mark.parametrize(
    "change",
    [
        {"held": "int", "serialized_value": "x"},
        {"held": "nothing"},
        {"held": "int", "serialized_value": DIGITS},
        {"held": "Tensor"},
    ],
    ids=str,
)
def test_enum_member_entry_that_is_invalid_is_refused(base, change):
    base["manifest"]["0/state/member"].update(change)
    refused(base, "0/state/member")


@pytest.mark.parametrize("change", [{"held": "int", "serialized_value": "3"}, {"name": "GREEN", "held": None}], ids=str)
def test_enum_member_that_the_class_lacks_is_a_mismatch(base, change):
    entry = base["manifest"]["0/state/member"]
    entry.update(change)
    if entry["held"] is None:
        del entry["held"]
        entry["serialized_value"] = ""
    store(MANIFEST, sign(encoded(base)))
    live = StateDict(member=Color.RED, **{name: None for name in rich()["state"] if name != "member"})
    with pytest.raises(SnapshotError, match="state/member: the snapshot has"):
        Snapshot(URL, allow_pickle=True).restore({"state": live})
    assert live["member"] is Color.RED


@pytest.mark.parametrize(
    "keys",
    [["lr", "weight", 5], ["lr", "weight", "weight"], ["lr", "weight", {"bool": "True"}], ["lr", "weight"]],
    ids=str,
)
def test_dataclass_entry_with_invalid_fields_is_refused(base, keys):
    base["manifest"]["0/state/config"]["keys"] = keys
    refused(base, "0/state/config", error=SnapshotError)


def test_dataclass_entry_cannot_set_dunder_attributes(base):
    """What is neither a field nor an attribute of the live one is never set."""
    names = ["__class__", "__dict__", "__init__"]
    manifest = base["manifest"]
    manifest["0/state/config"]["keys"] = ["lr", *names]
    del manifest["0/state/config/weight"], manifest["0/state/config/color"]
    for name in names:
        manifest[f"0/state/config/{name}"] = {"type": "int", "serialized_value": "1"}
    ordered = {path: manifest[path] for path in sorted(manifest)}
    store(MANIFEST, sign(encoded({**base, "manifest": ordered})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = rich()["state"]
    weight = live["config"].weight
    report = Snapshot(URL, allow_pickle=True).restore({"state": live})
    assert type(live["config"]) is Config
    assert live["config"].weight is weight
    assert {line.path for line in report.unexpected} == {f"state/config/{name}" for name in names}


def test_dataclass_and_enum_entries_import_no_module(base):
    """No module is imported, and nothing is looked up."""
    for path in ("0/state/config", "0/state/member"):
        base["manifest"][path]["obj_type"] = "antigravity.Thing"
    store(MANIFEST, sign(encoded(base)))
    import sys

    read = Snapshot(URL, allow_pickle=True).get_state_dict_for_key("state")
    assert "antigravity" not in sys.modules
    assert read["config"].class_name == "antigravity.Thing"


def test_bytes_io_and_generator_entries_that_are_invalid_are_refused(base):
    entry = base["manifest"]["0/state/generator"]
    for change in ({"device": "cuda:x"}, {"device": 5}, {}):
        base["manifest"]["0/state/generator"] = {**entry, "params": change}
        refused(base, "0/state/generator", error=SnapshotError)
    base["manifest"]["0/state/generator"] = {**entry, "parts": {}}
    refused(base, "0/state/generator", error=SnapshotError)
    kept = base["manifest"]["0/state/generator"] = entry
    assert kept
    file = base["manifest"]["0/state/file"]
    begin, _ = file["byte_range"]
    file["byte_range"] = [begin, begin + 3]
    del file["digest"]
    refused(base, "0/state/file", error=SnapshotError)


@pytest.mark.parametrize("length", [0, 2, 4, 1 << 60])
def test_slice_entry_of_another_length_is_refused(base, length):
    base["manifest"]["0/state/typed/slice"]["length"] = length
    refused(base, "0/state/typed/slice")


def test_dataclass_entries_nested_without_end_are_refused(base):
    manifest = base["manifest"]
    path = "0/state/config/weight"
    del manifest[path]
    for _ in range(600):
        manifest[path] = {"type": "dataclass", "keys": ["a"], "obj_type": "x.Y"}
        path += "/a"
    manifest[path] = {"type": "int", "serialized_value": "1"}
    refused(base, "0/state/config", error=SnapshotError)


def test_generator_keeps_its_state_if_the_stored_state_is_invalid(base):
    live = torch.Generator().manual_seed(5)
    store(MANIFEST, sign(encoded(base)))
    document = document_of("values/s")
    state = document["manifest"]["0/state/generator"]["parts"]["state"]
    begin, _ = state["byte_range"]
    state["byte_range"], state["shape"] = [begin, begin + 16], [16]
    del state["digest"]
    store(MANIFEST, sign(encoded(document)))
    with pytest.raises(SnapshotError):
        Snapshot(URL).read_object("0/state/generator", obj_out=live)
    assert live.initial_seed() == 5
