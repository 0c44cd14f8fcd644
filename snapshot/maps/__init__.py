"""Tensor maps: recipes that turn the tensors of one layout into those of another."""
