"""Trains language models with online RL, and checks that what it trains on is what the model sampled."""

__version__ = "0.1.0"
