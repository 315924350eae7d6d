"""Trains on the groups of a step that are complete while others are still sampled, by the same weights (`rollout.stream`)."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rlgen.errors import EngineError
from rlgen.processes import Processes
from rlgen.rewards.early import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.table import RowTable
from rlgen.run.state import random_tensors, set_random
from rlgen.trainers.groups import Groups
from rlgen.types import Group, Samples

POLL = 0.005  # seconds between two looks for scored groups

Sampled: TypeAlias = tuple[list[Group], int]  # as `Sampler.groups` returns it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Trains in the calling thread, while a thread of its own waits for the engine. After an error nothing is left of the step.

    Only that thread asks the engine for samples, and it has ended before anything else is asked of the engine.
    """

    processes: Processes
    sampler: Sampler
    early: EarlyScoring
    labels: tuple[str, ...]  # of the rewards
    groups: Groups

    def while_sampling(self, step: int, epoch: float, sample: Callable[[], Sampled]) -> Sampled:
        """Returns what `sample` returns, which runs in a thread of its own. Trains on groups as soon as they are scored.

        After an error, sampling has ended, and nothing is left of the step.
        """
        sampled: Future[Sampled] = Future()

        def work() -> None:
            if self.groups.threads is not None:
                torch.set_num_threads(max(1, torch.get_num_threads() - self.groups.threads))
            try:
                sampled.set_result(sample())
            except BaseException as error:
                sampled.set_exception(error)

        # The engine restores the random states that it found, and so do activation checkpoints: both at once leave other states.
        draws = random_tensors()
        thread = threading.Thread(target=work, name="rlgen-stream", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                for group in self.early.settled(step):
                    samples = Samples.of(group.samples, self.labels)
                    if not self.groups.waits(samples):
                        self.groups.learn(RowTable.gather(samples, self.processes), samples, epoch)
                thread.join(POLL)
            return sampled.result()
        except BaseException:
            self.sampler.give_up(EngineError("sampling was given up together with its step"))
            self.groups.drop()
            raise
        finally:
            thread.join()
            set_random(draws)
