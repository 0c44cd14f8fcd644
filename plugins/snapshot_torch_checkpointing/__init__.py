"""Checkpoints of torch_checkpointing, read and written."""
