"""Checks that engine and trainer compute with the same weights, and that their log-probs are comparable."""
