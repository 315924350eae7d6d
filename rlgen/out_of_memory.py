"""Recognises out-of-memory errors and describes them with the peak memory of this process."""

import re
import resource
from collections.abc import Sequence
from traceback import extract_tb

import psutil
import torch

GIB = 1 << 30
# Messages of the CPU's allocator, the system, vLLM and NVIDIA's libraries; on a GPU torch has its own exception class.
NO_MEMORY = re.compile(r"out of memory|not enough memory|an(no|')t allocate memory|_ALLOC_FAILED")
ADVICE = " If reserved but unallocated"  # start of torch's advice about its allocator


def failure_reason(error: Exception, what: str, helps: Sequence[str]) -> str:
    """Returns the message of `error`, or its class. If memory ran out, also names `what`, the peak memory so far and `helps`."""
    if not is_out_of_memory(error):
        return str(error) or one_line(error)
    said = " ".join(str(error).partition(ADVICE)[0].split()).rstrip(".") or type(error).__name__
    return (
        f"the memory does not suffice for {what}: {said}; {peak_memory()}. What helps most: {' or '.join(helps)};"
        " `rlgen estimate` shows the whole table"
    )


def one_line(error: BaseException) -> str:
    """Returns class and message of a library's error on one line, at most 300 characters; without a message, its line of code."""
    said = " ".join(str(error).split()) or next((frame.line for frame in extract_tb(error.__traceback__)[-1:] if frame.line), "")
    return f"{type(error).__name__}: {said}".rstrip(": ")[:300]


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(NO_MEMORY.search(str(error)))


def peak_memory() -> str:
    """Returns the peak memory of this process as text: on its GPU if it uses one, else in main memory."""
    if torch.cuda.is_initialized():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return f"peak {allocated / GIB:.2f} GiB allocated, {reserved / GIB:.2f} GiB reserved, of {total / GIB:.2f} GiB"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"peak {resident / GIB:.2f} GiB resident, of {psutil.virtual_memory().total / GIB:.2f} GiB"
