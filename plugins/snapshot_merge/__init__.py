"""Merged weights: averages, weighted sums, and LoRA adapters."""
