"""verl's checkpoint engines with the backend `snapshot`, on the real contract of version 0.9: python on_verl.py."""

import asyncio
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from tests.helpers.missing_packages import stand_in_for

warnings.simplefilter("ignore")
stand_in_for(
    "ray", "tensordict", "hydra", "codetiming", "zmq", "cachetools", "fastapi", "uvicorn", "starlette", "sglang",
    "vllm", "wandb", "datasets", "pandas", "qwen_vl_utils", "pydantic", "orjson", "pyarrow", "PIL",
)  # fmt: skip

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from verl.checkpoint_engine.base import CheckpointEngineRegistry  # noqa: E402

import snapshot_publish.verl  # noqa: E402, F401 - verl imports it as `custom_backend_module`
from snapshot import SnapshotError  # noqa: E402


def new_engine(folder, **more):
    return CheckpointEngineRegistry.new(
        "snapshot", bucket_size=1 << 20, url=str(folder / "store"), folder=str(folder / "memory"), timeout=60, **more
    )


def weights_of(step):
    """Weights that tell their step, which mixtures of steps do not."""
    generator = torch.Generator().manual_seed(7)
    for number in range(6):
        base = torch.randn(30 + number, 5, generator=generator).to(torch.bfloat16)
        base[number] += step
        yield f"layers.{number}.weight", base


def build_group(actors, rollouts):
    """What `CheckpointEngineManager.build_process_group` does."""
    metadata = [each.prepare() for each in [*actors, *rollouts]]
    of_actors, of_rollouts = type(actors[0]).build_topology(len(actors), len(rollouts), metadata)
    for group, given in ((actors, of_actors), (rollouts, of_rollouts)):
        for number, each in enumerate(group):
            each.init_process_group(**{name: values[number] for name, values in given.items()})


async def receive(engine, step):
    return [(name, tensor.clone()) async for name, tensor in engine.receive_weights(global_steps=step)]


def assert_step(received, step):
    found, expected = dict(received), dict(weights_of(step))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


async def test_verl_engine_receives_each_update_exactly(folder):
    actor, rollouts = new_engine(folder, is_master=True), [new_engine(folder) for _ in range(2)]
    for step in (10, 20, 20, 30):  # a step is repeated after a rollback
        build_group([actor], rollouts)
        sent, *received = await asyncio.gather(
            actor.send_weights(weights_of(step), global_steps=step), *(receive(each, step) for each in rollouts)
        )
        for each in received:
            assert_step(each, step)
        for each in [actor, *rollouts]:
            each.finalize()
    assert sent == {"snapshot/version": 4}
    assert_step([each async for each in rollouts[0].get_weights()], 30)


async def test_verl_engine_ignores_a_step_of_the_run_before_a_restart(folder):
    actor = new_engine(folder, is_master=True)
    build_group([actor], [])
    await actor.send_weights(weights_of(1), global_steps=5)
    again, rollout = new_engine(folder, is_master=True), new_engine(folder)
    build_group([again], [rollout])
    waiting = asyncio.create_task(receive(rollout, 5))
    await asyncio.sleep(0.5)
    assert not waiting.done(), "the older version of step 5 is not this update's"
    await again.send_weights(weights_of(2), global_steps=5)
    assert_step(await waiting, 2)


async def test_verl_engine_finds_damage_before_the_first_tensor(folder):
    actor, rollout = new_engine(folder, is_master=True), new_engine(folder)
    build_group([actor], [rollout])
    await actor.send_weights(weights_of(1), global_steps=1)
    (file,) = (folder / "store" / "weight_v000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(SnapshotError):
        await anext(rollout.receive_weights(global_steps=1))


async def test_verl_engine_times_out_if_no_version_is_published(folder):
    rollout = CheckpointEngineRegistry.new(
        "snapshot", bucket_size=0, url=str(folder / "store"), folder=str(folder / "memory"), timeout=0.2
    )
    rollout.init_process_group(after=0)
    with pytest.raises(TimeoutError, match="no version of step 3 after version 0"):
        await receive(rollout, 3)


async def test_verl_engine_ranks_of_the_actor_publish_a_part_each(folder):
    ranks = [subprocess.Popen([sys.executable, __file__, str(folder), str(rank)]) for rank in range(2)]
    assert [each.wait(300) for each in ranks] == [0, 0]
    rollout = new_engine(folder)
    rollout.init_process_group(after=0)
    assert_step(await receive(rollout, 4), 4)
    assert len([*(folder / "store" / "weight_v000001").glob("*.safetensors")]) == 2


def publish_part(folder, rank):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "ranks"), 2), rank=rank, world_size=2)
    actor = new_engine(folder, is_master=rank == 0)
    asyncio.run(actor.send_weights(weights_of(4), global_steps=4))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        publish_part(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                with tempfile.TemporaryDirectory() as place:
                    asyncio.run(test(Path(place)))
