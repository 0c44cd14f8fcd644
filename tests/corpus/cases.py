"""How each snapshot of the corpus is taken."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from snapshot import Snapshot, SnapshotManager, StateDict, TakeOptions
from snapshot.manifest import document, parts
from snapshot.plan import layout
from snapshot.save import commit
from tests.corpus import states
from tests.corpus.contents import describe
from tests.helpers.arguments import for_take

SECRET = bytes(range(32))
"""The private key of the signed snapshots, which protects nothing."""


def small(name, value):
    """Replace a limit wherever a module has it, so that a small state passes it."""
    stack = contextlib.ExitStack()
    for module in (document, layout, commit, parts):
        if hasattr(module, name):
            stack.enter_context(mock.patch.object(module, name, value))
    return stack


def described(app_state):
    """Return the contents of a rank's app state."""
    return {key: describe(stateful.state_dict()) for key, stateful in app_state.items()}


def take(folder, name, **options):
    """Take the state of a function on this rank. Return its contents before the take."""
    app_state = getattr(states, name)()
    found = described(app_state)
    Snapshot.take(folder, app_state, **for_take(**options))
    return found


def one(name, **options):
    """Return the function that takes a state on one rank."""

    def run(folder, pool):
        return {"": {"0": take(folder / name, name, **options)}}

    return name, run


def long_tensors(folder, pool):
    with small("LARGEST_FILE", 400_000):
        return {"": {"0": take(folder / "long_tensors", "long_tensors")}}


def _on_rank(folder, name, replicated, largest):
    with small("IN_ONE", largest):
        return take(folder, name, replicated=replicated)


def _ranks(folder, name, pool, state, largest=100_000):
    found = pool.run(_on_rank, str(folder / name), state, ["same/**"] if state == "shards" else None, largest)
    return {"": {str(rank): each for rank, each in enumerate(found)}}


def indexed(folder, pool):
    """A manifest whose only part has an index of several segments."""
    with small("IN_ONE", 5), small("INDEXED", 0), small("SEGMENT", 1000):
        return {"": {"0": take(folder / "indexed", "training")}}


def bases(folder, pool):
    """A chain of takes: a model of which one layer changes."""
    found = {}
    before = None
    for step in range(3):
        app_state = {"model": states.model_of(), "progress": StateDict(epoch=step)}
        with torch.no_grad(), small("LARGEST_FILE", 100):
            app_state["model"][2].bias.fill_(float(step))
            found[f"step-{step}"] = {"0": described(app_state)}
            before = Snapshot.take(
                folder / "bases" / f"step-{step}", app_state, base=before, options=TakeOptions(guards="off")
            )
    return found


def frozen(folder, pool):
    """Frozen parameters that only the base has."""
    whole, bare = folder / "frozen/whole", folder / "frozen/trainable"
    first = take(whole, "frozen_model")
    return {
        "whole": {"0": first},
        "trainable": {"0": take(bare, "frozen_model", base=Snapshot(whole), only="trainable")},
    }


def weights(folder, pool):
    """Frozen parameters that only a folder of weights has, in two files."""
    folder = folder / "weights"
    frozen = states.tuned_model()["model"][0].state_dict()
    files = {f"model-0000{number}-of-00002.safetensors": name for number, name in enumerate(frozen, 1)}
    (folder / "pretrained").mkdir(parents=True)
    for file, name in files.items():
        save_file({f"encoder.{name}": frozen[name]}, folder / "pretrained" / file)
    index = {"metadata": {}, "weight_map": {f"encoder.{name}": file for file, name in files.items()}}
    (folder / "pretrained" / "model.safetensors.index.json").write_text(json.dumps(index))
    base = folder / "pretrained"
    return {"trainable": {"0": take(folder / "trainable", "tuned_model", base=base, only="trainable")}}


def compressed(folder, pool):
    first = folder / "compressed/first"
    found = {"first": {"0": take(first, "compressible", compression="zstd")}}
    second = folder / "compressed/second"
    return found | {"second": {"0": take(second, "compressible", compression="zstd", base=Snapshot(first))}}


def signed(folder, pool):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(SECRET)
    plain = take(folder / "signed/plain", "several_blocks", sign=key)
    packed = take(folder / "signed/compressed", "compressible", sign=key, compression="zstd")
    return {"plain": {"0": plain}, "compressed": {"0": packed}}


def dcp(folder, pool):
    import torch.distributed.checkpoint as torch_dcp

    from snapshot.interop.dcp import SnapshotWriter

    state = {"model": dict(states.model_of().state_dict()), "step": 5, "name": "a"}
    torch_dcp.save(state, storage_writer=SnapshotWriter(str(folder / "dcp")), no_dist=True)
    return {"": {"0": {key: describe(value) for key, value in state.items()}}}


def run(folder, pool):
    """A root of a manager, with metrics and a pinned step."""
    found = {}
    with SnapshotManager(str(folder / "run"), signals=()) as manager:
        for step in (10, 20):
            app_state = {"progress": StateDict(step=step, weight=states.numbers(3, start=step))}
            found[f"step-{step}"] = {"0": described(app_state)}
            manager.take(step, app_state, metrics={"loss": 1 / step}, metadata={"any": [1, None, "text"]})
        manager.pin(10)
    return found


def near(folder, pool):
    """A root whose steps were uploaded from near folders, and that removed one."""
    found = {}
    work = Path(tempfile.mkdtemp())
    try:
        from snapshot_tiers import Near

        with SnapshotManager(str(work / "near"), near=Near(str(work / "host"), grace=30), signals=()) as manager:
            for step in (10, 20):
                app_state = {"progress": StateDict(step=step, weight=states.numbers(3, start=step))}
                found[f"step-{step}"] = {"0": described(app_state)}
                manager.async_take(step, app_state).wait("far", timeout=300)
            manager.snapshot(10).delete()
        del found["step-10"]
        shutil.copytree(work / "near", folder / "near")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


CASES = dict([
    one("values"), one("tensors"), one("newer_dtypes"), one("composed"), one("wrappers"), one("arrays"),
    one("known_objects"), one("configs"), one("training"), one("by_name"), one("pickles"),
    one("newest_compressed", compression="zstd"), one("plain_trees"), ("long_tensors", long_tensors),
    one("statistics", statistics=True),
    ("two_ranks", lambda folder, pool: _ranks(folder, "two_ranks", pool(2), "shards")),
    ("parts", lambda folder, pool: _ranks(folder, "parts", pool(2), "shards", largest=5)),
    ("indexed", indexed),
    ("newest_parts", lambda folder, pool: _ranks(folder, "newest_parts", pool(2), "known_objects", largest=5)),
    ("four_ranks", lambda folder, pool: _ranks(folder, "four_ranks", pool(4), "meshes")),
    ("bases", bases), ("frozen", frozen), ("weights", weights), ("compressed", compressed), ("signed", signed),
    ("dcp", dcp), ("run", run), ("near", near),
])  # fmt: skip
"""Name -> a function that takes the snapshots into a folder, and returns their contents by folder, rank and key."""
