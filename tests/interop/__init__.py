"""Other libraries' save and load over this one."""
