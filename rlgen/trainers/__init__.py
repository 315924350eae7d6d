"""Trainers: one loop for all, each algorithm two pure hooks."""
