"""Writes, reads and compares the run directory: everything that a run leaves on disk."""
