"""Many snapshots under one root: which is the newest, which may go, when to save, when to stop."""
