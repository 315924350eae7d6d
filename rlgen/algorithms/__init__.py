"""Algorithms, which define what is minimised: each is two pure functions of tensors, `advantages` and `loss`.

The recipe selects one by `trainer.kind`.
"""
