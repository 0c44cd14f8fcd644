"""A training that publishes versions, and what a pull must bring."""

import json

import torch
from safetensors.torch import load_file

from snapshot_publish import Publisher, PublishOptions
from tests.plugins.snapshot_publish.models import model, train


def names_of(told, *wanted):
    return [event.name for event in told if event.name in wanted]


def loaded(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state = {}
    for file in set(index["weight_map"].values()):
        state |= load_file(folder / file)
    assert state.keys() == index["weight_map"].keys()
    return state


def expect_loaded(folder, state):
    found = loaded(folder)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


class Run:
    """A store with some versions, and the state of each."""

    def __init__(self, folder, versions, **options):
        self.store = folder / "store"
        self.net = model()
        self.publisher = Publisher(self.store, options=PublishOptions(files={"config.json": b'{"x": 1}'}), **options)
        self.states = {}
        self.publish(versions)

    def publish(self, count=1):
        for _ in range(count):
            train(self.net)
            version = self.publisher.publish(10 * (len(self.states) + 1), self.net).wait().version
            self.states[version] = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def shard(self, version):
        [file] = (self.store / f"weight_v{version:06d}").glob("*.safetensors")
        return file

    def index(self, version):
        return self.store / f"weight_v{version:06d}" / "model.safetensors.index.json"
