"""Sends copies of a run's records to trackers: wandb, trackio, tensorboard, mlflow. A failure of theirs never reaches the run.

open.py       recipe -> `Sinks`, which the loop's reporter and the writer of rollouts call; a queue and a thread for each tracker
worker.py     the tracker's library, in a process of its own
wandb.py, …   one tracker each

Why not `accelerate.tracking`: it calls these libraries in the trainer's process, where one that hangs stops the run.
"""
