"""Hundreds of real ranks on one machine: `python -m tests.scale`. See docs/guides/distributed.md for figures."""
