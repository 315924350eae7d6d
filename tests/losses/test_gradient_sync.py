"""What sharded training sends to add up gradients, and when; the sums are those of one process."""

from typing import Any

import pytest
import sync_worker
import torch
from helpers.batches import default_dtype
from helpers.torchrun import launch, torchrun, well
from split_worker import ALGORITHMS, ALL, UPDATES, gradients, relative_error, train_batch_of
from sync_worker import DTYPE, NAME, WAYS

GROUPS = 2  # that FSDP2 makes of this model: its layer, and the rest


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("sync") / "found.pt"
    well(launch(sync_worker.__file__, output, launcher=torchrun(4), timeout=250, GLOO_SOCKET_IFNAME="lo"))
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
