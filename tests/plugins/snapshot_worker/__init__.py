"""The writer process."""
