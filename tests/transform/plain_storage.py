"""A storage without renames."""

from snapshot.io.storage import Capabilities
from snapshot.storages.memory import MemoryStorage


class Plain(MemoryStorage):
    """Cannot rename, as object stores cannot."""

    capabilities = Capabilities(durable=False, shares="copy", guarded_commit=True)
