"""`rlgen` with a fault in one of its processes: faulty.py FAULT train RECIPE …"""

import ctypes
import os
import sys
import time

import torch
from transformers import PreTrainedModel

from rlgen.cli.app import main
from rlgen.engines.transformers import TransformersEngine
from rlgen.models.policy import Policy
from rlgen.rewards.early import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.run import writing
from rlgen.run.signals import StopRequest
from rlgen.trainers.update import Updater


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

    def failing(updater, window, update):  # type: ignore[no-untyped-def]
        run(updater, window, update)
        raise ZeroDivisionError(f"a bug after {len(window.micro_batches)} micro-batches")

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


def one_hangs_in_c() -> None:
    """Holding Python's lock: no signal handler of Python runs, no thread."""
    run = Updater._run

    def hanging(updater, window, update):  # type: ignore[no-untyped-def]
        ctypes.PyDLL(None).sleep(1000)
        return run(updater, window, update)

    Updater._run = hanging  # type: ignore[method-assign]


def one_skips_a_step() -> None:
    """It trains nothing and goes on: the others wait for its gradient."""
    Updater.__call__ = lambda updater, window, step: ({}, None)  # type: ignore[method-assign]


def one_goes_another_way() -> None:
    """It does not ask whether the others stop."""
    StopRequest.check = lambda stop, processes, before_step=False: None  # type: ignore[method-assign]


def one_sleeps() -> None:
    run = Updater._run

    def sleeping(updater, window, update):  # type: ignore[no-untyped-def]
        time.sleep(1000)
        return run(updater, window, update)

    Updater._run = sleeping  # type: ignore[method-assign]


def one_is_slow() -> None:
    """Its rewards and its disk take long, and its engine has not answered yet what was asked ahead."""
    score, before_sync, save_pretrained = EarlyScoring.result, Sampler.before_sync, PreTrainedModel.save_pretrained

    def slow_reward(scorer, groups, step):  # type: ignore[no-untyped-def]
        time.sleep(7)
        return score(scorer, groups, step)

    def slow(sampler):  # type: ignore[no-untyped-def]
        time.sleep(7)
        before_sync(sampler)

    def slow_disk(model, folder, **options):  # type: ignore[no-untyped-def]
        time.sleep(7)
        save_pretrained(model, folder, **options)

    EarlyScoring.result, Sampler.before_sync = slow_reward, slow  # type: ignore[method-assign]
    PreTrainedModel.save_pretrained = slow_disk  # type: ignore[method-assign]


def one_has_no_space() -> None:
    """For its part of the checkpoint of step 2."""
    save_shards = writing.save_shards

    def fails(tensors, folder, rank):  # type: ignore[no-untyped-def]
        if "000002" in str(folder):
            raise OSError(28, "No space left on device")
        return save_shards(tensors, folder, rank)

    writing.save_shards = fails


def one_has_a_slow_disk() -> None:
    save_shards = writing.save_shards

    def slow(tensors, folder, rank):  # type: ignore[no-untyped-def]
        time.sleep(7)
        return save_shards(tensors, folder, rank)

    writing.save_shards = slow


def one_samples_for_long() -> None:
    """In step 3, three times as long as the timeout of its tests."""
    groups_of = Sampler.groups

    def slow(sampler, step, prompts):  # type: ignore[no-untyped-def]
        time.sleep(15 if step == 3 else 0)
        return groups_of(sampler, step, prompts)

    Sampler.groups = slow  # type: ignore[method-assign]


def one_fails_the_first_time() -> None:
    """In step 3 of the first attempt that its launcher makes."""
    run, steps = Updater.__call__, []

    def failing(updater, window, step):  # type: ignore[no-untyped-def]
        steps.append(step)
        if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
        return run(updater, window, step)

    Updater.__call__ = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if os.environ["RANK"] == os.environ.get("FAULTY_RANK", "1"):
        globals()[fault]()
    main()
