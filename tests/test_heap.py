"""A step finds the memory that the step before freed, without the kernel's help; and what was imported is not collected."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from rlgen.heap import collecting_once, importing

STEPS = """
import os, resource, sys, torch
from rlgen.heap import keep_freed_memory

def step():
    return [torch.ones(4 << 20) for _ in range(12)]  # 16 MiB each

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for how in sys.argv[1:]:
    if os.fork() == 0:  # each has a heap of its own, and torch is imported once
        if how == "kept":
            keep_freed_memory()
        for _ in range(3):
            step()
        before = faults()
        for _ in range(5):
            step()
        print(how, faults() - before, flush=True)
        os._exit(0)
    os.wait()
"""


# Each tensor has pages of its own, as with glibc's first guess; later ones depend on what lies at the end of the heap.
GIVEN_BACK = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}


def faults(*how: str) -> list[tuple[str, int]]:
    """Pages that the kernel had to find in five steps, in a process of its own each."""
    done = subprocess.run([sys.executable, "-c", STEPS, *how], capture_output=True, text=True, check=True, env=GIVEN_BACK)
    return [(line.rsplit(" ", 1)[0], int(line.rsplit(" ", 1)[1])) for line in done.stdout.splitlines()]


def test_freed_memory_is_kept_for_the_next_step() -> None:
    (_, freed), *kept = faults("as it is", *["kept"] * 3)
    assert freed > 50_000 and [how for how, _ in kept] == ["kept"] * 3
    assert max(pages for _, pages in kept) < 1_000


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_while_a_block_imports_and_what_it_made_is_left_out_afterwards() -> None:
    with importing():
        before = collections()
        kept = [[] for _ in range(100_000)]
        assert collections() == before
    assert gc.isenabled() and not {id(one) for one in kept} & {id(one) for one in gc.get_objects()}
    more = [[] for _ in range(100_000)]
    assert len(more) == 100_000 and collections() > before, "and then again"


def test_garbage_of_an_earlier_run_does_not_stay() -> None:
    class Node:
        own: object

    node = Node()
    node.own, gone = node, weakref.ref(node)
    gc.disable()  # so that it is still there when the next run begins
    try:
        del node
        assert gone() is not None
        with importing():
            pass
        assert gone() is None and not gc.isenabled()
    finally:
        gc.enable()


def test_a_pause_ends_with_an_error() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


ENDS = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))  # runs last
from rlgen.heap import collecting_once, importing
with importing():
    import json
"""


def test_nothing_is_left_out_when_the_process_ends() -> None:
    """Extension modules (nanobind's) count what is left then, and would report it as leaked."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_a_block_collects_once_at_its_end() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    with collecting_once():
        gc.unfreeze()  # as vLLM does
        gone, before = weakref.ref(Cycle()), collections()
        gc.collect()
        gc.collect()
        assert collections() == before and gone() is not None
    assert gone() is None and len(gc.get_objects()) < 1000, "what is alive is left out of later collections"
    gc.unfreeze()
