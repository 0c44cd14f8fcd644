"""What a state may hold."""
