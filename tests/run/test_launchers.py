"""Processes that torchrun or accelerate starts: which launches are refused, and how they end."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Proof
from helpers.torchrun import ALONE, ENVIRONMENT, launch, nothing_is_left, recipe, train, train_words

from rlgen import processes
from rlgen.errors import ProcessError
from rlgen.processes import EngineShare, Processes, born
from rlgen.run.launch import Launch, asked_for, check_launch

__all__ = ["nothing_is_left", "recipe"]


@pytest.mark.slow
def test_accelerate_that_starts_one_process_of_two(recipe: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    ended = launch("-m", "rlgen", *train_words(recipe, tmp_path / "run"), launcher=launcher)
    assert "was asked for 2 processes, but 1 runs" in ended.stderr and "exit status 9" in ended.stderr
    assert "torchrun --nproc-per-node 2" in ended.stderr and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.fault(77)
def test_accelerate_that_starts_two_processes(recipe: Path, tmp_path: Path, proof: Proof) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    directory = train(recipe, tmp_path / "run", "run.steps=1", launcher=launcher)
    logs = {path.name for path in (directory / "logs").iterdir()}
    assert {name for name in logs if name.startswith("rlgen")} == {"rlgen.log", "rlgen.rank1.log"}, (
        "two processes, none of them started others"
    )
    proof("`accelerate launch` around `rlgen train`, which never launches: two logs of two processes")


def test_a_mistake_of_the_recipe_is_said_once(recipe: Path, tmp_path: Path) -> None:
    ended = launch("-m", "rlgen", *train_words(recipe, tmp_path / "run", "processes.count=3"))
    assert ended.stderr.count("processes.count is 3, but 2 run") == 1 and "exitcode  : 9" in ended.stderr


ABORTS = """\
import atexit, ctypes, threading, time
from rlgen.cli import app
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)  # as a thread of gloo may do in the tear-down
atexit.register(print, "put away")
threading.Thread(target=lambda: (time.sleep(0.5), print("saved"))).start()
app.app = lambda arguments: (_ for _ in ()).throw(app.UsageError("a mistake"))
app.main()
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_exit_code_outlives_what_aborts_in_the_teardown(monkeypatch: pytest.MonkeyPatch, processes: str) -> None:
    """Threads and exit functions end before; what would take the interpreter apart does not run."""
    monkeypatch.setitem(ENVIRONMENT, "WORLD_SIZE", processes)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONUNBUFFERED", "")
    ended = launch("-c", ABORTS, launcher=ALONE)
    assert (ended.returncode, ended.stdout) == (2, "saved\nput away\n") and "error: a mistake" in ended.stderr


ONE, TWO = Launch(0, 1), Launch(0, 2)
ACCELERATE = ["python", "/venv/bin/accelerate", "launch"]


@pytest.mark.parametrize(
    ("launch", "count", "environment", "parents", "message"),
    [
        (ONE, 2, {}, [], "processes.count is 2, but 1 run"),
        (TWO, 1, {}, [], "start `rlgen train` without a launcher"),
        (
            ONE,
            None,
            {},
            [["bash"], [*ACCELERATE, "--num-processes=4", "-m", "rlgen", "train"]],
            "asked for 4 processes, but 1 runs",
        ),
        (ONE, None, {"ACCELERATE_MIXED_PRECISION": "bf16"}, [], "use --mixed_precision no"),
        (ONE, None, {"ACCELERATE_USE_DEEPSPEED": "true"}, [], "processes.strategy: fsdp"),
        (TWO, None, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, [], "micro_batch_tokens"),
    ],
)
def test_launches_that_are_refused(
    launch: Launch, count: int | None, environment: dict[str, str], parents: list[list[str]], message: str
) -> None:
    with pytest.raises(ProcessError, match=message):
        check_launch(launch, count, environment, parents)


@pytest.mark.slow
@pytest.mark.fault(85)
@pytest.mark.parametrize(("here", "interface"), [("2", "lo"), ("1", None)])
def test_processes_of_one_machine_listen_there_only(
    monkeypatch: pytest.MonkeyPatch, here: str, interface: str | None, proof: Proof
) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise RuntimeError("nobody there")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back as it was
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(processes.dist, "rendezvous", nobody)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": here}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessError, match=r"did not find the others within 1 s: nobody there\. If no launcher .* `unset RANK"):
        Processes.open(1)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(ProcessError):
        Processes.open(1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "whoever names one has it"
    proof(f"two processes, {here} of them here, look for each other")


@pytest.mark.slow
def test_launches_that_are_well(tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: 'no'\n"
    )
    of_file = [*ACCELERATE, "--config_file", str(config), "-m", "rlgen", "train"]
    assert asked_for([of_file]) == ("accelerate launch", 3)
    # one of another program, which started this run from within, and one whose own argument looks like it
    assert asked_for([["bash"], [*ACCELERATE, "--num_processes", "2", "tune.py"]]) is None
    assert asked_for([[*ACCELERATE, "--cpu", "-m", "rlgen", "train", "--num_processes", "2"]]) is None
    assert asked_for([["python", "/venv/bin/torchrun", "--nproc-per-node", "2", "-m", "rlgen"]]) is None
    check_launch(TWO, 2, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, [[*of_file[:-4], "train.sh"]])
    with pytest.raises(ProcessError, match="MASTER_ADDR, MASTER_PORT is not set"):
        Launch.of({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"})


def test_prompts_are_shared_by_engines_and_engines_by_processes() -> None:
    def engine_share(rank: int, world: int, size: int) -> EngineShare:
        processes = Processes(rank=rank, world=world, device=torch.device("cpu"), timeout=1, group=None, store=None)
        return EngineShare.of(processes, size)

    for world, size, items in ((4, 1, 5), (4, 2, 5), (3, 1, 2), (2, 2, 1)):
        seats = [engine_share(rank, world, size) for rank in range(world)]
        assert [item for s in seats if s.first for item in s.share(range(items))] == list(range(items))
        assert sum(s.first for s in seats) == world // size
    with pytest.raises(ProcessError, match="needs a multiple of 2 processes, but 3 run"):
        engine_share(0, 3, 2)


def test_a_process_is_still_itself_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil reckons the beginning of a process from the machine's, which moves with the clock."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as main:
        peers = ((socket.gethostname(), main.pid, born(psutil.Process(main.pid))),)
        second = replace(Processes.alone(), rank=1, world=2, peers=peers)
        boot = psutil.boot_time()
        for step in (0.0, 3.0, -3600.0):
            monkeypatch.setattr(psutil._psplatform, "boot_time", lambda step=step: boot + step)
            assert second._process(0) is not None
            assert not second.reports_end(), "the main process lives"
        main.kill()
        main.wait()
    assert second._process(0) is None
    assert second.reports_end()
