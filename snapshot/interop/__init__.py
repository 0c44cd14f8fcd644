"""Checkpoint APIs of other libraries, implemented with this library's engine."""
