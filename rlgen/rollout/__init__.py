"""Turns prompts into groups of sampled completions, and samples into micro-batches; owns the journal and the rollout files."""
