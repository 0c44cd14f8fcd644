"""Killed processes, lost power, broken disks, concurrent users, and the HTTP proxy that makes faults."""
