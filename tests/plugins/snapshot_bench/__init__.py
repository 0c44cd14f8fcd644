"""Benchmarks that prove claims at scale, and tests of `snapshot bench`."""
