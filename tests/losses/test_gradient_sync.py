"""What sharded training sends to add up gradients, and when; the sums are those of one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sync_worker
import torch
from split_worker import ALGORITHMS, ALL, UPDATES, default_dtype, gradients, relative_error, train_batch_of
from sync_worker import DTYPE, NAME, WAYS

GROUPS = 2  # that FSDP2 makes of this model: its layer, and the rest


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("sync") / "found.pt"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    words = [*launcher, sync_worker.__file__, str(output)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    return torch.load(output, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "defer"), WAYS)
def test_gradients_are_sent_when_the_recipe_says(launched: Any, count: int | None, defer: bool) -> None:
    found, micro_batches = launched
    gradient, sent = found[count, defer]
    with default_dtype(DTYPE):
        assert relative_error(gradient, gradients(ALGORITHMS[NAME], DTYPE, train_batch_of(ALGORITHMS[NAME], DTYPE, ALL))) <= 1e-9
    assert micro_batches > 1
    assert sent == {
        "reduce_scatter_single": UPDATES * GROUPS * (1 if defer else micro_batches),
        "all_reduce": 0 if count is None else UPDATES * GROUPS,
    }
