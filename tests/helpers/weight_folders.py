"""Folders of weights in Hugging Face's layout, and a run that trains an adapter on them."""

import json

import torch
from safetensors.torch import save_file
from torch import nn

from snapshot import Snapshot, TakeOptions

WIDTH = 300


def write_folder(path, tensors, files=1):
    """Write tensors as one file, or as several with an index. Return the folder."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().contiguous() for name, value in tensors.items()}
    if files == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names, places = list(tensors), {}
    for number in range(files):
        file, mine = f"model-{number + 1:05}-of-{files:05}.safetensors", names[number::files]
        save_file({name: tensors[name] for name in mine}, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(mine, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


class Adapted:
    """A pretrained network, which is frozen, with a trained head. Its tensors are longer than a block of digests."""

    def __init__(self, folder=None, files=1, layers=3):
        torch.manual_seed(5)
        self.pretrained = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 4)
        self.model = nn.ModuleDict({"pretrained": self.pretrained, "head": self.head})
        self.optimizer = torch.optim.AdamW(self.head.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.frozen_bytes = sum(each.nbytes for each in self.pretrained.parameters())
        if folder is not None:
            write_folder(folder, self.pretrained.state_dict(prefix="encoder."), files)

    def step(self):
        self.head(self.pretrained(torch.ones(2, WIDTH))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def spoil(self):
        """Change all weights, so that a restore must write them."""
        for parameter in self.model.parameters():
            parameter.data.fill_(7)

    def is_spoilt(self):
        return all(parameter.eq(7).all() for parameter in self.model.parameters())

    def has(self, values):
        return all(value.equal(values[name]) for name, value in self.model.state_dict().items())

    def take(self, path, base, **options):
        return Snapshot.take(path, self.state, options=TakeOptions(base=base, only="trainable", **options))
