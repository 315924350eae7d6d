"""Rewards: functions of completions, the user's or built in, called by parameter name."""

from rlgen.rewards.resolve import RewardFunction, resolve
from rlgen.rewards.score import Scorer

__all__ = ["RewardFunction", "Scorer", "resolve"]
