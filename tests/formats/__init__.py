"""Checkpoints of other libraries."""
