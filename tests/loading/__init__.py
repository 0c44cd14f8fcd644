"""Restoring and reading."""
