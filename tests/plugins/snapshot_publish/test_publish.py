"""Publishing on one rank: engines can read all versions, and only committed ones count."""

import errno
import json
from functools import partial

import numpy as np
import pytest
import torch

import snapshot
from snapshot import (
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLatest,
    KeepWithin,
    Snapshot,
    SnapshotError,
    StateDict,
    StorageError,
)
from snapshot.formats import hugging_face
from snapshot.manager.policies import Policy
from snapshot.testing.storages import faulty
from snapshot_publish import Publisher, PublishOptions, Subscriber
from tests.plugins.snapshot_publish import engine
from tests.plugins.snapshot_publish.models import model, train


def expect_state(found, module):
    """What an engine has read is the module's state, bit by bit."""
    state = module.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        dtype, shape, content = found[name]
        assert dtype == {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        assert shape == tuple(tensor.shape)
        assert content.tobytes() == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_publish_versions_are_read_by_an_engine(tmp_path):
    net = model()
    publisher = Publisher(tmp_path, full_every=4, keep=10)
    kinds = []
    for step in range(0, 100, 10):
        published = publisher.publish(step, net).wait()
        kinds.append(published.base)
        expect_state(engine.read(tmp_path, published.version), net)
        train(net)
    assert kinds == [None, 1, 2, 3, None, 5, 6, 7, None, 9]


def test_publish_delta_has_no_unchanged_tensors(tmp_path):
    net = model()
    publisher = Publisher(tmp_path)
    publisher.publish(1, net).wait()
    with torch.no_grad():
        net[1].bias[3] = 7
    publisher.publish(2, net).wait()
    index = json.loads((tmp_path / "weight_v000002" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == ["1.bias"]
    publisher.publish(3, net).wait()
    index = json.loads((tmp_path / "weight_v000003" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {}
    expect_state(engine.read(tmp_path, 3), net)


def test_publish_does_not_include_changes_after_the_call(tmp_path):
    net = model()
    publisher = Publisher(tmp_path)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    pending = publisher.publish(1, net)
    train(net, 1.0)
    pending.wait()
    for name, (_, _, content) in engine.read(tmp_path, 1).items():
        assert content.tobytes() == before[name].view(-1).view(torch.uint8).numpy().tobytes()


def test_publish_after_a_restart_begins_with_a_complete_version(tmp_path):
    net = model()
    first = Publisher(tmp_path)
    assert [first.publish(step, net).wait()[:] for step in (5, 6)] == [(1, 5, None), (2, 6, 1)]
    second = Publisher(tmp_path)
    assert [second.publish(step, net).wait()[:] for step in (5, 6)] == [(3, 5, None), (4, 6, 3)]


def test_publish_by_two_publishers_in_turns_writes_complete_versions(tmp_path):
    """A delta whose number does not follow its base would not be applied by engines."""
    net, other = model(), model(1)
    one, two = Publisher(tmp_path), Publisher(tmp_path)
    for turn in range(3):
        assert one.publish(turn, net).wait().base is None
        assert two.publish(turn, other).wait().base is None
    assert two.publish(9, other).wait()[:] == (7, 9, 6)
    expect_state(engine.read(tmp_path, 7), other)
    expect_state(engine.read(tmp_path, 5), net)


def test_publish_by_two_publishers_at_once_loses_nothing(tmp_path):
    net, other = model(), model(1)
    one, two = Publisher(tmp_path), Publisher(tmp_path)
    for turn in range(5):
        pending = [one.publish(turn, net), two.publish(turn, other)]
        versions = [each.wait().version for each in pending]
        expect_state(engine.read(tmp_path, versions[0]), net)
        expect_state(engine.read(tmp_path, versions[1]), other)


def test_publish_nested_states_and_unusual_tensors(tmp_path):
    state = {
        "a": {"b": torch.arange(6).view(2, 3).t(), "step": 3, "name": "x"},
        "module.c": torch.tensor(1.5),
        "layers": [torch.ones(2), ({"w": torch.ones(1)},)],
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "eight": torch.zeros(3, dtype=torch.float8_e4m3fn),
    }
    publisher = Publisher(tmp_path)
    publisher.publish(1, state).wait()
    state["a"]["b"][0, 0] = 99
    publisher.publish(2, state).wait()
    found = engine.read(tmp_path, 2)
    assert found.keys() == {"a.b", "module.c", "layers.0", "layers.1.0.w", "empty", "flags", "eight"}
    assert found["a.b"][:2] == ("I64", (3, 2))
    assert np.frombuffer(found["a.b"][2].tobytes(), np.int64).tolist() == [99, 3, 1, 4, 2, 5]
    folder = Subscriber(tmp_path, f"{tmp_path}-local").pull()
    from safetensors.torch import load_file

    [file] = folder.glob("*.safetensors")
    loaded = load_file(file)
    assert torch.equal(loaded["a.b"], state["a"]["b"])
    assert loaded["empty"].shape == (0, 4)


def test_publish_of_another_set_of_tensors_is_a_complete_version(tmp_path):
    publisher = Publisher(tmp_path)
    publisher.publish(1, {"a": torch.zeros(3)}).wait()
    assert publisher.publish(2, {"a": torch.zeros(4)}).wait().base is None
    assert publisher.publish(3, {"a": torch.zeros(4), "b": torch.zeros(1)}).wait().base is None
    assert publisher.publish(4, {"a": torch.zeros(4).double(), "b": torch.zeros(1)}).wait().base is None
    assert publisher.publish(5, {"a": torch.zeros(4).double(), "b": torch.zeros(1)}).wait().base == 4


def test_publish_small_memory_budget_bytes_writes_complete_versions_and_warns_once(tmp_path, told):
    net = model()
    publisher = Publisher(tmp_path, options=PublishOptions(memory_budget_bytes=1000))
    with pytest.warns(UserWarning, match="raise memory_budget_bytes"):
        assert publisher.publish(1, net).wait().base is None
    assert publisher.publish(2, net).wait().base is None
    assert [event.name for event in told].count("full_only") == 1


def test_publish_keep_deletes_old_versions_with_their_chains(tmp_path):
    net = model()
    publisher = Publisher(tmp_path, full_every=3, options=PublishOptions(files={"config.json": b"{}"}))  # keep=2
    left = []
    for step in range(10):
        publisher.publish(step, net).wait()
        left.append(sorted(engine.versions(tmp_path)))
        train(net)
    assert left[5] == [1, 2, 3, 4, 5, 6]
    assert left[6] == [4, 5, 6, 7]
    assert left[9] == [7, 8, 9, 10]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"weight_v{number:06d}" for number in left[9]]


def test_publish_keep_policy_counts_complete_versions(tmp_path):
    net = model()
    store, local = tmp_path / "store", tmp_path / "local"
    publisher = Publisher(store, full_every=2, keep=KeepEvery(3) | KeepLatest(1))
    for step in range(8):  # 1, 3, 5 and 7 are complete
        publisher.publish(step, net).wait()
        train(net)
    assert sorted(engine.versions(store)) == [3, 4, 7, 8]
    subscriber = Subscriber(store, local, keep=KeepFor("1h"))
    for version in (3, 8):
        subscriber.pull(version=version)
    assert len(list(local.glob("weight_*"))) == 2


class KeepIf(Policy):
    """Keep what a function of the number of a version says."""

    def __init__(self, says):
        self.says = says

    def keep(self, taken, now):
        return {each.step for each in taken if self.says(each.step)}


def test_publish_and_pull_keep_of_an_application_read_snapshots(tmp_path):
    evaluation = Snapshot.take(tmp_path / "evaluation", {"best": StateDict(version=2, order=0)})
    store, local = tmp_path / "store", tmp_path / "local"
    net = model()
    keep = KeepIf(lambda number: number == evaluation.read_object("best/version"))
    publisher = Publisher(store, full_every=1, keep=keep)
    for step in range(4):
        publisher.publish(step, net).wait()
        train(net)
    assert sorted(engine.versions(store)) == [2, 4]
    subscriber = Subscriber(store, local, keep=KeepIf(lambda at: at == evaluation.read_object("best/order")))
    for version in (4, 2):
        subscriber.pull(version=version)
    assert len(list(local.glob("weight_*"))) == 2


def test_publish_and_pull_keep_that_fails_deletes_nothing(tmp_path, caplog):
    def refuse(number):
        raise LookupError(f"no score for {number}")

    store, local = tmp_path / "store", tmp_path / "local"
    net = model()
    publisher = Publisher(store, full_every=1, keep=KeepIf(refuse))
    subscriber = Subscriber(store, local, keep=KeepIf(refuse))
    for step in range(3):
        publisher.publish(step, net).wait()
        subscriber.pull()
        train(net)
    assert sorted(engine.versions(store)) == [1, 2, 3]
    assert len(list(local.glob("weight_*"))) == 3
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    for place in (store, local):
        assert [each for each in warnings if str(place) in each and "KeepIf.keep failed: LookupError" in each]


@pytest.mark.parametrize("kind", [Publisher, partial(Subscriber, folder="local")])
def test_publish_and_pull_refuse_an_invalid_keep(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    for keep, error in (("2", TypeError), (0, ValueError), (KeepBest("loss"), ValueError), (KeepWithin(1), ValueError)):
        with pytest.raises(error, match="keep must be"):
            kind(tmp_path / "store", keep=keep)


@pytest.mark.parametrize("operation", ["create", "write", "finish", "put", "commit"])
def test_publish_that_fails_leaves_no_files_and_the_next_is_complete(tmp_path, operation):
    net = model()
    url = f"faulty+file://{tmp_path}"
    error = OSError(errno.ENOSPC, "No space left on device")
    with faulty(on=operation, path="weight_v000003/*", nth=1, error=error):
        publisher = Publisher(url)
        publisher.publish(1, net).wait()
        train(net)
        publisher.publish(2, net).wait()
        expected = engine.read(tmp_path, 2)
        train(net)
        with pytest.raises(StorageError, match="No space left"):
            publisher.publish(3, net).wait()
        assert sorted(engine.versions(tmp_path)) == [1, 2]
        assert not (tmp_path / "weight_v000003").exists()
        assert {name: each[2].tobytes() for name, each in engine.read(tmp_path, 2).items()} == {
            name: each[2].tobytes() for name, each in expected.items()
        }
        assert publisher.publish(3, net).wait()[:] == (3, 3, None)


def test_publish_refuses_invalid_arguments(tmp_path):
    for wrong in (0, 10_001, 1.5, True):
        with pytest.raises(ValueError, match=f"full_every must be an int from 1 to 10000, got {wrong}"):
            Publisher(tmp_path, full_every=wrong)
    with pytest.raises(ValueError, match="notify must be http"):
        Publisher(tmp_path, options=PublishOptions(notify=["file:///etc/passwd"]))
    with pytest.raises(ValueError, match="must not have weights"):
        Publisher(tmp_path, options=PublishOptions(files={"model.safetensors": b""}))
    with pytest.raises(ValueError, match="files must be a local folder"):
        Publisher(tmp_path, options=PublishOptions(files=tmp_path / "nothing"))
    publisher = Publisher(tmp_path)
    with pytest.raises(TypeError, match="must be a module or a state dict"):
        publisher.publish(1, [torch.zeros(1)])
    with pytest.raises(ValueError, match="step must be an int"):
        publisher.publish(-1, {"a": torch.zeros(1)})
    with pytest.raises(SnapshotError, match="cast or exclude"):
        publisher.publish(1, {"a": torch.zeros(1, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []


class Nested(torch.nn.Module):
    """A model with a submodule of a wrapper's name."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2, bias=False)
        self.head = torch.nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (Nested(), {"module.weight", "head.weight"}),
        (torch.optim.swa_utils.AveragedModel(Nested()), {"module.weight", "head.weight"}),
        (
            {f"_orig_mod.module.{name}": torch.ones(1) for name in ("module.weight", "head.weight")},
            {"module.weight", "head.weight"},
        ),
        ({"module": torch.zeros(2)}, {"module"}),
    ],
)
def test_publish_strips_only_wrapper_prefixes_from_names(tmp_path, state, names):
    Publisher(tmp_path).publish(1, state).wait()
    assert engine.read(tmp_path, 1).keys() == names


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"": torch.zeros(2)}, "each part of a tensor's name must have characters"),
        ({"a": torch.zeros(2, device="meta")}, "a: a published tensor must have values"),
        ({"a": torch.eye(3).to_sparse()}, "a: a published tensor must be dense"),
        ({"\ud800": torch.ones(2)}, "must have a name that UTF-8 can encode"),
    ],
)
def test_publish_names_tensors_that_cannot_be_published(tmp_path, state, message):
    with pytest.raises((SnapshotError, ValueError), match=message):
        Publisher(tmp_path).publish(1, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("files", [{"config.json": "text"}, {1: b""}])
def test_publish_files_must_be_bytes_by_name(tmp_path, files):
    with pytest.raises(TypeError, match="files must be bytes by name"):
        Publisher(tmp_path, options=PublishOptions(files=files))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_publish_refuses_nested_tensors(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(SnapshotError, match="got a nested tensor"):
        Publisher(tmp_path).publish(1, {"a": nested})


@pytest.mark.parametrize(("files", "removed", "base"), [({}, [], 1), ({"new": 1}, [], None), ({}, ["old"], None)])
def test_publish_resumed_continues_with_deltas_only_for_equal_tensors_and_files(files, removed, base, tmp_path):
    config = {"config.json": json.dumps({}).encode()}
    state = {"a": torch.randn(100), "old": torch.ones(50)}
    Publisher(tmp_path / "store", options=PublishOptions(files=config)).publish(1, state).wait()
    pulled = Subscriber(tmp_path / "store", tmp_path / "local").pull()
    again = Publisher(tmp_path / "store", options=PublishOptions(files={"config.json": json.dumps(files).encode()}))
    again.resume_from(pulled)
    state = {name: each + 1 for name, each in state.items() if name not in removed}
    assert again.publish(2, state).wait().base == base
    folder = Subscriber(tmp_path / "store", tmp_path / "fresh").pull()
    got = snapshot.load(folder)
    assert got.keys() == state.keys()
    assert all(torch.equal(got[name], state[name]) for name in state)
    assert json.loads((folder / "config.json").read_bytes()) == files


def test_publish_of_a_file_that_is_too_large_for_one_beside_the_weights_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face, "LONGEST_FILE", 10)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "config.json").write_bytes(b"{}" + 8 * b" ")
    assert (
        Publisher(tmp_path / "a", options=PublishOptions(files=tmp_path / "beside"))
        .publish(1, {"a": torch.ones(2)})
        .wait()
        .version
        == 1
    )
    (tmp_path / "beside" / "vocab.txt").write_bytes(11 * b"x")
    with pytest.raises(SnapshotError, match=r"vocab\.txt: is too large"):
        Publisher(tmp_path / "b", options=PublishOptions(files=tmp_path / "beside")).publish(
            1, {"a": torch.ones(2)}
        ).wait()
