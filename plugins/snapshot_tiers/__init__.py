"""Near folders: steps on each host, replicated and uploaded."""
