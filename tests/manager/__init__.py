"""SnapshotManager."""
