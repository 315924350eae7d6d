"""Keeps the memory management of C and of Python from repeating work in a run."""

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 1 << 30  # bytes at the end of the heap
OF_THEIR_OWN = 32 << 20  # bytes; larger tensors have pages of their own, which are given back when they are freed: glibc's limit


def keep_freed_memory() -> None:
    """Lets glibc keep up to 1 GiB of freed memory at the end of its heap. Does nothing with another C library.

    By default it gives 64 MiB and more back to the kernel at once. The activations of a micro-batch are freed after its backward
    pass, and the pages for the next one were found and zeroed again: on the CPU up to half of the time of an update.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_TRIM_THRESHOLD, KEPT)
        library.mallopt(M_MMAP_THRESHOLD, OF_THEIR_OWN)


@contextmanager
def importing() -> Iterator[None]:
    """Pauses Python's garbage collection while the block imports modules, and leaves what they made out of later collections.

    What they make stays, and Python would go through all of it again and again: 700,000 objects of torch, transformers and vLLM,
    five times in vLLM's start alone. Garbage from before is collected first, because it would be left out, too.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or extension modules would report as leaked what they still hold at the end
        if was_enabled:
            gc.enable()


@contextmanager
def collecting_once() -> Iterator[None]:
    """Collects garbage once, at the end of the block, however often the block asks for it. Leaves out what stays, as `importing`.

    vLLM ends an engine with three collections, and makes each look at all that was imported: half a second on a CPU.
    """
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect
        gc.collect()
        gc.freeze()
