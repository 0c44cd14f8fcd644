"""Tests that take minutes, each run by its name."""
