"""Writes small files with the packages of other libraries: `python tests/formats/write_foreign_files.py DIR`.

`foreign_files.zip` has its output, without scripts and texts. Run it only to add files: those that exist are never
written again, since later versions must read them, too. The packages: h5py keras gguf onnx zarr joblib scikit-learn
flax orbax-checkpoint tensorflow-cpu stable_baselines3 peft deepspeed. Files of old versions of torch are written by
`old_torch` with each of them.
"""

import os
import pickle
import sys
from pathlib import Path

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def array():
    import numpy as np

    return np.arange(6, dtype=np.float32).reshape(2, 3)


def numpy_(out):
    import numpy as np

    np.save(out / "array.npy", array())
    np.savez(out / "arrays.npz", w=array(), b=array()[0])
    np.savez_compressed(out / "compressed.npz", w=array())
    (out / "numpy_folder").mkdir()
    np.save(out / "numpy_folder" / "w.npy", array())


def hdf5(out):
    import h5py

    with h5py.File(out / "weights.h5", "w", libver="latest") as file:
        file["w"] = array()


def keras(out):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.save(out / "model.keras")
    model.save_weights(out / "model.weights.h5")


def gguf(out):
    import gguf

    writer = gguf.GGUFWriter(str(out / "model.gguf"), "llama")
    writer.add_tensor("w", array())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def onnx(out):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [numpy_helper.from_array(array(), "w")])
    onnx.save(helper.make_model(graph), str(out / "model.onnx"))


def zarr(out):
    import zarr

    for version in (2, 3):
        group = zarr.open_group(str(out / f"zarr{version}"), mode="w", zarr_format=version)
        group.create_array("w", data=array())


def pickles(out):
    import joblib
    from sklearn.linear_model import LinearRegression

    joblib.dump({"w": array()}, out / "model.joblib")
    (out / "sklearn.pkl").write_bytes(pickle.dumps(LinearRegression().fit(array(), array()[:, 0])))
    (out / "old.pkl").write_bytes(pickle.dumps({"w": [1.0]}, protocol=0))


def flax(out):
    from flax import serialization

    (out / "flax").mkdir()
    (out / "flax" / "flax_model.msgpack").write_bytes(serialization.to_bytes({"params": {"w": array()}}))


def orbax(out):
    import jax.numpy as jnp
    import orbax.checkpoint

    for name, ocdbt in (("orbax_ocdbt", True), ("orbax_plain", False)):
        checkpointer = orbax.checkpoint.PyTreeCheckpointer(use_ocdbt=ocdbt)
        checkpointer.save((out / name / "5").absolute(), {"w": jnp.asarray(array())})


def tensorflow(out):
    import tensorflow as tf

    (out / "tf_checkpoint").mkdir()
    tf.train.Checkpoint(w=tf.Variable(array())).save(str(out / "tf_checkpoint" / "ckpt"))
    module = tf.Module()
    module.w = tf.Variable(array())
    tf.saved_model.save(module, str(out / "tf_saved_model"))
    function = tf.function(lambda x: x + 1.0, input_signature=[tf.TensorSpec([2])])
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()], function)
    (out / "model.tflite").write_bytes(converter.convert())


def stable_baselines(out):
    import gymnasium
    from stable_baselines3 import PPO

    PPO("MlpPolicy", gymnasium.make("CartPole-v1"), policy_kwargs={"net_arch": [2]}).save(str(out / "ppo.zip"))


def torch_kinds(out):
    import torch
    from torch.package import PackageExporter

    torch.save({"w": torch.ones(2)}, out / "legacy.pt", _use_new_zipfile_serialization=False)
    model = torch.nn.Linear(2, 2)
    torch.jit.script(model).save(str(out / "script.pt"))
    torch.export.save(torch.export.export(model, (torch.ones(1, 2),)), str(out / "program.pt2"))
    with PackageExporter(str(out / "package.pt")) as package:
        package.save_pickle("m", "w.pkl", torch.ones(2))


def old_torch(out):
    """Write the files of one version of torch; this runs with Python 3.6, too."""
    import collections

    import torch

    t = torch.arange(6.0).view(2, 3)
    state = [("a.weight", t), ("a.t", t.t()), ("tied", t), ("n", torch.arange(4)[1:3])]
    model = collections.OrderedDict([*state, ("p", torch.nn.Parameter(torch.ones(2)))])
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters()).state_dict()
    held = {"model": model, "optimizer": optimizer, "epoch": 3}
    (out / "torch").mkdir(exist_ok=True)
    torch.save(held, str(out / "torch" / "torch-{}.pt".format(torch.__version__)))  # noqa: UP032
    program = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    program.save(str(out / "torch" / "script-{}.pt".format(torch.__version__)))  # noqa: UP032


def peft(out):
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["q_proj"]))
    adapted.save_pretrained(out / "peft")
    adapted.save_pretrained(out / "peft_bin", safe_serialization=False)


def deepspeed(out):
    import deepspeed
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29599", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    for stage in (2, 3):
        model = torch.nn.Linear(3, 2)
        config = {
            "train_batch_size": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.save_checkpoint(str(out / f"deepspeed{stage}"))


WRITERS = (
    numpy_, hdf5, keras, gguf, onnx, zarr, pickles, flax, orbax, tensorflow, stable_baselines, torch_kinds, old_torch,
    peft, deepspeed,
)  # fmt: skip

if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    for writer in WRITERS:
        if len(sys.argv) == 2 or writer.__name__ in sys.argv[2:]:
            writer(folder)
