"""Rewards: functions of a completion, or of a group of them, called by parameter name."""

from rlgen.rewards.resolve import RewardFunction, resolve
from rlgen.rewards.score import Scorer

__all__ = ["RewardFunction", "Scorer", "resolve"]
