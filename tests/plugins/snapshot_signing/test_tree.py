"""The tree of hashes of one file, and where its leaves are."""

import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from snapshot.tensors.digest import HASH_SIZE, LEAF, FileTree, RunningTree, tree_of
from snapshot_signing.keys import join_leaves, leaves_path, place_leaves

SIZES = st.sampled_from([0, 1, 31, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF, 3 * LEAF + 5])
SHORT = bytes(range(256)) * 5


def content(nbytes):
    return (SHORT * (nbytes // len(SHORT) + 1))[:nbytes]


def plain_root(data):
    """The root as docs/guides/signatures.md describes it, without this library's code."""
    leaves = b"".join(
        hashlib.sha256(b"snapshot leaf\0" + data[begin : begin + LEAF]).digest() for begin in range(0, len(data), LEAF)
    )
    return hashlib.sha256(b"snapshot file\0" + len(data).to_bytes(8, "little") + leaves).digest()


@given(SIZES, st.lists(st.integers(0, 3 * LEAF + 5), max_size=4))
def test_hash_tree_of_pieces_of_any_length_has_the_documented_root(nbytes, cuts):
    data = content(nbytes)
    places = [0, *sorted(min(cut, nbytes) for cut in cuts), nbytes]
    running = RunningTree()
    running.update(memoryview(data)[begin:end] for begin, end in pairwise(places))
    made = running.finish()
    assert made == tree_of(data)
    assert made.root == plain_root(data)
    assert made.size == nbytes


@given(SIZES.filter(bool), st.data())
def test_hash_tree_root_changes_with_every_byte_and_length(nbytes, data):
    whole = bytearray(content(nbytes))
    before = tree_of(whole).root
    at = data.draw(st.integers(0, nbytes - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    assert tree_of(whole).root != before
    whole = bytearray(content(nbytes))
    assert tree_of(whole[:-1]).root != before
    assert tree_of(whole + b"\0").root != before


def test_hash_tree_leaves_cannot_be_taken_for_a_file():
    """A file whose bytes are another one's leaves, with its mark or without, has another root."""
    held = tree_of(content(3 * LEAF))
    marked = b"snapshot file\0" + held.size.to_bytes(8, "little") + held.leaves
    assert held.root not in (tree_of(held.leaves).root, tree_of(marked).root)
    assert held.root != FileTree(held.size + 1, held.leaves).root


@given(st.dictionaries(st.integers(0, 30), SIZES, max_size=8), st.integers(1, 3))
def test_hash_tree_leaves_are_where_readers_look_for_them(sizes, ranks):
    files = {f"data/0123456789ab-{number % ranks}-{number}.bin": size for number, size in sizes.items()}
    trees = {name: tree_of(content(size)) for name, size in files.items()}
    joined, places = join_leaves(trees), place_leaves(files)
    for name, tree in trees.items():
        if tree.size <= LEAF:
            assert name not in places
            continue
        path, begin, end = places[name]
        assert path == leaves_path(name)
        assert joined[path][begin:end] == tree.leaves
        assert (end - begin) % HASH_SIZE == 0
    assert sum(map(len, joined.values())) == sum(end - begin for _, begin, end in places.values())
