"""What `take` returned from survives a loss of power; in the middle of it, the old snapshot does, or the new one."""

import pytest

from snapshot import Snapshot, StateDict
from tests.faults.mounted_disks import KINDS, disk
from tests.faults.power_loss import (
    honest,
    lose_at_operations,
    lost_after,
    lost_after_delete,
    lost_after_foreign,
    lost_without_sync,
    numbered_source,
    write_foreign,
)
from tests.faults.shared_folder import Place

pytestmark = [pytest.mark.deadly, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_leaves_the_old_or_the_new_snapshot(forker, tmp_path, kind):
    with disk(kind, tmp_path) as made:
        for verb, every, mode in [
            ("take", 12, "auto"),
            ("overwrite", 8, "auto"),
            ("overwrite", 20, "never"),
            ("overwrite", 20, "portable"),
            ("async_overwrite", 20, "auto"),
            ("based", 12, "auto"),
            ("delete", 20, "auto"),
        ]:
            assert lose_at_operations(forker, made, verb, every=every, mode=mode) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_keeps_new_folders_above_a_snapshot(forker, tmp_path, kind):
    with disk(kind, tmp_path) as made:
        for by_user in (False, True):
            path = made.mount / f"runs-{by_user}/of/today/step-1"
            assert forker.run(lost_after, str(path), str(made.mount), by_user).killed
            made.again()
            assert Place(path.parent, foreign=False).stands() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_after_a_take_that_is_not_durable_may_lose_it(forker, tmp_path, kind):
    with disk(kind, tmp_path) as made:
        found = []
        for survives in (False, True):
            place = Place(made.mount / f"here-{survives}", foreign=False)
            assert forker.run(lost_without_sync, str(place.path), str(made.mount), survives).killed
            made.again()
            found.append(honest(place.path))
            place.reset()
            place.goes_on(None, by_delete=False)
        assert found[0] != "whole"  # or nothing was lost, and this shows nothing


@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_does_not_restore_a_deleted_snapshot(forker, tmp_path, kind):
    with disk(kind, tmp_path) as made:
        path = made.mount / "step-1"  # of which nothing is left, and not even its folder
        Snapshot.take(path, {"s": StateDict(x=1)})
        assert forker.run(lost_after_delete, str(path), str(made.mount)).killed
        made.again()
        assert not path.exists()


@pytest.mark.parametrize("how", ["dcp", "safetensors", "torch", "copy", "dcp.save"])
@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_after_convert_and_copy_keeps_other_formats(forker, tmp_path, kind, how):
    sources = {version: numbered_source(tmp_path, version) for version in (1, 2)}
    with disk(kind, tmp_path) as made:
        for overwrite in (False, True):
            target = made.mount / f"checkpoint-{overwrite}"
            if overwrite:
                write_foreign(how, sources[1], str(target), overwrite=False)
                made.sync()
            ended = forker.run(lost_after_foreign, how, sources[2], str(target), str(made.mount), overwrite)
            assert ended.killed, ended
            made.again()
            values = Snapshot(target).read_object("0")
            while "b" not in values:
                values = next(iter(values.values()))
            assert [float(values[name].sum()) for name in ("a", "b")] == [6000.0, 4000.0]
