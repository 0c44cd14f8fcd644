"""Snapshots that were damaged, or made to do harm."""
