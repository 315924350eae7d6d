"""Runs the training step: sample, reward, build a window, update, report. One loop serves all algorithms."""
