"""The upload of one step to the far root, by one or two hosts: what is sent, committed, withdrawn and deleted."""

import json
from types import SimpleNamespace

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.errors import (
    CorruptSnapshotError,
    RunDeletedError,
    RunForkedError,
    StorageConflictError,
    StorageError,
)
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import ANYTHING
from snapshot.io.url import URL
from snapshot.manager.steps import TakePlace
from snapshot.manifest.document import METADATA, FileEntry, PackedFile
from snapshot.runs.facts import PINNED, path_of, read_facts, tombstone
from snapshot.runs.timeline import Attempt, Facts, Parent, encode_facts
from snapshot.runs.timeline import note_of as metadata_of
from snapshot.save.transaction import claim_path
from snapshot_tiers import far_upload as module
from snapshot_tiers import tier_set
from snapshot_tiers.control import Host, Registration, StepStatus
from snapshot_tiers.far_upload import (
    SHORTEST,
    FarStorage,
    FarUpload,
    Note,
    OpenUploads,
    Outdated,
    PackedUploads,
    Throttled,
    Undecided,
    is_begun,
    note_of,
    read_notes,
    remove_notes,
    table_of,
)
from snapshot_tiers.near_steps import NearFolder, copy_verified
from snapshot_tiers.tiered_steps import TieredRoot, TieredSteps
from tests.helpers.arguments import for_take

RUN = "c" * 12
A = Attempt("a" * 12, RUN, 1)
B = Attempt("b" * 12, RUN, 2, Parent(A.name, 5))
KNOWN = Facts(1, (A,))
VALUES = torch.arange(40_000.0)
"""160 kB."""


def take(folder, step=10, of=A, *, order=1, replaces=False, value=0, **options):
    """Take a step with two files on this host."""
    app = {"s": StateDict(x=VALUES + value)}
    given = {"compression": "zstd", "overwrite": True, **options}
    Snapshot.take(folder / f"step-{step}", app, **for_take(metadata=metadata_of(of, order, replaces=replaces), **given))


class House:
    """A near folder with a step, and a far root with an attempt."""

    def __init__(self, tmp_path):
        self.near, self.far, self.sessions = tmp_path / RUN, tmp_path / "far", []
        self.root = self.open(self.far)
        take(self.near)
        self.put(path_of(1), encode_facts(KNOWN))

    def open(self, path, scheme="file"):
        self.sessions.append(Session(URL(scheme, str(path)), None))
        return self.sessions[-1]

    @property
    def step(self):
        return NearFolder(str(self.near)).steps()[10]

    @property
    def names(self):
        return sorted(self.step.head.sizes())

    @property
    def there(self):
        return self.far / "step-10"

    @property
    def is_committed(self):
        return (self.there / METADATA).exists()

    def put(self, path, data):
        run(self.root.storage.put(path, data, expect=ANYTHING))

    def upload(self, **options):
        """Return an upload, as one host makes it."""
        self.sent = []
        source, target = self.open(self.near / "step-10", "near"), self.open(self.there)
        made = FarUpload(self.root.storage, source, target, self.step, self.sent.append, **options)
        made.target = target.storage
        return made

    def advance(self, upload, here=None, *, facts=KNOWN, names=(), commits=True):
        return run(upload.advance(facts, self.names if here is None else here, names=names, commits=commits))

    def expect_whole(self):
        assert {each.name for each in (self.there / "data").iterdir()} == {name[5:] for name in self.names}
        for name in self.names:
            assert (self.there / name).read_bytes() == (self.near / "step-10" / name).read_bytes()
        assert self.is_committed
        assert not (self.there / claim_path(self.step.save_id)).exists()
        assert not run(is_begun(self.root.storage, 10, self.step.save_id))
        assert Snapshot(self.there).verify().ok


@pytest.fixture
def house(tmp_path):
    made = House(tmp_path)
    yield made
    for each in made.sessions:
        run(each.close())


def test_far_upload_sends_all_files_and_commits_once(house):
    upload = house.upload()
    assert house.advance(upload)
    house.expect_whole()
    assert sum(house.sent) == sum(house.step.head.sizes().values())
    assert upload.facts == KNOWN
    token = (house.there / METADATA).stat()
    assert house.advance(upload)
    assert house.advance(house.upload(), [])
    assert (house.there / METADATA).stat() == token


@pytest.mark.parametrize("first", [0, 1])
def test_far_upload_of_two_hosts_commits_when_all_files_are_there(house, first):
    assert len(house.names) == 2
    one, other = house.upload(), house.upload()
    assert not house.advance(one, [house.names[first]])
    assert run(is_begun(house.root.storage, 10, house.step.save_id))
    assert not house.is_committed
    assert not house.advance(other, [house.names[1 - first]], commits=False)
    assert not house.is_committed  # the first host does that
    assert house.advance(one, [house.names[first]])
    house.expect_whole()
    assert house.advance(other, [], commits=False)


def test_far_upload_sends_a_file_of_wrong_size_again(house):
    upload = house.upload()
    assert not house.advance(upload, commits=False)
    path = house.there / house.names[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert not house.advance(upload)
    assert not house.is_committed
    assert house.advance(upload)
    house.expect_whole()


def test_far_upload_publishes_the_attempts_of_its_steps(house):
    pending = KNOWN.with_pending([B])
    take(house.near, of=B)
    with pytest.raises(Undecided, match="step-10"):
        house.advance(house.upload(), facts=pending)
    assert not (house.there / claim_path(house.step.save_id)).exists()
    upload = house.upload()
    assert house.advance(upload, facts=pending, names=[B.name])
    assert upload.facts == run(read_facts(house.root.storage)) == Facts(2, (A, B))
    house.expect_whole()


def test_far_upload_of_an_attempt_that_another_replaced_is_a_fork(house):
    take(house.near, of=B)
    other = Attempt("d" * 12, RUN, 2, Parent(A.name, 5))
    house.put(path_of(2), encode_facts(Facts(2, (A, other))))
    upload = house.upload()
    with pytest.raises(RunForkedError, match=B.name):
        house.advance(upload, facts=KNOWN.with_pending([B]), names=[B.name])
    assert upload.facts.published == (A, other)


@pytest.mark.parametrize("why", ["off", "buried", "replaced", "deleted"])
def test_far_upload_of_an_unwanted_step_puts_nothing(house, why):
    upload, here, errors = house.upload(), house.names, {"deleted": RunDeletedError}
    if why == "off":  # B began with step 5
        house.put(path_of(2), encode_facts(Facts(2, (A, B))))
    if why == "buried":
        house.put(tombstone(house.step.save_id), b"")
    if why == "replaced":
        take(house.near, value=1)
    if why == "deleted":
        house.put(path_of(1), encode_facts(Facts(1, (Attempt("f" * 12, "f" * 12, 1),))))
    with pytest.raises(errors.get(why, Outdated)):
        house.advance(upload, here)
    assert not house.is_committed
    assert not list(house.there.glob("data/*-*"))[why == "replaced" :]  # its claim


@pytest.mark.parametrize(
    ("order", "replaces", "is_newer"), [(2, True, True), (2, False, False), (1, True, False), (3, True, True)]
)
def test_far_upload_replaces_another_snapshot_of_the_step_only_on_purpose(house, order, replaces, is_newer):
    take(house.far, value=1, order=1)
    take(house.near, order=order, replaces=replaces)
    upload = house.upload()
    if is_newer:
        assert house.advance(upload)
        assert Snapshot(house.there).metadata.save_id == house.step.save_id
        house.expect_whole()
        return
    with pytest.raises(Outdated, match="newer snapshot"):
        house.advance(upload)
    assert Snapshot(house.there).metadata.save_id != house.step.save_id


def test_far_upload_replaces_a_damaged_manifest(house):
    take(house.far)
    data = bytearray((house.there / METADATA).read_bytes())
    data[-9] ^= 1
    (house.there / METADATA).write_bytes(data)
    assert house.advance(house.upload())
    assert Snapshot(house.there).metadata.save_id == house.step.save_id


@pytest.mark.parametrize("pinned", [False, True])
def test_far_upload_pins_what_is_pinned_near(house, pinned):
    if pinned:
        (house.near / "step-10" / PINNED).touch()
    assert house.advance(house.upload())
    assert (house.there / PINNED).exists() == pinned


def at_commit(monkeypatch, upload, work):
    """Do something right before the manifest is put."""
    commit = upload.target.commit

    async def changed(*given, **options):
        monkeypatch.undo()
        work()
        return await commit(*given, **options)

    monkeypatch.setattr(upload.target, "commit", changed)


def test_far_upload_whose_claim_was_removed_begins_again(house, monkeypatch):
    upload = house.upload()
    at_commit(monkeypatch, upload, (house.there / claim_path(house.step.save_id)).unlink)
    assert not house.advance(upload)
    assert not house.is_committed
    assert house.advance(upload)
    house.expect_whole()


def test_far_upload_that_another_host_committed_first_is_whole(house, monkeypatch):
    upload = house.upload()

    async def conflict(*_, **__):
        monkeypatch.undo()
        other = house.upload()
        assert await other.advance(KNOWN, house.names, names=(), commits=True)
        raise StorageConflictError("another host was faster")

    monkeypatch.setattr(upload.target, "commit", conflict)
    assert house.advance(upload)
    house.expect_whole()


@pytest.mark.parametrize("why", ["buried", "off", "deleted", "file"])
def test_far_upload_withdraws_a_manifest_that_must_not_be_there(house, monkeypatch, why):
    """A removal or a later attempt came between the check and the commit."""
    upload = house.upload()

    def change():
        if why == "buried":
            (house.far / ".pruned").mkdir()
            (house.far / tombstone(house.step.save_id)).touch()
        elif why == "off":
            (house.far / path_of(2)).write_bytes(encode_facts(Facts(2, (A, B))))
        elif why == "deleted":
            (house.far / path_of(1)).unlink()
        else:
            (house.there / house.names[0]).unlink()

    at_commit(monkeypatch, upload, change)
    if why == "file":
        assert not house.advance(upload)
        assert not house.is_committed
        assert house.advance(upload)
        house.expect_whole()
        return
    with pytest.raises(RunDeletedError if why == "deleted" else Outdated):
        house.advance(upload)
    assert not house.is_committed
    run(upload.discard())
    assert not [path for path in house.there.rglob("*") if path.is_file()]


def test_far_upload_withdraws_no_manifest_of_another_save(house):
    take(house.far, value=1)
    before = (house.there / METADATA).read_bytes()
    run(house.upload()._withdraw())
    assert (house.there / METADATA).read_bytes() == before


def test_far_upload_looks_again_if_the_answer_to_the_commit_was_lost(house, monkeypatch):
    upload = house.upload()
    commit = upload.target.commit

    async def lost(*given, **options):
        monkeypatch.undo()
        await commit(*given, **options)
        raise StorageError("no answer")

    monkeypatch.setattr(upload.target, "commit", lost)
    with pytest.raises(StorageError, match="no answer"):
        house.advance(upload)
    house.put(tombstone(house.step.save_id), b"")
    with pytest.raises(Outdated, match="removed"):
        house.advance(upload)
    assert not house.is_committed


def test_far_upload_discard_deletes_only_what_is_not_committed(house):
    upload = house.upload()
    assert not house.advance(upload, commits=False)
    (house.there / "data" / ".x.aside").touch()
    run(upload.discard())
    assert not [path for path in house.there.rglob("*") if path.is_file()]
    upload = house.upload()
    assert house.advance(upload)
    run(upload.discard())
    house.expect_whole()


# Compressed files


def test_far_upload_compresses_long_files_and_describes_them(house):
    take(house.near, order=2, compression=None)
    (name,) = house.names
    assert house.advance(house.upload(compress=True))
    assert (house.there / name).stat().st_size < (house.near / "step-10" / name).stat().st_size
    assert {path.name for path in (house.there / "data").iterdir()} == {name[5:], table_of(name)[5:]}
    far = Snapshot(house.there)
    assert far.metadata.format == "snapshot/2"
    assert far.verify().ok
    opened = FarStorage(house.open(house.there).storage)
    assert run(opened.stat(name)).size == house.step.head.sizes()[name]
    near = (house.near / "step-10" / name).read_bytes()
    read = bytearray(len(near) - 7)
    run(opened.read_into(name, 7, [read]))
    assert read == near[7:]


@pytest.mark.parametrize("compress", [False, True])
def test_far_upload_describes_a_file_that_two_hosts_sent_in_different_forms(house, monkeypatch, compress):
    take(house.near, order=2, compression=None)
    one, other, names = house.upload(compress=compress), house.upload(compress=not compress), house.names

    async def copy_after_the_other(*given, **options):
        monkeypatch.undo()
        assert await other.advance(KNOWN, names, names=(), commits=True)
        await copy_verified(*given, **options)

    monkeypatch.setattr(module, "copy_verified", copy_after_the_other)
    assert house.advance(one, commits=False)
    far = Snapshot(house.there)
    assert far.metadata.format == ("snapshot/2" if compress else "snapshot/1")
    assert far.verify().ok
    assert not list((house.there / "data").glob("*.json"))
    assert not (house.there / claim_path(house.step.save_id)).exists()


def test_far_upload_with_a_short_table_is_sent_again(house):
    take(house.near, order=2, compression=None)
    (name,) = house.names
    upload = house.upload(compress=True)
    assert not house.advance(upload, commits=False)
    notes = run(read_notes(upload.target, house.step.save_id))
    assert notes.keys() == {name}
    assert notes[name].size == (house.there / name).stat().st_size
    assert notes[name].table == (house.there / table_of(name)).stat().st_size
    (house.there / table_of(name)).write_bytes(b"short")
    assert not house.advance(upload)
    assert house.advance(upload)
    assert Snapshot(house.there).verify().ok


def test_read_notes_reads_those_of_one_save_and_passes_over_damaged_ones(house):
    storage, save_id = house.open(house.there).storage, "0123456789ab"
    note = Note(3, 4, "of the table", "of the file")
    put = {
        f"data/{save_id}-0-0.json": b'{"size": 3, "table": 4, "table_digest": "of the table", "digest": "of the file"}',
        f"data/{save_id}-0-1.json": b"{",
        f"data/{save_id}-0-2.json": b'{"size": 3, "table": 4, "table_digest": "", "digest": "", "more": 1}',
        f"data/{save_id}-0.json": b"a part of a manifest",
        f"data/{save_id}-0-3.bin": b"",
        "data/ba9876543210-0-0.json": b"{}",
    }
    for name, data in put.items():
        run(storage.put(name, data, expect=ANYTHING))
    assert run(read_notes(storage, save_id)) == {f"data/{save_id}-0-0.safetensors": note}
    run(remove_notes(storage, save_id))
    assert sorted(run(storage.list("data/"))) == sorted(list(put)[3:])


def test_note_describes_a_packed_file_for_the_far_manifest():
    name = "data/0123456789ab-0-7.safetensors"
    assert (table_of(name), note_of(name)) == (f"{name[:-12]}.bin", f"{name[:-12]}.json")
    note = Note(30, 8, "t", "d")
    packed = note.describe(name)
    assert packed == PackedFile(module.CODEC, 30, (f"{name[:-12]}.bin", 0, 8), "t", "d")
    assert Note.of(packed) == note
    assert Note.of(PackedFile(module.CODEC, 30, ("x", 5, 13), "t", "d")) == note
    assert module._is_of_an_uploader(name, FileEntry(9, packed=packed))
    assert not module._is_of_an_uploader(name, FileEntry(9))
    assert not module._is_of_an_uploader("data/0123456789ab-0-8.safetensors", FileEntry(9, packed=packed))


class Range:
    begin, end, plain, digest = 0, 100, True, ""


class File:
    def __init__(self, location="x.safetensors", size=SHORTEST, **changes):
        self.location, self.size = location, size
        self.ranges = [type("Changed", (Range,), changes)]


def test_packed_uploads_leave_short_and_compressed_files_alone(house, monkeypatch):
    uploads = PackedUploads(house.open(house.near / "step-10", "near"), house.open(house.there))

    async def ranges(*_):
        return [(1, "F32")]

    monkeypatch.setattr(uploads, "_ranges", ranges)
    plain = [File("x.bin"), File(size=SHORTEST - 1), File(begin=1), File(plain=False)]
    assert [run(uploads.pack(file)) for file in plain] == [None] * 4
    packing = run(uploads.pack(File()))
    assert packing.spill == str(house.near / "step-10")
    assert uploads._memory.limit == uploads._target.budget.total // 2
    uploads.made["x.safetensors"] = Note(1, 1, "", "")
    for name in ("x.json", "x.bin"):
        run(house.sessions[-1].storage.put(name, b""))
    run(uploads._publish("x.safetensors", None))
    assert uploads.made == {}
    assert not list(house.there.glob("*"))


@pytest.mark.parametrize(("free", "has_room"), [(150, False), (151, True)])
def test_packed_uploads_need_room_for_half_as_much_again(monkeypatch, free, has_room):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    assert module._has_room("x", 100) == has_room


def test_packed_uploads_refuse_a_damaged_header(house):
    take(house.near, order=2, compression=None)
    path = house.near / "step-10" / house.names[0]
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(CorruptSnapshotError, match="its header"):
        house.advance(house.upload(compress=True))
    assert not house.is_committed


# Reads at a limited rate


def test_throttled_reads_wait_for_the_bytes_before_them(house, monkeypatch):
    near, name = house.open(house.near / "step-10", "near").storage, next(n for n in house.names if "safe" in n)
    now, pauses = [100.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    async def pause(_, seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(module, "in_thread", pause)
    storage = Throttled(near, rate=100.0)
    buffers = [bytearray(50), bytearray(150)]
    run(storage.read_into(name, 0, buffers))
    assert pauses == [2.0]
    assert b"".join(buffers) == (house.near / "step-10" / name).read_bytes()[:200]
    now[0] += 10  # what was not used then is lost
    run(storage.read_into(name, 0, [bytearray(100)]))
    now[0] -= 0.5
    run(storage.read_into(name, 0, [bytearray(100)]))
    assert pauses == [2.0, 1.0, 1.5]
    run(storage.read_into(name, 0, [bytearray()]))
    assert len(pauses) == 3


# Several uploads


def test_open_uploads_close_what_ended_in_the_next_turn(house):
    given = Registration(RUN, KNOWN, A.name, str(house.far), {}, "latest", 0, [Host("a", "a", [0])], 0, "", rate=None)
    uploads, state = OpenUploads(), StepStatus(house.step.save_id)
    folder = NearFolder(str(house.near))
    assert uploads.is_tidy
    root = uploads.root(given)
    assert uploads.root(given) is root
    upload = uploads.begin(folder, house.step, state, given)
    assert uploads.get(10) is upload
    assert uploads.get(11) is None
    assert not house.advance(upload, commits=False)
    assert state.sent == sum(house.step.head.sizes().values())
    uploads.end(11)
    assert uploads.is_tidy
    uploads.end(10)
    assert uploads.get(10) is None
    assert not uploads.is_tidy
    assert [path for path in house.there.rglob("*") if path.is_file()]
    uploads.tidy()
    assert uploads.is_tidy
    assert not [path for path in house.there.rglob("*") if path.is_file()]
    upload = uploads.begin(folder, house.step, state, given)
    assert house.advance(upload)
    uploads.release(10)
    assert not uploads.is_tidy
    uploads.tidy()
    house.expect_whole()  # its files stay
    uploads.reset = True
    assert not uploads.is_tidy
    uploads.tidy()
    assert uploads.is_tidy
    assert uploads.root(given) is not root
    uploads.begin(folder, house.step, state, given)
    uploads.close()
    assert uploads.get(10) is None
    assert uploads.is_tidy


def test_is_begun_is_true_while_there_is_a_claim(house):
    assert not run(is_begun(house.root.storage, 10, house.step.save_id))
    assert not house.advance(house.upload(), [])
    assert run(is_begun(house.root.storage, 10, house.step.save_id))
    assert not run(is_begun(house.root.storage, 10, "0123456789ab"))
    assert not run(is_begun(house.root.storage, 11, house.step.save_id))


def test_far_manifest_names_no_file_of_another_step(house):
    before = house.near / "step-10"
    take(house.near, step=20, base=str(before))
    folder = NearFolder(str(house.near))
    near = folder.steps()[20]
    assert any(file.origin for file in near.head.files.values())
    upload = FarUpload(
        house.root.storage,
        house.open(house.near / "step-20", "near"),
        house.open(house.far / "step-20"),
        near,
        lambda _: None,
    )
    assert run(upload.advance(KNOWN, sorted(near.head.sizes()), names=(), commits=True))
    files = json.loads((house.far / "step-20" / METADATA).read_bytes().splitlines()[0])
    assert '"origin"' not in json.dumps(files)
    assert Snapshot(house.far / "step-20").verify().ok


@pytest.mark.parametrize(("patience", "waits"), [(60, True), (0, False)])
def test_wait_far_gives_other_ranks_of_the_host_time_to_store_the_manifest(monkeypatch, patience, waits):
    asked = []

    def state_of(status, step, save_id, *, wait, patience):
        asked.append(wait)

    tiers = SimpleNamespace(link=SimpleNamespace(ask=lambda *_: None), _far_state=state_of, patience=1.0)
    monkeypatch.setattr(tier_set, "APPEARS", patience)
    tier_set.TierSet.wait_far(tiers, 10, "save id", None)
    assert asked == [waits]


def test_step_that_is_written_directly_does_not_replace_one_that_cannot_be_looked_at(tmp_path):
    class Root:
        def step_url(self, step):
            return URL.parse(str(tmp_path / f"step-{step}"))

        async def folders(self):
            raise StorageError("the far root does not answer")

    steps = SimpleNamespace(root=Root(), options=SimpleNamespace(far="far", options={}), _patience=1.0)
    place = TieredSteps.place_of(steps, 3, "no space", "take")
    assert place == TakePlace(f"file://{tmp_path}/step-3", {}, near=False, replaces=False)


def test_restore_that_cannot_read_the_far_root_names_the_option_offline():
    def read_far(steps, patience):
        raise StorageError("the far root does not answer")

    root = SimpleNamespace(views=[], _tiers=SimpleNamespace(read_far=read_far), _patience=1.0, _offline=False)
    with pytest.raises(StorageError, match="does not answer") as caught:
        TieredRoot.read_facts(root)
    assert "offline=True" in caught.value.__notes__[0]
