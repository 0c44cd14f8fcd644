"""What a snapshot says of itself: entries, the document that holds them, and their checks."""
