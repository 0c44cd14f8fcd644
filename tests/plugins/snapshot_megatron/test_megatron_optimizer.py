"""Megatron-core's distributed optimizer on four real ranks: what one split saves, another goes on with, bit for bit."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from snapshot import CorruptSnapshotError, RankError, RestoreError, RestoreOptions, Snapshot, SnapshotError, TakeOptions
from snapshot.testing import Tap, tapped
from snapshot_megatron.adapter import MegatronState
from tests.helpers.rank_pool import Died, Pool
from tests.plugins.snapshot_megatron.megatron_jobs import resume, state_of, take, trained
from tests.plugins.snapshot_megatron.megatron_models import STATES, STEPS, Layout, build, truth

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(300)]

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

SPLITS = {
    "data": Layout(bucket=3000),
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
    "both": Layout(tensor=2, pipeline=2),
    "virtual": Layout(pipeline=2, virtual=2),
}


@pytest.fixture(scope="module")
def four():
    with Pool(4) as pool:
        yield pool


def _resume_all(path, saved, others):
    take(path, saved)
    for each in others:
        resume(path, each)


@pytest.mark.parametrize("saved", ["data", "tensor", "both", "virtual"])
def test_megatron_optimizer_goes_on_in_every_other_split(four, tmp_path, saved):
    four.run(_resume_all, str(tmp_path / "s"), SPLITS[saved], list(SPLITS.values()))
    snapshot = Snapshot(tmp_path / "s")
    assert snapshot.verify().ok
    entries = snapshot.get_manifest()
    key = "decoder.layers.mlp.linear_fc1.weight"
    assert entries[f"0/megatron/optimizer.state.exp_avg.{key}"].shape == (4, 80, 24)
    assert snapshot.read_object(f"megatron/optimizer.state.step.{key}").tolist() == [STEPS] * 4
    assert not [path for path, entry in entries.items() if type(entry).__name__ == "ObjectEntry"]  # no pickle
    expected = truth(key, (4, 80, 24), 2, STEPS)
    for name in STATES:  # without Megatron
        assert torch.equal(snapshot.read_object(f"megatron/optimizer.state.{name}.{key}"), expected[name])


@pytest.mark.parametrize(
    ("saved", "others"),
    [
        (Layout(pipeline=2, tied=True), [Layout(tied=True), Layout(tensor=2, pipeline=2, tied=True)]),
        (Layout(expert=2, experts=True), [Layout(experts=True), Layout(expert=4, experts=True)]),
        (Layout(instances=2), [Layout(tensor=2), Layout(instances=2, pipeline=2)]),
        (Layout(bf16=False), [Layout(bf16=False, pipeline=2), Layout(bf16=False, tensor=2)]),
        (Layout(fused=True, pipeline=2), [Layout(fused=True, bucket=3000), Layout(fused=True, tensor=2), Layout()]),
        (Layout(bucket=3000), [Layout(fused=True, tensor=2)]),
        (Layout(frozen=True, pipeline=2), [Layout(frozen=True), Layout(frozen=True, tensor=2, pipeline=2)]),
        (Layout(frozen=True, pipeline=2, fused=True), [Layout(frozen=True, fused=True)]),
    ],
    ids=[
        "tied",
        "experts",
        "instances",
        "float32",
        "steps of groups",
        "into steps of groups",
        "frozen",
        "frozen, steps",
    ],
)
def test_megatron_optimizer_of_other_models_goes_on_in_other_splits(four, tmp_path, saved, others):
    four.run(_resume_all, str(tmp_path / "s"), saved, others)


def _restore_before_the_first_step(path):
    job = build(SPLITS["data"])
    job.start()
    Snapshot.take(path, {"megatron": state_of(job)})
    assert not any(optimizer.optimizer.state for optimizer in job.optimizers())  # a take makes no state
    job = build(SPLITS["tensor"])
    Snapshot(path).restore({"megatron": state_of(job)})
    job.train()
    job.expect(STEPS)


def test_megatron_optimizer_without_a_step_is_saved_and_restored(four, tmp_path):
    four.run(_restore_before_the_first_step, str(tmp_path / "s"))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directories that Megatron wrote in another process: its writer forks."""
    folder = tmp_path_factory.mktemp("megatron")
    program = [sys.executable, "-m", "tests.plugins.snapshot_megatron.megatron_models"]
    wrong = ["--bucket", "3000"]
    for name, options in (("right", ["--tensor", "2"]), ("wrong", wrong), ("float32", [*wrong, "--no-bf16"])):
        more = ["--world", "2", "--kinds", "fully_reshardable", *options]
        subprocess.run([*program, folder / name, *more], check=True, capture_output=True, timeout=300)
    return folder


def test_megatron_state_restores_the_optimizer_of_a_directory_of_megatron(four, directories):
    place = str(directories / "right" / "fully_reshardable" / "iter_0000003")
    for layout in (SPLITS["data"], SPLITS["both"]):
        four.run(resume, place, layout)


def _refuse_directory(path, layout, error, words, change=lambda _: None):
    job = build(layout)
    change(job)
    held = _fingerprint(job)
    with pytest.raises(error, match=words):
        Snapshot(path).restore({"megatron": state_of(job)})
    assert all(map(torch.equal, held, _fingerprint(job)))
    assert not any(optimizer.optimizer.state for optimizer in job.optimizers())
    Snapshot(path).restore({"megatron": state_of(job)}, options=RestoreOptions(exclude=["megatron/optimizer**"]))
    for parameter, sharded in job.parameters():  # its weights are right
        expected = job.local(sharded, lambda *at: truth(*at, STEPS)["param"])
        assert torch.equal(parameter.detach(), expected.to(parameter.dtype))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("wrong", Layout(tensor=2)), ("wrong", Layout(pipeline=2, virtual=2)), ("float32", Layout(bf16=False))],
)
def test_megatron_state_refuses_a_directory_with_shifted_main_parameters_before_it_is_touched(
    four, directories, name, layout
):
    """Megatron shifts them after a bucket with padding at its end."""
    place = str(directories / name / "fully_reshardable" / "iter_0000003")
    four.run(_refuse_directory, place, layout, CorruptSnapshotError, "must not be used.*fully_reshardable")


def _change_group(job):
    for optimizer in job.optimizers():
        optimizer.optimizer.param_groups[0]["wd_mult"] = 0.25


def test_megatron_state_refuses_a_directory_with_other_groups_before_it_is_touched(four, directories):
    place = str(directories / "right" / "fully_reshardable" / "iter_0000003")
    words = r"nothing was touched.*\n.*no stored group fits.*wd_mult': 0\.25"
    four.run(_refuse_directory, place, SPLITS["both"], RestoreError, words, _change_group)


def _count_calls(path):
    job = trained(SPLITS["both"])
    names = [
        name
        for name in dir(dist)
        if callable(getattr(dist, name))
        and re.match("all_|broadcast|gather|reduce|scatter|barrier|send|recv|isend|irecv", name)
    ]
    called, kept = [], {}
    for name in names:
        kept[name] = getattr(dist, name)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, lambda *_, name=name, **__: called.append(name))
    try:
        Snapshot.take(path, {"megatron": state_of(job)})
        Snapshot(path).restore({"megatron": state_of(job)})
    finally:
        for name, function in kept.items():
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, function)
    job.expect(STEPS)
    return len(names), called


def test_megatron_optimizer_is_saved_and_restored_without_a_collective(four, tmp_path):
    for names, called in four.run(_count_calls, str(tmp_path / "s")):
        assert names > 10
        assert called == []


def _take_while_training(path):
    job = trained(SPLITS["data"])
    pending = Snapshot.async_take(path, {"megatron": state_of(job)})
    job.train(1, first=STEPS)
    pending.wait()
    resume(path, SPLITS["tensor"])


def test_megatron_optimizer_async_take_has_the_step_of_the_call(four, tmp_path):
    four.run(_take_while_training, str(tmp_path / "s"))


def _take_both(path):
    take(f"{path}/data", SPLITS["data"])
    take(f"{path}/virtual", SPLITS["virtual"])


def test_megatron_optimizer_diff_of_two_splits_of_a_step_is_empty(four, tmp_path):
    four.run(_take_both, str(tmp_path))
    assert Snapshot.diff(tmp_path / "data", tmp_path / "virtual").same


def _selected(path):
    take(path, SPLITS["data"])
    job = build(SPLITS["tensor"])
    Snapshot(path).restore(
        {"megatron": state_of(job)}, options=RestoreOptions(exclude=["megatron/optimizer*", "megatron/common_state*"])
    )
    assert not any(optimizer.optimizer.state for optimizer in job.optimizers())
    parameter, sharded = job.parameters()[0]
    expected = job.local(sharded, lambda *at: truth(*at, STEPS)["param"])
    assert torch.equal(parameter.detach(), expected.to(parameter.dtype))


def test_megatron_optimizer_excluded_from_a_restore_is_untouched(four, tmp_path):
    four.run(_selected, str(tmp_path / "s"))


def _fingerprint(job):
    held = [tensor.clone() for _, _, _, main, state in job.runs() for tensor in (main.detach(), *state.values())]
    return held + [parameter.detach().clone() for parameter, _ in job.parameters()]


def _refuse(path, change, error, words):
    state = change(trained(SPLITS["both"]))
    with pytest.raises(error, match=words):
        Snapshot.take(f"{path}/bad", {"megatron": state})


def _shuffle(job):
    """Exchange two runs of the same length, as a version with another order would."""
    for optimizer in job.optimizers():
        for bucket in (b for buffer in optimizer.gbuf_ranges for buckets in buffer.values() for b in buckets):
            sizes = {}
            for parameter, ranges in bucket["param_map"].items():
                other = sizes.setdefault((ranges["param"].start, ranges["param"].end), parameter)
                if other is not parameter and other.dim() > 1:
                    places = optimizer.model_param_group_index_map
                    places[other], places[parameter] = places[parameter], places[other]
                    return state_of(job)
    raise AssertionError("no two runs are alike")


def _rename(job):
    for optimizer in job.optimizers():
        optimizer.ranges_of_buffers = optimizer.__dict__.pop("gbuf_ranges")
    return state_of(job)


def _is_precise(job):
    for optimizer in job.optimizers():
        optimizer.config.use_precision_aware_optimizer = True
    return state_of(job)


def _copied(job):
    """A factory that transposes, as that of the experts of one large matrix did."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def build_fn(key, tensor, replica, _):
        return ShardedTensor.from_rank_offsets(key, tensor.t().contiguous(), replica_id=replica)

    def make():
        state = job.model_state()
        name, held = next((n, s) for n, s in state["model"].items() if n.endswith("linear_proj.weight"))
        state["model"][name] = ShardedTensorFactory(
            f"{name}.t", held.data, build_fn, lambda tree: tree, held.replica_id
        )
        return state

    return MegatronState(make, optimizer=job.optimizer)


def _without_parameters(job):
    return MegatronState({"iteration": 3}, optimizer=job.optimizer)


def _with_bfloat16_moments(job):
    for _, _, _, _, state in job.runs():
        state["exp_avg"] = state["exp_avg"].bfloat16()
        break
    return state_of(job)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_shuffle, "not those of the model's weights"),
        (_rename, "DistributedOptimizer has no gbuf_ranges"),
        (_is_precise, "use_precision_aware_optimizer"),
        (_copied, r"linear_proj\.weight.*copies or transposes"),
        (_with_bfloat16_moments, r"optimizer\.state\.exp_avg\..* must be a flat float32 tensor"),
        (_without_parameters, "is not in the sharded state dict"),
    ],
)
def test_megatron_optimizer_of_unknown_structure_is_refused_by_name(four, tmp_path, change, words):
    four.run(_refuse, str(tmp_path), change, SnapshotError, words)
    assert not (tmp_path / "bad" / "manifest.json").exists()


def _refuse_groups(path):
    take(path, SPLITS["data"])
    other = build(SPLITS["tensor"])
    _change_group(other)
    held = _fingerprint(other)
    with pytest.raises(RestoreError, match=r"no stored group fits.*wd_mult': 0\.25"):
        Snapshot(path).restore({"megatron": state_of(other)})
    assert all(map(torch.equal, held, _fingerprint(other)))
    assert not any(optimizer.optimizer.state for optimizer in other.optimizers())


def test_megatron_optimizer_with_an_unknown_group_is_refused_before_it_is_touched(four, tmp_path):
    four.run(_refuse_groups, str(tmp_path / "s"))


def _restore_groups_of_other_ranks(path):
    job = trained(Layout(frozen=True, pipeline=2))
    for optimizer in job.optimizers():
        for group in optimizer.optimizer.param_groups:
            group["eps"], group["betas"] = 1e-5, (0.5, 0.25)
        if dist.get_rank() < 2:  # the first stage has nothing to train
            assert not any(group["params"] for group in optimizer.optimizer.param_groups)
            optimizer.optimizer.param_groups.clear()  # as in versions that do not give all groups to all ranks
    Snapshot.take(path, {"megatron": state_of(job)})
    job = build(Layout(frozen=True, tensor=2))
    Snapshot(path).restore({"megatron": state_of(job)})
    job.expect(STEPS)
    groups = [group for optimizer in job.optimizers() for group in optimizer.optimizer.param_groups]
    assert {group["wd_mult"] for group in groups} == {0.0, 1.0}
    assert {(group["eps"], group["betas"]) for group in groups if group["params"]} == {(1e-5, (0.5, 0.25))}
    job = build(Layout(frozen=True))
    _change_group(job)
    held = _fingerprint(job)
    with pytest.raises(RestoreError, match=r"no stored group fits.*wd_mult': 0\.25"):
        Snapshot(path).restore({"megatron": state_of(job)})
    assert all(map(torch.equal, held, _fingerprint(job)))


def test_megatron_optimizer_restores_groups_that_the_first_rank_lacks(four, tmp_path):
    four.run(_restore_groups_of_other_ranks, str(tmp_path / "s"))


def _take_again_after_changes(path):
    job = trained(SPLITS["both"])
    state = state_of(job)
    Snapshot.take(f"{path}/1", {"megatron": state})
    job.train(1, first=STEPS)  # in the same memory
    Snapshot.take(f"{path}/2", {"megatron": state})
    for *_, main, held in job.runs():  # in other memory
        held |= {name: each.clone() for name, each in held.items()}
        main.data = main.data.clone()
    job.train(1, first=STEPS + 1)
    Snapshot.take(f"{path}/3", {"megatron": state})
    for number in (1, 2, 3):
        job = build(SPLITS["tensor"])
        Snapshot(f"{path}/{number}").restore({"megatron": state_of(job)})
        job.expect(STEPS + number - 1)


def test_megatron_optimizer_taken_again_has_what_it_has_then(four, tmp_path):
    four.run(_take_again_after_changes, str(tmp_path))


class _Killer(Tap):
    """Kills this process before it writes for the first time."""

    async def before(self, operation):
        if operation.name in ("put", "write"):
            os.kill(os.getpid(), signal.SIGKILL)


def _die_in_a_take(path, which):
    job = trained(SPLITS["data"])
    Snapshot.take(path, {"megatron": state_of(job)})
    job.train(1, first=STEPS)
    with tapped("killed", *([_Killer()] if dist.get_rank() == which else [])):
        Snapshot.take(
            f"killed+file://{path}", {"megatron": state_of(job)}, overwrite=True, options=TakeOptions(timeout=10)
        )


@pytest.mark.parametrize("which", [0, 3])
def test_megatron_optimizer_take_with_a_killed_rank_leaves_the_old_step(four, tmp_path, which):
    path = str(tmp_path / "s")
    with Pool(4) as pool:
        outcomes = pool.outcomes(_die_in_a_take, path, which)
    assert [type(each) for each in outcomes] == [Died if rank == which else RankError for rank in range(4)], outcomes
    four.run(resume, path, SPLITS["tensor"])


def _restore_in_part(path):
    take(path, SPLITS["data"])
    job = build(SPLITS["both"])
    weights = MegatronState(job.model_state)
    held = _fingerprint(job)
    with pytest.raises(RestoreError, match=r"optimizer\.state\.exp_avg\..*not in the application"):
        Snapshot(path).restore({"megatron": weights})
    assert all(map(torch.equal, held, _fingerprint(job)))
    report = Snapshot(path).restore({"megatron": weights}, options=RestoreOptions(strict=False))
    names = {line.path.removeprefix("megatron/") for line in report.unexpected}
    wanted = (f"optimizer.state.{name}.decoder.final_layernorm.weight" for name in (*STATES, "step"))
    assert names >= {*wanted} or dist.get_rank()  # a rank reports what it had itself
    _expect_weights_alone(job)
    job = build(SPLITS["virtual"])
    Snapshot(path).restore({"megatron": state_of(job)}, options=RestoreOptions(select=["megatron/decoder.*"]))
    _expect_weights_alone(job, "decoder.")
    for parameter, begin, end, main, _ in job.runs():  # a step would undo the restore otherwise
        weights = parameter.detach().flatten()[begin:end].float()
        restored = job.sharded[id(parameter)].key.startswith("decoder.")
        assert torch.equal(main.detach().flatten(), weights) or not restored
    job = build(replace(SPLITS["virtual"], fused=True))
    before = [dict(group, params=()) for each in job.optimizers() for group in each.optimizer.param_groups]
    Snapshot(path).restore({"megatron": state_of(job)}, options=RestoreOptions(exclude=["megatron/optimizer**"]))
    after = [dict(group, params=()) for each in job.optimizers() for group in each.optimizer.param_groups]
    assert after == before  # groups and steps go with the moments
    _expect_weights_alone(job)
    job = build(SPLITS["virtual"])
    select = ["megatron/optimizer.state.exp_avg.*"]
    Snapshot(path).restore({"megatron": state_of(job)}, options=RestoreOptions(select=select))
    for parameter, begin, end, _main, state in job.runs():
        expected = job.local(job.sharded[id(parameter)], lambda *at: truth(*at, STEPS)["exp_avg"])
        assert torch.equal(state["exp_avg"], expected.flatten()[begin:end])
        assert not state["exp_avg_sq"].any()  # not requested, so as if it were new
        assert state["step"] == 0


def _expect_weights_alone(job, prefix=""):
    assert not any(optimizer.optimizer.state for optimizer in job.optimizers())
    for parameter, sharded in job.parameters():
        if sharded.key.startswith(prefix):
            expected = job.local(sharded, lambda *at: truth(*at, STEPS)["param"])
            assert torch.equal(parameter.detach(), expected.to(parameter.dtype))


def test_megatron_optimizer_in_a_snapshot_is_restored_in_part_only_on_request(four, tmp_path):
    """With `strict=False` and with `select`."""
    four.run(_restore_in_part, str(tmp_path / "s"))
