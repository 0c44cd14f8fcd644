"""A storage for one test: opened, used and closed on the test's own event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from snapshot.registry import open_storage
from snapshot.storage import URL, Context, Storage
from snapshot.testing.parts import store

DEADLINE = 60.0
"""Timeout of one test in seconds."""

Test = Callable[..., Coroutine[Any, Any, None]]


def on_loop(*needed: str) -> Callable[[Test], Callable[..., None]]:
    """Run an asynchronous test on its own event loop, on which its storage is closed, too.

    Skip the test if the storage lacks a capability in `needed`.
    """

    def wrap(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(self: OpenedStorage, storage: Storage, **fixtures: Any) -> None:
            for name in needed:
                if not getattr(storage.capabilities, name):
                    pytest.skip(f"{type(storage).__name__} does not declare {name!r}")

            async def body() -> None:
                try:
                    await asyncio.wait_for(test(self, storage, **fixtures), DEADLINE)
                finally:
                    await storage.close()

            asyncio.run(body())

        return run

    return wrap


def names(error: pytest.ExceptionInfo[BaseException], storage: Storage, path: str) -> None:
    """Assert that an error names its file."""
    assert str(storage.url.join(path)) in str(error.value)


class OpenedStorage:
    """Fixtures of the conformance tests: a plugin's tests override `url`, and others if needed."""

    @pytest.fixture
    def url(self) -> str:
        """Return a new, empty place for each test."""
        raise NotImplementedError("the tests of a storage must define a fixture `url`")

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """Return the `storage_options` for opening."""
        return {}

    @pytest.fixture
    def context(self) -> Context:
        """Return the context of the operation."""
        return Context()

    @pytest.fixture
    def reopen(self, url: str, options: Mapping[str, Any], context: Context) -> Callable[[], Storage]:
        """Return a function that opens the same place again, as another process would."""
        return lambda: open_storage(URL.parse(url), options, context)

    @pytest.fixture
    def storage(self, reopen: Callable[[], Storage]) -> Storage:
        """Return the storage under test, not connected yet."""
        return reopen()

    async def place(self, storage: Storage, path: str, data: bytes) -> None:
        """Write a file to be read. A plugin that cannot write overrides this."""
        await store(storage, path, data)
