"""Objects that once needed a pickle: named tuples, namespaces, random number generators, configurations."""

import argparse
import collections
import dataclasses
import json
import random
import types
import typing
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, Snapshot, SnapshotManager, StateDict, TakeOptions
from snapshot.errors import SnapshotError, UnsafeObjectError
from snapshot.manifest import document
from snapshot.manifest.objects import decode_object, encode_object
from snapshot.saved import SavedObject
from tests.helpers.arguments import for_restore

pytestmark = pytest.mark.filterwarnings("error")


class Pair(typing.NamedTuple):
    weight: torch.Tensor
    count: int = 3


Point = collections.namedtuple("Point", "x y")


class Longer(typing.NamedTuple):
    weight: torch.Tensor
    count: int
    more: str = "default"


class WithAttributes(Point):
    """A named tuple whose instances have attributes, too."""


@dataclasses.dataclass
class Holder:
    pair: Pair
    rng: np.random.Generator


def saved(**held):
    return Snapshot.take("memory://known", {"s": StateDict(**held)}, overwrite=True)


def restored(snapshot, **live):
    app = StateDict(**live)
    report = snapshot.restore({"s": app})
    return app, report


# Named tuples


def test_namedtuple_restores_over_one_of_its_class():
    snapshot = saved(pair=Pair(torch.ones(3), 7), nested=Point(1, [Point(2, ("a",))]))
    target = torch.zeros(3)
    app, report = restored(snapshot, pair=Pair(target), nested=Point(None, [Point(None, None)]))
    assert type(app["pair"]) is Pair
    assert app["pair"].weight is target
    assert target.eq(1).all()
    assert app["pair"].count == 7
    assert app["nested"] == Point(1, [Point(2, ("a",))])
    assert type(app["nested"].y[0]) is Point
    assert not report.replaced


def test_namedtuple_without_a_live_one_is_a_saved_object_and_reported():
    snapshot = saved(pair=Pair(torch.ones(3), 7))
    app, report = restored(snapshot, pair=None)
    assert isinstance(app["pair"], SavedObject)
    assert app["pair"].kind == "namedtuple"
    assert app["pair"].count == 7
    [line] = report.replaced
    assert line.path == "s/pair"
    assert "its class is not allowed" in line.detail
    assert "torch.serialization.add_safe_globals([Pair])" in line.detail
    again = saved(**app)
    assert Snapshot.diff(snapshot.path, again.path).same


def test_namedtuple_of_a_safe_global_class_is_created():
    snapshot = saved(pair=Pair(torch.ones(3), 7))
    with torch.serialization.safe_globals([Pair]):
        app, report = restored(snapshot, pair=None)
    assert type(app["pair"]) is Pair
    assert not report.replaced


def test_namedtuple_fields_may_be_added_and_removed():
    app, report = restored(saved(pair=Pair(torch.ones(3), 7)), pair=Longer(torch.zeros(3), 0, "live"))
    assert app["pair"].count == 7
    assert app["pair"].more == "live"
    assert [line.path for line in report.kept] == ["s/pair/more"]
    app, report = restored(saved(pair=Longer(torch.ones(3), 7, "new")), pair=Pair(torch.zeros(3)))
    assert app["pair"].count == 7
    assert [line.path for line in report.unexpected] == ["s/pair/more"]


def test_namedtuple_field_without_a_default_is_named():
    snapshot = saved(pair=Point(1, 2))
    New = collections.namedtuple("New", "x y z")
    New.__module__, New.__qualname__ = Point.__module__, Point.__qualname__
    with torch.serialization.safe_globals([New]):
        _, report = restored(snapshot, pair=None)
    assert "has a field 'z' without a default" in report.replaced[0].detail


def test_read_object_returns_a_namedtuple_of_the_class_of_obj_out():
    snapshot = saved(pair=Pair(torch.ones(3), 7))
    found = snapshot.read_object("s/pair", Pair(torch.zeros(3)))
    assert type(found) is Pair
    assert found.weight.eq(1).all()


def test_namedtuple_with_attributes_is_pickled():
    value = WithAttributes(1, 2)
    value.note = "more"
    with pytest.warns(UserWarning, match="stored as pickles"):
        snapshot = saved(value=value)
    assert snapshot.metadata.format == "snapshot/1"


def test_namedtuples_in_sets_and_dataclasses():
    holder = Holder(Pair(torch.ones(2), 1), np.random.default_rng(3))
    snapshot = saved(points={Point(1, 2), Point(3, 4)}, holder=holder)
    expected = holder.rng.random()
    app, _ = restored(snapshot, points={Point(0, 0)}, holder=Holder(Pair(torch.zeros(2)), np.random.default_rng()))
    assert app["points"] == {Point(1, 2), Point(3, 4)}
    assert type(app["holder"]) is Holder
    assert app["holder"].pair.weight.eq(1).all()
    assert app["holder"].rng.random() == expected


# Namespaces


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
def test_namespace_is_restored(kind):
    value = kind(lr=0.1, names=["a"], inner=kind(x=1), weight=torch.ones(2), **{"a/b": 1})
    live = torch.zeros(2)
    for start in (None, kind(weight=live)):
        app, report = restored(saved(args=value), args=start)
        assert type(app["args"]) is kind
        assert type(app["args"].inner) is kind
        assert vars(app["args"]).keys() == vars(value).keys()
        assert app["args"].weight.eq(1).all()
        assert not report.replaced
    assert app["args"].weight is live


def test_namespace_that_contains_itself_is_pickled():
    value = types.SimpleNamespace(x=1)
    value.me = value
    with pytest.warns(UserWarning, match="stored as pickles"):
        saved(args=value)


# Random number generators

BITS = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]
MAKERS = [lambda seed, bits=bits: np.random.Generator(bits(seed)) for bits in BITS]
MAKERS += [np.random.RandomState, random.Random]


def draw(generator):
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.randrange(1 << 70)]
    if isinstance(generator, np.random.RandomState):
        return [generator.rand(), generator.standard_normal(), generator.randint(1 << 30)]
    children = [child.random() for child in generator.spawn(2)]
    return [generator.random(), generator.integers(1 << 20, dtype=np.uint32), generator.standard_normal(), *children]


@given(which=st.integers(0, len(MAKERS) - 1), seed=st.integers(0, 2**32 - 2), steps=st.integers(0, 3))
def test_generator_of_numpy_and_python_continues_after_restore(which, seed, steps):
    generator = MAKERS[which](seed)
    for _ in range(steps):
        draw(generator)
    snapshot = saved(rng=generator)
    live = MAKERS[which](seed + 1)
    app, _ = restored(snapshot, rng=live)
    assert app["rng"] is live  # filled in place: the application may hold it elsewhere
    new, _ = restored(snapshot)
    expected = draw(generator)
    assert draw(live) == expected
    assert draw(new["rng"]) == expected


def test_generator_with_another_bit_generator_is_filled_in_place():
    live = np.random.Generator(np.random.MT19937(3))
    generator = np.random.Generator(np.random.Philox(5))
    app, _ = restored(saved(rng=generator), rng=live)
    assert app["rng"] is live
    assert live.random() == generator.random()
    old = np.random.RandomState(np.random.PCG64(1))
    state = np.random.RandomState(7)
    restored(saved(rng=state), rng=old)
    assert old.rand() == state.rand()


def test_generator_is_unchanged_by_a_refused_restore():
    snapshot = saved(rng=np.random.default_rng(1), other=torch.ones(2))
    live = np.random.default_rng(2)
    before = live.bit_generator.state
    model = torch.nn.Linear(2, 2)
    with pytest.raises(Exception, match="model"):
        snapshot.restore({"s": StateDict(rng=live), "model": model})
    assert live.bit_generator.state == before


def edited(data, change):
    """The bytes of a generator with a change to its state."""
    found = json.loads(data)
    change(found)
    return json.dumps(found).encode()


STATES = [lambda bits=bits: np.random.Generator(bits(1)) for bits in BITS]
CHANGES = [
    lambda d: d["seed"].update(pool_size=str(1 << 31)),
    lambda d: d["seed"].update(entropy=["1"] * 1000),
    lambda d: d["seed"].update(entropy="-1"),
    lambda d: d["seed"].update(entropy="9" * 1000),
    lambda d: d["bits"].update(bit_generator="os.system"),
    lambda d: d.update(bits={}),
    lambda d: d.update(bits=5),
    lambda d: d.update(bits=[]),
    lambda d: d["bits"].update(state={}),
    lambda d: d["bits"].update(state={"state": "x", "inc": "1"}),
    lambda d: d["bits"].update(has_uint32="7"),
    lambda d: d["bits"].update(uinteger=str(1 << 32)),
    lambda d: d["bits"].update(buffer_pos="-1"),
    lambda d: d["bits"].update(more="1"),
]
POSITIONS = ["1000000000", "-1000000000", "2147483647", "1000", "-5", "625", "99999999999", "x", 5, None]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", range(len(STATES)))
def test_generator_hostile_state_of_numpy_is_refused(which, change):
    stored = encode_object(STATES[which]())
    data = edited(stored.data, change)
    with pytest.raises(CorruptSnapshotError, match=r"s/rng: not the state of a numpy\.random\.Generator"):
        decode_object("s/rng", stored.serializer, stored.kind, data)


@pytest.mark.parametrize("position", POSITIONS)
def test_generator_position_outside_of_the_key_is_refused(position):
    """NumPy does not check it, and would read memory that is not its own."""
    for generator in (np.random.Generator(np.random.MT19937(1)), np.random.RandomState(1)):
        stored = encode_object(generator)
        found = json.loads(stored.data)
        found["bits"]["state"]["pos"] = position
        with pytest.raises(CorruptSnapshotError, match="not the state"):
            decode_object("s/rng", stored.serializer, stored.kind, json.dumps(found).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"words": [0] * 624},
        {"words": ["x"] * 625},
        {"words": [1 << 40] * 625},
        {"version": 9},
        {"normal": "text"},
        {"normal": 5},
    ],
)
def test_generator_hostile_state_of_python_is_refused(change):
    stored = encode_object(random.Random(1))
    data = edited(stored.data, lambda d: d.update(change))
    with pytest.raises(CorruptSnapshotError, match="not the state"):
        decode_object("s/rng", stored.serializer, stored.kind, data)


KINDS = [("random", "numpy.random.Generator"), ("random", "x"), ("OmegaConf", "omegaconf.OmegaConf")]


@given(data=st.binary(max_size=60))
def test_generator_state_of_any_bytes_is_refused(data):
    for serializer, kind in KINDS:
        with pytest.raises(CorruptSnapshotError):
            decode_object("s/rng", serializer, kind, data)


def test_generator_damaged_state_is_refused_before_anything_is_changed(tmp_path):
    Snapshot.take(tmp_path, {"s": StateDict(rng=np.random.default_rng(3), a=torch.ones(2), z=random.Random(1))})
    [binary] = (tmp_path / "data").glob("*.bin")
    data = binary.read_bytes()
    binary.write_bytes(data.replace(b"has_uint32", b"has_uint33"))
    live = StateDict(rng=np.random.default_rng(4), a=torch.zeros(2), z=random.Random(2))
    before = live["rng"].bit_generator.state, live["z"].getstate()
    for options in ({}, {"verify": False}):
        with pytest.raises(CorruptSnapshotError):
            Snapshot(tmp_path).restore({"s": live}, **for_restore(**options))
        assert live["a"].sum() == 0
        assert (live["rng"].bit_generator.state, live["z"].getstate()) == before


@pytest.mark.parametrize("how", [{"select": ["s/rng"]}, {"exclude": ["s/t"]}, {"select": ["**/rng"]}])
def test_generator_is_a_leaf_for_select_and_exclude(how):
    generator = np.random.default_rng(3)
    snapshot = saved(rng=generator, t=torch.ones(2))
    live = StateDict(rng=np.random.default_rng(4), t=torch.zeros(2))
    snapshot.restore({"s": live}, **for_restore(**how))
    assert live["rng"].random() == generator.random()
    assert live["t"].sum() == 0
    state = {"s": StateDict(rng=generator, t=torch.ones(2), state=StateDict(x=1).data)}
    taken = Snapshot.take(
        "memory://known/globs", state, overwrite=True, options=TakeOptions(exclude=["**/t", "**/state/**"])
    )
    taken.restore({"s": live})
    assert live["rng"].random() == generator.random()


def test_generator_live_one_is_not_filled_from_two_saved_ones():
    live = np.random.default_rng(9)
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    app, _ = restored(saved(pair=[first, second]), pair=[live, live])
    assert [each.random() for each in app["pair"]] == [first.random(), second.random()]


@pytest.mark.parametrize("seed", [np.int64(4), np.array([1, 2], dtype=np.uint32), [1, 2, 3], 1 << 100, None])
def test_generator_seeds_of_all_kinds(seed):
    generator = np.random.default_rng(seed)
    app, _ = restored(saved(rng=generator))
    assert draw(app["rng"]) == draw(generator)


def _own_generators(folder, saving):
    import torch.distributed as dist

    rank = dist.get_rank()
    generator = np.random.default_rng(rank + 10 * (not saving))
    app = {"m": StateDict(t=torch.ones(2) * saving), "d": StateDict(g=generator)}
    if saving:
        Snapshot.take(folder, app, replicated=["m/**"])
        return generator.random()
    try:
        Snapshot(folder).restore(app)
    except SnapshotError as error:
        return str(error), float(app["m"]["t"].sum())
    return generator.random()


def test_generator_of_another_rank_is_refused_before_anything_is_changed(two, three, folder):
    expected = two.run(_own_generators, folder, True)
    assert two.run(_own_generators, folder, False) == expected
    for text, total in three.run(_own_generators, folder, False):
        assert "d/g" in text
        assert total == 0


def test_generator_subclass_is_pickled():
    with pytest.warns(UserWarning, match=r"random\.SystemRandom|Own"):
        saved(rng=type("Own", (random.Random,), {"__module__": __name__, "__reduce__": lambda self: (list, ())})())


# Configurations


def test_omegaconf_config_is_restored_with_interpolations():
    omegaconf = pytest.importorskip("omegaconf")
    create = omegaconf.OmegaConf.create
    config = create(
        {"lr": 0.1, "twice": "${lr}", "list": [1, {"x": None}], "later": "???", 3: "int"}, flags={"struct": True}
    )
    app, _ = restored(saved(config=config, list=create([1, "${..config.lr}"])), config=None)
    assert type(app["config"]) is omegaconf.DictConfig
    assert app["config"] == config
    assert app["config"].twice == 0.1
    assert omegaconf.OmegaConf.is_struct(app["config"])
    assert omegaconf.OmegaConf.is_missing(app["config"], "later")
    assert type(app["list"]) is omegaconf.ListConfig


@dataclasses.dataclass
class Schema:
    lr: float = 0.1


def test_omegaconf_structured_or_flagged_config_is_pickled():
    omegaconf = pytest.importorskip("omegaconf")
    structured = omegaconf.OmegaConf.structured(Schema)
    inner = omegaconf.OmegaConf.create({"lr": 1, "model": {"lr": "${..lr}"}}).model
    flagged = omegaconf.OmegaConf.create({"a": {"b": 1}})
    omegaconf.OmegaConf.set_readonly(flagged.a, True)
    for config in (structured, inner, flagged):
        with pytest.warns(UserWarning, match="stored as pickles"):
            saved(config=config)


def test_omegaconf_part_of_a_config_and_special_numbers():
    omegaconf = pytest.importorskip("omegaconf")
    whole = omegaconf.OmegaConf.create({"model": {"lr": 1, "nan": float("nan"), "inf": float("inf"), "big": 1 << 80}})
    app, _ = restored(saved(config=whole.model))
    assert repr(app["config"]) == repr(whole.model)
    assert app["config"].big == 1 << 80


def test_omegaconf_config_without_omegaconf_is_a_saved_object(monkeypatch):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.1})
    snapshot = saved(config=config)
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "omegaconf", None)
        app, _ = restored(snapshot)
        assert app["config"].kind == "OmegaConf"
        assert app["config"].content == {"lr": 0.1}
        again = Snapshot.take("memory://known/again", {"s": app}, overwrite=True)
    assert again.read_object("s/config") == config


# The format


def test_format_snapshot_3_is_used_only_for_new_types(tmp_path):
    assert saved(a=1, b=Holder(None, None)).metadata.format == "snapshot/1"
    snapshot = Snapshot.take(tmp_path / "s", {"s": StateDict(args=argparse.Namespace(a=1))})
    assert snapshot.metadata.format == "snapshot/3"
    assert Snapshot.take(
        tmp_path / "z", {"s": StateDict(a=Point(1, 2), b=torch.ones(9))}, options=TakeOptions(compression="zstd")
    ).verify()
    path = tmp_path / "s" / ".snapshot_metadata"
    for older in ("snapshot/1", "snapshot/2"):
        data = path.read_bytes().replace(b"snapshot/3", older.encode())
        with pytest.raises(CorruptSnapshotError, match="digest"):
            document.decode_document(data, "here")
        body = data[: data.rindex(b',"digest"')]
        again = b'%s,"digest":"%s"}' % (body, document.digest_range(body).encode())
        with pytest.raises(CorruptSnapshotError, match="format must be snapshot/3"):
            document.decode_document(again, "here")


def _take_parts(folder):
    import torch.distributed as dist

    rank = dist.get_rank()
    held = {f"k{at}": torch.full((2,), at) for at in range(4)} | {"point": Point(rank, 2)}
    document.IN_ONE = 3
    try:
        Snapshot.take(folder, {"s": StateDict(**held)})
    finally:
        document.IN_ONE = 100_000
    app = StateDict(point=Point(0, 0))
    Snapshot(folder).restore({"s": app})
    return app["point"] == Point(rank, 2)


def test_format_snapshot_3_of_manifest_parts(two, folder):
    assert two.run(_take_parts, folder) == [True, True]
    stored = json.loads(Path(folder, ".snapshot_metadata").read_text())
    assert stored["format"] == "snapshot/3"
    assert stored["parts"]
    assert Snapshot(folder).verify()


# What still needs a pickle


class Opaque:
    """An object that only a pickle can hold."""


def test_allow_pickle_error_refuses_pickles_in_take(tmp_path):
    app = {"s": StateDict(fine=1, deep={"odd": Opaque()})}
    with pytest.raises(UnsafeObjectError, match=r"s/deep/odd \(.*Opaque\)") as caught:
        Snapshot.take(tmp_path / "s", app, options=TakeOptions(allow_pickle="error"))
    assert "exclude" in str(caught.value)
    assert not any((tmp_path / "s").rglob("*-*")) if (tmp_path / "s").exists() else True
    with pytest.raises(UnsafeObjectError):
        Snapshot.async_take(tmp_path / "s", app, options=TakeOptions(allow_pickle="error")).wait()
    with pytest.warns(UserWarning, match=r"s/deep/odd"):
        Snapshot.take(tmp_path / "s", app)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Snapshot.take(tmp_path / "s", app, overwrite=True, options=TakeOptions(allow_pickle=True))
    with pytest.raises(ValueError, match="allow_pickle must be 'warn', 'error' or True, got False"):
        Snapshot.take(tmp_path / "t", app, options=TakeOptions(allow_pickle=False))


def test_allow_pickle_error_in_take_options_of_a_manager(tmp_path):
    with SnapshotManager(str(tmp_path), signals=()) as manager:
        with pytest.raises(UnsafeObjectError):
            manager.take(1, {"s": StateDict(odd=Opaque())}, options=TakeOptions(allow_pickle="error"))
        manager.take(1, {"s": StateDict(odd=Opaque())}, options=TakeOptions(allow_pickle=True))
        assert manager.steps() == [1]


def _refuse(folder):
    import torch.distributed as dist

    held = Opaque() if dist.get_rank() else 1
    Snapshot.take(folder, {"s": StateDict(held=held)}, options=TakeOptions(allow_pickle="error"))


def test_allow_pickle_error_on_one_rank_is_raised_on_all(two, folder):
    outcomes = two.outcomes(_refuse, folder)
    assert all("s/held" in str(each) for each in outcomes)
    assert not Snapshot(folder).exists()


def test_changed_configuration_that_json_cannot_hold_is_an_error_and_not_lost():
    changed = SavedObject("OmegaConf", "omegaconf.OmegaConf", {"content": {"x": b"1"}, "flags": {}})
    with pytest.raises(TypeError, match="a configuration with a bytes"):
        encode_object(changed)
