"""Names that plugins were once written against go on for two minor versions, with a warning."""

import importlib

import pytest

from snapshot.plugins.network.retry import RetryPolicy, TransientError, retry_request
from snapshot.plugins.network.transfer import BufferSink, BytesSink, RequestBody, ResponseSink
from snapshot.plugins.objectstore.driver import Driver, Page
from snapshot.plugins.objectstore.object_storage import ObjectStorage

OLD = {
    ("attempts", "PassingError"): TransientError,
    ("attempts", "Patience"): RetryPolicy,
    ("attempts", "patiently"): retry_request,
    ("attempts", "Sink"): ResponseSink,
    ("attempts", "Scatter"): BufferSink,
    ("attempts", "Whole"): BytesSink,
    ("attempts", "Body"): RequestBody,
    ("objects", "ObjectStorage"): ObjectStorage,
    ("objects", "Driver"): Driver,
    ("objects", "Page"): Page,
    ("drivers", "Driver"): Driver,
    ("drivers", "Page"): Page,
}


@pytest.mark.parametrize(("module", "name"), OLD)
def test_an_old_name_is_the_new_one_and_warns(module, name):
    old = importlib.import_module(f"snapshot.plugins.{module}")
    with pytest.warns(FutureWarning, match=OLD[module, name].__name__):
        assert getattr(old, name) is OLD[module, name]


def test_a_name_that_never_was_is_an_error():
    old = importlib.import_module("snapshot.plugins.attempts")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = old.nonsense
