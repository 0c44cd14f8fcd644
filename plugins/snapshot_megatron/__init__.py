"""Megatron: its checkpoints from before `torch_dist`, Megatron-core's and Megatron-Bridge's savers."""
