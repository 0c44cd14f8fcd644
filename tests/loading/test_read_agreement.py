"""The leader's decision before a restore reads: which ranks of a host read the same bytes."""

import pytest

from snapshot.io.url import URL
from snapshot.loading.shared_reads import ReadVote, _decide


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
