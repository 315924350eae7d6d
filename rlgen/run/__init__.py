"""The run directory: everything a run leaves behind."""
