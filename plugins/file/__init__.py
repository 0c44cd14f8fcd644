"""Local and mounted file systems."""

from snapshot.plugins.file.file_storage import FileStorage

__all__ = ["FileStorage"]
