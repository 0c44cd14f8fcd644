"""Exports of a manager's steps in other formats, made in the background by a process of low priority."""

from snapshot_export.kept_export import KeptExport

__all__ = ["KeptExport"]
