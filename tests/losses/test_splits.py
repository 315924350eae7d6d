"""The real updater's gradient of every loss does not depend on how the rows of a step are split, nor over how many processes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import split_worker
import torch
from helpers.batches import default_dtype
from helpers.slow import slow_but
from helpers.torchrun import launch, torchrun, well
from split_worker import ALGORITHMS, ALL, DTYPES, FEW, GROUPS, Dealt, Found, gradients, relative_error, train_batch_of
from torch import Tensor

from rlgen.trainers.train_batch import TrainBatch

# Threads that wait for each other make so small a model forty times slower.
pytestmark = pytest.mark.usefixtures("one_thread")
every_loss = pytest.mark.parametrize("name", ALGORITHMS)
in_both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
PROCESSES = (2, 3)
BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}


@cache
def whole(name: str, dtype: torch.dtype, rows: Sequence[int] = ALL) -> Tensor:
    with default_dtype(dtype):
        return gradients(ALGORITHMS[name], dtype, in_micro_batches(train_batch_of(ALGORITHMS[name], dtype, rows), 1))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Found], dict[int, Dealt]]:
    """Gradients of every loss by number of processes; starting them is what takes time."""
    found, dealt = {}, {}
    for processes in PROCESSES:
        output = tmp_path_factory.mktemp("gradients") / "gradients.pt"
        launcher = torchrun(processes)
        well(launch(split_worker.__file__, output, launcher=launcher, timeout=250, GLOO_SOCKET_IFNAME="lo"))
        found[processes], dealt[processes] = torch.load(output, weights_only=False)
    return found, dealt


@pytest.fixture(scope="module")
def of_processes(launched: tuple[dict[int, Found], dict[int, Dealt]]) -> dict[int, Found]:
    return launched[0]


@pytest.mark.slow
@every_loss
@in_both_dtypes
def test_processes_change_nothing(name: str, dtype: torch.dtype, of_processes: dict[int, Found]) -> None:
    for processes, found in of_processes.items():
        assert relative_error(found[name, dtype, False, len(ALL)], whole(name, dtype)) <= BOUND[dtype], processes


@pytest.mark.slow
@every_loss
def test_sharded_weights_change_nothing(name: str, of_processes: dict[int, Found]) -> None:
    gradient = of_processes[2][name, torch.float64, True, len(ALL)]
    assert relative_error(gradient, whole(name, torch.float64)) <= BOUND[torch.float64]


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_processes_without_rows_change_nothing(name: str, sharded: bool, of_processes: dict[int, Found]) -> None:
    gradient = of_processes[3][name, torch.float64, sharded, len(FEW)]
    assert relative_error(gradient, whole(name, torch.float64, FEW)) <= BOUND[torch.float64]


# In float32 a loss is split by itself in `test_invariants.py`; here it goes the same way as in float64.
IN_BOTH = [(name, dtype) for name in ALGORITHMS for dtype in DTYPES]
QUICK = [(name, dtype) for name, dtype in IN_BOTH if dtype == torch.float64 or name in ("dapo", "no kl", "sigmoid")]


@pytest.mark.parametrize(("name", "dtype"), slow_but(IN_BOTH, *QUICK), ids=str)
def test_micro_batches_and_order_change_nothing(name: str, dtype: torch.dtype) -> None:
    algorithm = ALGORITHMS[name]
    assert (whole(name, dtype).abs().amax(dim=1) > 1e-3).all()
    for count in (1, 2, 3, 7):
        order = torch.randperm(len(ALL), generator=torch.Generator().manual_seed(count)).tolist()
        for rows in (ALL, order):
            with default_dtype(dtype):
                train_batch = in_micro_batches(train_batch_of(algorithm, dtype, rows), count)
                assert len(train_batch.micro_batches) == count
                assert relative_error(gradients(algorithm, dtype, train_batch), whole(name, dtype)) <= BOUND[dtype], count


def in_micro_batches(train_batch: TrainBatch, count: int) -> TrainBatch:
    """Of one row, or pair, each, but for the last, which has the rest."""
    pairs = train_batch.pair_id.tolist()
    units = [[row for row, of_row in enumerate(pairs) if of_row == pair] for pair in dict.fromkeys(pairs) if pair >= 0]
    units = units or [[row] for row in range(len(pairs))]
    parts = [*units[: count - 1], [row for unit in units[count - 1 :] for row in unit]]
    return replace(train_batch, micro_batches=tuple(map(tuple, parts)), idle=())


def test_the_losses_differ() -> None:
    """But for the two that have two names: else a setting acts on nothing here."""
    losses = [name for name in ALGORITHMS if name != "bnpo"]
    for place, name in enumerate(losses):
        for other in losses[:place]:
            assert relative_error(whole(name, torch.float64), whole(other, torch.float64)) > 1e-6, (name, other)


def test_the_rows_are_as_their_comment_says() -> None:
    rows = split_worker.samples()
    assert [row for row, sample in enumerate(rows) if not sample.loss_mask.any()] == [3, 4, 16]
    assert len({GROUPS[row] for row in FEW}) == 1 and len(FEW) < max(PROCESSES)


@pytest.mark.slow
def test_groups_are_dealt_to_several_processes_and_pairs_to_one(launched: tuple[dict[int, Found], dict[int, Dealt]]) -> None:
    for dealt in launched[1].values():
        for name, hands in dealt.items():
            every = sorted(hand.rows[row] for hand in hands for rows in (*hand.micro_batches, *hand.idle) for row in rows)
            assert every == sorted(row for hand in hands for row in hand.rows) and len(set(every)) == len(every)
            assert len({len(hand.micro_batches) for hand in hands}) == 1 == len({len(hand.idle) for hand in hands})
            assert all(len(hand.rows) for hand in hands)
            if name != "sigmoid":
                assert set(hands[0].samples.group_id) & set(hands[1].samples.group_id)
            else:
                pairs = [set(hand.pair_id.tolist()) for hand in hands]
                assert not set.intersection(*pairs)


@pytest.mark.slow
def test_each_row_comes_with_its_own_tokens(launched: tuple[dict[int, Found], dict[int, Dealt]]) -> None:
    for dealt in launched[1].values():
        for hands in dealt.values():
            for train_batch in hands:
                for row in range(len(train_batch.samples)):
                    sent, sampled = train_batch.samples[row], split_worker.samples()[int(train_batch.samples.seed[row])]
                    assert replace(sent, completion="x") == sampled


@pytest.mark.slow
def test_rows_without_advantage_go_through_no_backward_pass(launched: tuple[dict[int, Found], dict[int, Dealt]]) -> None:
    """A group of equal rewards (rows 10 to 12) and an unscorable row."""
    for dealt in launched[1].values():
        idle = {int(hand.samples.seed[row]) for hand in dealt["no kl"] for rows in hand.idle for row in rows}
        learning = {int(hand.samples.seed[row]) for hand in dealt["no kl"] for rows in hand.micro_batches for row in rows}
        assert {7, 10, 11, 12} <= idle and not idle & learning
