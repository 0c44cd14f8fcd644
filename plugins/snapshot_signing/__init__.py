"""Signed snapshots."""
