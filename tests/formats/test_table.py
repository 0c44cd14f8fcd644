"""The table of formats in docs/integrations/interop.md: each cell is tried with a file of the format's own tools."""

import itertools
import json
import re
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from snapshot import Snapshot, Target, load
from tests.helpers.states import equal
from tests.helpers.storage_calls import use
from tests.plugins.snapshot_gguf.gguf_files import file_of
from tests.plugins.snapshot_megatron.megatron_legacy_folders import _write_trained

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/integrations/interop.md"
COUNT = itertools.count()


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 6)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def unzipped(archive, name):
    def make(folder):
        (path,) = TESTS.glob(f"plugins/*/{archive}")
        zipfile.ZipFile(path).extractall(folder)
        return folder / name

    return make


def snapshot(folder):
    model, optimizer = trained()
    Snapshot.take(folder / "s", {"model": model, "optim": optimizer})
    return folder / "s"


def torch_file(folder):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder / "x.pt")
    return folder / "x.pt"


def dcp(folder):
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder / "d", no_dist=True)
    return folder / "d"


def safetensors(folder):
    save_file(trained()[0].state_dict(), folder / "x.safetensors")
    return folder / "x.safetensors"


def hugging_face_bin(folder):
    torch.save(trained()[0].state_dict(), folder / "pytorch_model.bin")
    return folder


def gguf(folder):
    (folder / "x.gguf").write_bytes(file_of(dict(trained()[0].state_dict())))
    return folder / "x.gguf"


def peft(folder):
    names = {"lora_A": (4, 8), "lora_B": (8, 4)}
    weights = {f"base_model.model.q.{name}.weight": torch.randn(shape) for name, shape in names.items()}
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def rank_files(folder):
    model, optimizer = trained()
    for rank in range(2):
        torch.save(model.state_dict(), folder / f"model_world_size_2_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), folder / f"optim_world_size_2_rank_{rank}.pt")
    return folder


def megatron_legacy(folder):
    _write_trained(folder, 2, 1, "distributed")
    return folder


SAMPLES = {
    "snapshot": snapshot,
    "DCP": dcp,
    "safetensors": safetensors,
    "pytorch_model.bin": hugging_face_bin,
    "torch.save": torch_file,
    "files by rank": rank_files,
    "DeepSpeed ZeRO": unzipped("deepspeed_files.zip", "stage3"),
    "DeepSpeed Universal": unzipped("deepspeed_files.zip", "stage2-universal"),
    "torch_checkpointing": unzipped("torch_checkpointing_files.zip", "torch"),
    "Megatron legacy": megatron_legacy,
    "Orbax": unzipped("orbax_files.zip", "ocdbt"),
    "GGUF": gguf,
    "PEFT": peft,
}
WRITTEN = {"snapshot": "snapshot", "DCP": "dcp", "safetensors": "safetensors", "torch.save": "torch"}


def table():
    text = PAGE.read_text().partition("### Formats and operations")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return rows[0][1:], {row[0].replace("`", ""): row[1:] for row in rows[2:]}


COLUMNS, ROWS = table()


def tensors_of(path):
    return {name: entry for name, entry in Snapshot(path).get_manifest().items() if entry.is_tensor and entry.shape}


def expect_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert all(equal(found[name], expected[name]) for name in expected)


def opens(path, folder):
    assert tensors_of(path)
    assert load(path)


def boxes(path, folder):
    for name in list(tensors_of(path))[:8]:
        whole = Snapshot(path).read_object(name)
        assert torch.equal(Snapshot(path).read_object(name, box=[slice(1, 3)]), whole[1:3]), name


def restores(path, folder):
    read = Snapshot(path).read_object
    names = list(tensors_of(path))[:8]
    for name in names:
        live = torch.full_like(whole := read(name), 7)
        assert torch.equal(read(name, live), whole)
        assert torch.equal(live, whole)


def converts(path, folder):
    held = Snapshot(path).get_manifest()
    beyond = [name.partition("/")[2] for name, entry in held.items() if "complex" in str(getattr(entry, "dtype", ""))]
    for to, end in (("snapshot", ""), ("torch", ".pt"), ("safetensors", ".safetensors"), ("dcp", "")):
        exclude = beyond if to == "safetensors" else []  # which has no complex numbers
        target = folder / f"to-{to}{end}"
        Snapshot(path).convert(Target(target, to), exclude=exclude)
        expect_tensors(load(target), load(path, exclude=exclude))


def moments(path, folder):
    assert any(name.rpartition("/")[2] in ("exp_avg", "exp_avg_sq") for name in tensors_of(path))


def remote(path, folder):
    url = f"memory://table-{next(COUNT)}"
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    root = path.parent if path.is_file() else path

    async def upload(storage):
        for each in files:
            await storage.put(each.relative_to(root).as_posix(), each.read_bytes())

    use(url, {}, upload)
    expect_tensors(load(f"{url}/{path.name}" if path.is_file() else url), load(path))


def verifies(path, folder):
    assert Snapshot(path).verify()


CHECKS = {
    "opens": opens, "boxes": boxes, "into live tensors": restores, "verify": verifies, "convert from": converts,
    "moments": moments, "remote": remote,
}  # fmt: skip


@pytest.mark.parametrize("column", CHECKS)
@pytest.mark.parametrize("name", SAMPLES)
def test_formats_table_in_interop_md_is_correct(name, column, tmp_path):
    source, work = tmp_path / "source", tmp_path / "work"
    source.mkdir()
    work.mkdir()
    cell = ROWS[name][COLUMNS.index(column)]
    if cell == "yes":
        CHECKS[column](SAMPLES[name](source), work)
    else:
        assert re.fullmatch("not stored", cell), cell
        with pytest.raises(AssertionError):
            CHECKS[column](SAMPLES[name](source), work)


def _parts(paths):
    """Load each checkpoint by rows over the ranks, and compare the rows with the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for path in paths:
        whole = load(path)
        names = {name: Shard(0) for name, each in whole.items() if each.dim()}
        for name, part in load(path, parts=(mesh, names)).items():
            expected = whole[name]
            if name in names:
                pieces = expected.chunk(dist.get_world_size())
                expected = pieces[dist.get_rank()] if dist.get_rank() < len(pieces) else expected[:0]
            assert equal(part.to_local(), expected), (path, name)


def test_formats_table_formats_load_onto_a_mesh(three, tmp_path):
    held = [name for name in SAMPLES if ROWS[name][COLUMNS.index("sharded")] == "yes"]
    assert len(held) == len(SAMPLES)
    paths = []
    for number, name in enumerate(held):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(str(SAMPLES[name](folder)))
    three.run(_parts, paths)


def test_formats_table_lists_all_formats():
    assert list(ROWS) == list(SAMPLES)
    assert set(COLUMNS) == {*CHECKS, "sharded", "written"}
    assert {name for name in ROWS if ROWS[name][COLUMNS.index("written")] == "yes"} == {
        *WRITTEN,
        "GGUF",
        "PEFT",
        "DeepSpeed Universal",
        "torch_checkpointing",
    }
