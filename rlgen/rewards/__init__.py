"""Rewards: functions of a completion, or of a group of them, called by parameter name in processes that can be killed."""
