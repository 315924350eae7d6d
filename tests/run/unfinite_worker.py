"""`rlgen` whose second step is not finite in one process alone, and whose groups are constant now and then:
unfinite_worker.py RANK loss|gradient train RECIPE …"""

import math
import os
import sys
from dataclasses import replace

import numpy as np
from helpers.before import before

from rlgen.cli.app import main
from rlgen.trainers.collect import Collector
from rlgen.trainers.update import Updater

SCREEN = os.dup(1)  # before a run sends what is printed to its log


def plant(what: str, step_of_fault: int = 2) -> None:
    run, now = Updater._run, [0]

    def wrong(updater, train_batch, update):  # type: ignore[no-untyped-def]
        part = run(updater, train_batch, update)
        if now[-1] != step_of_fault:
            return part
        os.write(SCREEN, f"planted in process {os.environ.get('RANK', '0')}: {what} of step {now[-1]}\n".encode())
        if what == "loss":
            return replace(part, loss=math.nan)
        gradient = [parameter.grad for parameter in updater.policy.parameters() if parameter.grad is not None][1]
        getattr(gradient, "_local_tensor", gradient).view(-1)[3] = math.nan
        return part

    before(Updater, "__call__", lambda updater, train_batch, step: now.append(step))
    Updater._run = wrong  # type: ignore[method-assign]


def some_constant() -> None:
    rewarded = Collector.rewarded

    def changed(collect, groups, step):  # type: ignore[no-untyped-def]
        samples = rewarded(collect, groups, step)
        return replace(samples, reward=np.where(samples.group_id % 3 == 0, 0.5, samples.reward))

    Collector.rewarded = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, what = sys.argv.pop(1), sys.argv.pop(1)
    some_constant()
    if os.environ.get("RANK", "0") == rank:
        plant(what)
    main()
