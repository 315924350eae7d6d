"""Builds a running trainer from a recipe, for `rlgen train`, `rlgen doctor` and Python.

    attempt.train(path, options)            one attempt of a run, from its directory to its exit code
      reopen        options -> RunDirectory   a new directory, an earlier one, or the one that rank 0 has opened
      trainer       RunContext -> Trainer     calls all of the following, the cheapest first
        data          recipe -> Data            model location, tokenizer, prompts
        inputs        Data -> UserCode          rewards, tools and other code; compares all with the last attempt, and records it
        trainer_and_engine                      TrainerAndEngine: both open, with the same weights
          policy        recipe -> Policies        the trained model, and its frozen reference
          train_state   Policies -> TrainState    optimizer and schedule, and what learns from the samples of a step
          restore       checkpoint -> Position    the step from which the run continues
        probe         TrainerAndEngine -> Probe   what the sentinel compares
        largest       Updater -> None           the largest micro-batches, tried before step 1

`rlgen doctor` uses only `data`, `trainer_and_engine` and `probe`; `rlgen replay`, in `replay` and `change`, only `policy` and
`train_state`.
"""

from rlgen.setup.attempt import train
from rlgen.setup.reopen import TrainOptions

__all__ = ["TrainOptions", "train"]
