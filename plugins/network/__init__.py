"""Shared parts of network storages: retries, and bodies that are sent and received without extra copies."""
