"""Folders in Hugging Face's layout that tests write."""

import json

import torch
from torch import nn

INDEX = "pytorch_model.bin.index.json"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def write(folder, parts=2, state=None):
    """Write what `save_pretrained(safe_serialization=False)` writes."""
    state = model().state_dict() if state is None else state
    folder.mkdir(parents=True, exist_ok=True)
    if parts == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return state
    names, located = list(state), {}
    for part in range(parts):
        file = f"pytorch_model-{part + 1:05d}-of-{parts:05d}.bin"
        chosen = names[part::parts]
        torch.save({name: state[name] for name in chosen}, folder / file)
        located |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": 1}, "weight_map": {name: located[name] for name in names}}
    (folder / INDEX).write_text(json.dumps(index))
    return state
