"""The leader's decision before a restore reads: which ranks of a host read the same bytes."""

from types import SimpleNamespace

import pytest

from snapshot.io.url import URL
from snapshot.loading import own_copies
from snapshot.loading.shared_reads import ReadVote, _decide
from snapshot.manifest import entries as e
from snapshot.manifest.containers import DictEntry
from snapshot.manifest.values import IntEntry, StrEntry


def decision(*votes, once=False):
    return _decide([ReadVote(once, reads, host, [], []) for host, reads in votes], URL.parse("/x"))


def decide(*votes, once=False):
    return decision(*votes, once=once).same


@pytest.mark.parametrize(
    ("votes", "same"),
    [
        ([("a", "x"), ("a", "x")], ["x"]),
        ([("a", "x"), ("b", "x")], []),
        ([("a", "x"), ("a", "y")], []),
        ([("a", "x"), ("a", "y"), ("a", "y"), ("b", "x")], ["y"]),
        ([("a", ""), ("a", "")], []),
    ],
)
def test_read_agreement_ranks_of_a_host_with_equal_reads_share_them(votes, same):
    assert decide(*votes) == same


def test_read_once_needs_no_page_cache_agreement():
    assert decide(("a", "x"), ("a", "x"), once=True) == []


def test_read_agreement_speakers_are_only_ranks_that_read_once():
    votes = [("a", "x"), ("b", "y"), ("c", "x")]
    assert decision(*votes, once=True).speakers == [0, 1]
    assert decision(*votes).speakers == [0], "the reply to thousands of ranks must stay short"


# Values that all ranks stored each for itself

DIGEST = "xxh3:" + "1" * 32


def tensor(location="a", digest=DIGEST, dtype="float32", shape=(2,), **more):
    return e.TensorEntry(location, (0, 8), dtype, shape, digest, **more)


def two_boxes(first=DIGEST, second=DIGEST):
    halves = [
        e.Shard((at,), (1,), e.TensorEntry("a", (4 * at, 4 * at + 4), "float32", (1,), digest))
        for at, digest in enumerate((first, second))
    ]
    return e.ChunkedTensorEntry("float32", (2,), halves)


def stored(serializer="bytes", digest=DIGEST, obj_type="x", end=8):
    return e.ObjectEntry("a", (0, end), serializer, obj_type, digest)


OTHER = "xxh3:" + "2" * 32
ARRAY = {"dtype": "<f4", "shape": (2,)}


@pytest.mark.parametrize(
    ("first", "other", "equal"),
    [
        (IntEntry("5"), IntEntry("5"), True),
        (IntEntry("5"), IntEntry("6"), False),
        (IntEntry("5"), StrEntry("5"), False),
        (IntEntry("5"), None, False),
        (tensor(), tensor("b"), True),
        (tensor(), tensor(digest=OTHER), False),
        (tensor(), tensor(shape=(1, 2)), False),
        (tensor(), tensor(dtype="int32"), False),
        (tensor(), two_boxes(), None),
        (two_boxes(), two_boxes(), True),
        (two_boxes(), two_boxes(second=OTHER), False),
        (tensor(digest=None), tensor(), None),
        (tensor(), tensor(digest=None), None),
        (tensor(dtype="odd", digest=None), tensor(dtype="odd"), False),
        (e.NDArrayEntry(tensor(), **ARRAY), e.NDArrayEntry(tensor("b"), **ARRAY), True),
        (e.NDArrayEntry(tensor(), **ARRAY), e.NDArrayEntry(tensor(digest=OTHER), **ARRAY), False),
        (e.NDArrayEntry(tensor(), **ARRAY), e.NDArrayEntry(tensor(), order="F", **ARRAY), False),
        (e.NDArrayEntry(tensor(), **ARRAY), tensor(), False),
        (e.TensorPartsEntry("q", {"a": tensor()}, {}), e.TensorPartsEntry("q", {"a": tensor("b")}, {}), True),
        (e.TensorPartsEntry("q", {"a": tensor()}, {}), e.TensorPartsEntry("q", {"b": tensor()}, {}), False),
        (
            e.TensorPartsEntry("q", {"a": tensor(), "b": tensor()}, {}),
            e.TensorPartsEntry("q", {"a": tensor(), "b": tensor(digest=OTHER)}, {}),
            False,
        ),
        (stored(), stored(), True),
        (stored(), stored(digest=OTHER), False),
        (stored(), stored(serializer="utf8"), False),
        (stored(), stored(obj_type="y"), False),
        (stored(digest=None), stored(digest=None), False),
        (DictEntry([]), DictEntry([]), False),
    ],
)
def test_own_copies_are_equal_if_digests_or_the_bytes_show_it(first, other, equal, monkeypatch):
    """`None`: the bytes are read."""
    read = []

    def compare(opened, twin, *, verify):
        assert verify
        read.append(twin)
        return True

    monkeypatch.setattr(own_copies, "have_equal_bytes", compare)
    held = {f"{rank}/s/x": entry for rank, entry in enumerate((first, first, other)) if entry is not None}

    def copies(world=3, parts=(), manifest=held):
        document = SimpleNamespace(world_size=world, manifest=manifest, parts=parts)
        return own_copies.OwnCopies(SimpleNamespace(document=document))

    known = copies()
    assert known.are_equal("s/x") is (equal is not False)
    assert bool(read) is (equal is None)
    count = len(read)
    assert known.are_equal("s/x") is (equal is not False)
    assert len(read) == count, "it is remembered"
    assert not copies(world=own_copies.MOST_RANKS + 1).are_equal("s/x")
    waits = copies(parts=["more"])
    assert waits.are_equal("s/x") is (equal is not False)
    if other is None:
        waits._opened.document.manifest = {**held, "2/s/x": first}
        assert waits.are_equal("s/x"), "it was in a part that had not been read"
