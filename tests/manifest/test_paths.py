"""The mapping from keys to paths is injective, and has an inverse."""

from hypothesis import given
from hypothesis import strategies as st

from snapshot.manifest.paths import (
    decode_component,
    decode_key,
    encode_component,
    encode_key,
    find_tagged_keys,
    key_component,
    quote_path,
)

texts = st.text(st.characters(exclude_categories=())) | st.text("%/[]25Fu D80int:1")
keys = texts | st.integers(-(2**70), 2**70) | st.booleans() | st.none() | st.floats(allow_nan=False)


@given(texts)
def test_encode_component_has_an_inverse(text):
    made = encode_component(text)
    assert decode_component(made) == text
    assert "/" not in made
    made.encode()


@given(st.lists(texts, unique=True))
def test_encode_component_is_injective(found):
    assert len({encode_component(text) for text in found}) == len(found)
    assert len({quote_path(encode_component(text)) for text in found}) == len(found)


@given(st.dictionaries(keys, st.none()))
def test_key_component_is_unique_for_the_keys_of_a_dict(found):
    tagged = find_tagged_keys(found)
    made = [key_component(encode_key(key), i in tagged) for i, key in enumerate(found)]
    assert len(set(made)) == len(made)


@given(keys)
def test_decode_key_returns_the_original_key(key):
    back = decode_key(encode_key(key))
    assert type(back) is type(key)
    assert repr(back) == repr(key)


def test_encode_key_returns_none_for_unsupported_keys():
    assert encode_key((1, 2)) is None
    assert encode_key(b"x") is None
    assert encode_key(float("nan")) is None
