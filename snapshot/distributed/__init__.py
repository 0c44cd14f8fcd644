"""Ranks: who takes part, and how they agree."""
