"""`snapshot bench`: what saving and restoring cost, beside raw I/O and other libraries."""
