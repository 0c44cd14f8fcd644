"""Whatever bytes a manifest is: one of our errors, soon, or a manifest."""

import contextlib
import time

import msgspec
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot import Snapshot, SnapshotError, StateDict
from snapshot.manifest.document import METADATA, decode_document
from snapshot.plugins.memory import MemoryStorage  # noqa: F401 - the storage that is written to below
from snapshot.tensors.digest import of_range


def signed(body):
    return b'%s,"digest":"%s"}' % (body, of_range(body).encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes(data, sign):
    with contextlib.suppress(SnapshotError):
        decode_document(signed(data) if sign else data, "here")


def body_of(tmp_path):
    Snapshot.take(tmp_path / "s", {"s": StateDict(a=torch.ones(3), b={1: "x"}, c=2.5, d=(1,))}, overwrite=True)
    return (tmp_path / "s" / METADATA).read_bytes().rpartition(b',"digest"')[0]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_change_of_a_good_manifest(tmp_path, data):
    body = body_of(tmp_path)
    at = data.draw(st.integers(0, len(body) - 1))
    length = data.draw(st.integers(0, 20))
    new = data.draw(
        st.binary(max_size=10) | st.sampled_from([b"1e400", b"-1", b'"', b"[[[[", b"null", b"99999999999999999999"])
    )
    (tmp_path / "s" / METADATA).write_bytes(signed(body[:at] + new + body[at + length :]))
    live = {"s": StateDict(a=torch.zeros(3), b=None, c=None, d=None)}
    with contextlib.suppress(SnapshotError):
        Snapshot(tmp_path / "s").restore(live)
    with contextlib.suppress(SnapshotError):
        Snapshot(tmp_path / "s").verify()
    with contextlib.suppress(SnapshotError):
        Snapshot(tmp_path / "s").get_state_dict_for_key("s")


def test_deep_and_long_documents_end_soon(tmp_path):
    body = msgspec.json.decode(body_of(tmp_path) + b"}")
    began = time.perf_counter()
    for metadata in (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
        data = msgspec.json.encode(body | {"metadata": 0}).replace(b'"metadata":0', b'"metadata":' + metadata)[:-1]
        with contextlib.suppress(SnapshotError):
            decode_document(signed(data), "here")
    entries = {f"0/s/{i}": {"type": "list", "length": 1 << 60} for i in range(1000)} | {
        "0/s": {"type": "list", "length": 1 << 60}
    }
    (tmp_path / "s" / METADATA).write_bytes(signed(msgspec.json.encode(body | {"manifest": entries})[:-1]))
    for verb in (
        lambda s: s.get_state_dict_for_key("s"),
        lambda s: s.restore({"s": StateDict()}),
        lambda s: s.read_object("0/s"),
    ):
        try:
            verb(Snapshot(tmp_path / "s"))
        except SnapshotError:
            pass
        else:
            raise AssertionError
    assert time.perf_counter() - began < 10
