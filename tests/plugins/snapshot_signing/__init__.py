"""Signatures, from the tree of hashes to what a reader with a key refuses."""
