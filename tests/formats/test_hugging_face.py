"""Folders with `pytorch_model.bin`, in one file or several with an index: every verb reads them, and runs no pickle."""

import json
import pickle
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import save_file

import snapshot
import snapshot_merge
from snapshot import CorruptSnapshotError, RestoreError, Snapshot, SnapshotNotFoundError, Target
from snapshot.errors import UnsafeObjectError
from snapshot.errors import UnsupportedFormatError as Unsupported
from snapshot.formats.hugging_face import describe_folder
from snapshot.formats.registry import SearchedFolder
from snapshot.io.loop import run as run_soon
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL, Context
from tests.formats.hugging_face_folders import INDEX, model, write
from tests.helpers.states import expect_equal


def expect_equal_in_any_order(got, expected):
    expect_equal(dict(sorted(got.items())), dict(sorted(expected.items())))


@pytest.fixture(params=[1, 2, 3], ids=["one file", "two files", "three files"])
def folder(request, tmp_path):
    write(tmp_path / "hf", request.param)
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "training_args.bin").write_bytes(pickle.dumps(print))
    return tmp_path / "hf"


def test_pytorch_model_bin_is_listed_read_restored_and_verified(folder):
    state = model().state_dict()
    opened = Snapshot(folder)
    assert opened.exists()
    assert opened.metadata.format == "torch.save"
    assert {path for path in opened.get_manifest() if path != "0"} == {f"0/{name}" for name in state}
    expect_equal(dict(opened.read_object("0")), dict(state))
    assert torch.equal(opened.read_object("0/2.weight", box=[1]), state["2.weight"][1])
    other = model()
    for each in other.state_dict().values():
        each.zero_()
    opened.restore({"net": other})
    expect_equal(dict(other.state_dict()), dict(state))
    assert opened.verify()
    expect_equal_in_any_order(snapshot.load(folder), state)


def test_pytorch_model_bin_is_converted_compared_merged_and_copied(folder, tmp_path):
    state = dict(model().state_dict())
    for target, kind in (("a.safetensors", "safetensors"), ("b.pt", "torch"), ("c", "dcp"), ("d", "snapshot")):
        Snapshot(folder).convert(Target(tmp_path / target, kind))
        expect_equal_in_any_order(snapshot.load(tmp_path / target), state)
    floats = {name: each for name, each in state.items() if each.is_floating_point()}
    snapshot_merge.merge([folder, folder], tmp_path / "mean")
    expect_equal_in_any_order({name: snapshot.load(tmp_path / "mean")[name] for name in floats}, floats)
    Snapshot(folder).copy(tmp_path / "copy")
    assert {each.name for each in (tmp_path / "copy").iterdir()} == {
        each.name for each in folder.iterdir() if each.name.startswith("pytorch_model")
    }
    assert not Snapshot.diff(folder, tmp_path / "copy")
    assert Snapshot.diff(folder, write(tmp_path / "new", 1, {**state, "2.bias": torch.zeros(4)}) and tmp_path / "new")


def test_pytorch_model_bin_copy_replaces_files_that_would_be_opened_first(folder, tmp_path):
    (tmp_path / "old").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "old" / "model.safetensors")
    with pytest.raises(snapshot.SnapshotExistsError, match=r"model\.safetensors: exists already"):
        Snapshot(folder).copy(tmp_path / "old")
    Snapshot(folder).copy(Target(tmp_path / "old", overwrite=True))
    expect_equal_in_any_order(snapshot.load(tmp_path / "old"), model().state_dict())


def test_pytorch_model_bin_index_can_be_opened(tmp_path):
    state = write(tmp_path)
    expect_equal(dict(Snapshot(tmp_path / INDEX).read_object("0")), dict(state))
    Snapshot(tmp_path / INDEX).copy(tmp_path / "to" / "x.bin.index.json")
    expect_equal(dict(Snapshot(tmp_path / "to").read_object("0")), dict(state))


def test_pytorch_model_bin_is_ignored_beside_safetensors(tmp_path):
    write(tmp_path, 1)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(snapshot.load(tmp_path)) == ["w"]


@pytest.mark.parametrize("name", ["adapter_model.bin", "diffusion_pytorch_model.bin", "adapter_model.safetensors"])
def test_hugging_face_adapters_and_pipeline_parts_are_opened(tmp_path, name):
    (save_file if name.endswith("s") else torch.save)({"w": torch.ones(2)}, tmp_path / name)
    assert snapshot.load(tmp_path)["w"].all()


def test_hugging_face_model_saved_by_transformers_is_restored(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    saved = transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path)
    assert "lm_head.weight" not in snapshot.load(tmp_path)
    torch.manual_seed(1)
    fresh = transformers.LlamaForCausalLM(config)
    Snapshot(tmp_path).restore({"model": fresh})
    expect_equal(dict(fresh.state_dict()), dict(saved.state_dict()))
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    config.tie_word_embeddings = False
    apart = transformers.LlamaForCausalLM(config)
    with pytest.raises(RestoreError, match=r"model/lm_head\.weight: is in the application, not in the snapshot"):
        Snapshot(tmp_path).restore({"model": apart})


# Wrong and hostile ones


def run(mark):
    open(mark, "w").close()


class Harm:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return run, (self.mark,)


@pytest.mark.parametrize("parts", [1, 2])
def test_pytorch_model_bin_runs_no_pickle(tmp_path, parts):
    mark = tmp_path / "ran"
    state = dict(write(tmp_path / "m", parts, {"a": torch.ones(2), "harm": Harm(str(mark)), "b": torch.ones(3)}))
    opened = Snapshot(tmp_path / "m")
    assert torch.equal(opened.read_object("0/b"), state["b"])
    with pytest.raises(UnsafeObjectError, match="0/harm: a "):
        opened.read_object("0/harm")
    opened.verify()
    assert not mark.exists()
    Snapshot(tmp_path / "m", allow_pickle=True).read_object("0/harm")
    assert mark.exists()


def change(folder, **weights):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= weights
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../out.bin", "/etc/passwd", "a/../b.bin", "s3://b/x.bin", ""])
def test_pytorch_model_bin_index_cannot_name_files_outside_the_folder(tmp_path, name):
    write(tmp_path / "m")
    torch.save({"w": torch.ones(2)}, tmp_path / "out.bin")
    change(tmp_path / "m", w=name)
    with pytest.raises(CorruptSnapshotError, match="a location must be"):
        Snapshot(tmp_path / "m").get_manifest()


def test_pytorch_model_bin_missing_file_or_tensor_is_named(tmp_path):
    write(tmp_path)
    change(tmp_path, w="pytorch_model-00001-of-00002.bin")
    with pytest.raises(CorruptSnapshotError, match=r"'w' is missing in pytorch_model-00001-of-00002\.bin"):
        Snapshot(tmp_path).get_manifest()
    change(tmp_path, w="absent.bin")
    with pytest.raises(CorruptSnapshotError, match=r"refers to absent\.bin, which is missing"):
        Snapshot(tmp_path).get_manifest()
    torch.save([torch.ones(2)], tmp_path / "absent.bin")
    with pytest.raises(CorruptSnapshotError, match=r"absent\.bin: must have a dict of tensors"):
        Snapshot(tmp_path).get_manifest()


def test_pytorch_model_bin_part_in_another_format_is_named(tmp_path):
    write(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    change(tmp_path, w="old.bin")
    with pytest.raises(Unsupported, match=r"old\.bin: a bare pickle, as written by torch\.save before torch 1\.6"):
        Snapshot(tmp_path).get_manifest()
    (tmp_path / "old.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(Unsupported, match=r"old\.bin: a Git LFS pointer"):
        Snapshot(tmp_path).get_manifest()


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"w": 3}}', b"\xff{", b""])
def test_pytorch_model_bin_invalid_index_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CorruptSnapshotError, match="not an index of weights"):
        Snapshot(tmp_path).get_manifest()


def test_pytorch_model_bin_pickles_of_all_files_share_one_limit(tmp_path):
    write(tmp_path, 3, {f"{index}": torch.ones(1) for index in range(90)})
    storage = open_storage(URL.parse(str(tmp_path)), {}, Context())
    longest = max(len(file.read(file.namelist()[0])) for file in map(ZipFile, tmp_path.glob("*.bin")))
    index = (tmp_path / INDEX).stat().st_size
    limit = max(index, longest) + 100
    assert limit < 3 * longest
    with pytest.raises(CorruptSnapshotError, match="the pickles of its files exceed the limit"):
        run_soon(describe_folder(SearchedFolder(storage.url, storage, open_storage, limit)))


def test_pytorch_model_bin_truncated_file_is_corrupt(tmp_path):
    write(tmp_path, 1)
    data = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptSnapshotError, match="not a torch archive"):
        Snapshot(tmp_path).get_manifest()


def test_hugging_face_folder_without_weights_is_not_found(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SnapshotNotFoundError, match="no snapshot found"):
        Snapshot(tmp_path).get_manifest()


def test_safetensors_files_without_an_index_are_one_checkpoint(tmp_path):
    parts = {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.zeros(3), "z": torch.arange(4)}}
    for name, tensors in parts.items():
        save_file(tensors, tmp_path / name, {"format": "pt"} if name.startswith("b") else None)
    opened, state = Snapshot(tmp_path), parts["a.safetensors"] | parts["b.safetensors"]
    expect_equal_in_any_order(dict(opened.read_object("0")), state)
    assert opened.metadata.metadata == {"format": "pt"}
    assert opened.verify()
    live = snapshot.StateDict({name: torch.empty_like(each) for name, each in state.items()})
    opened.restore({"s": live})
    expect_equal(dict(live), state)
    opened.copy("memory://several")
    assert not Snapshot.diff(tmp_path, "memory://several")
    expect_equal(snapshot.load(tmp_path / "a.safetensors"), parts["a.safetensors"])
    save_file({"y": torch.ones(3)}, tmp_path / "c.safetensors")
    with pytest.raises(
        Unsupported,
        match=r"c\.safetensors and b\.safetensors both have 'y', .* open one of them:\n  a\.safetensors\n  b",
    ):
        Snapshot(tmp_path).get_manifest()


def test_safetensors_numbered_parts_need_their_index(tmp_path):
    for number in (1, 2):
        save_file({f"x{number}": torch.ones(2)}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    with pytest.raises(Unsupported, match="2 safetensors files but no index"):
        Snapshot(tmp_path).get_manifest()


def test_safetensors_folder_with_several_indices_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
        (tmp_path / f"{name}.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": f"{name}.safetensors"}})
        )
    with pytest.raises(
        Unsupported, match=r"has 2 checkpoints; open the index of one of them:\n  a\.safetensors\.index"
    ):
        Snapshot(tmp_path).get_manifest()
    assert snapshot.load(tmp_path / "a.safetensors.index.json")["x"].all()


# Parts that the ranks of DCP's HuggingFaceStorageWriter wrote


def _write_parts(folder):
    """Write a sharded model three times. Return the whole state."""
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.fsdp import fully_shard

    made = model()
    whole = {name: each.clone() for name, each in made.state_dict().items()}
    fully_shard(made)
    state = made.state_dict()
    files = {name: 1 + at % 2 for at, name in enumerate(state)}
    floats = {name: each for name, each in state.items() if each.is_floating_point()}  # torch merges no others
    save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/one", save_distributed=True))
    save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/two", files, save_distributed=True))
    merged = HuggingFaceStorageWriter(f"{folder}/merged", save_distributed=True, enable_consolidation=True)
    save(floats, storage_writer=merged)
    return whole


def test_dcp_hugging_face_writer_shards_are_joined(two, tmp_path):
    whole = two.run(_write_parts, str(tmp_path))[0]
    floats = {name: each for name, each in whole.items() if each.is_floating_point()}
    for name, expected in {"one": whole, "two": whole, "merged": floats, "merged/sharded": floats}.items():
        expect_equal_in_any_order(snapshot.load(tmp_path / name), expected)
    parts = sorted((tmp_path / "one").iterdir())
    assert len(parts) == 2
    for part in parts:
        with pytest.raises(Unsupported, match="DCP; open its folder"):
            Snapshot(part).get_manifest()
    (tmp_path / "two" / "shard-00001-model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptSnapshotError, match="leave gaps, so a file is missing"):
        Snapshot(tmp_path / "two").get_manifest()
    (tmp_path / "two" / "shard-00002-model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptSnapshotError, match="files of 1 of 2 parts are missing, such as model-00002"):
        Snapshot(tmp_path / "two").get_manifest()
    for part in parts:
        part.rename(part.with_name(f"{part.name[6:11]}.safetensors"))
    with pytest.raises(Unsupported, match="part of a checkpoint of DCP"):
        Snapshot(tmp_path / "one").get_manifest()


@pytest.mark.parametrize(
    ("information", "fault"),
    [
        ({"w": {"saved_offsets": [0]}}, "must have the offsets of 'w', got"),
        ({"w": {"saved_offsets": [-1, 0]}}, "must have the offsets of 'w', got"),
        ({"v": {"saved_offsets": [0, 0]}}, "must have the offsets of 'w', got None"),
        ({"w": 1}, "DCP_SHARDING_INFO"),
        ([], "DCP_SHARDING_INFO"),
    ],
)
def test_dcp_hugging_face_writer_invalid_offsets_are_corrupt(tmp_path, information, fault):
    file = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2, 3)}, file, {"DCP_SHARDING_INFO": json.dumps(information)})
    with pytest.raises(CorruptSnapshotError, match=fault):
        Snapshot(tmp_path).get_manifest()


def test_dcp_hugging_face_writer_shards_that_overlap_or_differ_are_corrupt(tmp_path):
    for rank, (value, begin) in enumerate([(torch.ones(2, 3), 0), (torch.ones(2, 3), 1)], 1):
        information = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [begin, 0]}})}
        save_file({"w": value}, tmp_path / f"shard-{rank:05}-model-00001-of-00001.safetensors", information)
    with pytest.raises(CorruptSnapshotError, match="the parts of 'w' overlap"):
        Snapshot(tmp_path).get_manifest()
    information = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2, 0]}})}
    save_file({"w": value.half()}, tmp_path / "shard-00002-model-00001-of-00001.safetensors", information)
    with pytest.raises(CorruptSnapshotError, match="the parts of 'w' have different dtypes"):
        Snapshot(tmp_path).get_manifest()


# Indices


@pytest.mark.parametrize("part", ["model.fp16-{:05}-of-00002.safetensors", "model-{:05}-of-00002.fp16.safetensors"])
def test_hugging_face_variant_is_opened_by_its_index(tmp_path, part):
    state = {"a": torch.randn(3), "b": torch.randn(2)}
    located = {name: part.format(at) for at, name in enumerate(state, 1)}
    for name, file in located.items():
        save_file({name: state[name]}, tmp_path / file)
    with pytest.raises(Unsupported, match="no index for them"):
        Snapshot(tmp_path).get_manifest()
    (tmp_path / "model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": located}))
    expect_equal_in_any_order(snapshot.load(tmp_path), state)
    expect_equal_in_any_order(snapshot.load(tmp_path / "model.safetensors.index.fp16.json"), state)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_hugging_face_tensor_missing_in_the_index_is_read_and_reported(tmp_path, caplog, suffix):
    state = {"a": torch.randn(3), "b": torch.randn(2)}
    store = save_file if suffix == "safetensors" else torch.save
    store(state, tmp_path / f"part.{suffix}")
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    index = tmp_path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": f"part.{suffix}"}}))
    expect_equal_in_any_order(snapshot.load(tmp_path), state)
    assert f"does not list 1 tensor, which its files have; they are read, too:\n  b in part.{suffix}" in caplog.text
    state = {"b": torch.randn(2), "c": torch.randn(1)}
    store(state, tmp_path / f"more.{suffix}")
    index.write_text(json.dumps({"weight_map": {"a": f"part.{suffix}", "c": f"more.{suffix}"}}))
    with pytest.raises(CorruptSnapshotError, match=r"does not list 'b', which .* both have"):
        Snapshot(tmp_path).get_manifest()
