"""URLs are read as they were written, and their text never shows a secret."""

import os
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.io.storage import URL, check_path

SCHEMES = st.sampled_from(["s3", "gs", "memory", "recording+file", "simplecache::s3"])
SEGMENT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/?@"), min_size=1, max_size=12)
LOCATION = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join)
QUERY = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
SECRET = st.text("abcXYZ019+=%-_.~!:", min_size=8, max_size=40)


@given(SCHEMES, LOCATION, QUERY)
def test_url_parse_of_reveal_gives_the_same_url(scheme, location, query):
    url = URL(scheme, location, query)
    assert URL.parse(url.reveal()) == url


@given(SEGMENT.filter(lambda name: name not in (".", "..")))
def test_url_of_a_file_keeps_every_name(name):
    url = URL("file", f"/folder/{name}")
    assert URL.parse(url.reveal()) == url
    assert str(url) == f"/folder/{name}"
    assert URL.parse(str(url)) == url


@given(SCHEMES, SEGMENT.filter(lambda name: ":" not in name), SECRET, LOCATION, QUERY)
def test_url_text_hides_the_password_and_the_query(scheme, user, secret, location, query):
    url = URL.parse(f"{scheme}://{user}:{secret}@{location}?{query}")
    shown = f"{scheme}://{user}:***@{location.rstrip('/')}" + ("?***" if query else "")
    assert str(url) == shown
    assert repr(url) == f"URL({shown!r})"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:secret@bucket/run@v2", "s3://key:***@bucket/run@v2"),
        ("s3://key:sec/ret+x@bucket/run", "s3://key:***@bucket/run"),
        ("s3://key:@bucket", "s3://key:***@bucket"),
        ("s3://token@bucket", "s3://***@bucket"),
        ("http://host:9000/run@v2", "http://host:9000/run@v2"),
        ("http://host/run:1@v2", "http://host/run:1@v2"),
        ("https://host/run?X-Signature=abc", "https://host/run?***"),
        ("https://host/run?", "https://host/run"),
    ],
)
def test_url_text_hides_only_secrets(text, shown):
    assert str(URL.parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/run", URL("s3", "bucket/run")),
        ("S3://Bucket/Run/", URL("s3", "Bucket/Run")),
        ("s3://bucket/run?versionId=1", URL("s3", "bucket/run", "versionId=1")),
        ("s3://bucket/a b#c+d%41", URL("s3", "bucket/a b#c+d%41")),
        ("/a/b?c", URL("file", "/a/b?c")),
        ("/a/b/", URL("file", "/a/b")),
        ("file:///a/b%20c", URL("file", "/a/b c")),
        ("file://localhost/a", URL("file", "/a")),
        ("simplecache::s3://bucket/run", URL("simplecache::s3", "bucket/run")),
        ("recording+file:///a", URL("recording+file", "/a")),
    ],
)
def test_url_parse_keeps_the_written_text(text, url):
    assert URL.parse(text) == url


def test_url_parse_of_a_path_without_a_scheme_is_a_file_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert URL.parse("run/1") == URL("file", os.path.join(os.getcwd(), "run/1"))
    assert URL.parse("C:/run") == URL("file", os.path.join(os.getcwd(), "C:/run"))
    assert URL.parse("~/run") == URL("file", "/home/somebody/run")


@pytest.mark.parametrize("text", ["file://relative", "file://host/path", "file://"])
def test_url_parse_refuses_a_file_url_with_a_host(text):
    with pytest.raises(ValueError, match="three slashes"):
        URL.parse(text)


@pytest.mark.parametrize(
    ("text", "path", "joined"),
    [
        ("s3://bucket/run?versionId=1", "data/1", "s3://bucket/run/data/1?versionId=1"),
        ("s3://bucket", "data/1", "s3://bucket/data/1"),
        ("memory://run", "", "memory://run"),
        ("/", "run", "file:///run"),
        ("/a b", "c%41", "file:///a%20b/c%2541"),
    ],
)
def test_url_join_adds_a_path_before_the_query(text, path, joined):
    assert URL.parse(text).join(path).reveal() == joined


@given(st.lists(SEGMENT.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4))
def test_check_path_accepts_paths_below_the_root(parts):
    path = "/".join(parts)
    assert check_path(path) == path
    assert os.path.normpath(os.path.join("/root", path)) == f"/root/{path}"


@given(st.lists(st.sampled_from(["", ".", "..", "a", "b"]), min_size=1, max_size=5))
def test_check_path_refuses_paths_that_could_leave_the_root(parts):
    path = "/".join(parts)
    if {"", ".", ".."} & set(parts):
        with pytest.raises(ValueError, match="a path in a storage must be relative"):
            check_path(path)
    else:
        assert check_path(path) == path


def test_url_parse_decodes_percent_quoting_of_file_urls(tmp_path):
    folder = tmp_path / "ünï #1"
    assert URL.parse(f"file://{quote(str(folder))}").location == str(folder)
    assert URL.parse(folder.as_uri()) == URL.parse(str(folder))


@pytest.mark.parametrize("text", ["s3:/bucket/run", "file:/tmp/x", "https:/host", "fsspec+s3:/a", "gs:/"])
def test_url_parse_refuses_a_scheme_with_one_slash(text):
    with pytest.raises(ValueError, match="two slashes"):
        URL.parse(text)


@pytest.mark.parametrize("text", ["./s3:/bucket", "/s3:/bucket", "a:1/b", "c:/b", "run:5", "x/s3:/y"])
def test_url_parse_accepts_paths_that_resemble_a_scheme(text):
    assert URL.parse(text).scheme == "file"
