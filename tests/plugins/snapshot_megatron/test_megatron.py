"""Megatron-core's sharded state dicts, made by the real library, saved by us on real ranks, restored in other splits:
the same as what Megatron's own save and load give."""

import functools
import importlib.util

import pytest
import torch
import torch.distributed as dist

from snapshot import RankError, RestoreError, RestoreOptions, Snapshot, SnapshotError, TakeOptions, Target
from snapshot_megatron.adapter import MegatronState
from tests.helpers.megatron_dirs import LAYERS, Split, load, megatron, save, sharded, write_directory
from tests.helpers.rank_pool import Pool
from tests.helpers.states import expect_equal

pytestmark = pytest.mark.libraries

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def two():
    with Pool(2) as pool:
        pool.run(_import, timeout=300)
        yield pool


def _import():
    megatron()


@functools.cache
def alone(rank):
    """A group of one rank, which sees the world as a job of one process does."""
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    return groups[rank]


def unwrapped(value):
    """A state dict with what its wrappers hold in their places: what a restore is to give."""
    if isinstance(value, dict):
        return {key: unwrapped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [unwrapped(child) for child in value]
    if isinstance(value, torch.Tensor):
        return value
    return value.unwrap() if hasattr(value, "unwrap") else getattr(value, "data", value)


def restored(path, split, pg=None):
    state, live = sharded(split, blank=True)
    stateful = MegatronState(state, pg=pg)
    Snapshot(path, pg).restore({"megatron": stateful})
    expect_equal(stateful.loaded, unwrapped(sharded(split)[0]), ordered=False)
    return stateful.loaded, live


def _other_splits(path, saved, others):
    rank = dist.get_rank()
    state, _ = sharded(Split(**saved, rank=rank))
    Snapshot.take(path, {"megatron": MegatronState(state)})
    for other in others:
        restored(path, Split(**other, rank=rank))
    group = alone(rank)
    if rank == 0:
        restored(path, Split(), group)
    dist.barrier()


@pytest.mark.parametrize("saved", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}])
def test_megatron_state_restores_into_every_other_split(two, tmp_path, saved):
    others = [{"tensor": 2}, {"pipeline": 2}, {"data": 2}]
    two.run(_other_splits, str(tmp_path / "s"), saved, others)
    snapshot = Snapshot(tmp_path / "s")
    assert snapshot.verify()
    entries = snapshot.get_manifest()
    assert entries["0/megatron/layers.out.weight"].shape == (LAYERS, 6, 8)
    assert snapshot.read_object("0/megatron/layers._extra_state%2Fshard_3_4/layer") == 3
    assert snapshot.read_object("0/megatron/common_state/optimizer/param_groups/0/betas") == (0.9, 0.95)
    assert not [path for path, entry in entries.items() if type(entry).__name__ == "ObjectEntry"]  # no pickle
    alike = [path for path in entries if path.startswith("1/") and "/" in path.removeprefix("1/")]
    assert alike == []  # all else is for all ranks, and stands once


def _one_rank_saves(path):
    group = alone(dist.get_rank())
    if dist.get_rank() == 0:
        Snapshot.take(path, {"megatron": MegatronState(sharded(Split())[0], pg=group)}, group)
    dist.barrier()
    for other in ({"tensor": 2}, {"pipeline": 2}):
        restored(path, Split(**other, rank=dist.get_rank()))


def test_megatron_state_of_one_rank_restores_on_two(two, tmp_path):
    two.run(_one_rank_saves, str(tmp_path / "s"))


def _in_place(path):
    split = Split(tensor=2, rank=dist.get_rank())
    Snapshot.take(path, {"megatron": MegatronState(sharded(split)[0])})
    loaded, live = restored(path, split)
    kept = {each.data_ptr() for each in live}
    model = loaded["model"]
    for name, value in model.items():
        if not name.endswith(("_extra_state", "fc1.weight")):  # objects are new, and what is merged is, too
            assert value.data_ptr() in kept, name
    again, _ = sharded(split)
    again["iteration"] = 8
    Snapshot.take(f"{path}-again", {"megatron": MegatronState(again)})  # goes by what the restored one had agreed on
    stateful = MegatronState(sharded(split, blank=True)[0])
    Snapshot(f"{path}-again").restore({"megatron": stateful})
    expect_equal(stateful.loaded, unwrapped({**sharded(split)[0], "iteration": 8}), ordered=False)


def test_megatron_state_restores_tensors_in_place(two, tmp_path):
    two.run(_in_place, str(tmp_path / "s"))


def _against_megatron(folder, saved, wanted):
    rank = dist.get_rank()
    theirs, ours = f"{folder}/theirs", f"{folder}/ours"
    save(sharded(Split(**saved, rank=rank))[0], theirs)
    Snapshot.take(ours, {"megatron": MegatronState(sharded(Split(**saved, rank=rank))[0])})
    split = Split(**wanted, rank=rank)
    one = load(sharded(split, blank=True)[0], theirs)
    stateful = MegatronState(lambda: sharded(split, blank=True)[0])
    Snapshot(ours).restore({"megatron": stateful})
    expect_equal(stateful.loaded, one, ordered=False)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"tensor": 2}, {"tensor": 2}),
        ({"tensor": 2}, {"pipeline": 2}),
        ({"pipeline": 2}, {"tensor": 2}),
        ({"data": 2}, {"pipeline": 2}),
        ({"tensor": 2}, {"tensor": 2, "padded": 14}),  # the stored vocabulary is longer
        ({"tensor": 2, "padded": 14}, {"tensor": 2, "padded": 20}),  # and shorter
        ({"tensor": 2, "padded": 14}, {"tensor": 2, "padded": 40}),  # so that the second rank has only padding
    ],
)
def test_megatron_state_restore_equals_megatron_s_own_load(two, tmp_path, saved, wanted):
    two.run(_against_megatron, str(tmp_path), saved, wanted)


def _without_padded(path):
    rank = dist.get_rank()
    Snapshot.take(path, {"megatron": MegatronState(sharded(Split(tensor=2, padded=14, rank=rank))[0])})
    tree, live = sharded(Split(tensor=2, padded=20, rank=rank))
    held = [each.clone() for each in live]
    Snapshot(path).restore({"megatron": MegatronState(tree)}, options=RestoreOptions(exclude=["megatron/**"]))
    assert all(map(torch.equal, live, held))


def test_megatron_state_restore_leaves_padding_that_is_not_requested(two, tmp_path):
    two.run(_without_padded, str(tmp_path / "s"))


def _from_megatrons(folder, wanted):
    write_directory(folder)
    split = Split(**wanted, rank=dist.get_rank())
    stateful = MegatronState(lambda: sharded(split, blank=True)[0])
    Snapshot(folder).restore({"megatron": stateful})
    expect_equal(stateful.loaded, load(sharded(split, blank=True)[0], folder), ordered=False)


@pytest.mark.parametrize("wanted", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "padded": 20}])
def test_megatron_directory_restores_like_megatron_s_own_load(two, tmp_path, wanted):
    two.run(_from_megatrons, str(tmp_path / "theirs"), wanted)


def _converted(folder):
    write_directory(folder)
    rank = dist.get_rank()
    if rank == 0:
        Snapshot(folder).convert(Target(f"{folder}-ours", "snapshot"))
    dist.barrier()
    restored(f"{folder}-ours", Split(tensor=2, rank=rank))


def test_megatron_directory_restores_from_its_conversion(two, tmp_path):
    two.run(_converted, str(tmp_path / "theirs"))


def _nothing_common(folder):
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def state(held):
        return {"o": ShardedObject("o", held, (2,), (dist.get_rank(),))}

    save(state([5]), folder)
    stateful = MegatronState(state(None))
    Snapshot(folder).restore({"megatron": stateful})
    assert stateful.loaded == {"o": [5]} == load(state(None), folder)


def test_megatron_directory_with_only_objects_restores(two, tmp_path):
    two.run(_nothing_common, str(tmp_path / "theirs"))


def _all_but_one_object(folder):
    write_directory(folder)
    stateful = MegatronState(sharded(Split(tensor=2, rank=dist.get_rank()), blank=True)[0])
    Snapshot(folder).restore({"megatron": stateful}, options=RestoreOptions(exclude=["megatron/plain.list*"]))
    assert stateful.loaded["plain"] == {"dict": {"a": 1}, "list": ["here"], "one": [[7]], "int": 5, "none": None}


def test_megatron_directory_list_that_is_not_selected_is_unchanged(two, tmp_path):
    two.run(_all_but_one_object, str(tmp_path / "theirs"))


def _planned(path):
    split = Split(tensor=2, rank=dist.get_rank())
    state, live = sharded(split)
    app_state = {"megatron": MegatronState(state)}
    plan = Snapshot.plan(app_state, path=path)
    for step in range(2):  # one plan for many steps
        pending = Snapshot.async_take(f"{path}-{step}", app_state, options=TakeOptions(plan=plan))
        with torch.no_grad():
            for each in live:
                each.add_(1)  # cannot reach the snapshot
        pending.wait()
    found = MegatronState(sharded(split, blank=True)[0])
    Snapshot(f"{path}-1").restore({"megatron": found})
    expect_equal(found.loaded["model"]["final_norm.weight"], state["model"]["final_norm.weight"].data - 1)
    return plan.bytes_per_rank


def test_megatron_state_plan_is_reused_for_async_take(two, tmp_path):
    loads = two.run(_planned, str(tmp_path / "s"))
    assert loads[0] == loads[1]
    assert Snapshot(tmp_path / "s-0").verify()


def _unfit(path):
    rank = dist.get_rank()
    plan = Snapshot.plan({"megatron": MegatronState(sharded(Split(tensor=2, rank=rank))[0])}, path=path)
    changed = sharded(Split(tensor=2, rank=rank))[0]
    if rank == 1:
        changed["optimizer"]["momentum"] = torch.zeros(3)  # which is rank 0's to save, and not known there
        del changed["model"]["layers.1.out.weight"]
    Snapshot.take(path, {"megatron": MegatronState(changed)}, options=TakeOptions(plan=plan))


def test_megatron_state_plan_that_no_longer_fits_raises_on_all_ranks(two, tmp_path):
    first, second = two.outcomes(_unfit, str(tmp_path / "s"))
    assert isinstance(first, SnapshotError)
    assert isinstance(second, SnapshotError | ValueError)
    assert not Snapshot(tmp_path / "s").exists()


def _other_plan(path):
    rank = dist.get_rank()
    plan = Snapshot.plan({"megatron": MegatronState(sharded(Split(tensor=2, rank=rank))[0])}, path=path)
    other = MegatronState(sharded(Split(tensor=2, rank=rank), dtype=torch.bfloat16)[0])
    Snapshot.take(path, {"megatron": other}, options=TakeOptions(plan=plan))


def test_megatron_state_plan_for_another_dtype_is_refused(two, tmp_path):
    outcomes = two.outcomes(_other_plan, str(tmp_path / "s"))
    assert any("the plan must be for the same names, shapes, dtypes" in str(error) for error in outcomes)
    assert all(isinstance(error, ValueError | RankError) for error in outcomes)
    assert list(tmp_path.glob("s/*")) == []


def _no_main_replica(path):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    part = ShardedTensor.from_rank_offsets("weight", torch.ones(3), replica_id=dist.get_rank() + 1)
    Snapshot.take(path, {"megatron": MegatronState({"weight": part})})


def test_megatron_state_tensor_without_a_main_replica_is_refused(two, tmp_path):
    for error in two.outcomes(_no_main_replica, str(tmp_path / "s")):
        assert isinstance(error, SnapshotError)
        assert "megatron/weight: the parts with replica=0 have 0 of 3 elements" in str(error)


def _two_mains(path):
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    Snapshot.take(path, {"m": MegatronState({"rng": ShardedObject("rng", {"of": dist.get_rank()}, (1,), (0,))})})


def test_megatron_state_object_with_two_main_replicas_is_refused(two, tmp_path):
    for error in two.outcomes(_two_mains, str(tmp_path / "s")):
        assert isinstance(error, SnapshotError)
        assert "m/rng%2Fshard_0_1/of" in str(error)
    assert list(tmp_path.glob("s/*")) == []


def _names_differ(path):
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    def state(name, number):
        return {
            "a": ShardedTensor.from_rank_offsets(name, torch.full((2,), number), (0, dist.get_rank(), 2)),
            "rng": ShardedObject("rng", {"seed": number}, (3,), (dist.get_rank() if number else 2,)),
        }

    Snapshot.take(path, {"m": MegatronState(state("old", 1.0))})
    live = state("new", 0.0)
    with pytest.raises(RestoreError) as error:
        Snapshot(path).restore({"m": MegatronState(live)})
    told = "\n".join(error.value.mismatches)
    assert "m/new: in the application, but not in the snapshot" in told
    assert "m/rng%2Fshard_2_3: in the application, but not in the snapshot" in told
    assert live["a"].data.eq(0).all()
    del live["rng"]
    report = Snapshot(path).restore({"m": MegatronState(live)}, rename={"m/old": "m/new"})
    assert live["a"].data.eq(1).all()
    return [str(line) for line in report.lines]


def test_megatron_state_missing_names_are_listed_and_can_be_renamed(two, tmp_path):
    for rank, lines in enumerate(two.run(_names_differ, str(tmp_path / "s"))):
        assert any(f"m/rng%2Fshard_{rank}_3: the application has no such name" in line for line in lines), lines


def _odd_structures(path):
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

    def state(number):
        part = ShardedTensor.from_rank_offsets("w", torch.full((2,), number), (0, dist.get_rank(), 2))
        return {
            "mixed": [part, "text" if number else "other", {"inner": None, 3: (1, 2)}],
            5: {"deep": [{"x": LocalNonpersistentObject([number])}]},
            "none": {},
            "empty": [],
            "tuple": (1.5, torch.arange(3) if number else torch.zeros(3)),
        }

    Snapshot.take(path, {"m": MegatronState(state(1.0))})
    found = []
    stateful = MegatronState(state(0.0), found.append)
    Snapshot(path).restore({"m": stateful})
    assert found == [stateful.loaded]
    expect_equal(stateful.loaded, unwrapped({**state(1.0), 5: {"deep": [{"x": [0.0]}]}}), ordered=False)
    shorter = state(0.0)
    del shorter["mixed"][2]
    with pytest.raises(RestoreError, match="common_state/mixed: the snapshot has a list of 3 here"):
        Snapshot(path).restore({"m": MegatronState(shorter)})


def test_megatron_state_mixed_lists_and_empty_containers_are_restored(two, tmp_path):
    two.run(_odd_structures, str(tmp_path / "s"))


def _parts_of_it(path):
    split = Split(tensor=2, rank=dist.get_rank())
    Snapshot.take(path, {"m": MegatronState(sharded(split)[0])}, metadata={"content": {"distrib_optim": False}})
    assert Snapshot(path).metadata.metadata["content"] == {"distrib_optim": False}
    state = sharded(split, blank=True)[0]
    stateful = MegatronState(state)
    report = Snapshot(path).restore({"m": stateful}, select=["m/layers.out.weight", "m/common_state/iteration"])
    assert report.restored == 2  # all layers are one tensor
    assert stateful.loaded["iteration"] == 7
    assert stateful.loaded["optimizer"]["param_groups"][0]["lr"] == 0.0  # what was here
    assert stateful.loaded["model"]["layers.0.norm.weight"].eq(-1).all()
    assert stateful.loaded["model"]["layers.0.out.weight"].ne(-1).any()
    weights = {"model": {key: value for key, value in sharded(split, blank=True)[0]["model"].items() if "out" in key}}
    with pytest.raises(SnapshotError, match=r"m/final_norm\.weight"):
        Snapshot(path).restore({"m": MegatronState(weights)})
    stateful = MegatronState(weights)
    Snapshot(path).restore({"m": stateful}, strict=False)
    expect_equal(
        stateful.loaded["model"]["layers.1.out.weight"], unwrapped(sharded(split)[0])["model"]["layers.1.out.weight"]
    )


def test_megatron_state_select_restores_a_part_and_keeps_content_metadata(two, tmp_path):
    two.run(_parts_of_it, str(tmp_path / "s"))


def _without_data(path):
    split = Split(tensor=2, rank=dist.get_rank())
    state = {"model": sharded(split)[0]["model"]}
    Snapshot.take(path, {"m": MegatronState(state)})
    empty = {"model": sharded(split, blank=True)[0]["model"]}
    for value in empty["model"].values():
        if hasattr(value, "local_shape"):
            value.data = None
    with pytest.raises(SnapshotError, match="ShardedTensor without data"):
        Snapshot.take(f"{path}-2", {"m": MegatronState(empty)}, alone(dist.get_rank()))
    stateful = MegatronState(empty)
    Snapshot(path).restore({"m": stateful})
    expect_equal(stateful.loaded, unwrapped(state), ordered=False)


def test_megatron_state_tensors_without_data_are_allocated_by_restore(two, tmp_path):
    two.run(_without_data, str(tmp_path / "s"))


def test_megatron_is_not_imported_for_a_plain_state_dict(warm):
    script = """
import sys
from snapshot import Snapshot
from snapshot_megatron.adapter import MegatronState
state = MegatronState({"a": 1})
Snapshot.take("memory://x", {"m": state}).restore({"m": state})
assert state.loaded == {"a": 1}
assert not [name for name in sys.modules if name.startswith("megatron")]
"""
    warm.run(script)
