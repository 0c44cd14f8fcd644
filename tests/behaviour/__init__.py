"""What holds for a whole save and restore: exact values, faults, limits, races, public names."""
