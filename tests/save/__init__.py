"""Taking a snapshot."""
