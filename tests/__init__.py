"""The tests of the library, a folder for each of its rooms."""
