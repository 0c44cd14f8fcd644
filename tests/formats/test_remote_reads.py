"""Checkpoints of others far away: few requests and few bytes for a listing and a part, over S3 and HTTP."""

import contextlib
import json
import warnings
from urllib.parse import quote, urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from zstandard import ZstdCompressor

from snapshot import Snapshot, StateDict
from tests.formats.remote_copies import on_s3
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.versions import ALONE
from tests.plugins.snapshot_gguf.gguf_files import file_of, rounded
from tests.plugins.snapshot_orbax.orbax_items import item

MiB = 1 << 20
BIG = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
STATE = {"big": BIG, **{f"t{index}": torch.full((10,), float(index)) for index in range(20)}}


def torch_file(folder):
    torch.save(STATE, folder / "x.pt")
    return "x.pt"


def dcp_folder(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(STATE), checkpoint_id=folder, **ALONE)
    return ""


def hugging_face(folder):
    names = list(STATE)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, chosen in files.items():
        save_file({name: STATE[name] for name in chosen}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in files.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ""


def torch_parts(folder):
    names = list(STATE)
    files = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for file, chosen in files.items():
        torch.save({name: STATE[name] for name in chosen}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in files.items() for name in chosen}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return ""


def gguf_file(folder):
    (folder / "x.gguf").write_bytes(file_of(STATE))
    return "x.gguf"


def orbax_folder(folder):
    arrays = {"big": chunked(BIG)} | {name: chunked(each) for name, each in STATE.items() if name != "big"}
    item(folder, arrays)
    return ""


def chunked(tensor):
    """The metadata and the chunks of an array of zarr: four of the long one, so that few bytes have a part of it."""
    rows = len(tensor) // 4 if tensor.ndim == 2 else len(tensor)
    chunks = [rows, *tensor.shape[1:]]
    metadata = {"shape": list(tensor.shape), "chunks": chunks, "dtype": "<f4", "compressor": {"id": "zstd"}}
    parts = {
        ".".join([str(number), *["0"] * (tensor.ndim - 1)]): ZstdCompressor().compress(each.numpy().tobytes())
        for number, each in enumerate(tensor.split(rows))
    }
    return metadata, parts


@contextlib.contextmanager
def on_http(folder, nginx):
    name = f"{folder.parent.name}-{folder.name}"
    (nginx.folder / name).mkdir()
    for file in folder.rglob("*"):
        (nginx.folder / name / file.name).write_bytes(file.read_bytes())
    parts = urlsplit(nginx.url)
    with FaultProxy(f"http://{parts.netloc}") as proxy:
        yield proxy, f"{proxy.url}{parts.path}/{quote(name)}", None


@pytest.fixture(params=["moto", "nginx"], ids=["s3", "http"])
def place(request):
    """Puts a folder's files on a server."""
    if request.param == "moto":
        pytest.importorskip("boto3")
        server = request.getfixturevalue("moto")
        return lambda folder: on_s3(folder, server)
    server = request.getfixturevalue("nginx")
    return lambda folder: on_http(folder, server)


@pytest.mark.parametrize(
    "write", [torch_file, dcp_folder, hugging_face, torch_parts, gguf_file], ids=lambda each: each.__name__
)
def test_foreign_checkpoint_on_s3_or_http_is_listed_read_in_part_and_restored(tmp_path, place, write):
    folder = tmp_path / "f"
    folder.mkdir()
    name = write(folder)
    with place(folder) as (proxy, url, options):
        snapshot = Snapshot(f"{url}/{name}".rstrip("/"), storage_options=options)
        assert snapshot.get_manifest()["0/big"].shape == (1024, 1024)
        listed = len(proxy.requests), sum(each.response_bytes for each in proxy.requests)
        assert torch.equal(snapshot.read_object("0/big", box=[slice(500, 502), slice(3, 9)]), BIG[500:502, 3:9])
        parts = len(proxy.requests), sum(each.response_bytes for each in proxy.requests)
        live = StateDict({key: torch.zeros_like(each) for key, each in STATE.items()})
        snapshot.restore({"all": live})
        assert all(torch.equal(live[key], each) for key, each in STATE.items())
        total = len(proxy.requests), sum(each.response_bytes for each in proxy.requests)
    assert listed[0] <= 24
    assert listed[1] < MiB // 2
    assert parts[0] - listed[0] <= 8
    assert parts[1] - listed[1] < MiB
    assert total[0] - parts[0] <= 40
    assert total[1] - parts[1] < sum(file.stat().st_size for file in folder.iterdir()) + MiB


def test_gguf_blocks_are_read_by_ranges(tmp_path, place):
    long = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "x.gguf").write_bytes(file_of({"long": (long, "Q8_0")}))
    with place(folder) as (proxy, url, options):
        snapshot = Snapshot(f"{url}/x.gguf", storage_options=options)
        assert snapshot.get_manifest()["0/long"].dtype == "float32"
        before = sum(each.response_bytes for each in proxy.requests)
        assert torch.equal(snapshot.read_object("0/long", box=[slice(500, 502)]), rounded(long)[500:502])
        assert sum(each.response_bytes for each in proxy.requests) - before < MiB // 2
        assert torch.equal(snapshot.read_object("0/long"), rounded(long))


def test_orbax_arrays_are_read_from_an_object_store(tmp_path, moto):
    pytest.importorskip("boto3")
    folder = tmp_path / "f"
    orbax_folder(folder)
    stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    with on_s3(folder, moto) as (proxy, url, options):
        snapshot = Snapshot(url, storage_options=options)
        assert snapshot.get_manifest()["0/big"].shape == (1024, 1024)
        before = sum(each.response_bytes for each in proxy.requests)
        assert torch.equal(snapshot.read_object("0/big", box=[slice(500, 502), slice(3, 9)]), BIG[500:502, 3:9])
        assert sum(each.response_bytes for each in proxy.requests) - before < stored // 2
        live = StateDict({key: torch.zeros_like(each) for key, each in STATE.items()})
        snapshot.restore({"all": live})
        assert all(torch.equal(live[key], each) for key, each in STATE.items())
