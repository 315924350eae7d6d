"""Order statistics by counting: exact, whatever process holds a value."""

from collections.abc import Sequence
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from rlgen.losses.order import kth_smallest, quantile

ODD = (0.0, -0.0, 1.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, float("inf"), float("-inf"), 0.1, 0.1000001)


@pytest.mark.parametrize("count", [1, 2, 5, 1000, 10_007])
def test_each_place_has_the_value_that_sorting_gives_it(count: int) -> None:
    made = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=made) * 10.0 ** torch.randint(-6, 3, (count,), generator=made)
    ranks = sorted({0, 1 % count, count // 3, count // 2, count - 1})
    assert kth_smallest(values, ranks) == [values.sort().values[rank].item() for rank in ranks]


def test_odd_values_have_their_places() -> None:
    values = torch.tensor(ODD)
    assert kth_smallest(values, range(len(ODD))) == sorted(values.tolist())


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.5, 0.8, 0.999, 1.0])
def test_a_quantile_is_that_of_numpy(share: float) -> None:
    values = torch.randn(777, generator=torch.Generator().manual_seed(3))
    assert quantile(values, share) == np.quantile(values.double().numpy(), share)


def in_threads(parts: Sequence[Tensor], share: float) -> list[float]:
    """The quantile as each of several processes computes it; threads that add up what they have stand for them."""
    barrier, shared = Barrier(len(parts)), [torch.zeros(0)] * len(parts)
    found = [0.0] * len(parts)

    def of_process(rank: int) -> None:
        def total(values: Tensor, op: str = "sum") -> Tensor:
            shared[rank] = values
            barrier.wait()
            added: Tensor = sum(shared)  # type: ignore[assignment]
            barrier.wait()
            return added

        found[rank] = quantile(parts[rank], share, total)

    threads = [Thread(target=of_process, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_it_does_not_matter_who_has_which_values() -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(4)).exp()
    whole = quantile(values, 0.87)
    assert in_threads([values[:3], values[3:3], values[3:]], 0.87) == [whole] * 3
