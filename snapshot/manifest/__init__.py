"""Contents of a manifest: entries, the document with the entries, and their validation."""
