"""Tensors as bytes: where they lie, what they are called on storage, and how their bytes are digested."""
