"""The real updater's gradient of every loss does not depend on how the rows of a step are split, nor over how many processes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import split_worker
import torch
from loss_cases import ALGORITHMS
from split_worker import ALL, DTYPES, FEW, GROUPS, Found, default_dtype, gradients, relative_error, window_of
from torch import Tensor

from rlgen.processes import Processes
from rlgen.trainers.window import Window

every_loss = pytest.mark.parametrize("name", ALGORITHMS)
in_both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
PROCESSES = (2, 3)
BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make so small a model forty times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def whole(name: str, dtype: torch.dtype, rows: Sequence[int] = ALL) -> Tensor:
    with default_dtype(dtype):
        return gradients(ALGORITHMS[name], dtype, in_micro_batches(window_of(ALGORITHMS[name], dtype, rows), 1))


@pytest.fixture(scope="module")
def of_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """Gradients of every loss by number of processes; starting them is what takes time."""
    found = {}
    for processes in PROCESSES:
        output = tmp_path_factory.mktemp("gradients") / "gradients.pt"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*launcher, str(Path(split_worker.__file__)), str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        launched = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        assert launched.returncode == 0, launched.stderr
        found[processes] = torch.load(output)
    return found


@every_loss
@in_both_dtypes
def test_processes_change_nothing(name: str, dtype: torch.dtype, of_processes: dict[int, Found]) -> None:
    for processes, found in of_processes.items():
        assert relative_error(found[name, dtype, False, len(ALL)], whole(name, dtype)) <= BOUND[dtype], processes


@every_loss
def test_sharded_weights_change_nothing(name: str, of_processes: dict[int, Found]) -> None:
    gradient = of_processes[2][name, torch.float64, True, len(ALL)]
    assert relative_error(gradient, whole(name, torch.float64)) <= BOUND[torch.float64]


@every_loss
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_processes_without_rows_change_nothing(name: str, sharded: bool, of_processes: dict[int, Found]) -> None:
    gradient = of_processes[3][name, torch.float64, sharded, len(FEW)]
    assert relative_error(gradient, whole(name, torch.float64, FEW)) <= BOUND[torch.float64]


@every_loss
@in_both_dtypes
def test_micro_batches_and_order_change_nothing(name: str, dtype: torch.dtype) -> None:
    algorithm = ALGORITHMS[name]
    assert (whole(name, dtype).abs().amax(dim=1) > 1e-3).all()
    for count in (1, 2, 3, 7):
        order = torch.randperm(len(ALL), generator=torch.Generator().manual_seed(count)).tolist()
        for rows in (ALL, order):
            with default_dtype(dtype):
                window = in_micro_batches(window_of(algorithm, dtype, rows), count)
                assert len(window.micro_batches) == count
                assert relative_error(gradients(algorithm, dtype, window), whole(name, dtype)) <= BOUND[dtype], count


def in_micro_batches(window: Window, count: int) -> Window:
    """Of one row, or pair, each, but for the last, which has the rest."""
    pairs = window.pair_id.tolist()
    units = [[row for row, of_row in enumerate(pairs) if of_row == pair] for pair in dict.fromkeys(pairs) if pair >= 0]
    units = units or [[row] for row in range(len(pairs))]
    parts = [*units[: count - 1], [row for unit in units[count - 1 :] for row in unit]]
    return replace(window, micro_batches=tuple(map(tuple, parts)))


def test_the_losses_differ() -> None:
    """But for the two that have two names: else a setting acts on nothing here."""
    losses = [name for name in ALGORITHMS if name != "bnpo"]
    for place, name in enumerate(losses):
        for other in losses[:place]:
            assert relative_error(whole(name, torch.float64), whole(other, torch.float64)) > 1e-6, (name, other)


def test_the_rows_are_as_their_comment_says() -> None:
    rows = split_worker.samples()
    assert [row for row, sample in enumerate(rows) if not any(sample.loss_mask)] == [3, 4, 16]
    assert len({GROUPS[row] for row in FEW}) == 1 and len(FEW) < max(PROCESSES)


def test_groups_are_dealt_to_several_processes_and_pairs_to_one() -> None:
    for world in PROCESSES:
        for name in ("dapo", "sigmoid"):
            windows = [window_of(ALGORITHMS[name], torch.float64, ALL, process(rank, world)) for rank in range(world)]
            hands = [[row for rows in window.micro_batches for row in rows] for window in windows]
            assert sorted(row for hand in hands for row in hand) == list(range(len(windows[0].samples)))
            assert len({len(window.micro_batches) for window in windows}) == 1
            if name == "dapo":
                groups = [{windows[0].samples[row].group_id for row in hand} for hand in hands]
                assert groups[0] & groups[1]
            else:
                pairs = [{int(windows[0].pair_id[row]) for row in hand} for hand in hands]
                assert all(hands) and not set.intersection(*pairs)


def process(rank: int, world: int) -> Processes:
    return replace(split_worker.ONE, rank=rank, world=world)
