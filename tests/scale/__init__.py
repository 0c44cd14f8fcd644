"""Hundreds of real ranks on one machine: `python -m tests.scale`. See docs/distributed.md for figures."""
