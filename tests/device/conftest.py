"""Keeps the fake accelerator out of every process but the one that is started for it."""

collect_ignore = ["fakedev.py", "on_fakedev.py"]
