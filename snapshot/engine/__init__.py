"""The impure middle: the I/O loop, memory, staging, writing, reading and committing."""
