"""What a launcher asked for, and what it started. Torch-free: it is looked at before anything heavy."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlgen.errors import ProcessError

MAIN = "rlgen"  # what a launcher of this run has on its command line
START_ALL = (
    "start them with `torchrun --nproc-per-node {n} -m rlgen train …` (or `accelerate launch --multi_gpu --num_processes {n} -m"
    " rlgen train …`, which starts them on the CPU too)"
)
# What `accelerate launch` can be told that would change the training, or would seem to: the recipe says it.
ELSEWHERE: dict[str, tuple[Sequence[str], str]] = {
    "ACCELERATE_MIXED_PRECISION": (("no",), "model.dtype says what the forward computes in; use --mixed_precision no"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("1",), "micro-batches follow from optim.micro_batch_tokens; leave it out"),
    "ACCELERATE_DYNAMO_BACKEND": (("no",), "rlgen does not compile the model; use --dynamo_backend no"),
    "ACCELERATE_USE_FSDP": (("false",), "set processes.strategy: fsdp in the recipe, and use --multi_gpu"),
    "ACCELERATE_USE_DEEPSPEED": (("false",), "rlgen shards with FSDP2: set processes.strategy: fsdp, and use --multi_gpu"),
    "ACCELERATE_USE_MEGATRON_LM": (("false",), "set processes.strategy: fsdp in the recipe, and use --multi_gpu"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """How many processes run, and which one this is."""

    rank: int
    world: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Launch":
        """From the variables that every launcher sets.

        Raises:
            ProcessError: some are there and others are not.
        """
        world = int(environment.get("WORLD_SIZE", "1"))
        needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if world > 1 and (missing := [name for name in needed if name not in environment]):
            raise ProcessError(
                f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set: no launcher did this; " + START_ALL.format(n=world)
            )
        return cls(int(environment.get("RANK", "0")) if world > 1 else 0, world)


def check_launch(launch: Launch, count: int | None, environment: Mapping[str, str], parents: Sequence[Sequence[str]]) -> None:
    """Compares what runs with what was asked for.

    Args:
        count: of the recipe, `processes.count`.
        parents: command lines of the processes above this one, the nearest first.

    Raises:
        ProcessError: they differ, or the launcher was told what only the recipe says.
    """
    for name, (allowed, what_to_do) in ELSEWHERE.items():
        if environment.get(name, allowed[0]).lower() not in allowed:
            raise ProcessError(f"{name} is {environment[name]}: {what_to_do}")
    asked = asked_for(parents)
    if asked is not None and asked[1] != launch.world:
        launcher, number = asked
        raise ProcessError(
            f"`{launcher}` was asked for {number} processes, but {launch.world} runs: it starts several only where it finds as"
            f" many GPUs, or is told --multi_gpu; {START_ALL.format(n=number)}"
        )
    if count is not None and count != launch.world:
        how = START_ALL.format(n=count) if count > 1 else "start `rlgen train` alone"
        raise ProcessError(f"processes.count is {count}, but {launch.world} run; {how}, or change it")


def restarted(environment: Mapping[str, str]) -> bool:
    """Whether torchrun has started these processes before, and they failed."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launched_by() -> list[Any]:
    """Which process started this one: host, pid, and seconds from its machine's start to its own, as in `processes.born`.

    In containers pids repeat: a new launch is likely to have the one that an earlier launch had.
    """
    number = os.getppid()
    try:
        began = round(psutil.Process(number).create_time() - psutil.boot_time(), 2)
    except (psutil.Error, OSError):  # beyond this container, another user's, or gone
        began = None
    return [socket.gethostname(), number, began]


def parents() -> list[list[str]]:
    """Command lines of the processes above this one, the nearest first."""
    lines = []
    for process in psutil.Process().parents():
        try:
            lines.append(process.cmdline())
        except psutil.Error:  # another user's, or gone
            lines.append([])
    return lines


def asked_for(parents: Sequence[Sequence[str]]) -> tuple[str, int] | None:
    """Name of the launcher that started this run, and how many processes it was asked for; None: there is none that says.

    Only `accelerate launch` can start fewer than it was asked for. A launcher of another program, one that started this run from
    within, does not have rlgen on its command line.
    """
    for line in parents:
        words = list(line)
        names = [Path(word).name for word in words]
        if not any(name == MAIN or MAIN in Path(word).parts for name, word in zip(names, words, strict=True)):
            continue
        if "torchrun" in names or "torch.distributed.run" in words:
            return None  # it starts what it is asked for, or fails
        if "accelerate.commands.launch" in words:
            arguments = words[words.index("accelerate.commands.launch") + 1 :]
        elif "accelerate" in names and "launch" in words:
            arguments = words[words.index("launch", names.index("accelerate")) + 1 :]
        else:
            continue
        number = accelerate_processes(arguments)
        return None if number is None else ("accelerate launch", number)
    return None


def accelerate_processes(arguments: Sequence[str]) -> int | None:
    """`--num_processes` of an `accelerate launch`, or what its configuration file says; None: neither."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    given: Any = launch_command_parser().parse_args(list(arguments))
    if given.num_processes is not None:
        return int(given.num_processes)
    if given.config_file is None and (given.cpu or not os.path.isfile(default_config_file)):
        return None
    number = load_config_from_file(given.config_file).num_processes
    return int(number) if number > 0 else None
