"""Snapshots of what is trained alone: restores compare what was left out with the live tensors, or read it."""

import shutil
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from snapshot import RestoreError, RestoreOptions, Snapshot, SnapshotError, StateDict, StorageError, TakeOptions
from snapshot.io import loop
from snapshot.io.registry import open_storage
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA
from snapshot.testing import Log, tapped
from tests.helpers.arguments import for_restore
from tests.plugins.snapshot_tiers.jobs import flip_keeping_time
from tests.save.frozen_training import WIDTH, Run, expect_whole, files


@pytest.fixture
def trained(tmp_path):
    """A run with a snapshot `base`, and `adapter`, which lacks what is frozen."""
    run = Run()
    Snapshot.take(tmp_path / "base", run.state)
    run.step()
    snapshot = Snapshot.take(
        tmp_path / "adapter", run.state, base=tmp_path / "base", options=TakeOptions(only="trainable")
    )
    assert snapshot.report.omitted_bytes == 4 * (WIDTH * WIDTH + WIDTH) * 4
    assert sum(each.stat().st_size for each in files(tmp_path / "adapter").values()) < 60_000
    return run


def test_only_trainable_restores_what_was_saved_if_the_rest_is_equal(trained, tmp_path):
    values = trained.values()
    trained.step()
    report = Snapshot(tmp_path / "adapter").restore(trained.state)
    assert not report.missing
    assert all(value.equal(values[name]) for name, value in trained.values().items())


class Places:
    """The places of a snapshot's files: this host's folder, then another one."""

    remote = False

    def __init__(self, other):
        self.other = open_storage(URL.parse(str(other)))
        self.save_id = Snapshot(other).metadata.save_id

    def places(self, path):
        return [None, self.other]

    def size(self, path):
        return None

    def passed(self, path, place, error):
        pass

    def count(self, place, nbytes):
        pass


def test_only_trainable_reads_a_damaged_near_file_from_the_far_root(trained, tmp_path):
    values = trained.values()
    shutil.copytree(tmp_path / "adapter", tmp_path / "far")
    for path in files(tmp_path / "adapter").values():
        if path.suffix == ".safetensors":
            flip_keeping_time(path)
    trained.step()
    places = Places(tmp_path / "far")
    near = Snapshot(f"near://{tmp_path}/adapter", storage_options={"sources": places})
    near.restore(trained.state, options=RestoreOptions(base=tmp_path / "base"))  # which has no options of near folders
    loop.run(places.other.close())
    assert all(value.equal(values[name]) for name, value in trained.values().items())


@pytest.mark.parametrize("layout", ["plain", "strided"])
def test_only_trainable_restore_changes_nothing_if_frozen_tensors_differ(trained, tmp_path, layout):
    weight = trained.frozen[1].weight
    if layout == "strided":
        weight.data = weight.data.t().contiguous().t()
    head = trained.head.weight.clone()
    Snapshot(tmp_path / "adapter").restore(trained.state)
    weight.data[3, 3] = torch.nextafter(weight.data[3, 3], torch.tensor(9.0))
    trained.head.weight.data.zero_()
    for options in ({}, {"strict": False}, {"verify": False}, {"atomic": True}):
        with pytest.raises(RestoreError, match=r"frozen\.1\.weight.*had not changed from its base") as raised:
            Snapshot(tmp_path / "adapter").restore(trained.state, **for_restore(**options))
        assert len(raised.value.mismatches) == 1
        assert not trained.head.weight.any()
    Snapshot(tmp_path / "adapter").restore(trained.state, options=RestoreOptions(base=tmp_path / "base"))
    assert trained.head.weight.equal(head)


def test_only_trainable_restore_with_base_reads_omitted_tensors(trained, tmp_path):
    values = trained.values()
    Snapshot(tmp_path / "base").copy(tmp_path / "copied")
    for base in ("base", "copied", Snapshot(tmp_path / "base")):
        for parameter in trained.model.parameters():
            parameter.data.fill_(7)
        given = base if isinstance(base, Snapshot) else tmp_path / base
        report = Snapshot(tmp_path / "adapter").restore(trained.state, options=RestoreOptions(base=given))
        assert report.bytes_read > 1 << 20
        assert all(value.equal(values[name]) for name, value in trained.values().items())


def test_only_trainable_restore_with_a_compressed_base(tmp_path):
    """Its files have other sizes than the snapshot records."""
    run = Run()
    Snapshot.take(tmp_path / "base", run.state, options=TakeOptions(compression="zstd"))
    run.step()
    values = run.values()
    Snapshot.take(tmp_path / "adapter", run.state, base=tmp_path / "base", options=TakeOptions(only="trainable"))
    for parameter in run.model.parameters():
        parameter.data.fill_(7)
    Snapshot(tmp_path / "adapter").restore(run.state, options=RestoreOptions(base=tmp_path / "base"))
    assert all(value.equal(values[name]) for name, value in run.values().items())
    damaged = max(files(tmp_path / "base").values(), key=lambda each: each.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(SnapshotError):
        Snapshot(tmp_path / "adapter").restore(run.state, options=RestoreOptions(base=tmp_path / "base"))


def test_only_trainable_restore_refuses_another_snapshot_as_base(trained, tmp_path):
    other = Run()
    other.frozen[0].weight.data += 1
    Snapshot.take(tmp_path / "other", {**other.state, "more": StateDict(x=torch.ones(3))})
    trained.frozen[0].weight.data += 1
    with pytest.raises(RestoreError, match=r"base must be .*base with the save id"):
        Snapshot(tmp_path / "adapter").restore(trained.state, options=RestoreOptions(base=tmp_path / "other"))
    with pytest.raises(SnapshotError):
        Snapshot(tmp_path / "adapter").restore(trained.state, options=RestoreOptions(base=tmp_path / "missing"))


def test_only_trainable_restore_finds_a_damaged_base(trained, tmp_path):
    (frozen,) = (each for each in files(tmp_path / "base").values() if each.stat().st_size > 1 << 20)
    with frozen.open("r+b") as file:
        file.seek(200_000)
        file.write(b"rot")
    trained.frozen[0].weight.data += 1
    with pytest.raises(SnapshotError, match="digest must be"):
        Snapshot(tmp_path / "adapter").restore(trained.state, options=RestoreOptions(base=tmp_path / "base"))


def test_only_trainable_restore_of_other_dtypes_or_single_objects_needs_base(trained, tmp_path):
    """New tensors, other dtypes, and single objects."""
    snapshot = Snapshot(tmp_path / "adapter")
    trained.frozen.to(torch.float64)
    with pytest.raises(RestoreError, match=r"pass RestoreOptions\(base="):
        snapshot.restore(trained.state, options=RestoreOptions(cast="any"))
    snapshot.restore(trained.state, options=RestoreOptions(cast="any", base=tmp_path / "base"))
    for name in ("model/frozen.0.weight", "model"):
        with pytest.raises(SnapshotError, match=r"pass RestoreOptions"):
            snapshot.read_object(name)
    assert snapshot.read_object("model/head.weight").equal(trained.head.weight)
    with pytest.raises(RestoreError):
        snapshot.restore({"model": StateDict()})


def test_only_trainable_omits_only_frozen_and_equal_parameters(tmp_path):
    """Buffers, averages, and a half that is frozen today but was trained, are all saved."""
    norm = nn.BatchNorm1d(WIDTH * 100).requires_grad_(False)
    generator, teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = nn.ModuleDict({"norm": norm, "generator": generator, "teacher": teacher, "fixed": fixed})
    other = StateDict(table=torch.randn(300, 300))
    state = {"model": model, "other": other}
    base = Snapshot.take(tmp_path / "base", state)
    teacher.weight.data.mul_(0.5)
    generator.weight.data.add_(1)
    generator.requires_grad_(False)
    made = Snapshot.take(tmp_path / "s", state, base=base, options=TakeOptions(only="trainable"))
    left_out = sum(each.nbytes for each in (*norm.parameters(), fixed.weight, fixed.bias, teacher.bias, generator.bias))
    assert made.report.omitted_bytes == left_out
    shutil.rmtree(tmp_path / "base")
    teacher.weight.data.zero_()
    norm.running_mean.fill_(3)
    generator.weight.data.zero_()
    other["table"].zero_()
    made.restore(state)
    assert generator.weight.any()
    assert teacher.weight.any()
    assert not norm.running_mean.any()
    assert other["table"].any()


def test_only_trainable_snapshot_can_be_a_base(trained, tmp_path):
    trained.step()
    later = Snapshot.take(
        tmp_path / "later", trained.state, base=tmp_path / "adapter", options=TakeOptions(only="trainable")
    )
    assert later.report.omitted_bytes == 4 * (WIDTH * WIDTH + WIDTH) * 4
    values = trained.values()
    for parameter in trained.model.parameters():
        parameter.data.fill_(7)
    later.restore(trained.state, options=RestoreOptions(base=tmp_path / "base"))
    assert all(value.equal(values[name]) for name, value in trained.values().items())
    full = Snapshot.take(tmp_path / "full", trained.state, base=later)
    assert full.report.omitted_bytes == 0
    expect_whole(tmp_path / "full", values)


def test_only_trainable_with_a_missing_base_saves_everything(tmp_path):
    run = Run()
    made = Snapshot.take(tmp_path / "s", run.state, base=tmp_path / "none", options=TakeOptions(only="trainable"))
    assert made.report.omitted_bytes == 0
    assert len(made.report.notes) == 1
    expect_whole(tmp_path / "s", run.values())


def test_only_trainable_omits_tied_and_split_parameters_completely(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot.plan.layout.CUT", 1 << 18)
    monkeypatch.setattr("snapshot.plan.layout.LARGEST_FILE", 1 << 18)
    model = nn.Module()
    model.a = nn.Parameter(torch.randn(1000, 300), requires_grad=False)
    model.b = model.a
    model.c = nn.Parameter(torch.randn(10))
    base = Snapshot.take(tmp_path / "base", {"m": model})
    made = Snapshot.take(tmp_path / "s", {"m": model}, base=base, options=TakeOptions(only="trainable"))
    assert made.report.omitted_bytes == model.a.nbytes
    made.restore({"m": model})
    value = model.a.clone()
    model.a.data[999, 299] += 1
    with pytest.raises(RestoreError):
        made.restore({"m": model})
    made.restore({"m": model}, options=RestoreOptions(base=base))
    assert model.a.equal(value)


def test_only_trainable_overwriting_its_base_omits_nothing(trained, tmp_path):
    values = trained.values()
    for path in ("base", "adapter"):
        made = Snapshot.take(
            tmp_path / "base",
            trained.state,
            base=tmp_path / path,
            overwrite=True,
            options=TakeOptions(only="trainable"),
        )
        assert made.report.omitted_bytes == 0
        assert "nothing is left out, since" in made.report.notes[0]
        expect_whole(tmp_path / "base", values)
        if path == "base":
            Snapshot.take(
                tmp_path / "adapter", trained.state, base=made, overwrite=True, options=TakeOptions(only="trainable")
            )


@pytest.mark.parametrize("what", ["missing", "short", "rotten", "no table"])
def test_only_trainable_saves_a_tensor_that_the_base_has_lost(tmp_path, what):
    run = Run(layers=1)  # short enough to be read whole
    run.state["long"] = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
    base = Snapshot.take(tmp_path / "base", run.state)
    (frozen,) = (each for each in files(tmp_path / "base").values() if each.stat().st_size > 1 << 18)
    if what == "missing":
        frozen.unlink()
    elif what == "short":
        frozen.write_bytes(frozen.read_bytes()[:-1])
    elif what == "rotten":
        frozen.write_bytes(frozen.read_bytes()[:-1] + b"?")
    else:
        (table,) = (each for each in files(tmp_path / "base").values() if each.suffix == ".bin")
        table.unlink()
    made = Snapshot.take(tmp_path / "s", run.state, base=base, options=TakeOptions(only="trainable"))
    most = (WIDTH * WIDTH + WIDTH + 2 * WIDTH) * 4 if what == "no table" else 0
    assert made.report.omitted_bytes <= most
    if what != "no table":
        shutil.rmtree(tmp_path / "base")
    weight = run.state["long"].weight.clone()
    run.state["long"].weight.data.zero_()
    made.restore(run.state)
    assert run.state["long"].weight.equal(weight)


def test_only_trainable_does_not_rely_on_a_deleted_base_of_the_base(trained, tmp_path):
    shutil.rmtree(tmp_path / "base")
    made = Snapshot.take(
        tmp_path / "later", trained.state, base=tmp_path / "adapter", options=TakeOptions(only="trainable")
    )
    assert made.report.omitted_bytes == 0
    expect_whole(tmp_path / "later", trained.values())


def test_only_trainable_restore_into_memory_shared_with_an_omitted_tensor_raises(tmp_path):
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(100), requires_grad=False)
    model.b = nn.Parameter(torch.zeros(100))
    base = Snapshot.take(tmp_path / "base", {"m": model})
    model.b.data.fill_(7)
    made = Snapshot.take(tmp_path / "s", {"m": model}, base=base, options=TakeOptions(only="trainable"))
    model.b.data = model.a.data
    with pytest.raises(RestoreError, match="share memory"):
        made.restore({"m": model})
    assert not model.a.any()


def test_only_trainable_take_fails_if_its_base_is_deleted(tmp_path):
    run = Run()
    Snapshot.take(tmp_path / "base", run.state)

    class Remove(Log):
        async def before(self, operation):
            if operation.name == "finish":
                shutil.rmtree(tmp_path / "base", ignore_errors=True)

    with tapped("gone", Remove()), pytest.raises(SnapshotError, match="removed or replaced"):
        Snapshot.take(
            f"gone+file://{tmp_path}/s", run.state, base=tmp_path / "base", options=TakeOptions(only="trainable")
        )
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("when", [("read_into", METADATA), ("stat", "*")])
@pytest.mark.parametrize("replaced", [False, True])
def test_only_trainable_take_notices_a_base_deleted_while_it_compares(tmp_path, when, replaced):
    run = Run()
    Snapshot.take(tmp_path / "base", run.state)

    class Remove(Log):
        async def before(self, operation):
            await super().before(operation)
            if [each.name == when[0] and fnmatchcase(each.path, when[1]) for each in self.operations].count(True) == 1:
                shutil.rmtree(tmp_path / "base", ignore_errors=True)
                if replaced:
                    shutil.copytree(tmp_path / "other", tmp_path / "base", dirs_exist_ok=True)

    Snapshot.take(tmp_path / "other", {"s": StateDict(x=1)})
    with tapped("gone", Remove()):
        made, failed = None, ""
        try:
            made = Snapshot.take(
                tmp_path / "s", run.state, base=f"gone+file://{tmp_path}/base", options=TakeOptions(only="trainable")
            )
        except SnapshotError as error:
            failed = str(error)
    if made is None:
        assert "removed or replaced" in failed
        assert not (tmp_path / "s").exists()
    else:
        assert not made.report.omitted_bytes
        expect_whole(tmp_path / "s", run.values())


def test_only_trainable_omits_tensors_even_if_no_files_can_be_shared(tmp_path):
    run = Run()
    Snapshot.take("memory://left-out/base", run.state, overwrite=True)
    Snapshot.take(tmp_path / "base", run.state)
    for base in ("memory://left-out/base", [tmp_path / "base"]):
        made = Snapshot.take(
            tmp_path / "s", run.state, base=base, overwrite=True, options=TakeOptions(only="trainable")
        )
        assert made.report.omitted_bytes == 4 * (WIDTH * WIDTH + WIDTH) * 4
        assert made.report.written_bytes < 60_000
        made.restore(run.state)


def test_only_trainable_base_of_a_base_on_another_storage_gets_no_storage_options(tmp_path):
    run = Run()
    Snapshot.take(tmp_path / "base", run.state)
    first = Snapshot.take(
        "memory://left-out/a", run.state, base=tmp_path / "base", overwrite=True, options=TakeOptions(only="trainable")
    )
    made = Snapshot.take(tmp_path / "s", run.state, base=first, options=TakeOptions(only="trainable"))
    assert made.report.omitted_bytes == first.report.omitted_bytes
    shutil.rmtree(tmp_path / "base")
    made = Snapshot.take(tmp_path / "t", run.state, base=first, options=TakeOptions(only="trainable"))
    assert made.report.omitted_bytes == 0
    expect_whole(tmp_path / "t", run.values())


@pytest.mark.parametrize("name", ["get", "stat", "read_into", "drop_caches"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_only_trainable_take_does_not_fail_if_its_base_cannot_be_read(tmp_path, name, nth):
    run = Run()
    Snapshot.take(tmp_path / "base", run.state)

    class Break(Log):
        async def before(self, operation):
            await super().before(operation)
            if operation.name == name and [each.name for each in self.operations].count(name) >= nth:
                raise StorageError("the disk is broken")

    for only in (None, "trainable"):
        with tapped("sick", Break()):
            made = Snapshot.take(
                tmp_path / str(only), run.state, base=f"sick+file://{tmp_path}/base", options=TakeOptions(only=only)
            )
        assert made.verify()
        if not made.report.omitted_bytes:
            expect_whole(tmp_path / str(only), run.values())


def test_only_trainable_restore_of_equal_bytes_into_one_memory(tmp_path):
    model = nn.Module()
    model.left_out = nn.Parameter(torch.zeros(100), requires_grad=False)
    model.x = nn.Parameter(torch.ones(100))
    model.y = nn.Parameter(torch.ones(100))
    base = Snapshot.take(tmp_path / "base", {"m": model})
    made = Snapshot.take(tmp_path / "s", {"m": model}, base=base, options=TakeOptions(only="trainable"))
    model.y.data = model.x.data
    for snapshot in (base, made):
        snapshot.restore({"m": model})
