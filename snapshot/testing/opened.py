"""A storage for one test: opened, used and closed on an event loop of the test's own."""

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
"""Seconds that one test may take."""

Test = Callable[..., Coroutine[Any, Any, None]]


def on_loop(*needed: str) -> Callable[[Test], Callable[..., None]]:
    """Run an asynchronous test on an event loop of its own, on which its storage is closed, too.

    `needed` are the capabilities without which there is nothing to test.
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
    """Assert that an error says which file it is about."""
    assert str(storage.url.join(path)) in str(error.value)


class OpenedStorage:
    """The fixtures of the conformance kit: a plugin's tests say `url`, and the others where it needs them."""

    @pytest.fixture
    def url(self) -> str:
        """Return a fresh, empty place for each test."""
        raise NotImplementedError("the tests of a storage have a fixture `url`")

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """Return the `storage_options` to open it with."""
        return {}

    @pytest.fixture
    def context(self) -> Context:
        """Return what the operation tells the storage."""
        return Context()

    @pytest.fixture
    def reopen(self, url: str, options: Mapping[str, Any], context: Context) -> Callable[[], Storage]:
        """Return what opens the same place once more, as another process would."""
        return lambda: open_storage(URL.parse(url), options, context)

    @pytest.fixture
    def storage(self, reopen: Callable[[], Storage]) -> Storage:
        """Return the storage under test; nothing is connected yet."""
        return reopen()

    async def place(self, storage: Storage, path: str, data: bytes) -> None:
        """Put a file there to be read. A plugin that can't write overrides this."""
        await store(storage, path, data)
