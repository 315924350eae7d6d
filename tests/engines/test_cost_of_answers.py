"""What an answer costs the process that asked: no object a token, and no more for a request the more of them are open.

In calls and in CPU time of this process, not in time on the clock.
"""

import tracemalloc

import numpy
import pytest
from answers import URL, asking, calls, reading, synthetic

from rlgen.engines.answer import read_answer
from rlgen.types import Span

FEW, MANY = 1024, 4096


@pytest.mark.slow  # what it measures is the machine's, if anything else runs there
@pytest.mark.timed
def test_a_request_costs_the_same_however_many_are_open() -> None:
    few, many = calls(FEW), calls(MANY)
    assert many <= 1.05 * few, f"{few:.0f} calls a request with {FEW} open, {many:.0f} with {MANY}"
    # CPU time says the same of what a call does; it is a coarse measure, for a core is twice as fast while its neighbour rests.
    few, many = min(asking(FEW) for _ in range(3)), min(asking(MANY) for _ in range(3))
    assert many <= 3 * few and many <= 1.5, f"{few:.2f} ms a request with {FEW} open, {many:.2f} ms with {MANY}"


def test_reading_arrays_costs_next_to_nothing_and_json_no_object_that_stays() -> None:
    assert 20 * reading(8192, arrays=True) < reading(8192, arrays=False)  # it is a two hundredth
    for arrays in (True, False):
        raw = synthetic(100_000, arrays)
        tracemalloc.start()
        kept = read_answer(raw, arrays, URL, lambda label: 3)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (kept.token_ids.dtype, kept.logp.dtype) == (numpy.int32, numpy.float32)
        assert len(kept.token_ids) == len(kept.logp) == 100_000 and kept.spans == (Span(0, 100_000, 3),)
        assert held < 10 * 100_000, "two numbers of 4 bytes a token"
