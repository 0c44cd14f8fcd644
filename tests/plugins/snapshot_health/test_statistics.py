"""Statistics of tensors that a take stores beside its manifest."""

import math

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import CorruptSnapshotError, Snapshot, StateDict, TakeOptions
from snapshot.manifest.document import METADATA
from snapshot.testing import recording
from snapshot_health.bisection import find_first_bad
from snapshot_health.statistics import PIECE, combine_statistics, measure_tensor
from tests.helpers.arguments import for_take

NUMBERS = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 3e38, 1e-40])


def expected(tensor):
    """The statistics of a tensor, slowly."""
    wide = tensor.double().flatten().tolist()
    finite = [each for each in wide if math.isfinite(each)]
    return (
        len(wide), sum(map(math.isnan, wide)), sum(map(math.isinf, wide)), wide.count(0.0), math.hypot(*finite),
        min(finite, default=None), max(finite, default=None),
    )  # fmt: skip


def expect_statistics(found, tensor):
    wanted = expected(tensor)
    assert (found.count, found.nan, found.infinite, found.zero) == wanted[:4]
    assert found.norm == pytest.approx(wanted[4], rel=1e-5)
    assert (found.min, found.max) == wanted[5:]
    return True


@given(st.lists(NUMBERS, max_size=40), st.integers(0, 40))
def test_statistics_of_any_numbers_whole_and_in_parts(numbers, cut):
    tensor = torch.tensor(numbers, dtype=torch.float32)
    assert expect_statistics(measure_tensor(tensor), tensor)
    parts = [measure_tensor(tensor[:cut]), measure_tensor(tensor[cut:])]
    assert expect_statistics(combine_statistics(parts), tensor)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8,
        torch.bool,
    ],
    ids=str,
)  # fmt: skip
def test_statistics_of_each_dtype(dtype):
    tensor = torch.randn(7, 11).mul(3).to(dtype)
    assert expect_statistics(measure_tensor(tensor), tensor)
    assert expect_statistics(measure_tensor(tensor.t()), tensor)


def test_statistics_of_long_strided_huge_and_odd_tensors():
    long = torch.randn(3, PIECE + 5)
    long[1, 7] = math.inf
    assert expect_statistics(measure_tensor(long), long)
    assert expect_statistics(measure_tensor(long.t()), long)
    assert measure_tensor(torch.full((9,), 1e300, dtype=torch.float64)).norm == pytest.approx(3e300)
    assert measure_tensor(torch.full((9,), 1e-300, dtype=torch.float64)).norm == pytest.approx(3e-300)
    assert math.isfinite(measure_tensor(torch.full((900,), 1e308, dtype=torch.float64)).norm)
    pair = measure_tensor(torch.tensor([3 + 4j, complex(math.nan, 0)]))
    assert (pair.count, pair.nan, pair.zero, pair.norm) == (4, 1, 1, 5.0)
    assert measure_tensor(torch.empty(3, device="meta")) is None


def mixed():
    model = nn.Linear(5, 3)
    return {
        "m": model,
        "s": StateDict(big=torch.randn(300, 40), ints=torch.arange(4), n=3, text="x", none=torch.empty(0, 4)),
    }


@pytest.mark.parametrize("verb", ["take", "async_take"])
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"base": True}], ids=["plain", "packed", "based"])
def test_statistics_of_a_take_equal_the_stored_values(tmp_path, verb, options):
    app = mixed()
    if "base" in options:
        options = {"base": Snapshot.take(tmp_path / "base", app)}
        app["s"]["ints"] = torch.arange(5, 9)
    if verb == "take":
        Snapshot.take(tmp_path / "s", app, **for_take(statistics=True, **options))
    else:
        pending = Snapshot.async_take(tmp_path / "s", app, **for_take(statistics=True, **options))
        with torch.no_grad():
            app["m"].weight.fill_(7.0)
        pending.wait()
    snapshot = Snapshot(tmp_path / "s")
    found = snapshot.get_statistics()
    assert set(found) == {"0/m/weight", "0/m/bias", "0/s/big", "0/s/ints", "0/s/none"}
    assert all(expect_statistics(each, snapshot.read_object(path)) for path, each in found.items())
    assert found["0/m/weight"].max < 1
    assert snapshot.verify().ok
    assert b'"format":"snapshot/3"' in (tmp_path / "s" / METADATA).read_bytes()


def test_statistics_are_empty_unless_requested(tmp_path):
    snapshot = Snapshot.take(tmp_path / "s", mixed())
    assert snapshot.get_statistics() == {}
    assert not list(tmp_path.rglob("*.stats"))
    assert b'"format":"snapshot/1"' in (tmp_path / "s" / METADATA).read_bytes()
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    assert Snapshot(tmp_path / "w.pt").get_statistics() == {}


def test_statistics_of_a_prepared_tensor_are_those_of_the_stored_one(tmp_path):
    def halve(path, tensor, tracing):
        return tensor.bfloat16() / 2

    state = {"s": StateDict(w=torch.full((4,), 6.0))}
    snapshot = Snapshot.take(
        tmp_path / "s", state, _custom_tensor_prepare_func=halve, options=TakeOptions(statistics=True)
    )
    assert snapshot.get_statistics()["0/s/w"].max == 3.0


def test_statistics_are_kept_by_copy_and_removed_by_delete(tmp_path):
    Snapshot.take(tmp_path / "s", mixed(), options=TakeOptions(statistics=True))
    Snapshot(tmp_path / "s").copy(tmp_path / "c")
    assert Snapshot(tmp_path / "c").get_statistics() == Snapshot(tmp_path / "s").get_statistics() != {}
    assert Snapshot(tmp_path / "c").verify().ok
    Snapshot(tmp_path / "s").copy(tmp_path / "part", select=["m/**"])
    assert set(Snapshot(tmp_path / "part").get_statistics()) <= {"0/m/weight", "0/m/bias"}
    Snapshot(tmp_path / "c").delete()
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_file()]


@pytest.mark.parametrize("signed", [False, True])
def test_statistics_that_were_changed_are_refused(tmp_path, signed):
    key = Ed25519PrivateKey.generate() if signed else None
    Snapshot.take(tmp_path / "s", mixed(), options=TakeOptions(statistics=True, sign=key))
    [file] = tmp_path.rglob("*.stats")
    public = key.public_key() if key else None
    assert len(Snapshot(tmp_path / "s", key=public).get_statistics()) == 5
    whole = file.read_bytes()
    for data in (whole.replace(b"[15,0,", b"[15,1,"), whole[:-1], whole + b" ", b"{}"):
        file.write_bytes(data)
        with pytest.raises(CorruptSnapshotError):
            Snapshot(tmp_path / "s", key=public).get_statistics()
        assert not Snapshot(tmp_path / "s", key=public).verify().ok
    file.unlink()
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path / "s").get_statistics()


def test_statistics_let_the_guard_find_one_nan_at_once(tmp_path):
    model = nn.Linear(512, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight[31, 77] = math.nan
    [finding] = Snapshot.take(
        tmp_path, {"m": model, "o": optimizer}, options=TakeOptions(statistics=True)
    ).report.findings
    assert str(finding) == "nonfinite: NaN or infinity in m/weight (1 of 20,480)"


def test_bisect_reads_statistics_and_no_data(tmp_path):
    steps = list(range(10, 100, 10))
    for step in steps:
        w = torch.full((40, 30), 1.0)
        if step >= 70:
            w[3] = math.nan
        Snapshot.take(tmp_path / f"step-{step}", {"s": StateDict(w=w)}, options=TakeOptions(statistics=True))
    with recording() as log:
        report = find_first_bad(steps, lambda step: Snapshot(f"recording+file://{tmp_path}/step-{step}"))
    assert (report.step, report.last_good) == (70, 60)
    assert report.faults == ("0/s/w: 30 are NaN or infinite",)
    assert log.nbytes("read_into", "data/*.safetensors") == 0


def _take_and_measure(path):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(60.0).view(12, 5)
    state = StateDict(
        own=torch.full((4,), float(rank + 1)), same=torch.arange(9.0), cut=distribute_tensor(whole, mesh, [Shard(0)])
    )
    Snapshot.take(path, {"s": state}, replicated=["s/same"], options=TakeOptions(statistics=True))
    return Snapshot(path).get_statistics()


def test_statistics_of_shards_of_several_ranks_are_combined(two, tmp_path):
    one, other = two.run(_take_and_measure, tmp_path / "s")
    assert one == other
    assert {path: each.max for path, each in one.items()} == {
        "0/s/own": 1.0,
        "1/s/own": 2.0,
        "0/s/same": 8.0,
        "0/s/cut": 59.0,
    }
    assert expect_statistics(one["0/s/cut"], torch.arange(60.0))
    for name in one:
        assert Snapshot(tmp_path / "s").read_object(name) is not None
