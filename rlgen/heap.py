"""Spares a run what the memory management of C and of Python would do again and again."""

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT = 1 << 30  # bytes at the end of the heap
OF_THEIR_OWN = 32 << 20  # bytes from which on a tensor has pages of its own, which are given back when it is freed: glibc's limit


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
