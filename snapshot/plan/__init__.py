"""Pure functions: what is written where, and what is read from where. No I/O, no clock, no ranks, no storage."""
