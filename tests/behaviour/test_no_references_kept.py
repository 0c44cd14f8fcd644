"""Nothing of an application is kept when a verb is over: not its tensors, nor copies of them."""

import gc
import time
import weakref

import numpy as np
import pytest
import torch

from snapshot import RestoreOptions, Sharded, Snapshot, StateDict
from tests.helpers.arguments import for_take

ODD = {
    "plain": lambda: 1,
    "array": lambda: np.ones(3),
    "scalar": lambda: np.float32(2),
    "sharded": lambda: Sharded(torch.ones(8), (8,), (0,)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 3, torch.qint8),
    "strided": lambda: torch.ones(5, 6).t(),
    "set": lambda: {1, 2},
    "long": lambda: torch.ones(300_000),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("verb", ["take", "async_take", "restore"])
def test_take_async_take_and_restore_keep_no_references_to_tensors(kind, verb):
    """Leaves and wants are hidden from the garbage collector: a cycle through one of them is never collected."""
    known = []

    def prepared(path, tensor, tracing):
        made = tensor.clone()
        known.append(weakref.ref(made))
        return made

    for _ in range(3):
        app = {"s": StateDict(x=torch.ones(5), odd=ODD[kind]())}
        known.append(weakref.ref(app["s"]["x"]))
        options = {"overwrite": True, "_custom_tensor_prepare_func": prepared}
        if verb == "async_take":
            Snapshot.async_take("memory://kept", app, **for_take(**options)).wait()
        else:
            Snapshot.take("memory://kept", app, **for_take(**options))
        if verb == "restore":
            app = {"s": StateDict(x=torch.zeros(5), odd=ODD[kind]())}
            known.append(weakref.ref(app["s"]["x"]))
            Snapshot("memory://kept").restore(app, options=RestoreOptions(cast="any"))
        del app
    for _ in range(100):  # a thread that has just given its result may hold its frame for a moment
        gc.collect()
        if not any(each() is not None for each in known):
            break
        time.sleep(0.05)
    assert len(known) >= 6
    assert not [each() for each in known if each() is not None]
