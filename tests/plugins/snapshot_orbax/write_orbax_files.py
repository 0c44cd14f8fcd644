"""Writes small checkpoints with Orbax and TensorStore: `python tests/plugins/snapshot_orbax/write_orbax_files.py DIR`.

`orbax_files.zip` has its output. Run it only to add files: those that exist are never written again, since later
versions must read them, too. The packages: orbax-checkpoint, with JAX for CPUs.
"""

import os
import sys

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))


def sharded(array, *names):
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*names)))


def tree():
    return {
        "params": {
            "dense": {
                "kernel": sharded(jnp.arange(32.0, dtype=jnp.bfloat16).reshape(8, 4), "x", "y"),
                "bias": sharded(jnp.arange(4.0), None),
            }
        },
        "opt": [sharded(jnp.arange(64.0).reshape(16, 4) / 8, "x"), {"count": jnp.int32(7)}, (), None],
        "step": 5,
        "lr": 0.5,
        "flag": True,
        "name": "hello",
        "none": None,
        "empty": {},
        "array": np.arange(6, dtype=np.int64).reshape(2, 3),
        "zero": sharded(jnp.zeros((8, 8)), "x", "y"),
        "narrow": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "complex": jnp.ones(2, jnp.complex64),
        "a.b/c": jnp.ones(3),
        "long": sharded(jnp.arange(3000.0).reshape(30, 100), "x"),
    }


def main(out):
    for name, options in {
        "ocdbt": {"use_ocdbt": True, "use_zarr3": False},
        "plain": {"use_ocdbt": False, "use_zarr3": False},
        "zarr3": {"use_ocdbt": True, "use_zarr3": True},
        "plain3": {"use_ocdbt": False, "use_zarr3": True},
    }.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as saver:
            saver.save(os.path.join(out, name), tree())
    uneven = {"w": jnp.arange(35.0).reshape(5, 7)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as saver:
        args = ocp.args.PyTreeSave(uneven, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=32), uneven))
        saver.save(os.path.join(out, "chunks"), args=args)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as saver:
        saver.save(os.path.join(out, "chunks3"), args=args)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(os.path.join(out, "manager"), options=options) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))
    with ocp.CheckpointManager(os.path.join(out, "items"), options=options) as manager:
        more = {"state": ocp.args.StandardSave({"w": jnp.arange(3.0)}), "extra": ocp.args.JsonSave({"a": 1})}
        manager.save(4, args=ocp.args.Composite(**more))
    from orbax.checkpoint.experimental import v1

    v1.save_pytree(os.path.join(out, "v1"), {"w": jnp.arange(3.0), "deep": {"b": jnp.ones((2, 2))}})
    by_tensorstore(out)
    with_codecs(out)
    with_commit_files(out)
    split(out)


def with_commit_files(out):
    """Steps as on a storage without renames: a file commits each, and the last save ends before it."""
    from orbax.checkpoint import options as choices
    from orbax.checkpoint._src.path import atomicity

    mode = choices.AtomicityOptions(mode=choices.AtomicityMode.COMMIT_FILE)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, atomicity_options=mode)
    manager = ocp.CheckpointManager(os.path.join(out, "committed"), options=options)
    manager.save(3, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))

    async def end(self):
        raise KeyboardInterrupt

    atomicity.CommitFileTemporaryPath.finalize, finalize = end, atomicity.CommitFileTemporaryPath.finalize
    try:
        manager.save(4, args=ocp.args.StandardSave({"w": jnp.arange(4.0)}))
    except KeyboardInterrupt:
        atomicity.CommitFileTemporaryPath.finalize = finalize


def split(out):
    """A database whose nodes and values are in files of their own."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    options = tensorstore_utils.OcdbtKvStoreWriteOptions
    plain = options.__init__
    options.__init__ = lambda self, *given, **named: plain(
        self, *given, **(named | {"store_ocdbt_metadata_and_values_separately": True})
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as saver:
        saver.save(os.path.join(out, "split"), {"w": jnp.arange(3000.0).reshape(30, 100), "b": {"c": jnp.ones(5)}})
    options.__init__ = plain


def codec_arrays():
    """Arrays of several sizes, some with long repetitions: name -> array and chunks."""
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.standard_normal((90, 60)).round(1), axis=1).astype(np.float32)
    tile = rng.integers(0, 255, 9000).astype(np.uint8)
    return {
        "small": (np.arange(35, dtype=np.float32).reshape(5, 7), [2, 3]),
        "smooth": (smooth, [64, 60]),
        "noise": (rng.integers(0, 60_000, (9, 77)).astype(np.uint16), [9, 77]),
        "zeros": (np.where(np.arange(9000) == 7, 3.0, 0.0), [9000]),
        "tiles": (np.tile(tile, 2), [18_000]),
    }


def with_codecs(out):
    """Write arrays with the other codecs that TensorStore has for zarr."""
    import json

    import tensorstore as ts

    kinds = {f"{name}2": {"compressor": {"id": name, "level": 6}} for name in ("gzip", "zlib")}
    for name in ("lz4", "lz4hc", "zstd", "zlib", "blosclz"):
        for shuffle in (0, 1, 2):
            blosc = {"id": "blosc", "cname": name, "clevel": 5, "shuffle": shuffle}
            kinds[f"blosc_{name}_{shuffle}_2"] = {"compressor": blosc}
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    kinds["gzip3"] = {"codecs": [plain, {"name": "gzip", "configuration": {"level": 5}}]}
    blosc = {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4}
    kinds["blosc3"] = {"codecs": [plain, {"name": "blosc", "configuration": blosc}]}
    for version in "23":
        top, leaves = os.path.join(out, f"codecs{version}"), {}
        for kind, more in kinds.items():
            for name, (array, chunks) in codec_arrays().items() if kind.endswith(version) else ():
                metadata = {"shape": list(array.shape), **more}
                if version == "2":
                    metadata["chunks"] = chunks
                else:
                    metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunks}}
                base = {"driver": "file", "path": f"{top}/{kind}.{name}/"}
                spec = {"driver": "zarr" if version == "2" else "zarr3", "kvstore": base, "metadata": metadata}
                opened = ts.open(spec, create=True, dtype=ts.dtype(array.dtype.name)).result()
                opened.write(array).result()
                keys = [{"key": each, "key_type": 2} for each in (kind, name)]
                leaves[str((kind, name))] = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
        tree = {"tree_metadata": leaves, "use_ocdbt": False, "use_zarr3": version == "3"}
        with open(os.path.join(top, "_METADATA"), "w") as file:
            json.dump(tree, file)


def by_tensorstore(out):
    """Write arrays with what Orbax does not use by itself: chunks beyond the edge, shards of chunks, and deep trees."""
    import json

    import tensorstore as ts

    array = np.arange(35.0, dtype=np.float32).reshape(5, 7)
    kinds = {
        "edge2": ("zarr", {"chunks": [2, 3], "compressor": {"id": "zstd"}}),
        "turned2": ("zarr", {"chunks": [2, 3], "compressor": {"id": "zstd"}, "order": "F"}),
        "big2": ("zarr", {"chunks": [5, 7], "compressor": {"id": "zstd"}, "dtype": ">f4"}),
        "plain2": ("zarr", {"chunks": [2, 3], "compressor": None, "dimension_separator": "/"}),
        "edge3": ("zarr3", {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}}}),
        "shards3": ("zarr3", {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
            "codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 2], "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]}}],
        }),
    }  # fmt: skip
    for folder, version, base in (
        ("odd2", "2", "file"),
        ("odd3", "3", "file"),
        ("deep2", "2", "ocdbt"),
        ("deep3", "3", "ocdbt"),
    ):
        leaves = {}
        top = os.path.join(out, folder)
        os.makedirs(top)
        for name, (driver, metadata) in kinds.items():
            if not name.endswith(version):
                continue
            for number in range(6 if base == "ocdbt" else 1):
                kvstore = {"driver": "file", "path": f"{top}/{name}.{number}/"}
                if base == "ocdbt":
                    config = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 20}
                    kvstore = {
                        "driver": "ocdbt",
                        "base": f"file://{top}/",
                        "path": f"{name}.{number}/",
                        "config": config,
                    }
                more = {"dtype": "float32"} if driver == "zarr3" or "dtype" not in metadata else {}
                spec = {"driver": driver, "kvstore": kvstore, "metadata": {"shape": [5, 7], **metadata}, **more}
                held = array + number
                if name.startswith(("edge", "shards")):
                    held[:2, :3] = 0  # a chunk that is not stored
                ts.open(spec, create=True).result().write(held).result()
                keys = [{"key": name, "key_type": 2}, {"key": str(number), "key_type": 1}]
                leaves[str((name, number))] = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
        tree = {"tree_metadata": leaves, "use_ocdbt": base == "ocdbt", "use_zarr3": version == "3"}
        with open(os.path.join(top, "_METADATA"), "w") as file:
            json.dump(tree, file)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
