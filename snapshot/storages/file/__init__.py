"""Local and mounted file systems."""

from snapshot.storages.file.file_storage import FileStorage

__all__ = ["FileStorage"]
