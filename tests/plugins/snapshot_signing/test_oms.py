"""Signatures of a folder as a whole, by ECDSA keys: `snapshot sign --format oms`."""

import hashlib
import json
import os
import shutil
from base64 import b64decode, b64encode
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import save_file

from snapshot import Snapshot, SnapshotManager, StateDict, TakeOptions, load
from snapshot.cli import main
from snapshot.errors import CorruptSnapshotError, SignatureError, SnapshotError, SnapshotNotFoundError, StorageError
from snapshot.storages.memory import MemoryStorage
from snapshot_signing import bundle as bundles
from snapshot_signing import folder as folders
from snapshot_signing.keys import create_keys
from tests.helpers.storage_calls import use

ELEMENTS = 20_000


def key_of(number, curve=ec.SECP256R1):
    return ec.derive_private_key(number, curve())


KEY = key_of(7)
PUBLIC = KEY.public_key()
STRANGER = key_of(8)


def state(value=1.0):
    return {"s": StateDict(w=torch.full((ELEMENTS,), float(value)), step=int(value))}


@pytest.fixture
def step(tmp_path):
    """A signed snapshot."""
    path = tmp_path / "run" / "step-1"
    Snapshot.take(path, state(), options=TakeOptions(guards="off"))
    Snapshot(path).sign(KEY)
    return path


def data_file(path):
    return next((path / "data").glob("*.safetensors"))


def change_byte(path):
    """Change a byte, and neither the size nor the time of the file."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def statement_of(path):
    return json.loads(b64decode(json.loads((path / "model.sig").read_bytes())["dsseEnvelope"]["payload"]))


def write_bundle(path, payload, key=KEY, **fields):
    """Write a bundle with a payload that the key really signs."""
    payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    held = bundles.EcdsaKey(key, "key")
    envelope = {
        "payload": b64encode(payload).decode(),
        "payloadType": bundles.PAYLOAD_TYPE,
        "signatures": [{"sig": b64encode(held.sign(payload)).decode()}],
    }
    made = {
        "mediaType": bundles.MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": held.hint}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    (path / "model.sig").write_text(json.dumps({**made, **fields}))


def sign_again(path, change):
    """Sign a statement that was changed, with the digest of digests that goes with it."""
    statement = statement_of(path)
    change(statement)
    digests = b"".join(bytes.fromhex(each["digest"]) for each in statement["predicate"]["resources"])
    statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(digests).hexdigest()
    write_bundle(path, statement)


def expect_refused(path, *texts, key=PUBLIC, kind=SignatureError):
    with pytest.raises(kind) as raised:
        Snapshot(path, key=key).verify()
    for text in texts:
        assert text in str(raised.value)
    return raised.value


# What verifies


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1])
def test_verify_accepts_what_the_key_has_signed(tmp_path, curve):
    key = key_of(9, curve)
    Snapshot.take(tmp_path / "a", state())
    signed = Snapshot(tmp_path / "a").sign(key)
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    report = Snapshot(tmp_path / "moved", key=key.public_key()).verify()
    assert report.ok
    assert report.signer == signed.signer == str(bundles.EcdsaKey(key, "key"))
    assert report.signer in report.summary
    assert Snapshot(tmp_path / "moved", key=key).verify().signer == report.signer


def test_sign_lists_each_file_in_canonical_order(step):
    statement = statement_of(step)
    files = {path.relative_to(step).as_posix(): path for path in step.rglob("*") if path.is_file()}
    found = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    del files["model.sig"]
    assert found == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert list(found) == sorted(found, key=lambda name: name.split("/"))
    assert statement["subject"][0]["name"] == "step-1"


def test_sign_and_verify_use_the_storage():
    url = "memory://oms/step"
    Snapshot.take(url, state())
    Snapshot(url).sign(KEY)
    assert Snapshot(url, key=PUBLIC).verify().ok
    use(url, {}, lambda storage: storage.put("data/more", b"x"))
    expect_refused(url, "data/more is not signed")


def test_sign_covers_folders_of_other_libraries(tmp_path):
    save_file({"w": torch.arange(300.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".gitattributes").write_text("changed at will")
    assert "all files are signed by" in Snapshot(tmp_path).sign(KEY).summary
    report = Snapshot(tmp_path, key=PUBLIC).verify()
    assert (report.ok, report.unverifiable) == (True, 0)
    (tmp_path / ".gitattributes").unlink()
    assert Snapshot(tmp_path, key=PUBLIC).verify().ok
    (tmp_path / "config.json").write_text("[]")
    expect_refused(tmp_path, "config.json is not the signed one")


def test_sign_replaces_a_bundle_and_also_covers_this_librarys_signature(step, secret, public):
    Snapshot(step).sign(secret)
    expect_refused(step, ".signature is not signed")
    Snapshot(step).sign(KEY)
    assert Snapshot(step, key=PUBLIC).verify().ok
    assert Snapshot(step, key=public).verify().ok


def test_verify_of_a_pinned_step_still_accepts_it(step):
    with SnapshotManager(step.parent, signals=()) as manager:
        manager.pin(1)
        assert Snapshot(step, key=PUBLIC).verify().ok
        manager.unpin(1)
    assert Snapshot(step, key=PUBLIC).verify().ok


def test_verify_needs_little_memory(step):
    assert Snapshot(step, key=PUBLIC).verify(memory_budget_bytes=10_000).ok


def test_verify_shows_its_progress(step):
    seen = []
    Snapshot(step, key=PUBLIC).verify(progress=seen.append)
    assert (
        seen[-1].done
        == seen[-1].total
        == sum(path.stat().st_size for path in step.rglob("*") if path.is_file() and path.name != "model.sig")
    )


# What does not


def test_verify_names_files_that_were_added_or_removed(step):
    (step / "more.txt").touch()
    shutil.copy(data_file(step), step / "data" / "copy")
    data_file(step).unlink()
    with pytest.raises(SignatureError) as raised:
        Snapshot(step, key=PUBLIC).verify()
    assert len(raised.value.faults) == 3
    for text in ("more.txt is not signed", "data/copy is not signed", ".safetensors is missing"):
        assert text in str(raised.value)


def test_verify_finds_a_changed_byte_in_each_file(step):
    for path in sorted(each for each in step.rglob("*") if each.is_file() and each.name != "model.sig"):
        before = path.read_bytes()
        change_byte(path)
        assert expect_refused(step).faults == (f"{path.relative_to(step).as_posix()} is not the signed one",)
        path.write_bytes(before)
    assert Snapshot(step, key=PUBLIC).verify().ok


def test_verify_finds_files_that_were_exchanged(step):
    Snapshot.take(step.parent / "step-2", state(2))
    Snapshot(step.parent / "step-2").sign(KEY)
    shutil.copy(step.parent / "step-2" / "model.sig", step / "model.sig")
    expect_refused(step, "is not signed", "is missing")


def test_verify_refuses_another_key_and_keys_of_another_kind(step, public):
    expect_refused(step, "is by another key", str(bundles.EcdsaKey(STRANGER, "key")), key=STRANGER)
    expect_refused(step, "is not signed: data/", key=public)
    named = {"verificationMaterial": {"publicKey": {}}}
    write_bundle(step, statement_of(step), STRANGER, **named)
    expect_refused(step, "does not match")
    write_bundle(step, statement_of(step), KEY, **named)
    assert Snapshot(step, key=PUBLIC).verify().ok


def test_verify_refuses_unsigned_snapshots(step, tmp_path):
    (step / "model.sig").unlink()
    expect_refused(step, "is not signed: cannot read model.sig")
    (step / "model.sig").mkdir()
    expect_refused(step, "is not signed: cannot read model.sig")
    save_file({"w": torch.arange(3.0)}, tmp_path / "model.safetensors")
    expect_refused(tmp_path, "is not signed: cannot read model.sig")
    (tmp_path / "empty").mkdir()
    expect_refused(tmp_path / "empty", "no snapshot found", kind=SnapshotNotFoundError)


def test_verify_refuses_links(step, tmp_path):
    held = data_file(step)
    shutil.move(held, tmp_path / "elsewhere")
    held.symlink_to(tmp_path / "elsewhere")
    expect_refused(step, held.name, "is a link")
    with pytest.raises(SignatureError, match="is a link"):
        Snapshot(step).sign(KEY)
    sign_again(step, lambda each: each["predicate"]["serialization"].update(allow_symlinks=True))
    expect_refused(step, held.name, "is a link")
    held.unlink()
    shutil.move(tmp_path / "elsewhere", held)
    assert Snapshot(step, key=PUBLIC).verify().ok
    (step / "more").symlink_to(tmp_path)
    expect_refused(step, "more: is a link")
    (step / "more").unlink()
    os.mkfifo(step / "pipe")
    with pytest.raises(StorageError, match="pipe: not a file"):
        Snapshot(step, key=PUBLIC).verify()


@pytest.mark.parametrize("ignored", ["data", ".snapshot_metadata", "config.json"])
def test_verify_leaves_out_no_file_that_a_signature_ignores(step, ignored):
    (step / "config.json").touch()

    def ignore(statement):
        predicate = statement["predicate"]
        predicate["serialization"]["ignore_paths"].append(ignored)
        predicate["resources"] = [each for each in predicate["resources"] if not each["name"].startswith(ignored)]

    Snapshot(step).sign(KEY)
    sign_again(step, ignore)
    expect_refused(step, ignored, "is not signed")


def test_verify_refuses_files_of_the_checkpoint_in_a_folder_that_no_signature_covers(tmp_path):
    (tmp_path / ".git").mkdir()
    save_file({"w": torch.arange(3.0)}, tmp_path / ".git" / "w.safetensors")
    index = {"metadata": {"total_size": 12}, "weight_map": {"w": ".git/w.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    Snapshot(tmp_path).sign(KEY)
    expect_refused(tmp_path, ".git/w.safetensors is not covered by the signature")


def test_verify_ignores_only_a_file_as_a_pin(step):
    (step / ".pinned").mkdir()
    (step / ".pinned" / "more.py").touch()
    expect_refused(step, ".pinned/more.py is not signed")


def test_verify_refuses_a_quick_look(step):
    with pytest.raises(ValueError, match="quick must be False with an ECDSA key"):
        Snapshot(step, key=PUBLIC).verify(quick=True)


def test_verify_accepts_other_fields_and_spellings(step):
    def change(statement):
        statement["subject"][0]["digest"] = {
            "sha256": statement["subject"][0]["digest"]["sha256"].upper(),
            "sha512": "0",
        }
        for each in statement["predicate"]["resources"]:
            each |= {"digest": each["digest"].upper(), "size": 3, "annotations": {"a": [1]}}

    sign_again(step, change)
    assert Snapshot(step, key=PUBLIC).verify().ok


def test_faults_of_names_with_line_breaks_are_one_line_each(step):
    (step / "a\nall is well").touch()
    assert expect_refused(step).faults == ("a\\nall is well is not signed",)
    with pytest.raises(SnapshotError, match=r"cannot sign a file of this name: 'a\\nall is well'; rename it"):
        Snapshot(step).sign(KEY)


def test_sign_notices_a_change_that_keeps_size_and_time(step, monkeypatch):
    before, verify_newest = (step / "model.sig").read_bytes(), folders.verify_newest

    def verify(*given, **named):
        report = verify_newest(*given, **named)
        change_byte(data_file(step))
        return report

    monkeypatch.setattr(folders, "verify_newest", verify)
    with pytest.raises(SnapshotError, match="was changed while it was signed"):
        Snapshot(step).sign(KEY)
    assert (step / "model.sig").read_bytes() == before


def test_verify_reports_damage_that_was_signed(step):
    change_byte(data_file(step))
    path = f"data/{data_file(step).name}"
    digest = hashlib.sha256(data_file(step).read_bytes()).hexdigest()

    def accept(statement):
        next(each for each in statement["predicate"]["resources"] if each["name"] == path)["digest"] = digest

    sign_again(step, accept)
    report = Snapshot(step, key=PUBLIC).verify()
    assert not report.ok
    assert path in report.faults[0]


def test_verify_notices_a_snapshot_that_is_replaced_meanwhile(step, monkeypatch):
    def verify(*arguments, **options):
        (step / "data" / "more").touch()
        return real(*arguments, **options)

    real = folders.verify_newest
    monkeypatch.setattr(folders, "verify_newest", verify)
    expect_refused(step, "was changed while it was verified")
    (step / "data" / "more").unlink()
    with pytest.raises(SnapshotError, match="was changed while it was signed"):
        Snapshot(step).sign(KEY)
    assert b"data/more" not in b64decode(json.loads((step / "model.sig").read_bytes())["dsseEnvelope"]["payload"])


def verify_together(path):
    """Return what a rank gets, and which files it has hashed."""
    hashed = []
    real = folders.Folder._hash

    async def hash_file(folder, path, found, meter):
        hashed.append(path)
        return await real(folder, path, found, meter)

    folders.Folder._hash = hash_file
    try:
        return hashed, Snapshot(path, key=PUBLIC).verify(ranks=True).signer
    except SnapshotError as error:
        return hashed, f"{type(error).__name__}: {error}"
    finally:
        folders.Folder._hash = real


def test_verify_shares_the_files_among_ranks_and_fails_on_all(step, two):
    (one, signer), (other, same) = two.run(verify_together, str(step))
    assert signer == same == str(bundles.EcdsaKey(PUBLIC, "key"))
    assert sorted(one + other) == [each["name"] for each in statement_of(step)["predicate"]["resources"]]
    change_byte(data_file(step))
    for _, text in two.run(verify_together, str(step)):
        assert "is not the signed one" in text


# Bundles that are damaged or hostile


def resource(name="a", **fields):
    return {"name": name, "algorithm": "sha256", "digest": "0" * 64, **fields}


def add_resource(name, **fields):
    return lambda statement: statement["predicate"]["resources"].append(resource(name, **fields))


def set_serialization(**fields):
    return lambda statement: statement["predicate"]["serialization"].update(fields)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add_resource("../a"), "'../a'"),
        (add_resource("/etc/passwd"), "'/etc/passwd'"),
        (add_resource("data/./a"), "'data/./a'"),
        (add_resource("a\0"), "must be relative"),
        (add_resource(""), "must be relative"),
        (add_resource(".snapshot_metadata"), "lists a file twice"),
        (add_resource("model.sig"), "model.sig is missing"),
        (add_resource("a", algorithm="blake3"), "blake3"),
        (add_resource("a", digest="00"), "a is missing"),
        (set_serialization(ignore_paths=["."]), "must be relative"),
        (set_serialization(ignore_paths=["../.."]), "must be relative"),
        (set_serialization(method="shards", shard_size=1), "'shards'"),
        (set_serialization(hash_type="blake2b"), "'blake2b'"),
        (set_serialization(ignore_paths="data"), "Expected `array`"),
        (lambda statement: statement.update(predicateType="https://model_signing/Digests/v0.1"), "Digests/v0.1"),
        (lambda statement: statement.update(_type="x"), "must be https"),
        (lambda statement: statement["subject"].append({"name": "b", "digest": {"sha256": "0" * 64}}), "inconsistent"),
    ],
)
def test_verify_refuses_hostile_statements(step, change, text):
    sign_again(step, change)
    expect_refused(step, text, "run/step-1")


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b"[" * 100_000, b'{"predicateType": NaN}', b"\xff"])
def test_verify_refuses_statements_that_are_none(step, payload):
    write_bundle(step, payload)
    expect_refused(step, "model.sig")


def test_verify_refuses_a_wrong_digest_of_digests(step):
    statement = statement_of(step)
    statement["subject"][0]["digest"]["sha256"] = "0" * 64
    write_bundle(step, statement)
    expect_refused(step, "is inconsistent")


def set_envelope(**fields):
    return lambda bundle: bundle["dsseEnvelope"].update(fields)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_envelope(payload="!"), "is damaged"),
        (set_envelope(payload="e30="), "does not match"),
        (set_envelope(payloadType="text/plain"), "must be application"),
        (set_envelope(signatures=[]), "must have one signature, got 0"),
        (set_envelope(signatures=[{"sig": ""}, {"sig": ""}]), "must have one signature, got 2"),
        (set_envelope(signatures=[{"sig": "AAAA"}]), "does not match"),
        (set_envelope(signatures=3), "Expected `array`"),
        (lambda bundle: bundle.update(mediaType="text/plain"), "text/plain"),
        (lambda bundle: bundle["verificationMaterial"].pop("publicKey"), "certificate"),
        (lambda bundle: bundle.pop("dsseEnvelope"), "dsseEnvelope"),
    ],
)
def test_verify_refuses_damaged_bundles(step, change, text):
    bundle = json.loads((step / "model.sig").read_bytes())
    change(bundle)
    (step / "model.sig").write_text(json.dumps(bundle))
    expect_refused(step, text)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"\xff\xfe", b"[" * 1_000_000, b'{"a":' * 100_000])
def test_verify_refuses_bundles_that_are_none(step, data):
    (step / "model.sig").write_bytes(data)
    expect_refused(step, "model.sig")


def test_verify_limits_the_size_of_a_bundle(step, monkeypatch):
    monkeypatch.setenv("SNAPSHOT_MANIFEST_BYTES", "1000")
    with pytest.raises(StorageError, match="limit"):
        Snapshot(step, key=PUBLIC).verify()


def test_bundle_that_lost_any_byte_is_refused(step):
    data = (step / "model.sig").read_bytes()
    key = bundles.EcdsaKey(PUBLIC, "key")
    whole = bundles.decode_bundle(data, key, "x")
    for at in range(0, len(data), 7):
        try:
            found = bundles.decode_bundle(data[:at] + data[at + 1 :], key, "x")
        except SignatureError:
            continue
        assert found == whole  # the byte was of a field that means nothing here


# What is not signed, and what is not read


def test_sign_refuses_damaged_and_unfinished_snapshots(step):
    before = (step / "model.sig").read_bytes()
    (step / ".take-0123456789ab").touch()
    with pytest.raises(SnapshotError, match=r"\.take-0123456789ab"):
        Snapshot(step).sign(KEY)
    (step / ".take-0123456789ab").unlink()
    change_byte(data_file(step))
    with pytest.raises(CorruptSnapshotError, match="is damaged, so it was not signed"):
        Snapshot(step).sign(KEY)
    assert (step / "model.sig").read_bytes() == before
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(step.parent / "nothing").sign(KEY)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (PUBLIC, "must be a private key, got a public one"),
        (key_of(3, ec.SECP521R1), "P-256 or P-384, got one on secp521r1"),
        (key_of(3, ec.SECP256K1), "P-256 or P-384, got one on secp256k1"),
    ],
)
def test_sign_refuses_public_keys_and_other_curves(step, key, text):
    with pytest.raises(ValueError, match=text):
        Snapshot(step).sign(key)


def test_sign_refuses_a_key_service_with_a_wrong_answer(step, monkeypatch):
    key = bundles.EcdsaKey(KEY, "key", private=True)
    key._private = STRANGER
    with pytest.raises(SignatureError, match="does not match its public key"):
        key.sign(b"x")


def test_verify_refuses_a_storage_that_cannot_list(monkeypatch):
    url = "memory://oms/unlisted"
    Snapshot.take(url, state())
    Snapshot(url).sign(KEY)
    monkeypatch.setattr(MemoryStorage, "capabilities", replace(MemoryStorage.capabilities, list=False))
    with pytest.raises(SnapshotError, match="cannot list files"):
        Snapshot(url, key=PUBLIC).verify()


def test_take_refuses_ecdsa_keys_and_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"must be an Ed25519 key, got an ECDSA key.*snapshot sign --format oms"):
        Snapshot.take(tmp_path / "a", state(), options=TakeOptions(sign=KEY))
    assert not (tmp_path / "a").exists()


def test_reads_with_an_ecdsa_key_are_refused(step):
    signed = Snapshot(step, key=PUBLIC)
    live = state(0)
    reads = [
        lambda: signed.restore(live),
        lambda: signed.read_object("s/w"),
        signed.get_manifest,
        lambda: load(signed),
        lambda: SnapshotManager(step.parent, signals=()).restore_latest(live, key=PUBLIC),
        lambda: Snapshot.take(step.parent / "step-2", live, options=TakeOptions(base=signed)),
        lambda: Snapshot.diff(signed, signed),
    ]
    for read in reads:
        with pytest.raises(ValueError, match=r"key must be an Ed25519 key.*snapshot verify --key"):
            read()
    assert live["s"]["step"] == 0


def test_reads_of_other_formats_with_an_ecdsa_key_are_refused(tmp_path):
    save_file({"w": torch.arange(3.0)}, tmp_path / "model.safetensors")
    Snapshot(tmp_path).sign(KEY)
    with pytest.raises(SnapshotNotFoundError, match="with a key, no other format is read"):
        load(Snapshot(tmp_path, key=PUBLIC))


def test_delete_and_prune_delete_the_bundle_and_a_replaced_snapshot_needs_another(step):
    Snapshot.take(step, state(2), overwrite=True)
    expect_refused(step, "is not signed", "is missing")
    Snapshot(step).sign(KEY)
    assert Snapshot(step, key=PUBLIC).verify().ok
    Snapshot(step).delete()
    assert not step.exists()
    with SnapshotManager(step.parent, keep=1, signals=()) as manager:
        manager.take(2, state(2))
        Snapshot(step.parent / "step-2").sign(KEY)
        manager.take(3, state(3))
    assert sorted(each.name for each in step.parent.glob("step-*")) == ["step-3"]


# Files that snapshots share


class Counted:
    """The bytes that were hashed."""

    def __init__(self, monkeypatch):
        self.nbytes = 0
        self.real = folders.Folder._hash
        monkeypatch.setattr(folders.Folder, "_hash", self.count())

    def count(self):
        async def hash_file(folder, path, found, meter):
            self.nbytes += found.size if path.endswith(".safetensors") else 0
            return await self.real(folder, path, found, meter)

        return hash_file

    def take(self):
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Two signed steps with the same physical file, and what is hashed of them from now on."""
    monkeypatch.setattr(folders, "YOUNG", -1.0)
    first, second = tmp_path / "a", tmp_path / "b"
    Snapshot.take(first, state())
    Snapshot.take(second, state(), options=TakeOptions(base=first))
    (one,), (two,) = (list(path.glob("data/*.safetensors")) for path in (first, second))
    assert one.samefile(two)
    counted = Counted(monkeypatch)
    for path in (first, second):
        Snapshot(path).sign(KEY)
    assert counted.take() == 2 * one.stat().st_size  # what is signed is always hashed
    folders._verified.reset()
    return first, second, counted


def test_verify_hashes_a_file_that_is_shared_with_a_verified_base_once(shared):
    first, second, counted = shared
    nbytes = data_file(first).stat().st_size
    assert Snapshot(first, key=PUBLIC).verify().ok
    assert Snapshot(second, key=PUBLIC).verify().ok
    assert counted.take() == nbytes
    assert Snapshot(first, key=PUBLIC).verify().ok  # what is verified again is read again
    assert counted.take() == nbytes


def test_verify_hashes_files_again_of_a_base_that_was_not_as_it_was_signed(shared):
    first, second, counted = shared
    (first / "more").touch()
    expect_refused(first, "more is not signed")
    (first / "more").unlink()
    change_byte(first / ".snapshot_metadata")
    expect_refused(first, ".snapshot_metadata is not the signed one")
    counted.take()
    assert Snapshot(second, key=PUBLIC).verify().ok
    assert counted.take() == data_file(second).stat().st_size


def test_verify_hashes_files_again_that_are_not_the_same_file(shared):
    first, second, counted = shared
    nbytes = data_file(first).stat().st_size
    assert Snapshot(first, key=PUBLIC).verify().ok
    link = data_file(second)
    shutil.copy2(link, second / "copy")
    (second / "copy").replace(link)
    assert Snapshot(second, key=PUBLIC).verify().ok
    assert counted.take() == 2 * nbytes
    change_byte(link)
    assert expect_refused(second).faults == (f"data/{link.name} is not the signed one",)


def test_verify_finds_a_shared_file_that_was_changed_after_the_base_was_verified(shared):
    first, second, counted = shared
    assert Snapshot(first, key=PUBLIC).verify().ok
    change_byte(data_file(second))  # with the size and the time that it had
    counted.take()
    expect_refused(second, "is not the signed one")
    assert counted.take()


def test_verify_hashes_files_again_that_changed_a_moment_ago_or_were_hashed_long_ago(shared, monkeypatch):
    first, second, counted = shared
    nbytes = data_file(first).stat().st_size
    monkeypatch.setattr(folders, "YOUNG", 1e9)
    for path in (first, second):
        assert Snapshot(path, key=PUBLIC).verify().ok
    assert counted.take() == 2 * nbytes
    monkeypatch.setattr(folders, "YOUNG", -1.0)
    monkeypatch.setattr(folders, "RECENT", 0.0)
    for path in (first, second):
        assert Snapshot(path, key=PUBLIC).verify().ok
    assert counted.take() == 2 * nbytes


# The command


@pytest.fixture
def folder(step, monkeypatch, capsys):
    monkeypatch.chdir(step.parent.parent)
    assert main(["sign", "--format", "oms", "--new-key", "ec"]) == 0
    capsys.readouterr()
    return step.parent.parent


def test_cli_sign_and_verify_with_an_ecdsa_key(folder, capsys):
    assert main(["sign", "run/step-1", "--format", "oms", "--key", "ec", "--json"]) == 0
    signer = json.loads(capsys.readouterr().out)["signer"]
    assert signer.startswith("ecdsa-p256:")
    assert main(["verify", "run", "--key", "ec.pub"]) == 0
    assert f"is signed by {signer}" in " ".join(capsys.readouterr().out.split())
    (folder / "run/step-1/more").touch()
    assert main(["verify", "run/step-1", "--key", "ec.pub"]) == 1
    assert "more is not signed" in " ".join(capsys.readouterr().out.split())
    (folder / "run/step-1/model.sig").unlink()
    assert main(["verify", "run", "--key", "ec.pub"]) == 1


def test_cli_sign_format_says_which_key_it_goes_with(folder, capsys):
    create_keys("ed")
    assert main(["sign", "run/step-1", "--format", "oms", "--key", "ed"]) == 2
    text = capsys.readouterr().err
    assert "must be an ECDSA key for --format oms, got an Ed25519 key, which goes with --format snapshot" in text
    assert main(["sign", "run/step-1", "--format", "snapshot", "--key", "ec"]) == 2
    assert "must be an Ed25519 key for --format snapshot, got an ECDSA key" in capsys.readouterr().err
    assert main(["sign", "run/step-1", "--format", "snapshot", "--key", "ed"]) == 0


def test_cli_sign_new_key_of_the_format_is_a_p256_key(folder):
    key = s.load_pem_private_key((folder / "ec").read_bytes(), None)
    assert isinstance(key.curve, ec.SECP256R1)
    assert (folder / "ec").stat().st_mode & 0o777 == 0o600
    assert s.load_pem_public_key((folder / "ec.pub").read_bytes()) == key.public_key()
