"""`compression="auto"` compresses where that is faster, by what takes of this process measured."""

import pytest
import torch

from snapshot import Snapshot, StateDict, TakeOptions, Target
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.save import pace
from snapshot.state.leaves import Leaf

MiB = 1 << 20


def leaves(*tensors):
    found = []
    for n, tensor in enumerate(tensors):
        dtype = str(tensor.dtype).removeprefix("torch.")
        address = tensor.data_ptr() if tensor.is_contiguous() else 0
        found.append(Leaf(f"t{n}", tensor, dtype, tuple(tensor.shape), tensor.nbytes, address=address))
    return found


@pytest.fixture
def session(tmp_path):
    made = Session(URL.parse(str(tmp_path)), None)
    pace._places.get().clear()
    yield made
    pace._places.get().clear()
    run(made.close())


@pytest.fixture(scope="module")
def numbers():
    return (torch.randn(20 * MiB, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def test_compression_auto_does_not_compress_without_a_measurement(session, numbers):
    assert not pace.compression_pays(session, leaves(numbers))


def note(session, seconds, *, packed=False, ratio=1.5):
    pace.note_speed(session, 40 * MiB, seconds, stored=int(40 * MiB / (ratio if packed else 1)), packed=packed)


@pytest.mark.parametrize(("seconds", "pays"), [(1000.0, True), (1e-6, False)])
def test_compression_auto_depends_on_the_link_speed(session, numbers, seconds, pays):
    note(session, seconds)
    assert pace.compression_pays(session, leaves(numbers)) is pays


def simulate(session, numbers, takes, stalls=(), *, raw=1000.0, packed=700.0):
    """Return the choices of takes. One needs `raw` or `packed` seconds, and a hundred times as many if it stalls.

    The link is so slow that the samples promise a gain on any machine, also one that does not run them for a while.
    """
    chosen = []
    for number in range(takes):
        way = pace.compression_pays(session, leaves(numbers))
        chosen.append(way)
        note(session, (packed if way else raw) * (100 if number in stalls else 1), packed=way, ratio=1.5)
    return chosen


@pytest.mark.parametrize("stalls", [(), (0,), (1,), (2,), (3,), (0, 1)])
def test_compression_auto_uses_the_faster_way_and_tries_the_other_rarely(session, numbers, stalls):
    chosen = simulate(session, numbers, 70, stalls)
    assert chosen[0] is False
    assert chosen[8:].count(False) <= 4
    slower = simulate(session, numbers, 70, raw=1000.0, packed=2000.0)
    assert slower[16:].count(True) <= 3


def test_compression_auto_notices_a_link_that_becomes_fast(session, numbers):
    simulate(session, numbers, 33)
    assert simulate(session, numbers, 20, raw=0.01, packed=0.05).count(True) <= 2


def test_compression_auto_stops_trying_if_takes_are_too_short_to_measure(session, numbers):
    note(session, 10.0)
    chosen = [pace.compression_pays(session, leaves(numbers)) for _ in range(20)]
    assert chosen[3:] == [False] * 17


@pytest.mark.parametrize("stalls", [(), (0,)])
def test_compression_auto_does_not_compress_to_a_fast_storage_after_a_stall(session, numbers, stalls):
    chosen = simulate(session, numbers, 40, stalls, raw=0.01, packed=0.05)
    assert chosen.count(True) <= len(stalls)


def test_compression_auto_does_not_compress_noise_or_small_states(session):
    note(session, 1000.0)
    noise = torch.randint(0, 256, (40 * MiB,), dtype=torch.uint8)
    assert not pace.compression_pays(session, leaves(noise))
    assert not pace.compression_pays(session, leaves(torch.zeros(1000)))
    pace.note_speed(session, MiB, 1e-9, stored=MiB, packed=True)  # too short to show a speed
    assert not next(iter(pace._places.get().values())).speeds[True]


def test_compression_auto_sample_shows_the_ratio(numbers):
    assert pace.sample(leaves(numbers)).ratio > 1.4
    assert pace.sample(leaves(torch.zeros(MiB))).ratio > 100
    assert pace.sample(leaves(torch.zeros(512, 512).t(), torch.zeros(0))).speed == 0.0


def test_compression_auto_measures_takes_and_compresses_to_a_slow_storage(session, tmp_path, numbers):
    app = {"s": StateDict(x=numbers)}
    Snapshot.take(tmp_path / "a", app, options=TakeOptions(compression="auto"))
    assert Snapshot(tmp_path / "a").metadata.format == "snapshot/1"
    (place,) = pace._places.get().values()
    assert place.speeds[False]
    place.links[0] = place.speeds[False][0] = 1e3
    Snapshot.take(tmp_path / "b", app, options=TakeOptions(compression="auto"))
    assert Snapshot(tmp_path / "b").metadata.format == "snapshot/2"
    assert place.speeds[True]
    Snapshot.async_take(tmp_path / "c", app, options=TakeOptions(compression="auto")).wait()
    assert Snapshot(tmp_path / "c").metadata.format == "snapshot/1"
    assert not Snapshot.diff(tmp_path / "a", tmp_path / "b")


def test_compression_auto_is_refused_by_copy(tmp_path):
    Snapshot.take(tmp_path / "a", {"s": StateDict(x=1)})
    with pytest.raises(ValueError, match="only takes are measured"):
        Snapshot(tmp_path / "a").copy(Target(tmp_path / "b", compression="auto"))
