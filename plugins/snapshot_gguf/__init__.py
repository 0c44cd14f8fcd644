"""GGUF files, read and written."""

from snapshot_gguf.options import GGUFOptions

__all__ = ["GGUFOptions"]
