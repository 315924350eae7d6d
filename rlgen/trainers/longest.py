"""The largest micro-batches that a run can meet, tried before step 1: too little memory shows at once, not at night."""

import torch

from rlgen.errors import SetupError
from rlgen.models.shortage import memory_for, peak
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.trainers.base import Signal
from rlgen.trainers.update import Updater
from rlgen.trainers.window import Window
from rlgen.types import Sample


def try_longest(recipe: Recipe, update: Updater, processes: Processes) -> str:
    """Forward and backward of one micro-batch a process: of the longest rows, and of as many tokens as there may be.

    Weights, gradients, optimizer and random states stay as they are. Room for the optimizer's state is taken where it is yet to
    come.

    Returns:
        What was tried, in words.

    Raises:
        SetupError: in all processes, if the memory of one does not suffice, as `Updater` raises it.
    """
    trained = [parameter for parameter in update.policy.parameters() if parameter.requires_grad]
    tried = []
    for rows, length in dict.fromkeys((longest(recipe, processes.world), fullest(recipe, processes.world))):
        window, size = made_up(recipe, rows, length, processes), f"{rows} rows of {length} tokens"

        def attempt(window: Window = window) -> None:
            with memory_for("the optimizer's state", update.less_memory("optimizer"), SetupError):
                moments = [] if update.optimizer.state else [torch.empty_like(p, requires_grad=False) for p in trained * 2]
            with torch.random.fork_rng():
                update.attempt(window)
            del moments

        processes.agreed(attempt, talks=update.sharded)
        tried.append(size)
    return f"the largest micro-batches fit: {', '.join(tried)}; {peak()}"


def longest(recipe: Recipe, processes: int) -> tuple[int, int]:
    """Rows and tokens of a row: as many of the longest as a micro-batch takes, or a process has."""
    rows = min(recipe.optim.micro_batch_tokens // recipe.max_row_tokens, share(recipe, processes))
    return whole_pairs(recipe, rows), recipe.max_row_tokens


def fullest(recipe: Recipe, processes: int) -> tuple[int, int]:
    """As many tokens as a micro-batch takes, in a row more than `longest` if need be."""
    rows = whole_pairs(recipe, min(-(-recipe.optim.micro_batch_tokens // recipe.max_row_tokens), share(recipe, processes)))
    return rows, min(recipe.max_row_tokens, max(2, recipe.optim.micro_batch_tokens // rows))


def share(recipe: Recipe, processes: int) -> int:
    """Samples of a step that a process trains on."""
    return -(-recipe.samples_per_step // processes)


def whole_pairs(recipe: Recipe, rows: int) -> int:
    """Rows of preferences go by twos."""
    return max(2, rows - rows % 2) if recipe.trainer.kind == "online_dpo" else max(1, rows)


def made_up(recipe: Recipe, rows: int, length: int, processes: Processes) -> Window:
    """A window of which each process has one micro-batch of `rows`."""
    completion = min(recipe.rollout.max_completion_tokens, length - 1)
    samples = [
        Sample(
            group_id=row // 2,
            sample_index=row % 2,
            prompt_ids=(0,) * (length - completion),
            completion_ids=(0,) * completion,
            sampler_logp=(-1.0,) * completion,
            loss_mask=(True,) * completion,
            finish_reason="length",
            weight_version=0,
            seed=0,
            completion="",
            rewards={},
            reward=None,
        )
        for row in range(rows * processes.world)
    ]
    place = torch.arange(len(samples))
    everyone = torch.ones(len(samples), dtype=torch.bool)
    signal = Signal(
        advantages=1.0 - 2.0 * (place % 2).double(),
        counted=everyone,
        trained=everyone,
        pair_id=place // 2 if recipe.trainer.kind == "online_dpo" else torch.full_like(place, -1),
    )
    # Rows of one length: the plan makes one micro-batch of them.
    window = Window.of(samples, signal, 0.0, rows * length, processes)
    window.ref_logp.update((row, torch.full((completion,), -1.0)) for row in range(len(samples)))
    return window
