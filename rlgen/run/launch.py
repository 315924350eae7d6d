"""Compares the processes that a launcher was asked for with those that it started. Imports no torch, as it runs first."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlgen.errors import ProcessError

IN_CLUSTER = "RLGEN_IN_CLUSTER"  # set for the processes that the driver of a cluster has started
MAIN = "rlgen"  # name on the command line of a launcher that started this run
START_ALL = (
    "start them with `torchrun --nproc-per-node {n} -m rlgen train …` (or `accelerate launch --multi_gpu --num_processes {n} -m"
    " rlgen train …`, which starts them on the CPU too)"
)
# Options of `accelerate launch` that would change the training, or seem to: the allowed value, and what to do instead.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "ACCELERATE_MIXED_PRECISION": ("no", "model.dtype says what the forward computes in; use --mixed_precision no"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "micro-batches follow from optim.micro_batch_tokens; leave it out"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "rlgen does not compile the model; use --dynamo_backend no"),
    "ACCELERATE_USE_FSDP": ("false", "set processes.strategy: fsdp in the recipe, and use --multi_gpu"),
    "ACCELERATE_USE_DEEPSPEED": ("false", "rlgen shards with FSDP2: set processes.strategy: fsdp, and use --multi_gpu"),
    "ACCELERATE_USE_MEGATRON_LM": ("false", "set processes.strategy: fsdp in the recipe, and use --multi_gpu"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """The number of processes, and the rank of this one."""

    rank: int
    world: int
    in_cluster: bool = False  # started by the driver of a cluster, which speaks for all processes

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Launch":
        """Reads rank and world size from the environment variables that every launcher sets."""
        world = int(environment.get("WORLD_SIZE", "1"))
        needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if world > 1 and (missing := [name for name in needed if name not in environment]):
            raise ProcessError(
                f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set: no launcher did this; " + START_ALL.format(n=world)
            )
        return cls(int(environment.get("RANK", "0")) if world > 1 else 0, world, IN_CLUSTER in environment)


def check_launch(launch: Launch, count: int | None, environment: Mapping[str, str], parents: Sequence[Sequence[str]]) -> None:
    """Checks that the processes that run are those that were asked for, by the recipe's `count` or a launcher."""
    for name, (allowed, what_to_do) in ELSEWHERE.items():
        if environment.get(name, allowed).lower() != allowed:
            raise ProcessError(f"{name} is {environment[name]}: {what_to_do}")
    asked = asked_for(parents)
    if asked is not None and asked[1] != launch.world:
        launcher, number = asked
        raise ProcessError(
            f"`{launcher}` was asked for {number} processes, but {launch.world} runs: it starts several only if it finds as many"
            f" GPUs, or with --multi_gpu; {START_ALL.format(n=number)}"
        )
    if count is not None and count != launch.world:
        how = START_ALL.format(n=count) if count > 1 else "start `rlgen train` without a launcher"
        raise ProcessError(f"processes.count is {count}, but {launch.world} run; {how}, or change it")


def launched_by() -> list[Any]:
    """Returns the host, the pid and the start time of the parent process; the last in seconds after its machine started.

    The start time is that of `processes.born`; None if it cannot be read. Pids repeat in containers: without it, a new launch
    could be taken for an earlier one.
    """
    number = os.getppid()
    try:
        began = round(psutil.Process(number).create_time() - psutil.boot_time(), 2)
    except (psutil.Error, OSError):  # outside of this container, another user's, or gone
        began = None
    return [socket.gethostname(), number, began]


def parents() -> list[list[str]]:
    """Returns the command lines of the ancestors of this process, nearest first; [] for those that cannot be read."""
    lines = []
    for process in psutil.Process().parents():
        try:
            lines.append(process.cmdline())
        except psutil.Error:  # another user's, or gone
            lines.append([])
    return lines


def asked_for(parents: Sequence[Sequence[str]]) -> tuple[str, int] | None:
    """Returns the name of the launcher of this run, and how many processes it was asked for; None if that is unknown.

    Only `accelerate launch` can start fewer processes than it was asked for. A launcher that started another program, which then
    started this run, is skipped: rlgen is not on its command line.
    """
    for words in parents:
        names = [Path(word).name for word in words]
        if not any(MAIN in Path(word).parts for word in words):
            continue
        if "torchrun" in names or "torch.distributed.run" in words:
            return None  # torchrun starts as many processes as it is asked for, or fails
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
    """Returns `--num_processes` of an `accelerate launch`, or the number in its configuration file; None if neither is set."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    given: Any = launch_command_parser().parse_args(list(arguments))
    if given.num_processes is not None:
        return int(given.num_processes)
    if given.config_file is None and (given.cpu or not os.path.isfile(default_config_file)):
        return None
    number = load_config_from_file(given.config_file).num_processes
    return int(number) if number > 0 else None
