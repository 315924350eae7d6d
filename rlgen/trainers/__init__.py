"""Runs the training step: sample, reward, build a train batch, update, report. One loop serves all algorithms."""
