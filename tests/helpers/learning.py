"""What learns from the samples of a step in one process, with a reward of the name `reward`."""

from typing import Any

from rlgen.algorithms.base import Algorithm
from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.trainers.loop import Learning
from rlgen.trainers.train_batch import TrainBatchBuilder
from rlgen.trainers.update import Updater
from rlgen.types import WHOLE


def learning(
    algorithm: Algorithm, policy: Policy, reference: Policy, optimizer: Any, budget: int, updates: int, max_grad_norm: float
) -> Learning:
    builder = TrainBatchBuilder(
        processes=Processes.alone(),
        algorithm=algorithm,
        weights={"reward": 1.0},
        reference=None if algorithm.reference == "none" else reference,
        distribution=WHOLE,
        budget=budget,
        packed=policy.packed,
    )
    update = Updater(
        processes=Processes.alone(),
        sharded=False,
        policy=policy,
        optimizer=optimizer,
        algorithm=algorithm,
        updates=updates,
        max_grad_norm=max_grad_norm,
        distribution=WHOLE,
        max_tokens=14,
        watch=None,
        less_memory=lambda phase: [],
        deterministic=False,
    )
    return Learning(builder=builder, update=update, groups=None)
