"""Storages of fsspec: every URL that it knows."""
