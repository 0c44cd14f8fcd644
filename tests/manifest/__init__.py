"""The manifest."""
