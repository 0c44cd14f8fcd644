"""Systems of `snapshot bench` on the fake accelerator. `test_bench_on_device.py` runs this in a process of its own."""

import pytest
import torch

from tests.device import fakedev

extension = fakedev.load()

from snapshot.cli import main  # noqa: E402
from snapshot_bench import raw_io, rounds  # noqa: E402 - the device is registered before the library is imported
from snapshot_bench.child import Task, Worker  # noqa: E402
from snapshot_bench.rounds import group_systems  # noqa: E402
from snapshot_bench.systems import OVERLAPPED  # noqa: E402
from snapshot_bench.workloads import CASES  # noqa: E402

# A child of the benchmark ignores all warnings; these are of DCP:
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Ignoring pin_memory flag")

DEVICE = "fakedev:1"
SCALE = 0.001
ROWS = {
    ("raw", "take"): ["raw, 1 stream", "raw, 2 streams", "raw, 1 stream, O_DIRECT"],
    ("raw", "cold"): ["raw, 1 stream", "raw, 2 streams", "raw, 1 stream, O_DIRECT", "raw, 2 streams, O_DIRECT"],
    ("raw", "async"): ["raw copy, each tensor", "raw copy, 64 MiB pieces"],
    ("snapshot", "async"): ["snapshot", "snapshot, overlapped"],
    ("dcp", "async"): ["dcp", "dcp, overlapped"],
}


@pytest.fixture(autouse=True)
def _two_lanes(monkeypatch):
    monkeypatch.setattr("snapshot.settings.Settings.cores", lambda self: 2)
    monkeypatch.setattr(raw_io, "DIRECT_BUFFER", 8 * raw_io.PAGE)  # many turns of the two buffers


def on_disk(tensors):
    return b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)


@pytest.fixture
def worker(tmp_path):
    return lambda system, operation, case="small": Worker(Task(system, case, SCALE, operation, str(tmp_path), DEVICE))


@pytest.mark.parametrize("case", CASES)
def test_bench_case_has_the_same_names_and_sizes_on_a_device(case):
    there, here = CASES[case].make(SCALE, torch.device(DEVICE)), CASES[case].make(SCALE)
    assert there.device == torch.device(DEVICE)
    assert {name: each.shape for name, each in there.tensors.items()} == {
        name: each.shape for name, each in here.tensors.items()
    }
    on_host = {name for name, each in there.tensors.items() if each.device.type == "cpu"}
    assert all(name.endswith(".step") for name in on_host), "AdamW keeps its steps on the host"
    if case != "train":  # which makes a step on the device
        assert there.digest() == here.digest()


@pytest.mark.parametrize("system", ["raw", "snapshot", "torch.save", "safetensors", "dcp"])
@pytest.mark.parametrize("operation", ["take", "restore", "async"])
def test_bench_repetition_ends_with_an_idle_device(worker, system, operation):
    measured = worker(system, operation, "train" if operation == "restore" else "small")
    if not measured.ways:
        return
    assert list(measured.ways) == ROWS.get((system, operation), list(measured.ways))
    for row in measured.ways:
        assert measured.repeat(row, check=True).seconds > 0  # which compares restored bytes
        assert extension.waiting() == 0


@pytest.mark.parametrize("system", ["snapshot", "dcp"])
def test_bench_async_save_has_the_bytes_of_the_device(worker, system, tmp_path):
    measured = worker(system, "async", "train")
    saved = measured.payload.digest()
    for row, start in measured.ways.items():
        start(str(tmp_path / row)).wait()
        measured.payload.wipe()
        measured.system.load(str(tmp_path / row))
        assert measured.payload.digest() == saved, row


def test_bench_dcp_of_an_older_torch_keeps_its_staging_memory(worker, monkeypatch):
    monkeypatch.delattr("torch.distributed.checkpoint.staging.DefaultStager")
    measured = worker("dcp", "async")
    assert list(measured.ways) == ["dcp"]
    for _ in range(2):
        measured.repeat("dcp", check=False)
    assert measured.system.caching_writer.state_dict_cache


def test_bench_time_includes_queued_work_unless_a_row_overlaps_it(worker):
    measured = worker("raw", "async")
    (tensor, *_) = measured.payload.tensors.values()
    source = torch.zeros(tensor.shape, pin_memory=True)

    def leave_queued(_where):
        tensor.detach().copy_(source, non_blocking=True)
        assert extension.waiting() == 1

    measured.ways = {"some": leave_queued, f"some, {OVERLAPPED}": leave_queued}
    for row, left in (("some", 0), (f"some, {OVERLAPPED}", 1)):
        measured.repeat(row, check=False)
        assert extension.waiting() == left
    torch.accelerator.synchronize(DEVICE)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_raw_io_files_and_tensors_of_a_device_have_all_bytes(tmp_path, monkeypatch, pinned, direct, count):
    if not pinned:
        monkeypatch.setattr(torch, "empty", _without_pinning(torch.empty))
    tensors = [torch.rand(size, device=DEVICE) for size in (1, 3, 50_000, 1024, 7)] + [torch.tensor(1.5)]
    expected = on_disk(tensors)
    lanes = [raw_io.StagedLane(torch.device(DEVICE)) for _ in range(count)]
    assert {buffer.is_pinned() for lane in lanes for buffer in lane.buffers} == {pinned}
    try:
        raw_io.write_staged(tensors, tmp_path, durable=True, lanes=lanes, direct=direct)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    whole = b"".join((tmp_path / f"{index}.raw").read_bytes() for index in range(count))
    assert whole == expected
    (tmp_path / "whole").write_bytes(whole)
    for tensor in tensors:
        tensor.zero_()
    raw_io.read_staged(tensors, tmp_path / "whole", lanes, direct)
    assert on_disk(tensors) == expected
    with pytest.raises(OSError, match="ended early"):
        raw_io.read_staged([*tensors, tensors[0]], tmp_path / "whole", lanes, direct)


def test_raw_io_copies_of_a_device_have_all_bytes(worker):
    measured = worker("raw", "async", "small")
    measured.repeat("raw copy, each tensor", check=False)
    assert on_disk(measured.system.copies) == on_disk(measured.payload.tensors.values())
    assert all(copy.is_pinned() for copy in measured.system.copies)


def _without_pinning(empty):
    def refuse(*args, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("this device cannot pin memory")
        return empty(*args, **options)

    return refuse


@pytest.mark.parametrize("pinned", [True, False])
def test_measure_device_measures_the_speed_of_the_link(monkeypatch, pinned):
    monkeypatch.setattr(raw_io, "LINK_PIECE", 1 << 20)
    if not pinned:
        monkeypatch.setattr(torch, "empty", _without_pinning(torch.empty))
    found = rounds.measure_device(DEVICE)
    assert (found["device"], found["name"], found["pinned"]) == (DEVICE, "fakedev", pinned)
    assert found["to_host_gb_per_second"] > 0
    assert found["to_device_gb_per_second"] > 0


def test_bench_group_systems_by_device_memory(monkeypatch):
    systems = ["raw", "snapshot", "torch.save", "dcp"]
    assert group_systems(systems, ["raw"], 1 << 20, DEVICE) == [systems]
    monkeypatch.setattr(torch.fakedev, "mem_get_info", lambda device: (4 << 30, 8 << 30), raising=False)
    assert group_systems(systems, ["raw"], 1 << 20, DEVICE) == [["raw", "snapshot", "torch.save"], ["raw", "dcp"]]


@pytest.mark.parametrize("name", ["fakedev:2", "fakedev:", "cuda", "meta"])
def test_cli_bench_device_that_torch_cannot_use_is_refused(tmp_path, capsys, name):
    assert main(["bench", str(tmp_path), "--device", name]) == 2
    printed = capsys.readouterr()
    assert f"argument --device: must be one of cpu, fakedev:0, fakedev:1, got '{name}'" in printed.err
    assert not printed.out


def test_cli_bench_device_without_memory_is_refused(tmp_path, capsys):
    extension.refuse_allocation(1)
    assert main(["bench", str(tmp_path), "--device", "fakedev"]) == 2
    assert "argument --device: fakedev:0: cannot be used: fakedev out of memory" in capsys.readouterr().err
