"""Runs functions of the user, rewards and tools, in processes that can be killed."""
