"""A save on storage: whatever happens to it, it is committed whole, or nothing of it is left."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.distributed.exchange import Exchange, OutcomeUnknown
from snapshot.distributed.group import SOLO
from snapshot.errors import CommitUnknown, CorruptSnapshotError, RankError, SnapshotExistsError, StorageError
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import Limits
from snapshot.io.url import URL
from snapshot.manifest import document
from snapshot.manifest.document import METADATA
from snapshot.save import planned_take
from snapshot.save.commit import commit_together
from snapshot.save.take_slots import TakeSlot
from snapshot.save.transaction import State, Transaction, claim_path, pending_saves
from snapshot.storages.file.file_storage import FileStorage
from snapshot.storages.file.files import LocalFileWriter
from snapshot.testing import faulty

SAVE = "0123456789ab"
MANIFEST = b'{"format":"x","save_id":"0123456789ab"}'
DATA = f"data/{SAVE}-0-0.safetensors"


def transaction(root, scheme="file"):
    session = Session(URL.parse(f"{scheme}://{root}"), None)
    return session, Transaction(session, Exchange(SOLO, "take", 10), SAVE)


def left(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) if root.exists() else []


async def put(session, path, data=b"data"):
    await session.storage.put(path, data)


async def put_and_commit(session, save, path, data=b"data"):
    async with save:
        await save.claim()
        await put(session, path, data)
        await save.commit(MANIFEST)


def test_transaction_commit_leaves_the_manifest_and_its_files(tmp_path):
    session, save = transaction(tmp_path)

    async def work():
        async with save:
            assert save.state is State.BEGUN
            await save.claim()
            assert save.state is State.WRITING
            assert SAVE in pending_saves()
            await put(session, DATA)
            await put(session, f"data/{SAVE}-1-0.json")
            await save.commit(MANIFEST, [f"data/{SAVE}-1-0.json"])

    run(work())
    assert save.state is State.COMMITTED
    assert left(tmp_path) == [METADATA, DATA]
    assert SAVE not in pending_saves()


@pytest.mark.parametrize("when", ["claimed", "writing", "written"])
def test_transaction_error_leaves_no_files(tmp_path, when):
    session, save = transaction(tmp_path)

    async def work():
        if when == "claimed":
            await save.claim()
            assert left(tmp_path) == [claim_path(SAVE)]
            await save.abort()
            return
        async with save:
            await save.claim()
            if when == "written":
                save.will_write([DATA])
                await put(session, DATA)
            raise KeyError("planned")

    if when == "claimed":
        run(work())
    else:
        with pytest.raises(KeyError):
            run(work())
    assert save.state is State.ABORTED
    assert left(tmp_path) == []
    assert SAVE not in pending_saves()


def test_transaction_that_never_began_deletes_nothing(tmp_path):
    session, save = transaction(tmp_path)
    run(put(session, DATA))
    assert run(save.abort()) == ""
    assert left(tmp_path) == [DATA]


def test_transaction_conflicts_with_another_snapshot_and_keeps_it(tmp_path):
    session, save = transaction(tmp_path)
    other = b'{"format":"x","save_id":"ffffffffffff"}'
    with pytest.raises(SnapshotExistsError, match="another take committed first"):
        run(put_and_commit(session, save, METADATA, other))
    session.__exit__()
    assert left(tmp_path) == [METADATA]
    assert save.state is State.ABORTED


def test_transaction_whose_manifest_is_refused_leaves_no_files(tmp_path):
    with faulty(on="commit", error=StorageError("refused")):
        session, save = transaction(tmp_path, "faulty+file")
        with pytest.raises(StorageError, match="refused"):
            run(put_and_commit(session, save, DATA))
    assert save.state is State.ABORTED
    assert left(tmp_path) == []


def test_transaction_whose_commit_response_was_lost_keeps_its_files(tmp_path):
    lost = StorageError("no answer")
    lost.uncertain = True
    with faulty(on="commit", error=lost):
        session, save = transaction(tmp_path, "faulty+file")
        with pytest.raises(CommitUnknown):
            run(put_and_commit(session, save, DATA))
    assert save.state is State.UNKNOWN
    assert left(tmp_path) == [claim_path(SAVE), DATA]
    assert SAVE not in pending_saves()


def test_transaction_whose_commit_is_found_after_a_lost_response_is_settled(tmp_path, monkeypatch):
    committed, right, settled = FileStorage.commit, FileStorage.settle, []

    async def commit(self, *arguments, **options):
        await committed(self, *arguments, **options)
        error = StorageError("no answer")
        error.uncertain = True
        raise error

    async def settle(self):
        await right(self)
        settled.append(await self.list())

    monkeypatch.setattr(FileStorage, "commit", commit)
    monkeypatch.setattr(FileStorage, "settle", settle)
    session, save = transaction(tmp_path)
    run(put_and_commit(session, save, DATA))
    assert save.state is State.COMMITTED
    assert METADATA in settled[-1]
    run(session.close())


def test_transaction_whose_claim_was_revoked_cannot_commit(tmp_path):
    session, save = transaction(tmp_path)
    _, other = transaction(tmp_path)

    async def work():
        async with save:
            await save.claim()
            await put(session, DATA)
            assert await other.revoke()
            await save.commit(MANIFEST)

    with pytest.raises(SnapshotExistsError):
        run(work())
    assert left(tmp_path) == []


def test_transaction_error_before_the_claim_deletes_nothing(tmp_path):
    session, save = transaction(tmp_path)
    run(put(session, DATA))

    async def work():
        async with save:
            raise KeyError("planned")

    with pytest.raises(KeyError):
        run(work())
    assert save.state is State.ABORTED
    assert left(tmp_path) == [DATA]
    assert SAVE not in pending_saves()


def test_transaction_writes_that_fail_together_raise_one_error_without_asyncio_logs(tmp_path, monkeypatch, caplog):
    """Two parts of a file fail at once, as on a full disk: asyncio logs each error that no code retrieves."""
    started: list[asyncio.Event] = []

    async def fail(self, offset, buffers):
        started.append(asyncio.Event())
        if len(started) == 2:
            for each in started:
                each.set()
        await started[-1].wait()
        raise StorageError("the disk is full")

    limits = Limits(preferred_part=1 << 20, parallel_parts=4, parts_per_file=2)
    monkeypatch.setattr(FileStorage, "limits", limits)
    monkeypatch.setattr(LocalFileWriter, "write", fail)
    state = StateDict(**{f"w{number}": torch.zeros(1 << 18) for number in range(6)})
    with pytest.raises(StorageError, match="the disk is full"):
        Snapshot.take(tmp_path / "x", {"s": state})
    assert len(started) == 2
    gc.collect()
    assert "never retrieved" not in caplog.text


class Seen:
    """The result of a commit, as a storage shows it: answers in their order."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def is_committed(self):
        self.asked.append("committed")
        return self.answers.pop(0)

    async def revoke(self):
        self.asked.append("revoke")
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ((True,), None),
        ((False, True), RankError),
        ((False, False, True), None),
        ((False, False, False), CommitUnknown),
    ],
)
def test_commit_of_a_lost_leader_is_decided_by_the_storage(answers, kind, caplog):
    outcome = Seen(*answers)

    class Lost:
        rank = 1

        def note_done(self):
            self.noted = True

        def agree(self, *_):
            raise OutcomeUnknown("rank 0 is lost")

    async def commit(_):
        raise AssertionError

    exchange, url = Lost(), URL.parse("/run/s")
    work = commit_together(url, exchange, outcome, done=1, commit=commit, answer=int)
    if kind is None:
        assert run(work) is None
        assert "/run/s: rank 0 is lost, but the snapshot is committed" in caplog.text
    else:
        with pytest.raises(kind, match=r"/run/s: rank 0 is lost") as caught:
            run(work)
        assert type(caught.value) is kind
        assert isinstance(caught.value.__cause__, OutcomeUnknown)
    assert outcome.asked == ["committed", "revoke", "committed"][: len(answers)]
    assert exchange.noted


def test_commit_together_gives_the_result_of_the_leader():
    async def commit(reports):
        return [*reports, "made"]

    async def work():
        with Exchange(SOLO, "take") as exchange:
            return await commit_together(
                URL.parse("/s"), exchange, Seen(), done="part", commit=commit, answer=list[str]
            ), exchange.posted

    assert run(work()) == (["part", "made"], True)


def test_slot_of_a_take_gives_the_pool_of_all_takes():
    pool = object()
    limits = []
    slot = TakeSlot(SimpleNamespace(pool=lambda limit: (limits.append(limit), pool)[1]))
    assert slot.pool(5) is pool
    assert limits == [5]


def test_take_with_shards_that_do_not_add_up_is_not_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "IN_ONE", 3)
    right = planned_take.shard_checksums
    monkeypatch.setattr(planned_take, "shard_checksums", lambda manifest: (right(manifest)[0], b"another"))
    state = StateDict({f"t{number}": torch.ones(2) for number in range(9)})
    with pytest.raises(CorruptSnapshotError, match="written twice or not at all"):
        Snapshot.take(tmp_path / "s", {"s": state})
    assert not (tmp_path / "s").exists()
