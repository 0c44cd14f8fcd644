"""What a state was computed with: recorded by each take, and compared at a restore and by `snapshot diff`."""

from snapshot_environment.facts import note

__all__ = ["note"]
