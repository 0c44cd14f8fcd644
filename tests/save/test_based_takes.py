"""Takes that are based on earlier snapshots: what is shared, what is written, and that each snapshot is whole."""

import errno
import os
import shutil
import stat

import pytest
import torch
from torch import nn

from snapshot import Snapshot, SnapshotExistsError, StateDict, TakeOptions, Target
from snapshot.events import add_handler, remove_handler
from snapshot.manifest.document import decode_document, encode
from snapshot.save import base_files, reuse
from snapshot.testing import Log, tapped
from tests.helpers.arguments import for_take
from tests.helpers.wrapper_tensors import quantised
from tests.save.frozen_training import WIDTH, Run, entries, expect_whole, files


def inodes(path):
    return {each.stat().st_ino for each in files(path).values()}


@pytest.mark.parametrize("verb", ["take", "async_take", "overlapped", "process"])
def test_base_shares_the_file_of_frozen_parameters_and_writes_all_else(tmp_path, verb, writer_process):
    run, kept, base = Run(), {}, None
    for number in range(4):
        run.step()
        path = tmp_path / f"step-{number}"
        if verb == "take":
            base = Snapshot.take(path, run.state, base=base)
        else:
            more = {"overlapped": {"staging": "overlapped"}, "process": {"worker": "process"}}.get(verb, {})
            base = Snapshot.async_take(path, run.state, **for_take(base=base, **more)).wait()
        kept[path] = run.values()
        frozen = 4 * (WIDTH * WIDTH + WIDTH) * 4
        if number:
            assert frozen <= base.report.shared_bytes < frozen + 10_000
            assert base.report.shared_files == 1
            assert base.report.written_bytes < 60_000
            assert len(inodes(path) & inodes(tmp_path / "step-0")) == 1
        else:
            assert base.report.shared_bytes == 0
    ages = [max(each.get("age", 0) for each in entries(path).values()) for path in kept]
    assert ages == [0, 1, 2, 3]
    for path, values in kept.items():
        expect_whole(path, values)
    for path in list(kept)[::2]:  # any may go
        Snapshot(path).delete()
    for path in list(kept)[1::2]:
        expect_whole(path, kept[path])


def test_base_changed_frozen_parameter_is_written_again(tmp_path):
    run = Run()
    base = Snapshot.take(tmp_path / "a", run.state)
    run.frozen[2].weight.data[0, 0] += 1
    later = Snapshot.take(tmp_path / "b", run.state, base=base)
    assert later.report.shared_bytes == 0
    expect_whole(tmp_path / "b", run.values())


def test_base_change_without_a_version_counter_is_found(tmp_path):
    run = Run()
    Snapshot.take(tmp_path / "a", run.state)
    weight = run.frozen[0].weight
    version = weight._version
    weight.detach().numpy()[5, 5] = 42.0
    assert weight._version == version
    assert Snapshot.take(tmp_path / "b", run.state, base=tmp_path / "a").report.shared_bytes == 0
    expect_whole(tmp_path / "b", run.values())


def test_base_tensor_equal_last_time_gets_a_file_that_can_be_shared(tmp_path):
    """It is not frozen: the second take finds it equal, the third one writes its file, the fourth shares it."""
    state = StateDict(still=torch.randn(300, 300), moving=torch.randn(300, 300))
    base, shared = None, []
    for number in range(5):
        state["moving"] += 1
        base = Snapshot.take(tmp_path / str(number), {"s": state}, base=base)
        shared.append(base.report.shared_bytes >= state["still"].nbytes)
    assert shared == [False, False, False, True, True]


def test_base_changing_frozen_parameter_does_not_affect_the_others(tmp_path):
    """A teacher that is an average does not require gradients, but changes at each step."""
    run = Run()
    teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    run.state["teacher"] = teacher
    base, shared = None, []
    for number in range(5):
        teacher.weight.data += 1
        base = Snapshot.take(tmp_path / str(number), run.state, base=base)
        shared.append(base.report.shared_bytes > 0)
        held = nn.Linear(WIDTH, WIDTH)
        base.restore({"teacher": held})
        assert held.weight.equal(teacher.weight)
    assert shared == [False, False, False, True, True]


def test_base_small_tensors_have_no_file_of_their_own(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    Snapshot.take(tmp_path / "a", {"m": model})
    assert len(files(tmp_path / "a")) == 1


def test_take_without_base_writes_the_same_manifest_as_before(tmp_path):
    Snapshot.take(tmp_path / "a", Run().state)
    assert all(each.keys() <= {"size", "header", "header_digest"} for each in entries(tmp_path / "a").values())


def test_base_shared_files_are_read_only_synced_and_can_be_deleted(tmp_path):
    run = Run()
    base = Snapshot.take(tmp_path / "a", run.state, options=TakeOptions(durable=False))
    synced = []
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
        Snapshot.take(tmp_path / "b", run.state, base=base)
    (shared,) = inodes(tmp_path / "a") & inodes(tmp_path / "b")
    assert shared in synced
    (path,) = (each for each in files(tmp_path / "b").values() if each.stat().st_ino == shared)
    assert not stat.S_IMODE(path.stat().st_mode) & 0o222
    Snapshot(tmp_path / "a").delete()
    Snapshot(tmp_path / "b").delete()
    assert not (tmp_path / "b").exists()


def test_base_overwritten_or_copied_snapshots_leave_others_complete(tmp_path):
    run = Run()
    base = Snapshot.take(tmp_path / "a", run.state)
    Snapshot.take(tmp_path / "b", run.state, base=base)
    values = run.values()
    shutil.copytree(tmp_path / "b", tmp_path / "copied")
    for parameter in run.model.parameters():
        parameter.data += 1
    Snapshot.take(tmp_path / "a", run.state, overwrite=True)
    for path in ("b", "copied"):
        expect_whole(tmp_path / path, values)
    expect_whole(tmp_path / "a", run.values())


def test_base_is_the_snapshot_itself_when_it_is_overwritten(tmp_path):
    run = Run()
    Snapshot.take(tmp_path / "a", run.state)
    before = inodes(tmp_path / "a")
    run.step()
    later = Snapshot.take(tmp_path / "a", run.state, base=tmp_path / "a", overwrite=True)
    assert later.report.shared_files == 1
    assert len(before & inodes(tmp_path / "a")) == 1
    assert len(files(tmp_path / "a")) == 2
    expect_whole(tmp_path / "a", run.values())


@pytest.mark.parametrize("what", ["missing", "uncommitted", "foreign", "damaged"])
def test_base_that_cannot_be_used_is_named_and_everything_is_written(tmp_path, what, caplog):
    run = Run()
    base = tmp_path / "base"
    if what == "foreign":
        Snapshot.take(tmp_path / "ours", run.state)
        Snapshot(tmp_path / "ours").convert(Target(base, to="safetensors"))
    elif what != "missing":
        Snapshot.take(base, run.state)
        manifest = base / ".snapshot_metadata"
        manifest.unlink() if what == "uncommitted" else manifest.write_bytes(manifest.read_bytes()[:-9] + b"x")
    snapshot = Snapshot.take(tmp_path / "s", run.state, base=base)
    assert snapshot.report.shared_bytes == 0
    (note,) = snapshot.report.notes
    assert str(base) in note
    assert note in caplog.text
    expect_whole(tmp_path / "s", run.values())


@pytest.mark.parametrize("when", ["stat", "share"])
def test_base_deleted_during_the_take_is_written_again(tmp_path, when):
    run = Run()
    Snapshot.take(tmp_path / "a", run.state)

    class Delete(Log):
        async def before(self, operation):
            if operation.name == when and "data/" in operation.path:
                shutil.rmtree(tmp_path / "a", ignore_errors=True)

    with tapped("vanish", Delete()):
        later = Snapshot.take(f"vanish+file://{tmp_path}/b", run.state, base=f"vanish+file://{tmp_path}/a")
    assert later.report.shared_bytes == 0
    assert len(later.report.notes) == 1
    expect_whole(tmp_path / "b", run.values())


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("verb", ["take", "async_take"])
def test_base_file_that_cannot_be_linked_is_written(tmp_path, monkeypatch, number, verb):
    run = Run()
    base = Snapshot.take(tmp_path / "a", run.state)

    link = os.link

    def refuse(*arguments, **_):
        if "data/" in str(arguments[0]) or isinstance(arguments[0], int):  # the commit links the manifest
            raise OSError(number, os.strerror(number))
        link(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("snapshot.storages.file.files.fcntl.ioctl", refuse)
        patch.setattr("os.copy_file_range", refuse)
        patch.setattr("os.link", refuse)
        made = getattr(Snapshot, verb)(tmp_path / "b", run.state, base=base)
        later = made if verb == "take" else made.wait()
    assert later.report.shared_bytes == 0
    assert os.strerror(number) in later.report.notes[0]
    expect_whole(tmp_path / "b", run.values())


def test_base_shared_file_is_written_anew_after_some_takes(tmp_path):
    run, base, shared = Run(), None, []
    most = reuse.OLDEST
    for number in range(most + 3):
        base = Snapshot.take(tmp_path / str(number), run.state, base=base, options=TakeOptions(durable=False))
        shared.append(base.report.shared_bytes > 0)
    assert shared == [False, *[True] * most, False, True]
    assert not inodes(tmp_path / str(most)) & inodes(tmp_path / str(most + 1))


def test_base_that_is_fixed_has_its_file_written_anew_after_some_takes(tmp_path):
    run, shared = Run(), []
    Snapshot.take(tmp_path / "base", run.state)
    for number in range(reuse.OLDEST + 2):
        made = Snapshot.take(
            tmp_path / str(number), run.state, base=tmp_path / "base", options=TakeOptions(durable=False)
        )
        shared.append(made.report.shared_bytes > 0)
    assert shared == [*[True] * reuse.OLDEST, False, True]


def test_base_list_of_two_keeps_two_physical_copies(tmp_path):
    run, made = Run(), []
    for number in range(5):
        run.step()
        made.append(Snapshot.take(tmp_path / str(number), run.state, base=made[:-3:-1]))
    assert [each.report.shared_bytes > 0 for each in made] == [False, False, True, True, True]
    for before, after in zip(range(4), range(1, 5), strict=True):
        assert not inodes(tmp_path / str(before)) & inodes(tmp_path / str(after))


def test_base_with_damaged_bytes_is_found_after_some_takes_and_written_anew(tmp_path):
    run = Run()
    found = []

    def handler(event):
        if event.name == "rotten":
            found.append(event)

    bases = [Snapshot.take(tmp_path / "a", run.state), Snapshot.take(tmp_path / "b", run.state)]
    bases.reverse()
    (frozen,) = (each for each in files(tmp_path / "a").values() if each.stat().st_size > 1 << 20)
    add_handler(handler)
    try:
        for number in range(2 * base_files.CHECKED + 6):
            if number == 3:
                frozen.chmod(0o644)
                with frozen.open("r+b") as file:
                    file.seek(500_000)
                    byte = file.read(1)
                    file.seek(500_000)
                    file.write(bytes([byte[0] ^ 1]))
            path = tmp_path / f"step-{number}"
            made = Snapshot.take(path, run.state, base=bases[:2], options=TakeOptions(durable=False))
            bases.insert(0, made)
            if found:
                break
    finally:
        remove_handler(handler)
    assert found, "the rot must be found"
    assert number <= 3 + 2 * base_files.CHECKED
    assert any("written again" in note for note in made.report.notes)
    assert not inodes(path) & {frozen.stat().st_ino}
    expect_whole(path, run.values())


def test_base_with_read_back_reads_a_shared_file_completely(tmp_path):
    run = Run()
    base = Snapshot.take(tmp_path / "a", run.state)
    (frozen,) = (each for each in files(tmp_path / "a").values() if each.stat().st_size > 1 << 20)
    with frozen.open("r+b") as file:
        file.seek(300_000)
        file.write(b"rot")
    later = Snapshot.take(tmp_path / "b", run.state, base=base, options=TakeOptions(read_back=True))
    assert later.report.shared_bytes == 0
    expect_whole(tmp_path / "b", run.values())


def test_base_take_failing_after_sharing_leaves_no_files(tmp_path, monkeypatch):
    run = Run()
    base = Snapshot.take(tmp_path / "a", run.state)
    for where in ("plan_writes", "Take"):
        with monkeypatch.context() as patch:

            def fail(*_, **__):
                raise KeyboardInterrupt

            patch.setattr(f"snapshot.save.take.{where}", fail)
            with pytest.raises(KeyboardInterrupt):
                Snapshot.take(tmp_path / "b", run.state, base=base)
        assert not (tmp_path / "b").exists()
    assert base.verify()
    Snapshot.take(tmp_path / "b", run.state, base=base)
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(tmp_path / "b", run.state, base=base)
    expect_whole(tmp_path / "b", run.values())


def odd_state():
    generator = torch.Generator()
    tied = torch.randn(200, 300)
    return StateDict(
        empty=torch.empty(0, 3),
        none=torch.empty(3, 0, dtype=torch.int8),
        scalar=torch.tensor(3.0),
        half=torch.randn(300, 301).to(torch.bfloat16),
        small=torch.randn(7).to(torch.float8_e4m3fn),
        strided=torch.randn(300, 200).t(),
        sparse=torch.eye(300).to_sparse(),
        array=torch.randn(300, 10).numpy(),
        tied={"a": tied, "b": tied},
        brackets={"a[0:1]": torch.randn(100), "__metadata__": torch.randn(100)},
        generator=generator,
        flags=torch.zeros(300_001, dtype=torch.bool),
    )


def test_base_shares_unchanged_values_of_every_kind(tmp_path):
    state = {"s": odd_state()}
    base = None
    for number in range(3):
        base = Snapshot.take(tmp_path / str(number), state, base=base)
    assert base.report.written_bytes < 20_000, base.report
    assert base.verify()
    other = {"s": StateDict()}
    base.restore(other)
    assert not Snapshot.diff(tmp_path / "0", base.path)
    assert other["s"]["tied"]["a"] is other["s"]["tied"]["b"]


def test_base_shares_all_files_of_a_long_tensor_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot.plan.layout.CUT", 1 << 18)
    monkeypatch.setattr("snapshot.plan.layout.LARGEST_FILE", 1 << 18)
    state = {"s": StateDict(long=torch.randn(1000, 300), other=torch.randn(200, 300))}
    base = Snapshot.take(tmp_path / "a", state)
    later = Snapshot.take(tmp_path / "b", state, base=base)
    assert later.report.shared_files >= 4
    assert later.report.written_bytes < 1000
    refused = []
    share = reuse.FileSharing._share_one

    async def refuse_one(self, match, name):
        if any(self._leaves[extent.leaf].path.endswith("long") for extent in match.plan.extents) and not refused:
            refused.append(name)
            return False
        return await share(self, match, name)

    monkeypatch.setattr(reuse.FileSharing, "_share_one", refuse_one)
    third = Snapshot.take(tmp_path / "c", state, base=base)
    assert third.verify()
    assert third.report.shared_bytes < later.report.shared_bytes - state["s"]["long"].nbytes + 10_000
    names = {name.partition("/")[2] for name in entries(tmp_path / "c")}
    assert names == set(files(tmp_path / "c")), "what was shared in vain is deleted"


def test_base_and_only_refuse_invalid_arguments(tmp_path):
    run = Run()
    with pytest.raises(ValueError, match="only='trainable' must have a base"):
        Snapshot.take(tmp_path / "a", run.state, options=TakeOptions(only="trainable"))
    with pytest.raises(ValueError, match="only must be 'trainable' or None, got 'frozen'"):
        Snapshot.take(tmp_path / "a", run.state, base=tmp_path, options=TakeOptions(only="frozen"))
    with pytest.raises(TypeError, match="base must be"):
        Snapshot.take(tmp_path / "a", run.state, base=3)
    assert not (tmp_path / "a").exists()


def test_only_trainable_with_sparse_and_wrapper_frozen_parameters(tmp_path):
    """Sparse ones have no address; those of wrapper tensors are in their inner tensors."""
    model = nn.Module()
    model.sparse = nn.Parameter(torch.eye(400).to_sparse(), requires_grad=False)
    model.wrapped = nn.Parameter(quantised(rows=20_000, block=1000), requires_grad=False)
    model.plain = nn.Parameter(torch.randn(300, 300), requires_grad=False)
    model.trained = nn.Parameter(torch.randn(300, 300))
    base = Snapshot.take(tmp_path / "a", {"m": model})
    model.trained.data += 1
    made = Snapshot.take(tmp_path / "b", {"m": model}, base=base)
    assert made.report.shared_bytes > model.plain.nbytes + 300_000
    assert made.verify()
    left_out = Snapshot.take(tmp_path / "c", {"m": model}, base=base, options=TakeOptions(only="trainable"))
    assert left_out.report.omitted_bytes >= model.plain.nbytes + 300_000
    left_out.restore({"m": model})


def test_base_that_the_storage_cannot_read_is_written_again(tmp_path):
    run = Run()
    Snapshot.take(tmp_path / "a", run.state)
    (tmp_path / "a" / ".snapshot_metadata").unlink()
    (tmp_path / "a" / ".snapshot_metadata").symlink_to(".snapshot_metadata")  # ELOOP
    made = Snapshot.take(tmp_path / "b", run.state, base=tmp_path / "a")
    assert made.report.shared_bytes == 0
    assert len(made.report.notes) == 1
    expect_whole(tmp_path / "b", run.values())


def test_base_with_a_block_table_beyond_its_file_is_not_read(tmp_path):
    """A manifest may be damaged, or hostile: no memory is allocated for bytes that cannot exist."""
    run = Run()
    Snapshot.take(tmp_path / "a", {"t": StateDict(x=torch.randn(300, 300))} | run.state)
    manifest = tmp_path / "a" / ".snapshot_metadata"
    document = decode_document(manifest.read_bytes(), "a")
    (entry,) = (each for path, each in document.manifest.items() if path == "0/t/x")
    entry.blocks = (entry.blocks[0], 0, 1 << 50)
    manifest.write_bytes(encode(document))
    made = Snapshot.take(tmp_path / "b", {"t": StateDict(x=torch.randn(300, 300))}, base=tmp_path / "a")
    assert made.report.shared_bytes == 0
    assert made.verify()


def test_base_with_a_damaged_header_is_found(tmp_path):
    run = Run(layers=1)
    base = Snapshot.take(tmp_path / "a", run.state)
    (frozen,) = (each for each in files(tmp_path / "a").values() if each.stat().st_size > 1 << 18)
    with frozen.open("r+b") as file:
        file.seek(20)
        file.write(b"x")
    made = Snapshot.take(tmp_path / "b", run.state, base=base)
    assert made.report.shared_bytes == 0
    assert made.verify()


def test_base_linked_files_have_permissions_of_the_umask(tmp_path, monkeypatch):
    run = Run()
    base = Snapshot.take(tmp_path / "a", run.state)
    link = os.link

    def refuse(*arguments, **_):
        if "data/" in str(arguments[0]):
            raise OSError(errno.EMLINK, "too many")
        link(*arguments)

    monkeypatch.setattr("os.link", refuse)
    before = os.umask(0o077)
    try:
        made = Snapshot.take(tmp_path / "b", run.state, base=base)
    finally:
        os.umask(before)
    assert made.report.shared_files == 1
    assert {stat.S_IMODE(each.stat().st_mode) & 0o077 for each in files(tmp_path / "b").values()} == {0}
    assert made.verify()


def test_base_memory_that_is_trained_or_a_buffer_is_not_frozen(tmp_path):
    model = nn.Module()
    model.flat = nn.Parameter(torch.randn(80_000))
    model.view = nn.Parameter(model.flat.detach()[:40_000], requires_grad=False)
    model.register_buffer("average", torch.randn(40_000))
    model.tied = nn.Parameter(model.average, requires_grad=False)
    model.fixed = nn.Parameter(torch.randn(40_000), requires_grad=False)
    base = Snapshot.take(tmp_path / "a", {"m": model})
    made = Snapshot.take(tmp_path / "b", {"m": model}, base=base, options=TakeOptions(only="trainable"))
    assert made.report.omitted_bytes == model.fixed.nbytes
