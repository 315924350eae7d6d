"""Loads an algorithm that the user writes: `trainer: {use: "mine.py:MyAlgorithm", args: {...}}`.

The class is called with the `trainer` section of the recipe, and has the members of `Algorithm`. `PolicyGradient` has all of them
but three:

    class Reinforce(PolicyGradient):
        divides_by = "sequences"

        def advantages(self, scores):
            centred = group_advantages(scores.rewards, scores.group_ids, "none")
            return Advantages.of_policy(centred, without_signal(scores.rewards, scores.group_ids), scores, self.recipe)

        def loss(self, x):
            token_BT = -x.weight * x.advantages[:, None].to(x.policy_logp) * select(x.mask, x.policy_logp)
            return select(x.mask, token_BT).sum() / max(x.totals.sequences, 1), {}

When it is loaded, it is tried on random rows. An algorithm is refused if its loss or gradient depends on the split into
micro-batches, differs when it is computed again, or comes from tokens outside the mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from rlgen.algorithms.base import Advantages, Algorithm, Denominator, Scores
from rlgen.errors import CodeError, RlgenError
from rlgen.losses.correction import Correction
from rlgen.losses.inputs import LossInputs, Stats, Totals
from rlgen.recipe.trainers import OwnRecipe
from rlgen.worker_pool.failures import described, user_line
from rlgen.worker_pool.find import find_function
from rlgen.worker_pool.source import Trade

ALGORITHM = Trade("trainer.use", "algorithm", CodeError)
MEMBERS = [name for name in vars(Algorithm) if not name.startswith("_")]
PROPERTIES = [name for name in MEMBERS if name not in ("advantages", "loss")]
ROWS, TOKENS = 6, 5  # of the trial, in groups of two
CLOSE = 1e-9  # relative distance of two gradients in float64 that rounding explains
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class OwnAlgorithm:
    """A user's algorithm. Errors in its code name the user's line."""

    use: str
    sha256: str | None  # of the user's code
    algorithm: Algorithm
    reference: Literal["none", "reward", "loss"]
    correction: Correction
    loss_temperature: float | None
    top_entropy: float
    entropy_gradient: bool
    learns_without_advantage: bool
    divides_by: Denominator

    @classmethod
    def load(cls, settings: OwnRecipe) -> "OwnAlgorithm":
        """Imports the class, calls it with `settings`, and tries its loss."""
        made, sha256 = find_function(settings.use, ALGORITHM)
        algorithm = call_function(settings.use, "it", lambda: made(settings))
        if missing := [name for name in MEMBERS if not hasattr(algorithm, name)]:
            hint = "derive the class from rlgen.algorithms.base.PolicyGradient, which has all but advantages, loss and divides_by"
            raise CodeError(f"trainer.use: {settings.use} lacks {', '.join(missing)}; {hint}")
        if algorithm.divides_by not in get_args(Denominator):
            counts = ", ".join(get_args(Denominator))
            raise CodeError(f"trainer.use: {settings.use}.divides_by is {algorithm.divides_by!r}; set it to one of {counts}")
        own = cls(settings.use, sha256, algorithm, **{name: getattr(algorithm, name) for name in PROPERTIES})
        own.tried()
        return own

    def advantages(self, scores: Scores) -> Advantages:
        advantages = call_function(self.use, "advantages", lambda: self.algorithm.advantages(scores))
        columns = [getattr(advantages, column.name, None) for column in fields(Advantages)]
        fits = all(isinstance(one, Tensor) and one.shape == scores.rewards.shape for one in columns)
        flags = fits and advantages.counted.dtype == advantages.trained.dtype == torch.bool
        if not flags or not advantages.advantages.isfinite().all():
            what = "Advantages with a finite advantage for each row, and the other columns as long"
            raise CodeError(f"trainer.use: {self.use}.advantages must return {what}")
        paired = (advantages.pair_id >= 0)[advantages.trained]
        if paired.any() and not paired.all():
            raise CodeError(f"trainer.use: {self.use}.advantages trains rows in pairs and rows in none; train one kind only")
        return advantages

    def loss(self, x: LossInputs) -> tuple[Tensor, Stats]:
        found = call_function(self.use, "loss", lambda: self.algorithm.loss(x))
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and found[0].ndim == 0):
            raise CodeError(f"trainer.use: {self.use}.loss must return a scalar tensor and a dict of stats")
        return found

    def tried(self) -> None:
        """Tries the loss on random rows: whole, whole again, and in two micro-batches. Raises CodeError with the numbers."""
        inputs = trial_inputs(self)
        value, gradient = gradient_of(self, inputs, range(ROWS))
        again, same = gradient_of(self, inputs, range(ROWS))
        first = 2 if (inputs.pair_id >= 0).any() else 3  # a group may be split, a pair may not
        parts = [gradient_of(self, inputs, rows) for rows in (range(first), range(first, ROWS))]
        size = gradient.norm().clamp(min=1e-30)
        split = torch.cat([part for _, part in parts])
        distance, apart = ((split - gradient).norm() / size).item(), abs(sum(part for part, _ in parts) - value)
        outside = gradient[~inputs.mask].abs().max().item()
        why = None
        if not gradient.isfinite().all() or outside:
            why = f"its gradient is {outside:.3g} outside of the mask; pass log-probs through rlgen.losses.masking.select"
        elif not gradient.any():
            why = "its gradient is zero; the loss must be differentiable in x.policy_logp"
        elif value != again or not torch.equal(gradient, same):
            why = f"computed twice it differs: {value:.9g} and {again:.9g}; remove what is random, or remembers earlier calls"
        elif not (distance <= CLOSE and apart <= CLOSE * max(1.0, abs(value))):
            why = (
                f"it depends on the split: the gradient of {ROWS} rows differs by {distance:.3g} of its norm in two"
                f" micro-batches, and the loss by {apart:.3g}; divide by a count of x.totals, never by one of the micro-batch"
            )
        if why is not None:
            raise CodeError(f"trainer.use: {self.use}.loss was tried on random rows: {why}")


def call_function(use: str, what: str, function: Callable[[], Found]) -> Found:
    """Calls the user's code; an error of it names the user's line."""
    try:
        return function()
    except (RlgenError, torch.OutOfMemoryError):  # a lack of memory is not the user's mistake: the caller says what helps
        raise
    except Exception as error:  # user code may raise anything
        where = use if what == "it" else f"{use}.{what}"
        raise CodeError(f"trainer.use: {where} raised {described(error)} {user_line(error, use.rpartition(':')[0])}") from error


def trial_inputs(algorithm: Algorithm) -> LossInputs:
    """Returns random rows in float64, three groups of two, with NaN outside of the mask."""
    draw = torch.Generator().manual_seed(0)

    def near(values: Tensor) -> Tensor:
        return values + 0.1 * torch.randn(values.shape, generator=draw, dtype=torch.float64)

    groups, lengths = torch.arange(ROWS) // 2, 1 + torch.arange(ROWS) % TOKENS
    mask = torch.arange(TOKENS)[None] < lengths[:, None]
    rewards = torch.randn(ROWS, generator=draw, dtype=torch.float64)
    advantages = algorithm.advantages(
        Scores(
            rewards=rewards,
            columns=rewards[:, None],
            column_weights=torch.ones(1, dtype=torch.float64),
            group_ids=groups,
            sample_index=torch.arange(ROWS) % 2,
            truncated=torch.zeros(ROWS, dtype=torch.bool),
            kl=rewards.abs() if algorithm.reference == "reward" else None,
        )
    )
    old = -torch.rand(ROWS, TOKENS, generator=draw, dtype=torch.float64) - 0.1
    inputs: dict[str, Any] = {"policy_logp": near(old), "old_logp": old, "sampler_logp": near(old), "entropy": -old}
    if algorithm.reference == "loss":
        inputs["ref_logp"] = near(old)
    inputs = {name: values.masked_fill(~mask, torch.nan) for name, values in inputs.items()}
    tokens, pairs = int(mask.sum()), int((advantages.pair_id >= 0).sum()) // 2
    return LossInputs(
        **{"ref_logp": None, **inputs},
        mask=mask,
        kept=mask,
        advantages=advantages.advantages,
        weight=near(torch.ones(ROWS, TOKENS, dtype=torch.float64)).masked_fill(~mask, 1.0),
        group_tokens=lengths.view(-1, 2).sum(1).repeat_interleave(2),
        pair_id=advantages.pair_id,
        totals=Totals(sequences=ROWS, tokens=tokens, kept=tokens, prompts=ROWS // 2, pairs=pairs),
        max_tokens=TOKENS,
        epoch=0.0,
    )


def gradient_of(algorithm: Algorithm, inputs: LossInputs, rows: Sequence[int]) -> tuple[float, Tensor]:
    """Returns the loss of these rows, and its gradient [rows, TOKENS] in their log-probs."""
    index = torch.tensor(rows)
    taken: dict[str, Any] = {
        one.name: value[index] for one in fields(LossInputs) if isinstance(value := getattr(inputs, one.name), Tensor)
    }
    logp = taken["policy_logp"].requires_grad_()
    loss, _ = algorithm.loss(replace(inputs, **taken))
    gradient = torch.autograd.grad(loss, logp, allow_unused=True)[0] if loss.requires_grad else None
    return loss.item(), torch.zeros_like(logp) if gradient is None else gradient
