"""DeepSpeed: its checkpoints are read and written as universal ones, and its engine saves snapshots."""
