"""Plans: pure functions."""
