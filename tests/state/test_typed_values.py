"""Values of classes that are not torch's nor containers: stored without a pickle, and back as what they were."""

import collections
import dataclasses
import enum
import functools
import io
import pathlib
import random
import uuid
import warnings
import zoneinfo
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot import RestoreError, RestoreOptions, Snapshot, StateDict, TakeOptions, Target
from snapshot.cli import main
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.manifest.objects import _make_python_random, _read_python_random
from snapshot.manifest.values import make_enum_entry, make_scalar_entry
from snapshot.saved import SavedObject
from snapshot.state import flatten
from tests.helpers.arguments import for_take
from tests.helpers.states import equal

URL = "memory://typed"


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.StrEnum):
    SLOW = "slow"
    FAST = "fast"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Bit(enum.IntFlag):
    A = 1
    B = 4


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    betas: tuple = (0.9, 0.99)
    extra: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    step: int
    weight: torch.Tensor


@dataclasses.dataclass
class Outer:
    inner: Config
    many: list
    frozen: Frozen
    level: Level = Level.LOW


def values():
    """One of each kind, made anew."""
    return {
        "datetime": datetime(2024, 2, 29, 23, 59, 59, 999_999),
        "datetime with a zone": datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
        "datetime at an offset": datetime(
            1, 1, 1, tzinfo=timezone(timedelta(hours=-1, microseconds=7), "odd;:%\ud800")
        ),
        "date": date(9999, 12, 31),
        "time": time(1, 2, 3, tzinfo=UTC, fold=1),
        "timedelta": timedelta(days=-3, microseconds=1),
        "timezone": timezone(timedelta(minutes=90)),
        "UTC": UTC,
        "ZoneInfo": zoneinfo.ZoneInfo("America/Argentina/Buenos_Aires"),
        "PurePosixPath": pathlib.PurePosixPath("a/%2F\udcff/é"),
        "PosixPath": pathlib.Path("/tmp/run"),
        "PureWindowsPath": pathlib.PureWindowsPath(r"C:\runs\1"),
        "UUID": uuid.UUID(int=7),
        "UUID that is safe": uuid.UUID(int=7, is_safe=uuid.SafeUUID.safe),
        "Decimal": Decimal("-0.00"),
        "Decimal of a large exponent": Decimal("1E+999999"),
        "Decimal that is no number": Decimal("sNaN123"),
        "Fraction": Fraction(-3, 7),
        "Fraction of large ints": Fraction(3**6000, 2**7000),
        "slice": slice(None, 3, -1),
        "slice of anything": slice("a", 2.5, (1, None)),
        "range": range(10, -(10**20), -3),
        "BytesIO": bytes_io(),
        "Generator": torch.Generator().manual_seed(11),
        "Enum": Color.BLUE,
        "Enum of a tuple": Color.PAIR,
        "IntEnum": Level.HIGH,
        "StrEnum": Mode.FAST,
        "Flag": Right.READ | Right.WRITE,
        "Flag of nothing": Right(0),
        "IntFlag": Bit.A | Bit(64),
        "dataclass": Config(0.3, (1, 2.0), {"a": [date(2024, 1, 1)], 3: None}),
        "frozen dataclass": Frozen(3, torch.arange(5.0)),
        "dataclass of dataclasses": Outer(
            Config(), [Config(1.0), Frozen(1, torch.ones(2))], Frozen(2, torch.zeros(2, 3)), Level.HIGH
        ),
    }


def bytes_io():
    made = io.BytesIO(b"contents" * 50)
    made.seek(17)
    return made


def containers():
    """Each container, with the value in it."""
    return {
        "list": lambda value: [value, 1],
        "tuple": lambda value: (0, value),
        "deque": lambda value: collections.deque([value], 3),
        "dict": lambda value: {"a/b": value, 3: 4},
        "OrderedDict": lambda value: collections.OrderedDict(x=value),
        "defaultdict": lambda value: collections.defaultdict(list, k=value),
        "Counter": lambda value: collections.Counter({"k": 1}) | collections.Counter(),
        "nested": lambda value: {"a": [({"b": value},)]},
        "dataclass": lambda value: Config(extra={"value": value}),
    }


def plainly_take(state, url=URL, **options):
    """A take that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Snapshot.take(url, state, **for_take(overwrite=True, **options))


def other(value):  # noqa: PLR0911 - a line per kind
    """A value of the same kinds and classes with other content."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) - 1
    if isinstance(value, torch.Generator):
        return torch.Generator().manual_seed(99)
    if isinstance(value, enum.Flag):
        return type(value)(1)
    if isinstance(value, enum.Enum):
        return next(iter(type(value)))
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(
            value, **{each.name: other(getattr(value, each.name)) for each in dataclasses.fields(value)}
        )
    if isinstance(value, dict):
        return type(value)({key: other(child) for key, child in value.items()})
    if isinstance(value, collections.defaultdict):
        return value
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value)(map(other, value))
    return None


@pytest.mark.parametrize("name", values())
def test_typed_value_is_restored_without_a_pickle(name):
    value = values()[name]
    snapshot = plainly_take({"state": StateDict(value=value)})
    live = StateDict(value=other(value))
    report = snapshot.restore({"state": live})
    assert equal(value, live["value"])
    assert not report.lines
    assert equal(value, snapshot.read_object("0/state/value", obj_out=other(value)))
    assert snapshot.verify().ok
    assert "torch_save" not in {getattr(entry, "serializer", "") for entry in snapshot.get_manifest().values()}


@pytest.mark.parametrize("container", containers())
def test_typed_values_in_every_container(container):
    make = containers()[container]
    held = {name: make(value) for name, value in values().items()}
    snapshot = plainly_take({"state": StateDict(held)})
    live = StateDict({name: make(other(value)) for name, value in values().items()})
    report = snapshot.restore({"state": live})
    for name, value in held.items():
        assert equal(value, live[name]), name
    assert not report.lines


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The writer process is there before descriptors are counted."""
    Snapshot.async_take(
        str(tmp_path_factory.mktemp("warm") / "x"), {"s": StateDict(values())}, options=TakeOptions(worker="process")
    ).wait()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_typed_values_in_async_take(worker, tmp_path):
    held = values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Snapshot.async_take(str(tmp_path / "s"), {"state": StateDict(held)}, options=TakeOptions(worker=worker)).wait()
    live = StateDict({name: other(value) for name, value in values().items()})
    Snapshot(str(tmp_path / "s")).restore({"state": live})
    for name, value in held.items():
        assert equal(value, live[name]), name


def test_dataclass_tensor_is_restored_in_place():
    saved = Frozen(3, torch.arange(5.0))
    snapshot = plainly_take({"state": StateDict(value=[saved])})
    live = StateDict(value=[Frozen(0, torch.zeros(5))])
    tensor = live["value"][0].weight
    snapshot.restore({"state": live})
    assert live["value"][0].weight is tensor
    assert torch.equal(tensor, torch.arange(5.0))


def test_generator_of_torch_is_set_in_place():
    snapshot = plainly_take({"state": StateDict(value=torch.Generator().manual_seed(4))})
    live = torch.Generator()
    snapshot.restore({"state": StateDict(value=live)})
    assert live.initial_seed() == 4
    out = torch.Generator()
    assert snapshot.read_object("0/state/value", obj_out=out) is out
    assert out.initial_seed() == 4


def test_dataclass_restore_calls_no_init_or_post_init():
    called = []

    @dataclasses.dataclass
    class Loud:
        lr: float
        init_only: dataclasses.InitVar[int] = 3
        KIND = "not a field"

        def __post_init__(self, init_only):
            called.append(init_only)
            self.derived = self.lr * 2

    snapshot = plainly_take({"state": StateDict(value=Loud(2.0))})
    live = StateDict(value=Loud(1.0))
    called.clear()
    report = snapshot.restore({"state": live})
    assert (live["value"].lr, live["value"].derived, called) == (2.0, 4.0, [])
    assert not report.lines


def test_dataclass_cached_property_is_computed_again():
    @dataclasses.dataclass
    class Lazy:
        width: int

        @functools.cached_property
        def area(self):
            return self.width**2

    saved, live = Lazy(3), StateDict(value=Lazy(2))
    assert (saved.area, live["value"].area) == (9, 4)
    plainly_take({"state": StateDict(value=Lazy(5))}).restore({"state": live})
    assert live["value"].area == 25


def versions():
    @dataclasses.dataclass
    class Old:
        lr: float = 0.1
        gone: int = 5

    @dataclasses.dataclass
    class New:
        lr: float = 0.0
        fresh: torch.Tensor = None

    return Old, New


def test_dataclass_fields_that_differ_are_reported_and_kept():
    old, new = versions()
    snapshot = plainly_take({"state": StateDict(value={"c": old(0.7)})})
    live = StateDict(value={"c": new(0.0, torch.ones(3))})
    kept = live["value"]["c"].fresh
    report = snapshot.restore({"state": live})
    assert type(live["value"]["c"]) is new
    assert live["value"]["c"].lr == 0.7
    assert live["value"]["c"].fresh is kept
    lines = {(line.kind, line.path) for line in report.lines}
    assert lines == {
        ("kept", "state/value/c/fresh"),
        ("unexpected", "state/value/c/gone"),
        ("replaced", "state/value/c"),
    }


def test_dataclass_field_that_was_removed_is_ignored():
    @dataclasses.dataclass
    class Old:
        lr: float
        gone: list

    @dataclasses.dataclass
    class New:
        lr: float

    more = enum.Enum("Color", {"RED": 1, "MORE": 5}, module=__name__, qualname="Color")
    snapshot = plainly_take({"state": StateDict(value=Old(2.0, [{"e": more.MORE, "c": Config()}]))})
    live = StateDict(value=New(1.0), other=Color.RED)
    report = snapshot.restore({"state": live})
    assert live["value"] == New(2.0)
    assert [line.path for line in report.unexpected] == ["state/value/gone"]
    assert {line.path for line in report.lines} == {"state/value", "state/value/gone", "state/other"}  # which is kept


def test_dataclass_restores_into_a_live_subclass():
    @dataclasses.dataclass
    class More(Config):
        more: int = 8

    snapshot = plainly_take({"state": StateDict(value=Config(0.9))})
    live = StateDict(value=More())
    report = snapshot.restore({"state": live})
    assert live["value"] == More(0.9)
    assert ("replaced", "state/value") in {(line.kind, line.path) for line in report.lines}


def test_dataclass_and_enum_classes_are_found_elsewhere_in_the_state():
    snapshot = plainly_take({"state": StateDict(history=[Config(1.0), Config(2.0)], colors={Color.RED, Color.PAIR})})
    live = StateDict(history=[Config()], colors={Color.BLUE})
    snapshot.restore({"state": live})
    assert live["history"] == [Config(1.0), Config(2.0)]
    assert live["colors"] == {Color.RED, Color.PAIR}


def test_dataclass_of_a_safe_global_class_is_created():
    snapshot = plainly_take({"state": StateDict(history=[Config(1.0)])})
    live = StateDict(history=[])
    with torch.serialization.safe_globals([Config]):
        snapshot.restore({"state": live})
    assert live["history"] == [Config(1.0)]


def test_saved_object_stands_for_an_unknown_class_and_can_be_saved_again():
    held = {"c": Config(0.5), "e": Color.BLUE, "f": Right.READ, "s": {Level.HIGH}, "p": Color.PAIR}
    snapshot = plainly_take({"state": StateDict(held)})
    read = snapshot.get_state_dict_for_key("state")
    name = f"{Config.__module__}.Config"
    assert isinstance(read["c"], SavedObject)
    assert (read["c"].class_name, read["c"].lr, read["c"]["betas"]) == (name, 0.5, (0.9, 0.99))
    assert repr(read["c"]) == f"<{name} lr=0.5 betas=(0.9, 0.99) extra={{}}>"
    assert (read["e"].name, read["e"].value) == ("BLUE", "blue")
    assert dict(read["p"]) == {"name": "PAIR"}
    live = StateDict(history=3)
    report = plainly_take({"state": StateDict(history=Config())}).restore({"state": live})
    assert isinstance(live["history"], SavedObject)
    assert any("SavedObject" in line.detail for line in report.replaced)
    plainly_take({"state": StateDict(held)}, "memory://typed-a")
    plainly_take({"state": StateDict(read)}, "memory://typed-b")
    assert not Snapshot.diff("memory://typed-a", "memory://typed-b")


def members(*names, values=None):
    return enum.Enum("Color", {name: value for value, name in enumerate(names, 1)} if values is None else values)


def test_enum_without_the_saved_member_raises_before_anything_is_changed():
    snapshot = plainly_take({"state": StateDict(a=torch.ones(3), e=members("RED", "BLUE").BLUE)})
    few, other_values = members("RED"), members(values={"RED": 1, "BLUE": 7, "GREEN": 3})
    swapped = members("BLUE", "RED")
    for kind in (few, other_values, swapped):
        live = StateDict(a=torch.zeros(3), e=kind.RED)
        with pytest.raises(RestoreError, match="state/e: the snapshot has"):
            snapshot.restore({"state": live})
        assert not live["a"].any()
        assert live["e"] is kind.RED


def test_enum_member_with_another_name_is_found_by_value_and_reported():
    snapshot = plainly_take({"state": StateDict(e=members("RED", "BLUE").BLUE)})
    live = StateDict(e=members("RED", "AZURE").RED)
    report = snapshot.restore({"state": live})
    assert live["e"].name == "AZURE"
    assert any("AZURE" in line.detail for line in report.replaced)


def test_dataclass_fields_are_selected_and_excluded():
    snapshot = plainly_take({"state": StateDict(value=Frozen(3, torch.ones(2)), e=Color.RED)})
    live = StateDict(value=Frozen(1, torch.zeros(2)), e=Color.BLUE)
    snapshot.restore({"state": live}, select=["state/value/weight"])
    assert live["value"].step == 1
    assert live["value"].weight.sum() == 2
    assert live["e"] is Color.BLUE
    live = StateDict(value=Frozen(1, torch.zeros(2)), e=Color.BLUE)
    snapshot.restore({"state": live}, options=RestoreOptions(exclude=["state/value/weight"]))
    assert live["value"].step == 3
    assert live["value"].weight.sum() == 0
    snapshot = plainly_take({"state": StateDict(value=Frozen(3, torch.ones(2)))}, exclude=["state/value/step"])
    live = StateDict(value=Frozen(1, torch.zeros(2)))
    assert [line.kind for line in snapshot.restore({"state": live}).lines] == ["kept"]
    assert live["value"].step == 1


@dataclasses.dataclass
class Reduced:
    lr: float

    def __reduce__(self):
        return Reduced, (self.lr,)


@dataclasses.dataclass
class Listed(list):
    lr: float = 0.1


@pytest.mark.parametrize("value", [Reduced(0.5), Listed()], ids=["own pickling", "a list, too"])
def test_dataclass_with_state_beyond_its_fields_is_pickled(value):
    with pytest.warns(UserWarning, match="stored as pickles"):
        snapshot = Snapshot.take(URL, {"state": StateDict(value=value)}, overwrite=True)
    assert Snapshot(URL, allow_pickle=True).read_object("0/state/value") == value
    assert snapshot.get_manifest()["0/state/value"].serializer == "torch_save"


def test_decimal_that_is_very_long_is_pickled():
    value = Decimal("1" * 20_000)
    with pytest.warns(UserWarning, match="stored as pickles"):
        Snapshot.take(URL, {"state": StateDict(value=value)}, overwrite=True)
    assert Snapshot(URL, allow_pickle=True).read_object("0/state/value") == value


zones = st.one_of(
    st.none(),
    st.just(UTC),
    st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone),
    st.sampled_from(["Europe/Berlin", "Asia/Kolkata", "UTC"]).map(zoneinfo.ZoneInfo),
)
typed = st.one_of(
    st.datetimes(timezones=zones, allow_imaginary=True),
    st.dates(),
    st.times(timezones=st.one_of(st.none(), st.just(UTC))),
    st.timedeltas(),
    st.uuids(),
    st.decimals(),
    st.fractions(),
    st.slices(10),
    st.builds(range, st.integers(), st.integers(), st.integers().filter(bool)),
    st.builds(pathlib.PurePosixPath, st.text(max_size=8)),
    st.builds(pathlib.PureWindowsPath, st.text(max_size=8)),
    st.binary(max_size=20).map(io.BytesIO),
    st.sampled_from([*Color, *Level, *Mode, Right.READ, Bit(77)]),
)


def as_before(monkeypatch):
    """Pickle what has an entry of its own now, as earlier versions did."""
    kinds = {type(value) for value in values().values()}
    for kind in kinds & flatten._VISITORS.keys():
        monkeypatch.delitem(flatten._VISITORS, kind)
    monkeypatch.setattr(flatten, "find_form", lambda kind: None)
    monkeypatch.setattr(flatten.compound, "take_apart", lambda value, within: None)


def test_typed_values_pickled_by_earlier_versions_are_restored(monkeypatch):
    state = {name: [value] for name, value in values().items() if name != "BytesIO"}
    with monkeypatch.context() as patched:
        as_before(patched)
        with pytest.warns(UserWarning, match="stored as pickles"):
            Snapshot.take(URL, {"state": StateDict(state)}, overwrite=True)
    assert {getattr(entry, "serializer", "torch_save") for entry in Snapshot(URL).get_manifest().values()} == {
        "torch_save"
    }
    live = StateDict({name: [other(value[0])] for name, value in state.items()})
    Snapshot(URL, allow_pickle=True).restore({"state": live})
    for name, (value,) in state.items():
        if "zone" not in name and not isinstance(value, time):  # torch's pickles lose the fold
            assert equal(value, live[name][0]), name
    with pytest.raises(UnsafeObjectError):
        Snapshot(URL).restore({"state": live})


@dataclasses.dataclass
class Node:
    name: str
    next: object = None


def test_dataclass_that_contains_itself_is_pickled():
    node = Node("a", [Node("b")])
    node.next[0].next = node
    with pytest.warns(UserWarning, match="stored as pickles"):
        Snapshot.take(URL, {"state": StateDict(value=[node])}, overwrite=True)
    live = StateDict(value=[Node("c")])
    live["value"][0].next = live["value"]
    Snapshot(URL, allow_pickle=True).restore({"state": live})
    (found,) = live["value"]
    assert found.next[0].next is found
    many = functools.reduce(lambda below, _: Node("x", (below, below)), range(60), None)
    holds_itself = flatten.compound.holds_itself
    assert not holds_itself(many)


def test_zone_info_that_this_machine_lacks_is_not_corrupt(monkeypatch, capsys, tmp_path):
    Snapshot.take(tmp_path / "s", {"state": StateDict(value=zoneinfo.ZoneInfo("Asia/Kolkata"))})

    def missing(key):
        raise zoneinfo.ZoneInfoNotFoundError(key)

    monkeypatch.setattr("snapshot.manifest.values.zoneinfo.ZoneInfo", missing)
    assert Snapshot(tmp_path / "s").verify()
    assert main(["ls", str(tmp_path / "s")]) == 0
    assert "Asia/Kolkata" in capsys.readouterr().out
    live = StateDict(value=1)
    with pytest.raises(UnsupportedFormatError, match="tzdata"):
        Snapshot(tmp_path / "s").restore({"state": live})
    assert live["value"] == 1


def test_generator_of_an_absent_device_can_be_saved_again(monkeypatch):
    plainly_take({"state": StateDict(value=torch.Generator().manual_seed(3))})
    real = torch.Generator

    def missing(device=None):
        raise RuntimeError("no such device")

    monkeypatch.setattr("snapshot.tensors.composite.torch.Generator", missing)
    read = Snapshot(URL).get_state_dict_for_key("state")
    monkeypatch.setattr("snapshot.tensors.composite.torch.Generator", real)
    assert (read["value"].class_name, read["value"].device) == ("torch.Generator", torch.device("cpu"))
    plainly_take({"state": StateDict(read)}, "memory://typed-a")
    assert not Snapshot.diff(URL, "memory://typed-a")


class Whole:
    """A stateful whose state is no dict."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


@pytest.mark.parametrize("name", values())
def test_typed_value_may_be_a_whole_state_dict(name):
    value = values()[name]
    snapshot = plainly_take({"state": Whole(value)})
    live = Whole(other(value))
    assert not snapshot.restore({"state": live}).lines
    assert equal(value, live.value)


def test_typed_value_may_be_the_extra_state_of_a_module():
    class Extra(torch.nn.Linear):
        extra = None

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    for value in (Frozen(1, torch.ones(2)), Color.RED, {Color.RED}, slice(1), date(2024, 1, 1)):
        saved, live = Extra(2, 2), Extra(2, 2)
        saved.extra, live.extra = value, other(value) if not isinstance(value, set) else {Color.BLUE}
        report = plainly_take({"m": saved}).restore({"m": live})
        assert equal(value, live.extra)
        assert not report.lines


def changed(value):
    """Another value of the same type."""
    if isinstance(value, slice):
        return slice(7)
    if isinstance(value, (torch.Tensor, torch.Generator, enum.Enum)) or dataclasses.is_dataclass(value):
        return other(value)
    if isinstance(value, io.BytesIO):
        return io.BytesIO(value.getvalue())  # at another position
    return next(each for each in values().values() if type(each) is not type(value))


@pytest.mark.parametrize("name", values())
def test_diff_of_typed_values_finds_only_changes(name):
    for where, value in (("a", values()), ("b", values()), ("c", {**values(), name: changed(values()[name])})):
        plainly_take({"state": StateDict(value)}, f"memory://typed-{where}")
    assert not Snapshot.diff("memory://typed-a", "memory://typed-b")
    found = Snapshot.diff("memory://typed-a", "memory://typed-c")
    assert found.changes
    assert all(each.path.startswith(f"state/{name}") for each in found.changes)
    assert str(found)


def test_diff_of_typed_values_finds_another_class():
    @dataclasses.dataclass
    class Other:
        lr: float = 0.1
        betas: tuple = (0.9, 0.99)
        extra: dict = dataclasses.field(default_factory=dict)

    plainly_take({"state": StateDict(c=Config())}, "memory://typed-a")
    plainly_take({"state": StateDict(c=Other())}, "memory://typed-b")
    (change,) = Snapshot.diff("memory://typed-a", "memory://typed-b").changes
    assert (change.path, change.what) == ("state/c", ("class",))


@pytest.mark.parametrize("name", values())
def test_cli_ls_and_show_typed_values(name, capsys, tmp_path):
    Snapshot.take(tmp_path / "s", {"state": StateDict(value=values()[name])}, options=TakeOptions(durable=False))
    assert main(["ls", str(tmp_path / "s"), "--flat"]) == 0
    assert "state/value" in capsys.readouterr().out
    assert main(["ls", str(tmp_path / "s"), "--json"]) == 0
    capsys.readouterr()
    for more in ([], ["--json"]):
        assert main(["show", str(tmp_path / "s"), "state/value", *more]) == 0
        assert "state/value" in capsys.readouterr().out


def test_convert_of_typed_values_keeps_or_names_them(tmp_path):
    plainly_take({"state": StateDict(values())})
    snapshot = Snapshot(URL)
    snapshot.convert("memory://typed-again")
    assert not Snapshot.diff(URL, "memory://typed-again")
    report = snapshot.convert(Target(tmp_path / "x.pt", "torch"))
    held = torch.load(tmp_path / "x.pt", weights_only=False)["state"]
    assert held["dataclass"] == {"lr": 0.3, "betas": (1, 2.0), "extra": {"a": [date(2024, 1, 1)], 3: None}}
    assert (held["IntEnum"], held["Enum of a tuple"], held["Decimal"]) == (2, "PAIR", Decimal("-0.00"))
    assert held["Generator"].initial_seed() == 11
    assert any(line.startswith("state/dataclass: the class") for line in report.left_out)
    with pytest.raises(UnsupportedFormatError, match="state/Generator"):
        snapshot.convert(Target(tmp_path / "dcp", "dcp"))
    report = snapshot.convert(Target(tmp_path / "dcp", "dcp"), exclude=["state/Generator"])
    assert any(line.startswith("state/Enum: the class") for line in report.left_out)
    report = snapshot.convert(Target(tmp_path / "x.safetensors", "safetensors"))
    assert report.tensors == 3
    assert any(line.startswith("state/range: a range") for line in report.left_out)


def test_replicated_typed_values_are_compared_with_all_their_fields():
    """What is compared over ranks is all of a value, and not its text alone."""
    texts = [
        make_enum_entry(Level.HIGH),
        make_enum_entry(other(Level.HIGH)),
        make_scalar_entry("\ud800"),
        make_scalar_entry("%uD800"),
    ]
    assert len({(type(each), each.identity) for each in texts}) == 4


@given(
    st.recursive(
        typed,
        lambda below: st.one_of(
            st.lists(below, max_size=3),
            st.lists(below, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3), below, max_size=3),
            st.builds(
                Config, st.floats(allow_nan=False), below, st.dictionaries(st.text(max_size=2), below, max_size=2)
            ),
        ),
        max_leaves=8,
    )
)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_typed_values_in_random_containers_are_restored(value):
    snapshot = plainly_take({"state": StateDict(value=value)})
    live = StateDict(value=other(value), classes=[Config(), *Color, *Level, *Mode, *Right, *Bit])
    snapshot.restore({"state": live})
    assert equal(value, live["value"])
    assert equal(value, snapshot.read_object("0/state/value", obj_out=value))


@pytest.mark.parametrize("at", [0, 300, 624])
@pytest.mark.parametrize("word", [-1, 1 << 32, 1.0, True])
def test_state_of_random_has_words_of_32_bits(at, word):
    value = random.Random(5)
    value.gauss(0, 1)
    found = _read_python_random(value)
    assert _make_python_random(found).getstate() == value.getstate()
    found["words"][at] = word
    with pytest.raises(ValueError, match="32 bits"):
        _make_python_random(found)
