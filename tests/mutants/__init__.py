"""Mutants: faults put into the code one at a time, to see which of them the tests find. See `__main__.py`."""
