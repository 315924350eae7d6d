"""`rlgen` with a fault in one of its processes: faulty.py FAULT train RECIPE …"""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.before import before
from transformers import PreTrainedModel

from rlgen.cli.app import main
from rlgen.engines.transformers import TransformersEngine
from rlgen.models.policy import Policy
from rlgen.rewards.score import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.run import writing
from rlgen.run.signals import StopRequest
from rlgen.trainers.collect import Collector
from rlgen.trainers.results import UpdateResult
from rlgen.trainers.update import Updater

SCREEN = os.dup(1)  # before a run sends what is printed to its log


def one_engine_loses_a_tensor() -> None:
    """Silently: its receipt says that it came."""
    sync = TransformersEngine.sync

    def without(engine, weights, version, hashed=False):  # type: ignore[no-untyped-def]
        own = engine._model.get_parameter("model.layers.1.mlp.up_proj.weight")
        before = own.detach().clone()
        receipt = sync(engine, weights, version, hashed)
        own.data.copy_(before)
        return receipt

    TransformersEngine.sync = without  # type: ignore[method-assign]


def one_backward_fails() -> None:
    run = Updater._run

    def failing(updater, train_batch, update):  # type: ignore[no-untyped-def]
        run(updater, train_batch, update)
        raise ZeroDivisionError(f"a bug after {len(train_batch.micro_batches)} micro-batches")

    Updater._run = failing  # type: ignore[method-assign]


def one_lacks_memory_in_backward() -> None:
    torch.Tensor.backward = no_memory  # type: ignore[method-assign]


def one_lacks_memory_in_optimizer() -> None:
    torch.optim.AdamW.step = no_memory  # type: ignore[method-assign]


def one_lacks_memory_in_scoring() -> None:
    """In the sentinel's first look, which the other one waits for."""
    Policy.forward = no_memory  # type: ignore[method-assign]


def no_memory(*arguments, **options):  # type: ignore[no-untyped-def]
    raise torch.OutOfMemoryError("CUDA out of memory")


def sleeps(seconds: float) -> Callable[..., None]:
    return lambda *_: time.sleep(seconds)


def one_hangs_in_c() -> None:
    """Holding Python's lock: no signal handler of Python runs, no thread."""
    before(Updater, "_run", lambda *_: ctypes.PyDLL(None).sleep(1000))


def one_skips_a_step() -> None:
    """It trains nothing and goes on: the others wait for its gradient."""
    Updater.__call__ = lambda updater, train_batch, step: ({}, None)  # type: ignore[method-assign]


def one_goes_another_way() -> None:
    """It does not ask whether the others stop."""
    StopRequest.check = lambda stop, processes, before_step=False: None  # type: ignore[method-assign]


def one_sleeps() -> None:
    before(Updater, "_run", sleeps(1000))


def one_is_slow() -> None:
    """Its rewards and its disk take long, and its engine has not answered yet what was asked ahead."""
    before(EarlyScoring, "result", sleeps(7))
    before(Sampler, "before_sync", sleeps(7))
    before(PreTrainedModel, "save_pretrained", sleeps(7))


def one_has_no_space() -> None:
    """For its part of the checkpoint of step 2."""

    def fails(tensors: Any, folder: Path, rank: int) -> None:
        if "000002" in str(folder):
            raise OSError(28, "No space left on device")

    before(writing, "save_shards", fails)


def one_has_a_slow_disk() -> None:
    before(writing, "save_shards", sleeps(7))


def one_samples_for_long() -> None:
    """In step 3, three times as long as the timeout of its tests."""
    before(Sampler, "groups", lambda sampler, step, prompts: time.sleep(15 if step == 3 else 0))


def one_fails_the_first_time() -> None:
    """In step 3 of the first attempt that its launcher makes."""

    def fails(updater: Updater, train_batch: Any, step: int) -> None:
        if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)

    before(Updater, "__call__", fails)


def one_loss_is_not_finite() -> None:
    not_finite_in_step_2(lambda policy, part: replace(part, loss=math.nan))


def one_gradient_is_not_finite() -> None:
    def spoil(policy: Policy, part: UpdateResult) -> UpdateResult:
        gradient = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None][1]
        getattr(gradient, "_local_tensor", gradient).view(-1)[3] = math.nan
        return part

    not_finite_in_step_2(spoil)


def not_finite_in_step_2(spoil: Callable[[Policy, UpdateResult], UpdateResult]) -> None:
    run, now = Updater._run, [0]

    def wrong(updater, window, update):  # type: ignore[no-untyped-def]
        part = run(updater, window, update)
        if now[-1] != 2:
            return part
        os.write(SCREEN, f"planted in process {os.environ.get('RANK', '0')}\n".encode())
        return spoil(updater.policy, part)

    before(Updater, "__call__", lambda updater, window, step: now.append(step))
    Updater._run = wrong  # type: ignore[method-assign]


def some_groups_are_constant() -> None:
    """In all processes: every third group, so that steps ask for further prompts."""
    rewarded = Collector.rewarded

    def changed(collect, groups, step):  # type: ignore[no-untyped-def]
        samples = rewarded(collect, groups, step)
        return replace(samples, reward=np.where(samples.group_id % 3 == 0, 0.5, samples.reward))

    Collector.rewarded = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if fault.endswith("not_finite"):
        some_groups_are_constant()
    if os.environ.get("RANK") in (None, os.environ.get("FAULTY_RANK", "1")):
        globals()[fault]()
    main()
