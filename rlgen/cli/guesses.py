"""Understands command lines as other tools take them: runs what is meant, or names the command that does it."""

import re
from collections.abc import Sequence
from pathlib import Path

from rlgen.errors import UsageError
from rlgen.run.find import RUNS, names_of_runs

DONE = {  # what is typed: what is run instead
    "version": ["--version"],
    "-V": ["--version"],
    "help": ["--help"],
    "list": ["recipes", "list"],
}
NAMED = {  # what is typed: what to type instead
    "resume": "`rlgen train RECIPE --resume` goes on from the newest checkpoint",
    **dict.fromkeys(("run", "start", "finetune"), "`rlgen train RECIPE` trains a model"),
    "grpo": "`rlgen train RECIPE` trains a model; write `trainer: {kind: grpo}` into the recipe",
    "rloo": "`rlgen train RECIPE` trains a model; write `trainer: {kind: rloo}` into the recipe",
    "dpo": "`rlgen train RECIPE` trains a model; write `trainer: {kind: online_dpo}` into the recipe",
    "check": "`rlgen validate RECIPE` checks a recipe, `rlgen doctor RECIPE` opens trainer and engine",
    "test": "`rlgen rewards test RECIPE` tries the rewards, `rlgen doctor RECIPE` opens trainer and engine",
    "merge": "`rlgen export RUN --out FOLDER` merges an adapter into its model",
    "logs": "`rlgen status RUN` prints the state of a run; its logs are in runs/NAME/logs/",
    "-v": "`rlgen --version` prints the version, `rlgen --debug COMMAND` shows tracebacks",
}
OPTIONS = {  # of commands that take a recipe
    "--steps": "write `--set run.steps={}`",
    **dict.fromkeys(("--config", "--recipe"), "the recipe is an argument: `rlgen train {}`"),
    "--model": "write `--set model.path={}`",
    "--lr": "write `--set optim.learning_rate={}`",
    "--seed": "write `--set run.seed={}`",
    **dict.fromkeys(("--gpus", "--num-gpus"), "write `torchrun --nproc-per-node {} -m rlgen train RECIPE`"),
    "--output-dir": "write `--run-dir {}`",
}
TAKEN = {("estimate", "--gpus")}  # the command has this option itself
TAKES_A_RECIPE = ("train", "doctor", "serve", "eval", "estimate", "validate", "show")
TAKES_A_RUN = ("status", "rollouts", "report", "replay", "export")
VALUE = re.compile(r"(?:--)?([a-z_]+(?:\.[a-z_0-9]+)+)(?:=(.*))?", re.DOTALL)  # run.steps=5


def understood(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of rlgen with a guess replaced by the command that it means. A guess that must not run unasked is a
    UsageError, which names the command to type.
    """
    if not arguments:
        return []
    first, *others = arguments
    if first == "help" and others:
        return [*others, "--help"]
    if first in DONE and not others:
        return DONE[first]
    if first in NAMED:
        raise UsageError(f"there is no command `{first}`; {NAMED[first]}")
    if Path(first).suffix in (".yaml", ".yml"):
        raise UsageError(f"{first} is a recipe, not a command; to train it: rlgen train {' '.join(arguments)}")
    if first in TAKES_A_RUN and not others:
        there = names_of_runs(RUNS)
        newest = f"; the newest in {RUNS}/ is {there[0]}: rlgen {first} {there[0]}" if there else ""
        raise UsageError(f"`rlgen {first}` needs the name of a run{newest}")
    if first in TAKES_A_RECIPE and not others:
        raise UsageError(f"`rlgen {first}` needs a recipe, a YAML file; `rlgen recipes list` shows some to copy")
    if first in TAKES_A_RECIPE:
        refuse_options(first, others)
    return list(arguments)


def refuse_options(command: str, arguments: Sequence[str]) -> None:
    """Raises UsageError for an option that other tools have and `command` has not, with what to write instead."""
    for before, argument, after in zip(["", *arguments], arguments, [*arguments[1:], ""], strict=False):
        name, _, value = argument.partition("=")
        if argument == "--":
            return
        if name in OPTIONS and (command, name) not in TAKEN:
            raise UsageError(f"there is no option {name}; {OPTIONS[name].format(value or after or 'VALUE')}")
        found = VALUE.fullmatch(argument)
        if not found or Path(argument).suffix in (".yaml", ".yml", ".json"):
            continue
        key, said = found.groups()
        if before == "--set" and said is None:
            raise UsageError(f"--set takes a key with its value: write `--set {key}={after or 'VALUE'}`")
        if before != "--set" and (argument.startswith("--") or said is not None):
            raise UsageError(f"{argument} is not an option; write `--set {key}={after or 'VALUE' if said is None else said}`")
