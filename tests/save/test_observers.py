"""Observers of other packages: what they may do to a take, and that they cannot fail it."""

import asyncio
import json
import logging
import re
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from snapshot import Snapshot, StateDict, TakeOptions, extensions
from snapshot.errors import MissingExtraError
from snapshot.save import observers
from tests.helpers.installed import installing
from tests.helpers.noted import noted

OBSERVER = """
import json
import msgspec
from snapshot.save.findings import Finding

class Mine:
    suffixes = [".mine"]

    def __init__(self, view):
        self.findings = [Finding("mine", f"{len(view.leaves)} leaves")]
        self.calls = []

    def files(self):
        return {".mine": b"stored"}

    def described(self, entries):
        self.calls.append(sorted(entries))

    def tell(self):
        return b"of this rank"

    def judge(self, told, metadata):
        noted = {**json.loads(bytes(metadata)), "told": [each.decode() for each in told]}
        return msgspec.Raw(json.dumps(noted).encode())

    def committed(self):
        self.calls.append("committed")

    def forget(self):
        self.calls.append("forgotten")

class Observer:
    made = []

    def observe(self, view, options):
        self.made.append(Mine(view))
        return self.made[-1]

class Broken(Mine):
    fails = ""

    def __getattribute__(self, name):
        if name == Broken.fails:
            raise OSError(f"no {name}")
        return super().__getattribute__(name)

class Fragile:
    def observe(self, view, options):
        if Broken.fails == "observe":
            raise OSError("no observe")
        return Broken(view)

MINE, FRAGILE, NUMBER = Observer(), Fragile(), 7

class Judged(Mine):
    work = None

    def judge(self, told, metadata):
        return Judged.work(metadata)

    def described(self, entries):
        entries.clear()

class Judging:
    def observe(self, view, options):
        Judged.described = Mine.described if Judged.work else Judged.described
        return Judged(view)

JUDGING = Judging()
"""


def state():
    return {"s": StateDict(a=torch.ones(3), b=torch.zeros(2))}


def test_observer_of_another_package_notes_and_judges_but_stores_no_file(install, tmp_path):
    install("snapshot.takes", "mine = tiny:MINE", module=OBSERVER)
    snapshot = Snapshot.take(tmp_path / "s", state(), metadata={"note": 1}, options=TakeOptions(sign=None))
    assert "mine: 2 leaves" in list(map(str, snapshot.report.findings))
    assert not list((tmp_path / "s" / "data").glob("*.mine")), "readers refuse a name that the format does not have"
    opened = Snapshot(tmp_path / "s")
    assert noted(opened.metadata.metadata) == {"note": 1, "told": ["of this rank"]}
    assert opened.verify().ok
    from tiny import Observer

    entries, *later = Observer.made[0].calls
    assert {"s/a", "s/b"} <= set(entries)
    assert later == ["committed", "forgotten"]


@pytest.mark.parametrize("name", ["observe", "findings", "described", "tell", "judge", "committed", "forget"])
def test_observer_of_another_package_that_fails_is_dropped(install, tmp_path, caplog, name):
    install("snapshot.takes", "fragile = tiny:FRAGILE", module=OBSERVER)
    from tiny import Broken

    Broken.fails = name
    with caplog.at_level(logging.ERROR, "snapshot"):
        Snapshot.take(tmp_path / "s", state())
        Snapshot.async_take(tmp_path / "t", state()).wait()
    assert caplog.text.count("the observer fragile of tiny 1.2 failed, and the take continues without it") == 1
    live = state()
    Snapshot(tmp_path / "t").restore(live)


ERRORS = [SystemExit(4), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
NAMES = ["observe", "described", "tell", "judge", "forget"]


@pytest.mark.parametrize(
    ("name", "error"),
    [each for each in product(NAMES, ERRORS) if each != ("observe", ERRORS[1])],  # which is Ctrl-C in the main thread
)
def test_observer_of_another_package_that_raises_no_exception_is_dropped(install, tmp_path, caplog, name, error):
    install(
        "snapshot.takes",
        "fragile = tiny:FRAGILE",
        module=OBSERVER.replace('OSError(f"no {name}")', "Broken.error").replace(
            'OSError("no observe")', "Broken.error"
        ),
    )
    from tiny import Broken

    Broken.fails, Broken.error = name, error
    Snapshot.async_take(tmp_path / "t", state()).wait(60)
    assert "the observer fragile of tiny 1.2 failed" in caplog.text
    assert Snapshot(tmp_path / "t").verify().ok


@pytest.mark.parametrize(
    "judged",
    [
        b'{"note":1,"a":2}', "text", msgspec.Raw(b"{}"), msgspec.Raw(b'{"note":2}'),
        msgspec.Raw(b'{"note":1,"a":"\xff"}'),
        msgspec.Raw(b'{"note":1,"a":1e99999}'), msgspec.Raw(b'{"note":1,"a":' + b"[" * 900 + b"]" * 900 + b"}"),
        msgspec.Raw(b'{"note":1,"a":"' + b"x" * (2 << 20) + b'"}'),
    ],
)  # fmt: skip
def test_observer_of_another_package_cannot_spoil_the_metadata(install, tmp_path, caplog, judged):
    install("snapshot.takes", "judging = tiny:JUDGING", module=OBSERVER)
    from tiny import Judged

    Judged.work = lambda metadata: judged
    Snapshot.take(tmp_path / "s", state(), metadata={"note": 1})
    assert noted(Snapshot(tmp_path / "s").metadata.metadata) == {"note": 1}
    assert "the observer judging of tiny 1.2 failed" in caplog.text


def test_observer_of_another_package_cannot_change_the_entries(install, tmp_path, caplog):
    install("snapshot.takes", "judging = tiny:JUDGING", module=OBSERVER)
    Snapshot.take(tmp_path / "s", state())
    assert {"0/s/a", "0/s/b"} <= set(Snapshot(tmp_path / "s").get_manifest())
    assert "the observer judging of tiny 1.2 failed" in caplog.text


def test_metadata_of_an_observer_is_stored_in_the_canonical_form(install, tmp_path):
    install("snapshot.takes", "judging = tiny:JUDGING", module=OBSERVER)
    from tiny import Judged

    def judge(metadata):
        return msgspec.Raw(json.dumps({"a": [1, 2], **json.loads(bytes(metadata))}, indent=1).encode() + b"\n")

    Judged.work = judge
    Snapshot.take(tmp_path / "s", state(), metadata={"note": 1})
    assert noted(Snapshot(tmp_path / "s").metadata.metadata) == {"note": 1, "a": [1, 2]}


def _take_with_nan(folder, without):
    if dist.get_rank() in without:
        points = extensions.own_points()
        extensions.own_points = lambda: {k: v for k, v in points.items() if k[0] != "snapshot.takes"}
        observers._installed.cache_clear()
    model = torch.nn.Linear(4, 4)
    model.weight.data.fill_(float("nan"))
    try:
        Snapshot.take(folder / "s", {"model": model})
    finally:
        if dist.get_rank() in without:
            extensions.own_points = original_points
            observers._installed.cache_clear()


original_points = extensions.own_points


def test_guards_of_ranks_that_have_them_count_if_another_lacks_the_package(two, tmp_path):
    two.run(_take_with_nan, tmp_path, [1])
    assert "snapshot.guards" in Snapshot(tmp_path / "s").metadata.metadata


def test_broken_health_package_fails_no_take_by_default_and_one_that_asks_for_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("snapshot_health.observe.GuardedTake", None)
    Snapshot.take(tmp_path / "s", state())
    Snapshot.take(tmp_path / "t", state(), options=TakeOptions(guards="off"))
    assert caplog.text.count("the observer health of snapshot-torch") == 1
    with pytest.raises(TypeError):
        Snapshot.take(tmp_path / "u", state(), options=TakeOptions(guards="refuse"))


def _take_with_observers(folder, names, fails):
    """Take on this rank with the observers that it has, one of which may fail. Return what was logged, and called."""
    rank = dist.get_rank()
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("snapshot")
    logger.addHandler(handler)
    try:
        with installing(folder / f"packages-{rank}") as install:
            install("snapshot.takes", *(f"{each} = tiny:{each.upper()}" for each in names[rank]), module=OBSERVER)
            if names[rank]:
                from tiny import Broken, Observer

                Broken.fails = fails[rank]
            for take in ("s", "t"):
                Snapshot.take(folder / take, {"s": StateDict(own=torch.full((3,), float(rank)))})
            made = [each.calls for each in Observer.made] if names[rank] else []
    finally:
        logger.removeHandler(handler)
    return heard, made


OTHER = "and the take continues without it"


@pytest.mark.parametrize("name", ["observe", "described", "tell"])
def test_observer_that_fails_on_one_rank_is_dropped_on_all(two, tmp_path, name):
    heard = [each for each, _ in two.run(_take_with_observers, tmp_path, [["fragile"]] * 2, ["", name])]
    assert heard[1] == [f"the observer fragile of tiny 1.2 failed, {OTHER}"]
    assert heard[0] == [f"the observer fragile of tiny 1.2 failed on another rank, or is not installed there, {OTHER}"]
    assert Snapshot(tmp_path / "t").verify()


def test_observer_that_fails_on_the_leader_is_dropped_on_all(two, tmp_path):
    heard = [each for each, _ in two.run(_take_with_observers, tmp_path, [["mine", "fragile"]] * 2, ["judge", ""])]
    assert heard[0] == [f"the observer fragile of tiny 1.2 failed, {OTHER}"]
    assert heard[1] == [f"the observer fragile of tiny 1.2 failed on another rank, or is not installed there, {OTHER}"]
    assert noted(Snapshot(tmp_path / "s").metadata.metadata) == {"told": ["of this rank", "of this rank"]}


@pytest.mark.parametrize("names", [[["mine"], []], [[], ["mine"]]])
def test_ranks_with_different_observers_take_the_same_steps(two, tmp_path, names):
    answers = two.run(_take_with_observers, tmp_path, names, ["", ""])
    [own] = [calls for (_, calls), each in zip(answers, names, strict=True) if each]
    assert all(calls[-1] == "forgotten" and "committed" not in calls for calls in own), "it was dropped before"
    assert Snapshot(tmp_path / "t").read_object("1/s/own").tolist() == [1, 1, 1]


def test_observer_of_another_package_that_cannot_be_loaded_is_logged_once(install, tmp_path, caplog):
    install("snapshot.takes", "gone = tiny:GONE", module=OBSERVER)
    with caplog.at_level(logging.WARNING, "snapshot"):
        Snapshot.take(tmp_path / "s", state())
        Snapshot.take(tmp_path / "t", state())
    assert caplog.text.count("the observer gone") == 1
    assert "of tiny 1.2" in caplog.text


def test_take_without_the_health_package_is_not_guarded_and_options_name_it(tmp_path, monkeypatch, caplog):
    points = extensions.own_points()
    monkeypatch.setattr(extensions, "own_points", lambda: {k: v for k, v in points.items() if k[0] != "snapshot.takes"})
    observers._installed.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "snapshot"):
            Snapshot.take(tmp_path / "s", {"s": StateDict(a=torch.tensor([float("nan")] * 4))})
            Snapshot.take(tmp_path / "t", state(), options=TakeOptions(guards="off"))
        assert caplog.text.count("snapshot_health is not installed: takes are not guarded") == 1
        for wanted in ({"guards": "refuse"}, {"guards": "report"}, {"statistics": True}):
            with pytest.raises(MissingExtraError, match="snapshot_health of snapshot-torch is not installed"):
                Snapshot.take(tmp_path / "u", state(), options=TakeOptions(**wanted))
        with pytest.raises(MissingExtraError, match=r"^get_statistics: snapshot_health"):
            Snapshot(tmp_path / "s").get_statistics()
    finally:
        observers._installed.cache_clear()
    assert json.loads((tmp_path / "s" / ".snapshot_metadata").read_bytes())["world_size"] == 1


def test_observer_of_the_docs_adds_to_the_metadata(tmp_path, install):
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    (code,) = re.findall(r"```python\n(# my_package/observer.py\n.*?)```", page, re.DOTALL)
    install("snapshot.takes", "counter = tiny:COUNTER", module=code)
    observers._installed.cache_clear()
    try:
        taken = Snapshot.take(tmp_path / "s", state())
    finally:
        observers._installed.cache_clear()
    assert noted(taken.metadata.metadata) == {"leaves": 2}
