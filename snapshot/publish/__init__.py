"""Weights from a training loop into inference engines, through a store."""
