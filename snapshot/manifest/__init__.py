"""The contents of a manifest: entries, the document that holds them, and their validation."""
