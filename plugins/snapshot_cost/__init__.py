"""What a run costs: its bytes, objects and requests."""
