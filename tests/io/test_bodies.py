"""Sinks of responses, and bodies of requests, without a server."""

import pytest

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError
from snapshot.io import bodies, retry
from snapshot.io.url import URL

WHERE = URL.parse("https://host/run/file")


@pytest.mark.parametrize(
    ("begin", "end", "header", "full"),
    [
        (0, None, None, False),
        (5, None, "bytes=5-", False),
        (0, 4, "bytes=0-3", False),
        (3, 4, "bytes=3-3", False),
        (4, 4, "bytes=4-3", True),
    ],
)
def test_sink_range_is_what_has_not_arrived(begin, end, header, full):
    sink = bodies.ResponseSink(WHERE, begin, end, None)
    assert sink.range == header
    assert sink.full is full
    with pytest.raises(NotImplementedError):
        sink.take(b"")


@pytest.mark.parametrize(
    ("at", "total", "token", "size", "kind"),
    [
        (4, 10, "t", None, None),
        (4, 8, "t", None, None),
        (4, None, None, 9, None),
        (4, 9, "t", 9, None),
        (3, 10, "t", None, StorageError),
        (5, 10, "t", None, StorageError),
        (4, 10, "u", None, StorageConflictError),
        (4, 10, "t", 9, CorruptSnapshotError),
        (4, 10, "t", 11, CorruptSnapshotError),
        (4, 7, "t", None, CorruptSnapshotError),
    ],
)
def test_sink_starts_checks_offset_version_and_size(at, total, token, size, kind):
    sink = bodies.ResponseSink(WHERE, 4, 8, "t")
    sink.size = size
    if kind is None:
        sink.starts(at, total, token)
        assert sink.token == "t"
        return
    with pytest.raises(kind, match="https://host/run/file") as caught:
        sink.starts(at, total, token)
    assert type(caught.value) is kind


def test_sink_keeps_the_version_of_the_first_response():
    sink = bodies.ResponseSink(WHERE, 0, None, None)
    sink.starts(0, None, None)
    assert sink.token is None
    sink.starts(0, None, "t")
    sink.starts(0, None, None)
    assert sink.token == "t"


class Told:
    def __init__(self):
        self.gained = self.moved = 0

    def gain(self):
        self.gained += 1

    def progress(self):
        self.moved += 1


def test_sink_counts_only_new_bytes_as_a_gain():
    sink = bodies.BytesSink(WHERE, None)
    sink.attempt = told = Told()
    sink.starts(0, None, "t")
    sink.take(b"abc")
    sink.take(b"de")
    assert (told.gained, told.moved, sink.position) == (2, 0, 5)
    sink.starts(0, None, "t")  # a server without ranges
    assert (sink.position, sink.data) == (0, b"")
    sink.take(b"abcd")
    assert (told.gained, told.moved) == (2, 1)
    sink.take(b"e")
    assert (told.gained, told.moved) == (2, 2)
    sink.take(b"f")
    assert (told.gained, told.moved, sink.data) == (3, 2, b"abcdef")


def test_sink_of_a_file_without_a_length_ends_with_the_response():
    sink = bodies.BytesSink(WHERE, None)
    sink.starts(0, None, None)
    sink.take(b"abc")
    assert not sink.full
    sink.ended()
    assert sink.full
    assert sink.end == 3
    sink = bodies.BytesSink(WHERE, None)
    sink.starts(0, 4, None)
    sink.take(b"abc")
    with pytest.raises(retry.TransientError, match="byte 3 of 4"):
        sink.ended()
    sink.take(b"d")
    sink.ended()
    assert sink.full


@pytest.mark.parametrize(("total", "limit", "fits"), [(5, 5, True), (6, 5, False), (None, 5, True), (6, None, True)])
def test_sink_limit_is_checked_before_and_while_bytes_arrive(total, limit, fits):
    sink = bodies.BytesSink(WHERE, limit)
    if fits:
        sink.starts(0, total, None)
    else:
        with pytest.raises(StorageError, match=r"6 bytes.* 5 "):
            sink.starts(0, total, None)
    sink.take(b"abc")
    sink.take(b"de")
    if limit is None:
        sink.take(b"f")
        return
    with pytest.raises(StorageError, match=r"6 bytes.* 5 "):
        sink.take(b"f")
    assert sink.data == b"abcde"


@pytest.mark.parametrize("cuts", [(9,), (1,) * 9, (2, 3, 4), (3, 3, 3), (5, 4), (12,)])
def test_sink_fills_buffers_in_order(cuts):
    held = [bytearray(3), bytearray(0), bytearray(1), bytearray(5)]
    sink, data, at = bodies.BufferSink(WHERE, 7, held, None), b"abcdefghixyz", 0
    assert (sink.position, sink.end) == (7, 16)
    for cut in cuts:
        sink.take(data[at : at + cut])
        at += cut
        assert sink.position == 7 + min(at, 9)
    assert held == [b"abc", b"", b"d", b"efghi"]
    assert sink.full


def test_request_body_is_read_like_a_file():
    body = bodies.RequestBody([b"abc", b"", memoryview(b"defg"), bytearray(b"h")])
    assert (len(body), body.nbytes, bool(body)) == (8, 8, True)
    assert body.seekable()
    assert [body.read(2), body.read(3), body.tell(), body.read(), body.read(), body.tell()] == [
        b"ab",
        b"cde",
        5,
        b"fgh",
        b"",
        8,
    ]
    assert [body.seek(1), body.read(1), body.seek(2, 1), body.read(None)] == [1, b"b", 4, b"efgh"]
    assert [body.seek(-2, 2), body.read(1), body.read(9)] == [6, b"g", b"h"]
    assert body.read(0) == b""
    body.seek(0)
    assert body.read() == b"abcdefgh"
    empty = bodies.RequestBody([b""])
    assert (len(empty), empty.read(), bool(empty)) == (0, b"", False)


def test_request_body_after_some_bytes_is_the_rest():
    body = bodies.RequestBody([b"abc", b"defg"])
    body.attempt = told = Told()
    assert [body.after(n).read() for n in range(8)] == [b"abcdefg"[n:] for n in range(8)]
    body.after(3).progress()
    assert told.moved == 1
    bodies.RequestBody([b"x"]).progress()
