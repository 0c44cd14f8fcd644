"""Whole checkpoints: verify, diff, copy, convert."""
