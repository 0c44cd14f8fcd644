"""Signatures: who wrote a snapshot, proven for every byte that is read."""
