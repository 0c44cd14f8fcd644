"""The versions in a store: their names, indexes, numbers and chains, and which of them are deleted."""

import json
import secrets

import pytest

from snapshot import KeepLatest
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotExistsError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.io.loop import run
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, ANYTHING, Context
from snapshot.io.url import URL
from snapshot_publish import store as module
from snapshot_publish.store import (
    CLAIM,
    CONTRACT,
    INDEX,
    IndexDetails,
    KnownVersion,
    VersionIndex,
    VersionStore,
    check_file_name,
    decode_index,
    encode_index,
    find_retired,
    version_name,
)
from snapshot_publish.subscriber import FIRST_PAUSE, LONGEST_PAUSE, Failure


@pytest.fixture
def store():
    return VersionStore(open_storage(URL.parse(f"memory://store-{secrets.token_hex(4)}"), None, Context()))


def put(store, path, data=b""):
    run(store.storage.put(path, data, expect=ANYTHING))


def put_index(store, version, before=None, **details):
    data = encode_index(version, before, {"w": "model-0.safetensors"}, IndexDetails(**details))
    put(store, f"{version_name(version)}/{INDEX}", data)
    return decode_index(data, version, "x")


def files(store):
    return sorted(run(store.storage.list("")))


# Numbers and claims


def test_store_numbers_are_those_of_folders(store):
    assert run(store.numbers()) == []
    for path in ("weight_v000002/x", "weight_v000010/x", "weight_v3/x", "other/x", "weight_v000007"):
        put(store, path)
    assert run(store.numbers()) == [2, 10]


def test_store_claim_reserves_the_next_free_number(store):
    assert [run(store.claim("p", "a")) for _ in range(2)] == [1, 2]
    other = VersionStore(store.storage)
    assert run(other.claim("q", "b")) == 3
    put_index(store, 7)
    assert run(store.claim("p", "c")) == 8
    claim = json.loads(run(store.storage.get(f"{version_name(8)}/{CLAIM}")))
    assert claim == {"publisher": "p", "attempt": "c"}


def test_store_claim_of_a_number_that_was_taken_meanwhile_is_the_one_after(store, monkeypatch):
    put(store, f"{version_name(1)}/{CLAIM}")
    put_index(store, 2)

    async def nothing():
        return []

    monkeypatch.setattr(store, "numbers", nothing)
    assert run(store.claim("p", "a")) == 3
    assert f"{version_name(2)}/{CLAIM}" not in files(store)
    assert f"{version_name(1)}/{CLAIM}" in files(store)


def test_store_claim_ends_at_the_last_number(store, monkeypatch):
    monkeypatch.setattr(module, "LAST", 2)
    assert [run(store.claim("p", "a")) for _ in range(2)] == [1, 2]
    with pytest.raises(SnapshotError, match="no free version number below 2"):
        run(store.claim("p", "a"))


def test_store_commit_needs_a_free_number(store):
    number = run(store.claim("p", "a"))
    data = encode_index(number, None, {"w": "f.safetensors"}, IndexDetails())
    run(store.commit(number, data, None))
    assert run(store.read_index(number)).files == {"w": "f.safetensors"}
    assert f"{version_name(number)}/{CLAIM}" not in files(store)
    assert store._known[number].base is None
    with pytest.raises(SnapshotExistsError, match="another publisher"):
        run(store.commit(number, data, None))


@pytest.mark.parametrize("claim", ["own", "other", "gone"])
def test_store_commit_without_guards_reads_the_claim_first(store, monkeypatch, claim):
    number = run(store.claim("p", "a"))
    path = f"{version_name(number)}/{CLAIM}"
    monkeypatch.setattr(module, "commit_condition", _absent)
    capabilities = type("Changed", (), {"guarded_commit": False, "conditional_put": True})
    monkeypatch.setattr(store.storage, "capabilities", capabilities)
    if claim == "other":
        put(store, path, b'{"publisher":"q","attempt":"b"}')
    if claim == "gone":
        run(store.storage.delete([path]))
    if claim == "own":
        run(store._expect_claim(number))
        run(store._expect_claim(number + 1))  # is not this publisher's
        return
    with pytest.raises(SnapshotExistsError, match="was removed by another publisher"):
        run(store.commit(number, b"{}", None))
    assert f"{version_name(number)}/{INDEX}" not in files(store)


async def _absent(*_):
    return ABSENT


@pytest.mark.parametrize("claim", [False, True])
def test_store_delete_attempt_deletes_the_claim_only_if_asked(store, claim):
    number = run(store.claim("p", "a"))
    for name in ("a.safetensors", "b.safetensors"):
        put(store, f"{version_name(number)}/{name}")
    run(store.delete_attempt(number, ["a.safetensors"], claim=claim))
    left = [f"{version_name(number)}/b.safetensors"]
    assert files(store) == sorted(left if claim else [*left, f"{version_name(number)}/{CLAIM}"])


# Chains


def test_store_chain_leads_from_a_full_version_to_the_newest(store):
    put_index(store, 1)
    put_index(store, 2, 1)
    newest = put_index(store, 3, 2, base=run(store.read_index(2)).digest)
    asked = []

    def chain(*here):
        asked.clear()
        found = run(store.chain(newest, lambda base, digest: asked.append((base, digest)) or base in here))
        return [each.version for each in found]

    assert chain() == [1, 2, 3]
    assert asked == [(2, newest.details.base), (1, "")]
    assert (chain(1), chain(2)) == ([2, 3], [3])
    put_index(store, 2, 1, step=5)
    with pytest.raises(CorruptSnapshotError, match="weight_v000002: is not the base of version 3"):
        chain()


@pytest.mark.parametrize(("longest", "is_refused"), [(2, False), (1, True)])
def test_store_chain_ends_after_too_many_deltas(store, monkeypatch, longest, is_refused):
    monkeypatch.setattr(module, "LONGEST_CHAIN", longest)
    put_index(store, 1)
    put_index(store, 2, 1)
    newest = put_index(store, 3, 2)
    if is_refused:
        with pytest.raises(CorruptSnapshotError, match="more than 1 deltas"):
            run(store.chain(newest, lambda *_: False))
    else:
        assert len(run(store.chain(newest, lambda *_: False))) == 3


def test_store_read_of_a_missing_version_is_not_found(store):
    with pytest.raises(StorageNotFoundError):
        run(store.read(4))


# Indexes


def test_index_is_decoded_as_encoded():
    details = IndexDetails("p", 7, 2.5, "base", {"w": "digest"}, {"config.json": (3, "d")})
    data = encode_index(12, 11, {"b": "2.safetensors", "a": "1.safetensors"}, details, total_size=9)
    found = decode_index(data, 12, "x")
    assert (found.version, found.base, found.details) == (12, 11, details)
    assert found.files == {"a": "1.safetensors", "b": "2.safetensors"}
    assert list(found.files) == ["a", "b"]
    full = json.loads(encode_index(12, None, {}, details, total_size=9))
    assert full["metadata"]["total_size"] == 9
    assert "base_version" not in full["metadata"]
    assert decode_index(json.dumps(full).encode(), 99, "x").base is None
    assert found.by_file() == {"1.safetensors": ["a"], "2.safetensors": ["b"]}
    both = VersionIndex(1, None, {"a": "x", "b": "x", "c": "y"}, details, "", {})
    assert both.by_file() == {"x": ["a", "b"], "y": ["c"]}


DELTA = {"version": "000012", "base_version": "000011", **CONTRACT}


@pytest.mark.parametrize(
    ("metadata", "weights", "error", "message"),
    [
        ({"version": "000013"}, {}, CorruptSnapshotError, "version must be 12, got 13"),
        ({"base_version": "000012"}, {}, CorruptSnapshotError, "base_version must be below 12, got 12"),
        ({"base_version": "-1"}, {}, CorruptSnapshotError, "base_version must be a number"),
        ({"base_version": "1" * 13}, {}, CorruptSnapshotError, "base_version must be a number"),
        ({"version": "\u0661\u0662"}, {}, CorruptSnapshotError, "version must be a number"),
        ({next(iter(CONTRACT)): "other"}, {}, UnsupportedFormatError, f"{next(iter(CONTRACT))} must be"),
        ({}, {"__metadata__": "x"}, CorruptSnapshotError, "must not be named"),
        ({}, {"w": "../x"}, CorruptSnapshotError, "plain name"),
        ({module.OWN: "3"}, {}, CorruptSnapshotError, "invalid"),
        ({module.OWN: '{"files": {"f": [1, ""]}}'}, {"w": "f"}, CorruptSnapshotError, "names the file 'f' twice"),
        ({module.OWN: json.dumps({"files": {INDEX: [1, ""]}})}, {}, CorruptSnapshotError, "twice"),
    ],
)
def test_index_that_does_not_fit_is_refused(metadata, weights, error, message):
    data = json.dumps({"weight_map": weights, "metadata": DELTA | metadata}).encode()
    with pytest.raises(error, match=message):
        decode_index(data, 12, "where")


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        ("a", True),
        ("a" * 200, True),
        ("a" * 201, False),
        ("\u00e9" * 100, True),
        ("\u00e9" * 101, False),
        ("", False),
        (".a", False),
        ("a/b", False),
        ("a\\b", False),
        ("a\0b", False),
        ("a\ud800", False),
        ("a.b c", True),
    ],
)
def test_check_file_name_accepts_plain_names(name, is_plain):
    if is_plain:
        assert check_file_name(name, "x") == name
        return
    with pytest.raises(CorruptSnapshotError, match="plain name"):
        check_file_name(name, "x")


# Retention


@pytest.mark.parametrize(
    ("bases", "keep", "gone"),
    [
        ({1: None, 2: 1, 3: None, 4: 3, 5: None}, 1, [1, 2, 3, 4]),
        ({1: None, 2: 1, 3: None, 4: 3, 5: None}, 2, [1, 2]),
        ({1: None, 2: 1, 3: None}, 2, []),
        ({1: None, 2: None, 3: 1}, 1, []),  # the base of a kept one
        ({1: None, 2: 1, 3: None, 4: 2}, 1, []),
        ({2: 1, 3: 2}, 1, []),
        ({2: 1, 3: None}, 1, []),
        ({}, 1, []),
    ],
)
def test_find_retired_keeps_deltas_and_their_bases(bases, keep, gone):
    versions = {number: KnownVersion(base, float(number)) for number, base in bases.items()}
    assert find_retired(versions, KeepLatest(keep), now=100.0) == gone
    assert find_retired(versions, None, now=100.0) == []


def test_store_retire_deletes_versions_and_own_leftovers(store):
    for number in (1, 2, 5):
        put_index(store, number, time=float(number))
        put(store, f"{version_name(number)}/model-0.safetensors")
    put(store, f"{version_name(3)}/{CLAIM}", b'{"publisher":"p","attempt":"a"}')  # of this publisher, that failed
    put(store, f"{version_name(3)}/model-0.safetensors")
    put(store, f"{version_name(4)}/{CLAIM}", b'{"publisher":"q","attempt":"a"}')  # may be writing now
    put(store, f"{version_name(6)}/{CLAIM}", b'{"publisher":"p","attempt":"a"}')  # is newer
    put(store, f"{version_name(7)}/notes.txt")
    put(store, f"{version_name(8)}/{INDEX}", b"damaged")
    store._known[9] = KnownVersion(None, 9.0)  # another publisher has deleted it
    run(store.retire(KeepLatest(2), "p"))
    assert run(store.numbers()) == [2, 4, 5, 6, 7, 8]
    assert store._known == {2: KnownVersion(None, 2.0), 5: KnownVersion(None, 5.0)}
    run(store.retire(None, "other"))
    assert run(store.numbers()) == [2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("names", "age", "is_gone"),
    [
        ((CLAIM, "x.safetensors"), module.DAY, True),
        ((CLAIM, "x.safetensors"), module.DAY - 1, False),
        (("x.safetensors",), module.DAY, False),  # of another library
        (("notes.txt",), module.DAY, False),
    ],
)
def test_store_retire_deletes_old_leftovers_of_other_publishers(store, monkeypatch, names, age, is_gone):
    put_index(store, 2)
    for name in names:
        put(store, f"{version_name(1)}/{name}", b'{"publisher":"q","attempt":"a"}')
    stat = store.storage.stat

    async def aged(path):
        found = await stat(path)
        return type("Stat", (), {"age": age, "size": found.size, "mtime": found.mtime})

    monkeypatch.setattr(store.storage, "stat", aged)
    run(store.retire(None, "p"))
    assert run(store.numbers()) == ([2] if is_gone else [1, 2])


# Versions that could not be used


def test_pull_failure_pause_grows_only_for_the_same_version(monkeypatch):
    def index(digest):
        return VersionIndex(1, None, {}, IndexDetails(), digest, {})

    now = [100.0]
    monkeypatch.setattr("snapshot_publish.subscriber.time.monotonic", lambda: now[0])
    first = Failure.after(None, index("a"), "why")
    assert first == Failure("a", "why", 100.0 + FIRST_PAUSE, FIRST_PAUSE)
    second = Failure.after(first, index("a"), "why")
    assert second.pause == 2 * FIRST_PAUSE
    assert Failure.after(second, index("b"), "why").pause == FIRST_PAUSE
    assert Failure.after(second._replace(pause=LONGEST_PAUSE), index("a"), "").pause == LONGEST_PAUSE
    assert (first.holds(index("a")), first.holds(index("b"))) == (True, False)
    now[0] = first.until
    assert not first.holds(index("a"))
