"""Checkpoints of other libraries, described by this library's entries, so that every verb works on them."""
