"""rlgen: online RL for language models that proves what it trains on."""

__version__ = "0.1.0"
