"""Holds the command line: one module for each command, and `app` with their options."""
