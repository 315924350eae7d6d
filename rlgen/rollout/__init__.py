"""Prompts to groups of sampled completions, and samples to micro-batches."""
