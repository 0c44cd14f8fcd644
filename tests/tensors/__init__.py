"""Tensors as bytes."""
