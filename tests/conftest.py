"""What holds for all tests."""

from hypothesis import settings

# A machine that is busy with something else is slow, and no test says anything about time.
settings.register_profile("snapshot", deadline=None)
settings.load_profile("snapshot")
