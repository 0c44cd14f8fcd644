"""The storage plugins, against their servers."""
