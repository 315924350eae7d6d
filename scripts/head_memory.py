"""`make head-memory`: peak memory and time of scoring tokens by chunks, beside the straightforward computation of all logits.

Each measurement is a process of its own: forward and backward, to the hidden states and to the head's weight. Extra memory is
the peak of the resident set less what was resident before, tensors that come in included; the gradients that come out are
counted on both sides. Exit code 1 if chunks take more than an eighth of the memory.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from rlgen.losses.logp import EntropyUse, HeadScores, head_scores
from rlgen.types import WHOLE

ENTROPIES: tuple[EntropyUse, ...] = ("none", "value", "gradient")
MOST = 1 / 8


class Size(NamedTuple):
    """Of a measurement; `chunk` 0: as many positions as `head_scores` chooses."""

    tokens: int = 4096
    vocabulary: int = 151_936
    hidden: int = 256
    chunk: int = 0


class Cost(NamedTuple):
    mib: float  # peak of the resident memory, less what was resident before
    seconds: float


class Row(NamedTuple):
    entropy: EntropyUse
    full: Cost
    chunked: Cost

    @property
    def share(self) -> float:
        return self.chunked.mib / self.full.mib


def full_scores(hidden: Tensor, weight: Tensor, ids: Tensor, entropy: EntropyUse) -> HeadScores:
    """All logits at once, as one would write it down."""
    logp_NV = (hidden @ weight.T).log_softmax(dim=-1)
    logp_KN = logp_NV.gather(1, ids[:, None])[:, 0][None]
    if entropy == "none":
        return HeadScores(logp_KN, None, None)
    if entropy == "value":
        logp_NV = logp_NV.detach()
    return HeadScores(logp_KN, -(logp_NV.exp() * logp_NV).sum(dim=-1), None)


def forward_and_backward(hidden: Tensor, weight: Tensor, ids: Tensor, mode: str, entropy: EntropyUse, chunk: int) -> None:
    if mode == "full":
        scores = full_scores(hidden, weight, ids, entropy)
    else:
        scores = head_scores(hidden, weight, ids, (WHOLE,), entropy=entropy, chunk=chunk or None)
    loss = scores.logp.mean() if entropy != "gradient" else scores.logp.mean() + scores.entropy.mean()
    loss.backward()


def tensors(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=generator).requires_grad_()
    weight = torch.randn(size.vocabulary, size.hidden, generator=generator).mul_(0.05).requires_grad_()
    return hidden, weight, torch.randint(0, size.vocabulary, (size.tokens,), generator=generator)


def resident(key: str) -> float:
    """MiB. VmRSS: resident now; VmHWM: the most since the process began, or since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def measure(size: Size, mode: str, entropy: EntropyUse) -> Cost:
    """In this process, which should have done nothing else."""
    small = size._replace(tokens=8, vocabulary=64, chunk=4)
    forward_and_backward(*tensors(small), mode, entropy, small.chunk)  # threads and libraries are set up
    given = tensors(size)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = resident("VmRSS"), time.perf_counter()
    forward_and_backward(*given, mode, entropy, size.chunk)
    seconds = time.perf_counter() - start
    return Cost(resident("VmHWM") - before, seconds)


def measure_apart(size: Size, mode: str, entropy: EntropyUse, repeats: int) -> Cost:
    """Medians over processes of their own."""
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in size._asdict().items()), mode, entropy]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}  # what a tensor frees is not kept by the allocator
    outputs = [
        subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout for _ in range(repeats)
    ]
    mib, seconds = zip(*(map(float, output.split()) for output in outputs), strict=True)
    return Cost(median(mib), median(seconds))


def compare(size: Size, repeats: int) -> list[Row]:
    return [Row(entropy, *(measure_apart(size, mode, entropy, repeats) for mode in ("full", "chunked"))) for entropy in ENTROPIES]


def print_table(size: Size, rows: list[Row]) -> None:
    threads = torch.get_num_threads()
    print(f"{size.tokens} tokens, vocabulary {size.vocabulary}, hidden size {size.hidden}, float32, {threads} threads")
    print("entropy    full MiB  chunked MiB  share   full s  chunked s  ratio")
    for row in rows:
        (full_mib, full_s), (mib, s) = row.full, row.chunked
        print(f"{row.entropy:9}{full_mib:10.0f}{mib:13.0f}  1/{1 / row.share:4.1f}{full_s:9.1f}{s:11.1f}{s / full_s:7.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in Size()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("measured", nargs="*", help="one measurement in this process: full|chunked none|value|gradient")
    arguments = parser.parse_args()
    size = Size(*(getattr(arguments, name) for name in Size._fields))
    if arguments.measured:
        print(*measure(size, *arguments.measured))
        return 0
    rows = compare(size, arguments.repeats)
    print_table(size, rows)
    return int(any(row.share > MOST for row in rows))


if __name__ == "__main__":
    sys.exit(main())
