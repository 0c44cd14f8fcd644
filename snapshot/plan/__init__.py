"""Pure functions that plan writes and reads, without I/O, clock, ranks or storage."""
