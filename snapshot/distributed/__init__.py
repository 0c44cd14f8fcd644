"""Ranks: the participants of an operation, and how they agree."""
