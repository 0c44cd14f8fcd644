"""Accelerators, on a fake one."""
