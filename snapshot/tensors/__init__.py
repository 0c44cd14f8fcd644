"""Tensors as bytes: their memory, their names on storage, and their digests."""
