"""Whatever a take accepts of NumPy's, in any container, comes back exactly: type, dtype, byte order, shape, bytes."""

import collections
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from snapshot import Snapshot, StateDict
from tests.helpers.states import equal

EMPTY = {
    "str": np.str_(""),
    "bytes": np.bytes_(b""),
    "void": np.void(b""),
    "str of a zero": np.str_("\0"),
    "bytes that end in zeros": np.bytes_(b"a\0\0"),
    "str that ends in a zero": np.str_("a\0"),
    "str with a lone surrogate": np.str_("\ud800b"),
    "texts": np.array(["", ""], dtype="U0"),
    "texts of no width": np.empty((2,), np.dtype([("a", "U0")]))["a"],
    "bytes of no width": np.empty((2, 2), np.dtype([("a", "S0")]))["a"],
    "voids": np.zeros((2, 3), "V0"),
    "no text at all": np.zeros((0, 2), "U0"),
    "no dimensions": np.array("", dtype="U0"),
    "a record of no width": np.zeros(2, np.dtype([("a", "U0"), ("b", "S0")]))[1],
    "records of no fields": np.zeros(3, np.dtype([])),
    "records with a field of no width": np.zeros(3, np.dtype([("a", "U0"), ("b", ">i4"), ("c", "V0")])),
    "fields of no elements": np.zeros(2, np.dtype([("a", "<f8", (0, 3))])),
    "np.record": np.rec.array([(1, "x")], dtype=[("a", ">i2"), ("b", "U3")])[0],
    "an array of np.record": np.zeros(2, np.dtype((np.record, [("a", "i4")]))),
}


def emptied(value):
    """The same containers, with arrays of the same kind and other content."""
    if isinstance(value, np.ndarray):
        return np.zeros_like(value, subok=False)
    if isinstance(value, np.generic):
        return None
    if isinstance(value, dict):
        return type(value)({key: emptied(child) for key, child in value.items()})
    return type(value)(map(emptied, value))


def check_round_trip(value):
    """Save a value; read it, and restore it over other content, in both ways that a take can write."""
    url = "memory://numpy-exact"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stored as pickles")
        snapshot = Snapshot.take(url, {"state": StateDict(value=value)}, overwrite=True)
    snapshot = Snapshot(url, allow_pickle=True)
    assert equal(value, snapshot.read_object("0/state/value"))
    assert equal(value, snapshot.get_state_dict_for_key("state")["value"])
    for live in (emptied(value), None):
        state = StateDict(value=live)
        snapshot.restore({"state": state})
        assert equal(value, state["value"])
    assert snapshot.verify().ok


@pytest.mark.parametrize("name", EMPTY)
def test_numpy_values_of_zero_width_are_restored(name):
    check_round_trip(EMPTY[name])


@pytest.mark.parametrize("name", EMPTY)
def test_numpy_values_of_zero_width_need_no_pickle(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Snapshot.take("memory://numpy-exact", {"state": StateDict(value=EMPTY[name])}, overwrite=True)


def test_numpy_empty_str_of_an_earlier_version_is_read():
    """It was stored as one zero under a dtype of no width."""
    from snapshot.state import leaves

    assert equal(
        np.str_(""),
        leaves.rebuild_array("p", leaves.wrap_array(np.zeros(4, np.uint8)), "<U0", (), order="C", scalar=True),
    )
    assert equal(
        np.bytes_(b""),
        leaves.rebuild_array("p", leaves.wrap_array(np.zeros(1, np.uint8)), "|S0", (), order="C", scalar=True),
    )


def dtypes():
    """Dtypes of all kinds, of both byte orders, and records of them in records."""
    plain = st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.unsigned_integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
        hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
        hnp.datetime64_dtypes(endianness="?"),
        hnp.timedelta64_dtypes(endianness="?"),
        hnp.unicode_string_dtypes(endianness="?", min_len=1, max_len=4),
        hnp.byte_string_dtypes(min_len=1, max_len=4),
        st.sampled_from(["longdouble", "clongdouble", "V0", "V5", "M8[25s]", ">m8[3D]", "M8"]).map(np.dtype),
    )
    widths = st.sampled_from(["U0", "S0", "V0"])
    wide = plain.filter(lambda each: each.itemsize > 0)
    kinds = st.one_of(st.tuples(plain), st.tuples(widths), st.tuples(wide, st.just((2, 0))))
    records = st.lists(kinds, max_size=3).map(
        lambda found: np.dtype([(f"f{i}", *each) for i, each in enumerate(found)])
    )
    return st.one_of(plain, records, hnp.array_dtypes(wide, max_size=3))


@st.composite
def arrays(draw):
    """Arrays and scalars of random bytes: of no dimensions, empty, not contiguous, in Fortran's order."""
    dtype = draw(dtypes())
    base = np.dtype(dtype.base)
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape, dtype=int)) * base.itemsize
    made = np.zeros(shape, base)
    if count:
        made = np.frombuffer(_bytes(draw, base, count), base).reshape(shape).copy()
    form = draw(st.sampled_from(["plain", "turned", "strided", "scalar", "fortran"]))
    if form == "turned":
        return made.T
    if form == "fortran":
        return np.asfortranarray(made)
    if form == "strided" and made.ndim:
        return made[::2]
    if form == "scalar":
        return made.reshape(-1)[0] if made.size else np.zeros((), base)[()]
    return made


def _bytes(draw, dtype, count):
    """Bytes that every dtype can hold: texts are of ASCII, and bools are bools."""
    if any(kind in str(dtype.descr) for kind in ("U", "b1")) or dtype.kind in "Ub":
        return bytes(count)
    return draw(st.binary(min_size=count, max_size=count))


texts = st.one_of(
    st.text(max_size=4).map(np.str_), st.binary(max_size=4).map(np.bytes_), st.binary(max_size=4).map(np.void)
)


def containers(children):
    """All containers that a take flattens, and which NumPy's values can be in."""
    listed = st.lists(children, max_size=3)
    return st.one_of(
        listed,
        listed.map(tuple),
        listed.map(collections.deque),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), children, max_size=3),
        st.dictionaries(st.text(max_size=3), children, max_size=3).map(collections.OrderedDict),
        st.dictionaries(st.text(max_size=3), children, max_size=3).map(collections.Counter),
    )


@given(st.recursive(st.one_of(arrays(), texts), containers, max_leaves=6))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_numpy_values_are_restored_exactly(value):
    check_round_trip(value)
