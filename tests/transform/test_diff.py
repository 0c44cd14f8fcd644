"""What differs between two snapshots: by their digests alone where that is enough, else by what is read."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, RestoreError, Snapshot, SnapshotNotFoundError, StateDict, Target
from snapshot.io.arena import arena
from snapshot.plan import layout
from snapshot.reports import MARKS
from snapshot.save import planned_take
from snapshot.tensors.memory import BY_NAME
from snapshot.testing import faulty, recording
from snapshot.transform.diff_bytes import Numbers, are_comparable
from tests.helpers.arguments import for_take


@pytest.fixture(autouse=True)
def all_memory_is_given_back():
    """Whatever happens, no slot of the arena is lost."""
    yield
    assert " 0 in use" in repr(arena())


def taken(name, state, **options):
    return Snapshot.take(f"memory://diff/{name}", {"m": StateDict(**state)}, **for_take(overwrite=True, **options))


def changes(diff, kind="changed"):
    return {each.path: each for each in diff if each.kind == kind}


def base():
    generator = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(300, 400, generator=generator),  # two blocks of digests
        "b": torch.zeros(10),
        "step": 3,
        "nan": float("nan"),
        "list": [1, {"x": None}, "text"],
        "array": np.arange(6.0).reshape(2, 3),
        "sparse": torch.eye(3).to_sparse(),
        "long": b"x" * 300_000,
        "empty": torch.empty(0, 3),
    }


def test_diff_of_equal_snapshots_is_same_and_reads_no_data():
    with recording() as log:
        for name in ("a", "b"):
            taken(name, base())
        diff = Snapshot.diff("recording+memory://diff/a", "recording+memory://diff/b")
    assert diff.same
    assert not diff
    assert list(diff) == []
    assert diff.equal == 11  # containers that hold something are seen by what they hold
    assert (diff.entries_read, diff.bytes_read) == (0, 0)
    assert {each.path for each in log.operations if each.name != "close"} == {".snapshot_metadata"}
    assert str(diff) == "the same: 11 entries; by the manifests alone, no data was read"


def test_diff_finds_each_kind_of_change_without_reading_data():
    a = taken("a", {**base(), "gone": torch.ones(5), "old": torch.arange(70.0)})
    state = base()
    state["w"][7, 9] += 1
    state |= {"step": 4, "fresh": 1, "new": torch.arange(70.0), "b": torch.zeros(2, 5), "list": [1, {"x": 2}, "text"]}
    state |= {"array": np.arange(6.0, dtype=np.float32).reshape(2, 3), "long": b"y" * 300_000}
    with recording() as log:
        taken("b", state)
        diff = Snapshot.diff(a, "recording+memory://diff/b")
    assert not log.of("read_into", "data/*")
    assert {kind: [each.path for each in diff if each.kind == kind] for kind in MARKS} == {
        "added": ["m/fresh"],
        "removed": ["m/gone"],
        "changed": ["m/array", "m/b", "m/list/1/x", "m/long", "m/step", "m/w"],
        "renamed": ["m/new"],
    }
    found = changes(diff)
    assert found["m/w"].what == ("bytes",)
    assert found["m/b"].what == ("shape",)
    assert found["m/list/1/x"].what == ("kind",)
    assert found["m/step"].detail == "int 3 -> int 4"
    assert (diff.renamed[0].before, str(diff.renamed[0])) == ("m/old", "> m/old -> m/new")
    assert bool(diff)
    assert len(diff) == 9
    assert [each.path for each in (*diff.added, *diff.removed)] == ["m/fresh", "m/gone"]


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (0.0, -0.0, "value"),
        (1, True, "kind"),
        (1, 1.0, "kind"),
        ([1], (1,), "kind"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "order"),
        ({1: "x"}, {"1": "x"}, "keys"),
        ([], {}, "kind"),
        (torch.zeros(3), -torch.zeros(3), "bytes"),
        (torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), "subclass"),
        (torch.zeros(3), torch.zeros(3).requires_grad_(), "requires_grad"),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), "stride_order"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32), "dtype"),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), "bytes"),
        (torch.eye(2).to_sparse(), torch.eye(2), "kind"),
        (np.zeros((2, 3)), np.asfortranarray(np.zeros((2, 3))), "order"),
        (np.float32(1), np.array(1, np.float32), "scalar"),
        (b"x" * 20_000, bytearray(b"x" * 20_000), "kind"),
    ],
    ids=str,
)
def test_diff_finds_what_restore_would_restore_differently(before, after, what):
    a, b = taken("a", {"x": before}), taken("b", {"x": after})
    diff = Snapshot.diff(a, b)
    assert what in changes(diff)["m/x"].what
    assert diff.entries_read == 0
    assert Snapshot.diff(a, taken("c", {"x": before})).same


def test_diff_finds_nan_payloads():
    odd = float(np.frombuffer(b"\x01\0\0\0\0\0\xf8\x7f", np.float64)[0])
    assert Snapshot.diff(taken("a", {"x": float("nan")}), taken("b", {"x": odd})).changed


def test_diff_finds_weights_that_are_no_longer_tied():
    one, other = torch.ones(50), torch.ones(50)
    a, b = taken("a", {"x": one, "y": one}), taken("b", {"x": one, "y": other})
    diff = Snapshot.diff(a, b)
    assert {path: each.what for path, each in changes(diff).items()} == {"m/x": ("ties",), "m/y": ("ties",)}
    assert diff.changed[0].detail == "tied to m/y -> not tied"
    assert Snapshot.diff(a, taken("c", {"x": one, "y": one})).same


def test_diff_does_not_report_a_rename_for_ambiguous_bytes():
    a = taken("a", {"x": torch.ones(3), "y": torch.ones(3), "s": 1})
    b = taken("b", {"z": torch.ones(3), "t": 1})
    diff = Snapshot.diff(a, b)
    assert not diff.renamed
    assert [each.path for each in diff.removed] == ["m/s", "m/x", "m/y"]


@pytest.mark.parametrize("cut", [4000, 10_000])
def test_diff_of_tensors_with_other_chunks_reads_within_a_small_memory_budget(monkeypatch, cut):
    state = {"x": torch.arange(40_000.0).view(200, 200), "same": torch.ones(100)}
    a = taken("a", state)
    state["x"] = state["x"].clone()
    monkeypatch.setattr(layout, "LARGEST_FILE", cut)
    planned_take._plans.reset()  # one that has planned nothing before
    b = taken("b", state)
    state["x"][150, 3] = -1
    c = taken("c", state)
    assert len(b.get_manifest()["0/m/x"].pieces()) > 1
    same, other = (Snapshot.diff(a, each, memory_budget_bytes=200_000) for each in (b, c))
    assert same.same
    assert (same.entries_read, other.entries_read) == (1, 1)
    assert same.bytes_read >= 2 * 160_000
    assert "1 entry had to be read" in str(same)
    assert [each.path for each in other.changed] == ["m/x"]
    assert Snapshot.diff(b, c).entries_read == 0, "their boxes coincide"


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_diff_finds_one_element_with_any_chunks(monkeypatch, data):
    shapes = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=3))
    dtypes = data.draw(st.lists(st.sampled_from([torch.float32, torch.int8, torch.float64]), min_size=3, max_size=3))
    state = {
        f"t{i}": torch.arange(math.prod(shape)).to(dtype).view(shape)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    made = []
    changed = data.draw(st.sampled_from(sorted(state)))
    for name in ("a", "b", "c"):
        planned_take._plans.reset()
        monkeypatch.setattr(layout, "LARGEST_FILE", data.draw(st.integers(64, 20_000)))
        if name == "c":
            flat = state[changed] = state[changed].clone()
            flat.view(-1)[data.draw(st.integers(0, flat.numel() - 1))] += 1
        made.append(taken(name, state))
    a, b, c = made
    budget = data.draw(st.sampled_from([1, 100_000, None]))
    assert Snapshot.diff(a, b, values=True, memory_budget_bytes=budget).same
    (change,) = Snapshot.diff(a, c, values=True, memory_budget_bytes=budget)
    assert (change.path, change.what, change.values.differing) == (f"m/{changed}", ("bytes",), 1)


def test_diff_values_measures_the_differences():
    state = {
        "f": torch.arange(3000.0).view(30, 100), "h": torch.ones(500, dtype=torch.bfloat16), "i": torch.arange(9),
        "c": torch.ones(4, dtype=torch.complex64), "t": torch.tensor([True, False]), "shape": torch.ones(3),
        "cast": torch.ones(4), "array": np.zeros(3), "texts": np.array(["a", "b"]), "same": torch.ones(9),
    }  # fmt: skip
    a = taken("a", state)
    changed = {
        name: value.clone() if isinstance(value, torch.Tensor) else value.copy() for name, value in state.items()
    }
    changed["f"][3] += 2
    changed["h"][7] = float("nan")
    changed["i"][2] = 2**62
    changed["c"][1] += 3 + 4j
    changed["t"][1] = True
    changed["array"][2] = -3
    changed["texts"][0] = "c"
    changed |= {"shape": torch.ones(4), "cast": torch.ones(4, dtype=torch.float64) * 2}
    diff = Snapshot.diff(a, taken("b", changed), values=True, memory_budget_bytes=1 << 20)
    found = {path.removeprefix("m/"): each.values for path, each in changes(diff).items()}
    assert found.keys() == {"f", "h", "i", "c", "t", "array", "texts", "shape", "cast"}
    assert (found["f"].elements, found["f"].differing, found["f"].largest, found["f"].norm) == (3000, 100, 2.0, 20.0)
    assert found["f"].relative == pytest.approx(20 / torch.arange(3000.0).double().norm().item())
    assert (found["h"].differing, found["h"].not_numbers, found["h"].norm) == (1, 1, 0.0)
    assert found["i"].largest == 2**62 - 2
    assert found["c"].largest == 5.0
    assert (found["t"].differing, found["t"].largest) == (1, 1)
    assert found["array"].norm == 3.0
    assert (found["cast"].differing, found["cast"].norm) == (4, 2.0)
    assert found["texts"] is found["shape"] is None
    assert "100 of 3,000 differ, at most by 2, norm 20" in str(diff)


REAL = [name for name in ("float64", "float32", "bfloat16", "float16", "float8_e5m2") if name in BY_NAME]


@settings(max_examples=60)
@given(st.data())
def test_diff_values_equals_that_of_whole_tensors(data):
    name = data.draw(st.sampled_from([*REAL, "int64", "uint64", "int8", "uint16", "bool", "complex64"]))
    dtype = BY_NAME[name]
    count = data.draw(st.integers(1, 40))
    width = dtype.itemsize * count
    raw = data.draw(st.binary(min_size=width, max_size=width)), data.draw(st.binary(min_size=width, max_size=width))
    a, b = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in raw)
    if name == "bool":
        a, b = a % 2, b % 2
    if data.draw(st.booleans()):
        b = a.clone()
    numbers, cut = Numbers(name), data.draw(st.integers(0, count)) * dtype.itemsize
    for piece in (slice(0, cut), slice(cut, None)):
        numbers.update(a[piece], b[piece])
    found = numbers.values()
    assert found.elements == count
    if name in ("int64", "uint64", "int8", "uint16", "bool"):
        x, y = (np.frombuffer(bytes(each.numpy()), "uint8" if name == "bool" else name).tolist() for each in (a, b))
        apart = [abs(p - q) for p, q in zip(x, y, strict=True) if p != q]
        assert (found.differing, found.largest) == (len(apart), max(apart, default=0))
        assert found.norm == pytest.approx(math.sqrt(sum(each**2 for each in apart)))
        return
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x, y = (each.view(dtype).to(wide) for each in (a, b))
    where = ~((x == y) | (x.isnan() & y.isnan()))
    apart = (x - y).abs()[where]
    assert found.differing == int(where.sum())
    assert found.not_numbers == int(apart.isnan().sum())
    apart = apart[~apart.isnan()]
    assert found.largest == (float(apart.max()) if apart.numel() else 0)
    expected = float(np.hypot.reduce(apart.numpy())) if apart.numel() else 0.0
    assert found.norm == pytest.approx(expected, rel=1e-9, abs=0)


def test_diff_values_knows_every_dtype_of_torch():
    assert {"float32", "bool", "int64", "uint64", "complex64"} <= {name for name in BY_NAME if are_comparable(name)}
    for name in BY_NAME:
        if are_comparable(name):
            numbers = Numbers(name)
            held = torch.zeros(16, dtype=torch.uint8)
            numbers.update(held, held)
            assert numbers.values().differing == 0


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_diff_of_other_formats_reads(tmp_path, to):
    state = {"w": torch.randn(300, 400), "turned": torch.randn(30, 20).t(), "b": torch.ones(3), "empty": torch.empty(0)}
    values = {} if to == "safetensors" else {"step": 3, "lr": [0.1, 0.2]}
    Snapshot.take(tmp_path / "a", {"m": StateDict(**state, **values)})
    Snapshot(tmp_path / "a").convert(Target(tmp_path / "other", to))
    rename = {"m": ""} if to == "safetensors" else None
    diff = Snapshot.diff(tmp_path / "a", tmp_path / "other", rename=rename)
    kinds = {each.path: each.what for each in diff}
    assert kinds == ({} if to == "torch" else {"turned" if rename else "m/turned": ("stride_order",)})
    assert diff.entries_read == 3
    state["w"][299, 399] += 1
    Snapshot.take(tmp_path / "b", {"m": StateDict(**state, **values)})
    diff = Snapshot.diff(
        tmp_path / "b", tmp_path / "other", rename=rename, values=True, select=["w" if rename else "m/w"]
    )
    assert [each.what for each in diff] == [("bytes",)]
    assert diff.changes[0].values.differing == 1
    for budget in (1 << 20, 4 << 20):
        assert len(Snapshot.diff(tmp_path / "b", tmp_path / "other", rename=rename, memory_budget_bytes=budget)) >= 1


def test_diff_select_exclude_and_rename():
    a = taken("a", {"old": {"w": torch.ones(3), "b": 1}, "rng": 1})
    b = taken("b", {"new": {"w": torch.ones(3), "b": 2}, "rng": 2})
    rename = {"m/old": "m/new"}
    assert [each.path for each in Snapshot.diff(a, b, rename=rename)] == ["m/new/b", "m/rng"]
    assert [each.path for each in Snapshot.diff(a, b, rename=rename, select=["m/new/*"])] == ["m/new/b"]
    assert Snapshot.diff(a, b, rename=rename, exclude=["**/rng", "**/b"]).same
    with pytest.raises(RestoreError, match="'m/nwe' matches nothing"):
        Snapshot.diff(a, b, select=["m/nwe"])
    with pytest.raises(TypeError, match="one string"):
        Snapshot.diff(a, b, select="m")
    with pytest.raises(RestoreError, match="not in the checkpoint"):
        Snapshot.diff(a, b, rename={"x": "y"})
    with pytest.raises(RestoreError, match="two entries the name"):
        Snapshot.diff(a, b, rename={"m/old/w": "m/rng"})
    with pytest.raises(SnapshotNotFoundError):
        Snapshot.diff(a, "memory://diff/none")


def test_diff_that_meets_damage_raises_and_names_it():
    a, b = taken("a", {"x": torch.zeros(100)}), taken("b", {"x": torch.ones(100)})
    damage = faulty(on="read_into", path="data/*", flip=9, times=None)
    with damage, pytest.raises(CorruptSnapshotError, match="m/x"):
        Snapshot.diff(Snapshot("faulty+memory://diff/a"), b, values=True)
    assert Snapshot.diff(a, b, values=True).changed[0].values.norm == 10.0
    refused = faulty(on="read_into", path="data/*", error=PermissionError(13, "Permission denied"))
    with refused, pytest.raises(OSError, match="Permission denied"):
        Snapshot.diff("faulty+memory://diff/a", b, values=True)


def test_diff_with_thousands_of_changes_prints_a_screen():
    a, b = (taken(name, {f"k{i}": value for i in range(1000)}) for name, value in (("a", 1), ("b", 2)))
    lines = str(Snapshot.diff(a, b)).splitlines()
    assert len(lines) == 202
    assert lines[0].startswith("1,000 changed, 0 the same")
    assert lines[-1] == "  … and 800 more"


def test_diff_progress_counts_the_bytes_read():
    seen = []
    a, b = taken("a", {"x": torch.zeros(100_000)}), taken("b", {"x": torch.ones(100_000)})
    Snapshot.diff(a, b, values=True, progress=seen.append)
    assert seen[-1].done == seen[-1].total == 800_000


def test_diff_rename_to_an_empty_name_raises():
    a, b = taken("a", {"x": torch.ones(3), "y": 1}), taken("b", {"y": 1})
    for rename in ({"m/x": ""}, lambda name: "" if name == "m/x" else name):
        with pytest.raises(RestoreError, match="must not give 'm/x' an empty name"):
            Snapshot.diff(a, b, rename=rename)
    nested = taken("c", {"in": {"x": torch.ones(3)}})
    flat = Snapshot.take("memory://diff/d", {"x": StateDict(x=torch.ones(3))}, overwrite=True)
    assert [each.path for each in Snapshot.diff(nested, flat, rename={"m": "", "m/in": "x"})] == []


@settings(max_examples=60)
@given(st.data())
def test_diff_values_subtracts_integers_of_two_dtypes_exactly(data):
    kinds = ["int64", "uint64", "int32", "uint32", "int8", "uint8", "bool"]
    first, second = (data.draw(st.sampled_from(kinds)) for _ in range(2))

    def drawn(name):
        if name == "bool":
            return st.integers(0, 1)
        low, high = np.iinfo(name).min, np.iinfo(name).max
        near = st.integers(-2, 2)
        return st.sampled_from([low, high, 0, 2**53, 2**63]).flatmap(
            lambda middle: near.map(lambda by: min(max(middle + by, int(low)), int(high)))
        )

    pairs = data.draw(st.lists(st.tuples(drawn(first), drawn(second)), min_size=1, max_size=20))
    x, y = zip(*pairs, strict=True)
    a, b = (
        taken("a", {"x": torch.tensor(x, dtype=BY_NAME[first])}),
        taken("b", {"x": torch.tensor(y, dtype=BY_NAME[second])}),
    )
    diff = Snapshot.diff(a, b, values=True)
    if first == second and x == y:
        assert diff.same
        return
    apart = [abs(p - q) for p, q in pairs if p != q]
    values = changes(diff)["m/x"].values
    assert (values.differing, values.largest, values.within) == (len(apart), max(apart, default=0), "")
    assert values.norm == pytest.approx(math.sqrt(sum(each**2 for each in apart)))
    norm = math.sqrt(sum(each**2 for each in x))
    assert values.relative == pytest.approx(values.norm / norm if norm else math.inf if values.norm else 0)


def test_diff_values_names_the_dtype_in_which_it_subtracts():
    a, b = taken("a", {"x": torch.tensor([2**53 + 1])}), taken("b", {"x": torch.tensor([2.0**53], dtype=torch.float64)})
    values = Snapshot.diff(a, b, values=True).changed[0].values
    assert values.within == "float64"
    assert str(values).endswith(", in float64")


def test_diff_values_says_if_only_bytes_differ():
    odd = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    a = taken("a", {"x": torch.tensor([0.0, 1]), "nan": torch.tensor([float("nan"), 1]), "more": torch.zeros(2)})
    b = taken("b", {"x": torch.tensor([-0.0, 1]), "nan": odd, "more": torch.ones(2)})
    lines = {change.path: str(change) for change in Snapshot.diff(a, b, values=True)}
    assert lines.keys() == {"m/x", "m/nan", "m/more"}
    assert [path for path, line in lines.items() if line.endswith("(only bytes differ)")] == ["m/nan", "m/x"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_diff_values_of_sparse_tensors():
    eye = torch.eye(4)
    state = {"coo": eye.to_sparse(), "csr": eye.to_sparse_csr(), "moved": eye.to_sparse(), "more": eye.to_sparse()}
    a = taken("a", state)
    turned = eye.roll(1, 0)
    after = {"coo": (eye * 3).to_sparse(), "csr": (eye * 2).to_sparse_csr(), "moved": turned.to_sparse()}
    b = taken("b", {**after, "more": (eye + turned).to_sparse()})
    diff = Snapshot.diff(a, b, values=True)
    found = changes(diff)
    assert (found["m/coo"].values.differing, found["m/coo"].values.norm) == (4, 4.0)
    assert found["m/csr"].values.norm == 2.0
    assert found["m/moved"].values is found["m/more"].values is None
    assert "no numbers for this kind" in found["m/moved"].detail
    assert found["m/more"].what == ("shape",)
    assert diff.entries_read == 2


def test_diff_values_says_if_a_dtype_has_no_numbers():
    kinds = {
        "date": np.array(["2026-01-01"], "datetime64[D]"), "turned": np.arange(3).astype(">i4"),
        "record": np.zeros(2, [("a", "<i4")]), "text": np.array([b"a", b"b"]),
        "short": torch.zeros(4, dtype=torch.uint8).view(torch.uint3),
    }  # fmt: skip
    other = {
        "date": np.array(["2026-01-02"], "datetime64[D]"), "turned": np.arange(1, 4).astype(">i4"),
        "record": np.ones(2, [("a", "<i4")]), "text": np.array([b"a", b"c"]),
        "short": torch.ones(4, dtype=torch.uint8).view(torch.uint3),
    }  # fmt: skip
    a, b = taken("a", kinds), taken("b", other)
    found = changes(Snapshot.diff(a, b, values=True))
    assert found.keys() == {f"m/{name}" for name in kinds}
    assert all("no numbers for this kind" in each.detail and each.values is None for each in found.values())
    assert not any("no numbers" in each.detail for each in Snapshot.diff(a, b))


def test_diff_values_reads_nothing_of_empty_tensors():
    a = taken("a", {"x": torch.empty(0, 3), "n": np.empty((0, 2), np.float32)})
    b = taken("b", {"x": torch.empty(0, 3, dtype=torch.float64), "n": np.empty((0, 2), np.float32)})
    diff = Snapshot.diff(a, b, values=True)
    assert ([each.what for each in diff], diff.entries_read, diff.bytes_read) == ([("dtype",)], 0, 0)


def test_diff_shows_the_part_of_long_values_that_differs():
    text = "x" * 300
    a = taken("a", {"text": text + "a" + text, "int": 10**100, "more": text})
    b = taken("b", {"text": text + "b" + text, "int": 10**100 + 7, "more": text + "y"})
    found = {path: each.detail for path, each in changes(Snapshot.diff(a, b)).items()}
    assert "xa" in found["m/text"].partition(" -> ")[0]
    assert "xb" in found["m/text"].partition(" -> ")[2]
    assert found["m/text"].endswith("from character 300 on")
    assert max(map(len, found.values())) < 250
    assert found["m/int"].count("7") == 1
    assert "(300 characters) -> " in found["m/more"]
    assert "(301 characters)" in found["m/more"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_diff_of_quantised_tensors_names_the_settings_that_differ():
    scales, zeros = torch.full((50,), 0.1, dtype=torch.float64), torch.zeros(50, dtype=torch.int64)
    made = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    other = torch.quantize_per_tensor(torch.ones(3), 0.25, 0, torch.qint8)
    wide = torch.quantize_per_channel(torch.ones(50, 2), scales, zeros, 0, torch.qint8)
    wider = torch.quantize_per_channel(torch.ones(50, 2), scales, zeros + 1, 0, torch.qint8)
    diff = Snapshot.diff(taken("a", {"x": made, "y": wide}), taken("b", {"x": other, "y": wider}))
    details = {path: each.detail for path, each in changes(diff).items()}
    assert details["m/x"] == "scale 0.5 -> 0.25"
    assert "scale" not in details["m/y"]
    assert changes(diff)["m/y"].what[0] in ("kind", "bytes")
