"""Runs rewards: functions of a completion or of a group, called with arguments by name in processes that can be killed."""
