"""Several snapshots under one root: the newest, the ones to delete, when to save, and when to stop."""
