"""A step finds the memory that the step before freed, without the kernel's help; and imports are not collected."""

import gc
import os
import subprocess
import sys

import pytest

from rlgen.heap import collecting_nothing

STEPS = """
import resource, sys, torch
from rlgen.heap import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()

def step():
    return [torch.ones(4 << 20) for _ in range(12)]  # 16 MiB each

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


# Each tensor has pages of its own, as with glibc's first guess; later ones depend on what lies at the end of the heap.
GIVEN_BACK = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}


def faults(how: str) -> int:
    """Pages that the kernel had to find in five steps."""
    done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True, env=GIVEN_BACK)
    return int(done.stdout)


def test_freed_memory_is_kept_for_the_next_step() -> None:
    assert faults("as it is") > 50_000
    assert max(faults("kept") for _ in range(3)) < 1_000


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_in_the_block_and_then_again() -> None:
    before = collections()
    with collecting_nothing():
        kept = [[] for _ in range(100_000)]
        assert collections() == before
    assert len(kept) == 100_000 and gc.isenabled()
    more = [[] for _ in range(100_000)]
    assert len(more) == 100_000 and collections() > before


def test_a_pause_ends_with_an_error_and_leaves_an_earlier_one() -> None:
    gc.disable()
    try:
        with collecting_nothing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ImportError), collecting_nothing():
        raise ImportError
    assert gc.isenabled()
