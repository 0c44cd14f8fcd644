"""Which frozen parameters a take leaves to a folder of weights: those with equal bytes there, whatever their names."""

import json
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from snapshot import RestoreError, RestoreOptions, Snapshot, StateDict, TakeOptions
from snapshot.manifest.document import METADATA
from snapshot.testing import recording
from tests.helpers.weight_folders import Adapted, write_folder


def take(path, model, base):
    return Snapshot.take(path, {"model": model}, options=TakeOptions(base=base, only="trainable"))


def left_out(path):
    """The range of the folder that each entry of the model refers to, by the entry's name."""
    document = json.loads((Path(path) / METADATA).read_bytes())
    found = {}
    for name, entry in document["manifest"].items():
        file = document["files"].get(entry.get("location"), {})
        if file.get("in_base"):
            found[name.removeprefix("0/model/")] = (file["name"], *entry["byte_range"])
    return found


def read_range(folder, place):
    name, begin, end = place
    return (Path(folder) / name).read_bytes()[begin:end]


def bytes_of(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


TENSORS = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([(), (1,), (2, 3), (3, 2), (6,)]),
    st.integers(0, 2),
)
"""A dtype, a shape, and a number that fills the tensor: equal ones are frequent."""


def filled(dtype, shape, number):
    return torch.full(shape, number, dtype=dtype)


@given(
    st.lists(st.tuples(TENSORS, st.booleans()), max_size=12),
    st.lists(TENSORS, min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_only_trainable_leaves_out_what_is_frozen_and_has_an_equal_tensor_of_its_own(live, stored, files):
    model = nn.Module()
    for number, (given_, frozen) in enumerate(live):
        model.register_parameter(f"p{number}", nn.Parameter(filled(*given_), requires_grad=not frozen))
    with tempfile.TemporaryDirectory() as root:
        folder = write_folder(
            Path(root, "weights"),
            {f"layer.{number}.p{number}": filled(*each) for number, each in enumerate(stored)},
            min(files, len(stored)),
        )
        made = take(Path(root, "s"), model, folder)
        found = left_out(Path(root, "s"))
        wanted = Counter(each for each, frozen in live if frozen) & Counter(stored)
        assert Counter(live[int(name.removeprefix("p"))][0] for name in found) == wanted
        assert len(set(found.values())) == len(found), "a range is used once"
        for name, place in found.items():
            assert read_range(folder, place) == bytes_of(getattr(model, name))
        values = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.fill_(7)
        made.restore({"model": model}, options=RestoreOptions(base=folder if found else None))
        assert all(value.equal(values[name]) for name, value in model.state_dict().items())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(20, 20), nn.Linear(20, 20)
        nn.init.zeros_(self.q_proj.bias)
        nn.init.zeros_(self.k_proj.bias)


class Wrapped(nn.Module):
    """A layer as PEFT wraps it."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = nn.Linear(20, 2, bias=False), nn.Linear(2, 20, bias=False)


def blocks(count=4):
    torch.manual_seed(1)
    return nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(count)])}).requires_grad_(False)


def wrap_like_peft(model):
    for block in model.layers:
        block.q_proj = Wrapped(block.q_proj)
    return nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})


WRAPPERS = {
    "none": lambda model: model,
    "peft": wrap_like_peft,
    "compiled": lambda model: nn.ModuleDict({"_orig_mod": model}),
    "another prefix": lambda model: nn.ModuleDict({"language_model": nn.ModuleDict({"model": model})}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_only_trainable_reads_the_tensor_of_each_parameter_alone_if_names_end_alike(tmp_path, wrapper):
    """Equal biases refer to the range with their own name, and other tensors of their shapes are not read."""
    model = blocks()
    names = {f"model.{name}": value for name, value in model.state_dict().items()}
    more = {f"vision.layers.{number}.other.weight": torch.randn(20, 20) for number in range(500)}
    folder = write_folder(tmp_path / "weights", names | more)
    header = {}
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, item in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            header[name] = tuple(8 + length + each for each in item["data_offsets"])
    live = WRAPPERS[wrapper](model)
    with recording() as log:
        made = take(tmp_path / "s", live, f"recording+file://{folder}")
    assert made.report.omitted_bytes == sum(value.nbytes for value in names.values())
    for name, (_, begin, end) in left_out(tmp_path / "s").items():
        bare = name[name.index("layers.") :].replace("base_layer.", "")
        assert header[f"model.{bare}"] == (begin, end)
    whole = sum(value.nbytes for value in more.values())
    assert log.nbytes("read_into") < whole // 2


def test_only_trainable_finds_tensors_under_any_names(tmp_path):
    model = blocks()
    folder = write_folder(
        tmp_path / "weights", {f"t{number}": value for number, value in enumerate(model.state_dict().values())}, 2
    )
    made = take(tmp_path / "s", model, folder)
    assert made.report.omitted_bytes == sum(value.nbytes for value in model.state_dict().values())
    assert not made.report.notes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.to(torch.bfloat16), "is bfloat16 here, and float32 there"),
        (lambda model: model.layers[0].q_proj.weight.data.add_(1), "has other values"),
        (
            lambda model: setattr(model, "new", nn.Parameter(torch.ones(3, 3, 3), requires_grad=False)),
            r"no tensor there has its shape, \[3, 3, 3\]",
        ),
    ],
)
def test_only_trainable_notes_frozen_parameters_that_a_folder_of_weights_lacks(tmp_path, change, reason):
    model = blocks(1)
    folder = write_folder(tmp_path / "weights", model.state_dict())
    change(model)
    made = take(tmp_path / "s", model, folder)
    [note] = made.report.notes
    assert re.search(reason, note)
    shutil.rmtree(folder)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    made.restore({"model": model})
    assert all(value.equal(values[name]) for name, value in model.state_dict().items())


def stacked(halves):
    """A stack of four experts, and its tensors in a folder: one for each expert, or two that are joined in memory."""
    torch.manual_seed(2)
    tensors = {
        f"layers.0.experts.{number}.{name}.weight": torch.randn(30, 50)
        for number in range(4)
        for name in ("gate", "up")[:halves]
    }
    joined = torch.stack(list(tensors.values())).reshape(4, 30 * halves, 50)
    model = nn.Module()
    model.experts = nn.Parameter(joined, requires_grad=False)
    return model, tensors


@pytest.mark.parametrize("halves", [1, 2])
def test_only_trainable_leaves_stacked_experts_to_their_tensors_in_a_folder_of_weights(tmp_path, halves):
    model, tensors = stacked(halves)
    folder = write_folder(tmp_path / "weights", tensors, 2)
    made = take(tmp_path / "s", model, folder)
    assert made.report.omitted_bytes == model.experts.nbytes
    entry = made.get_manifest()["0/model/experts"]
    assert len(entry.pieces()) == len(tensors)
    made.restore({"model": model})
    later = take(tmp_path / "t", model, made)
    assert later.report.omitted_bytes == model.experts.nbytes
    value = model.experts.clone()
    for snapshot in (made, later):
        model.experts.data[3, 2, 1] += 1
        with pytest.raises(RestoreError, match="had not changed from its base"):
            snapshot.restore({"model": model})
        snapshot.restore({"model": model}, options=RestoreOptions(base=folder))
        assert model.experts.equal(value)
        assert snapshot.verify()


def test_only_trainable_writes_stacked_experts_if_a_folder_of_weights_lacks_one(tmp_path):
    """What it has of them is left to another parameter."""
    model, tensors = stacked(1)
    model.other = nn.Parameter(model.experts[1].clone(), requires_grad=False)
    model.experts.data[3] += 1
    folder = write_folder(tmp_path / "weights", tensors)
    made = take(tmp_path / "s", model, folder)
    assert set(left_out(tmp_path / "s")) == {"other"}
    assert "model/experts: no tensor there has its shape" in made.report.notes[0]
    assert Snapshot(tmp_path / "s").read_object("model/experts").equal(model.experts)


def test_only_trainable_leaves_buffers_and_what_trains_to_the_snapshot(tmp_path):
    """They are written even if the folder has them."""
    model = nn.ModuleDict({"frozen": nn.BatchNorm1d(50).requires_grad_(False), "trained": nn.Linear(50, 50)})
    state = {"model": model, "table": StateDict(x=torch.ones(50, 50))}
    folder = write_folder(tmp_path / "weights", {**model.state_dict(), "x": torch.ones(50, 50)})
    made = Snapshot.take(tmp_path / "s", state, options=TakeOptions(base=folder, only="trainable"))
    assert left_out(tmp_path / "s").keys() == {"frozen.weight", "frozen.bias"}
    assert made.report.omitted_bytes == 400


def test_only_trainable_leaves_tied_parameters_out_once(tmp_path):
    model = nn.Module()
    model.embedding = nn.Parameter(torch.randn(400, 300), requires_grad=False)
    model.head = model.embedding
    folder = write_folder(tmp_path / "weights", {"embedding": model.embedding})
    made = take(tmp_path / "s", model, folder)
    assert made.report.omitted_bytes == model.embedding.nbytes
    found = left_out(tmp_path / "s")
    assert found["embedding"] == found["head"]
    value = model.embedding.clone()
    model.embedding.data.zero_()
    made.restore({"model": model}, options=RestoreOptions(base=folder))
    assert model.embedding.equal(value)
    assert model.head is model.embedding


@pytest.mark.parametrize("order", [[0], [0, 1], [1, 0]])
def test_only_trainable_prefers_a_folder_of_weights_in_a_list_of_bases(tmp_path, order):
    """The snapshot in the list does not become the base of what is left out."""
    run = Adapted(tmp_path / "weights")
    Snapshot.take(tmp_path / "one", run.state)
    bases = [tmp_path / "weights", tmp_path / "one"]
    made = run.take(tmp_path / "two", [bases[number] for number in order])
    assert made.report.omitted_bytes == run.frozen_bytes
    assert set(left_out(tmp_path / "two")) == {f"pretrained.{name}" for name in run.pretrained.state_dict()}
