"""Every cell: one recipe in rlgen's words and in TRL's, both run on the same rollout, compared in value and gradient.

rlgen splits its train batch into micro-batches of at most 120 tokens, and its result must not show it; TRL gets all rows as one
micro-batch, because its result would (`test_defects.py`). Left out, each for what TRL does there:

- `gspo_token`: TRL has none. Where no weight and no keep differs between the tokens of a row its gradient is gspo's; those
  cells are here, the others are hand values (tests/losses/test_variants.py).
- `k3_is` with gspo, gspo_token and luspo: TRL multiplies the token's KL by the whole row's ratio (defect 15). k3 is here.
- RLOO with corrections, a KL in the loss, an entropy bonus: TRL has none. With masked truncated rows and a KL, and the value
  with masked truncated rows: TRL drops such a row's KL and counts its advantage into the value (defect 14).
- Tokens that the engine did not score: rlgen refuses such a batch before its loss; hand values (tests/losses/test_correction.py).
- Not left out: vespo with corrections of sequences. TRL's constructor refuses them (defect 8), its loss does not.
- Aggregation `prompt_mean`, `batch_centered`, k2, `kl_use_weight`, `geometric`, hinge, means and several pairs in Online DPO:
  TRL has none; hand values.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from replay import PATTERNS, ROWS, Outcome, Rollout, oracle, random_rollout, rlgen_outcome
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rlgen.recipe.trainers import TrainerRecipe

RECIPES: TypeAdapter[Any] = TypeAdapter(TrainerRecipe)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Words(NamedTuple):
    """One choice, as rlgen's recipe says it and as TRL's config does."""

    rlgen: dict[str, Any]
    trl: dict[str, Any]

    def __add__(self, other: "Words") -> "Words":
        return Words(self.rlgen | other.rlgen, self.trl | other.trl)


def same(**fields: Any) -> Words:
    return Words(fields, fields)


@dataclass(frozen=True)
class Cell:
    row: str  # of the printed table
    column: str
    name: str  # within both
    oracle: str  # as `replay.oracle` takes it
    words: Words
    rollout: str  # pattern

    def __str__(self) -> str:
        return f"{self.row} × {self.column}: {self.name}, {self.rollout}"


def level(of: str) -> dict[str, Any]:
    return {"importance_sampling_level": of}


LOSSES = {
    **{loss: Words({"loss": loss}, {"loss_type": loss}) for loss in ("dapo", "grpo", "bnpo", "cispo", "sapo", "vespo")},
    "dr_grpo": Words({"loss": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gspo": Words({"loss": "gspo"}, {"loss_type": "grpo", **level("sequence")}),
    "gspo_token": Words({"loss": "gspo_token"}, {"loss_type": "grpo", **level("sequence")}),
    "luspo": Words({"loss": "luspo"}, {"loss_type": "luspo", **level("sequence")}),
}
OF_SEQUENCES = ("gspo", "gspo_token", "luspo")


def correction(mode: str, low: float | None, high: float, name: str | None = None) -> Words:
    caps = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    return Words({"correction": {"mode": name or mode, "min": low, "max": high}}, {"vllm_importance_sampling_mode": mode, **caps})


CORRECTIONS = {
    "none": Words({"correction": {"mode": "none"}}, {"vllm_importance_sampling_correction": False}),
    "token_truncate": correction("token_truncate", None, 2.0),
    "token_mask": correction("token_mask", 0.5, 2.0),
    "icepop": correction("token_mask", 0.5, 5.0, "icepop"),
    "sequence_truncate": correction("sequence_truncate", 0.5, 2.0),
    "sequence_mask": correction("sequence_mask", None, 3.0),
}


def clip(low: float, high: float, delta: float | None = None) -> Words:
    two_sided = {} if delta is None else {"delta": delta}
    return Words({"clip_low": low, "clip_high": high, **two_sided}, {"epsilon": low, "epsilon_high": high, **two_sided})


def sapo(positive: float, negative: float) -> Words:
    return Words(
        {"sapo_tau_positive": positive, "sapo_tau_negative": negative},
        {"sapo_temperature_pos": positive, "sapo_temperature_neg": negative},
    )


def vespo(*shape: float) -> Words:
    names = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
    theirs = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    return Words(
        {f"vespo_{name}": value for name, value in zip(names, shape, strict=True)},
        {f"vespo_{name}": value for name, value in zip(theirs, shape, strict=True)},
    )


CLIPS = {"clip .2/.28": clip(0.2, 0.28), "clip .1/.3": clip(0.1, 0.3), "delta 1.35": clip(0.1, 0.3, 1.35)}
# What bounds the ratio in losses that have no clip.
BOUNDS = {
    "cispo": {f"max {c}": Words({"cispo_max": c}, {"epsilon_high": c}) for c in (5.0, 1.5, 1.1)},
    "sapo": {"tau 1/1.05": sapo(1.0, 1.05), "tau .5/2": sapo(0.5, 2.0), "tau 3/3": sapo(3.0, 3.0)},
    "vespo": {"(2,3), (3,2)": vespo(2, 3, 3, 2), "(1,1), (1.5,.5)": vespo(1, 1, 1.5, 0.5), "(.5,2), (4,3)": vespo(0.5, 2, 4, 3)},
}


def kl(estimator: str) -> Words:
    return Words({"beta": 0.1, "kl": estimator}, {"beta": 0.1, "use_bias_correction_kl": estimator == "k3_is"})


KLS = {"no KL": same(beta=0.0), "k3_is": kl("k3_is"), "k3": kl("k3")}
OPTIONS = {
    "opsm": Words({"off_policy_max": 0.05}, {"off_policy_mask_threshold": 0.05}),
    "top entropy": Words({"top_entropy": 0.37}, {"top_entropy_quantile": 0.37}),
    "entropy bonus": Words({"entropy_bonus": 0.02}, {"entropy_coef": 0.02}),
    "top entropy, bonus and opsm": Words(
        {"top_entropy": 0.6, "entropy_bonus": 0.02, "off_policy_max": 0.1},
        {"top_entropy_quantile": 0.6, "entropy_coef": 0.02, "off_policy_mask_threshold": 0.1},
    ),
    "scale batch": same(scale_rewards="batch"),
    "scale other": Words({}, {}),  # group for dr_grpo, none for the others
    "normalize then sum": Words({"combine_rewards": "normalize_then_sum"}, {"multi_objective_aggregation": "normalize_then_sum"}),
    "truncated masked": Words({"mask_truncated": True}, {"mask_truncated_completions": True}),
}
OFF_POLICY = Words({"updates_per_rollout": 2}, {"num_iterations": 2})
ON_POLICY = Words({"updates_per_rollout": 1}, {"num_iterations": 1})
SAMPLED = Words({"kind": "grpo"}, {"use_vllm": True})


def grpo_cells() -> Iterator[Cell]:
    for loss, mode in ((loss, mode) for loss in LOSSES for mode in CORRECTIONS):
        if loss == "gspo_token" and mode in ("token_truncate", "token_mask", "icepop"):
            continue
        bounds = BOUNDS.get(loss, CLIPS)
        first = next(iter(bounds))
        choice = SAMPLED + LOSSES[loss] + CORRECTIONS[mode]
        kls = {name: words for name, words in KLS.items() if name != "k3_is" or loss not in OF_SEQUENCES}
        for bound, estimator, pattern in ((b, k, p) for b in bounds for k in kls for p in PATTERNS):
            words = choice + bounds[bound] + kls[estimator] + OFF_POLICY
            yield Cell(loss, mode, f"off policy, {bound}, {estimator}", "GRPO", words, pattern)
        for estimator, pattern in ((k, p) for k in kls for p in PATTERNS):
            words = choice + bounds[first] + kls[estimator] + ON_POLICY
            yield Cell(loss, mode, f"on policy, {estimator}", "GRPO", words, pattern)
        for option, words in OPTIONS.items():
            if option == "scale other":
                words = same(scale_rewards="group" if loss == "dr_grpo" else "none")
            if loss == "gspo_token" and "top entropy" in option:
                continue
            words = choice + bounds[first] + KLS["k3"] + OFF_POLICY + words
            yield Cell(loss, mode, f"off policy, {first}, k3, {option}", "GRPO", words, "holes")


def rloo_cells() -> Iterator[Cell]:
    """TRL's one form, the ratio of the whole completion. Its KL is that of the old log-probs: the engine must be exact."""
    choice = Words({"kind": "rloo", "ratio": "sequence", "correction": {"mode": "none"}}, {})
    bounds = {"clip .2/.28": clip(0.2, 0.28), "clip .6/2": clip(0.6, 2.0)}
    kls = {"no KL": same(beta=0.0), "KL in the reward": same(beta=0.1)}
    changes = {
        "plain": Words({}, {}),
        "normalized": same(normalize_advantages=True),
        "reward clip": Words({"reward_clip": (0.2, 1.7)}, {"reward_clip_range": (0.2, 1.7)}),
    }
    for (updates, words), bound in itertools.product({"off policy": OFF_POLICY, "on policy": ON_POLICY}.items(), bounds):
        if updates == "on policy" and bound != "clip .2/.28":
            continue
        for estimator, change, pattern in ((k, c, p) for k in kls for c in changes for p in ("full", "ragged")):
            both = choice + words + bounds[bound] + kls[estimator] + changes[change]
            yield Cell("rloo", "none", f"{updates}, {bound}, {estimator}, {change}", "RLOO", both, f"{pattern}, engine exact")


def online_dpo_cells() -> Iterator[Cell]:
    for loss, beta in ((loss, beta) for loss in ("sigmoid", "ipo") for beta in (0.1, 0.5)):
        for penalty, pattern in ((p, pattern) for p in (0.0, 2.0) for pattern in PATTERNS):
            name = f"{loss}, beta {beta}, EOS penalty {penalty}"
            choice = Words({"kind": "online_dpo", "ties": "first"}, {})
            words = choice + Words({"loss": loss}, {"loss_type": loss}) + same(beta=beta, missing_eos_penalty=penalty)
            yield Cell(
                "online_dpo", "none", name, "OnlineDPO", words + Words({"updates_per_rollout": 2}, {}), f"{pattern}, pairs"
            )


CELLS = [*grpo_cells(), *rloo_cells(), *online_dpo_cells()]


@cache
def rollout_of(name: str, updates: int, dtype: torch.dtype) -> Rollout:
    pattern, _, change = name.partition(", ")
    rollout = random_rollout(pattern, dtype)
    if updates == 1:  # nothing has moved yet
        rollout = replace(rollout, policy_logp=rollout.old_logp)
    if change == "engine exact":
        return replace(rollout, sampler_logp=rollout.old_logp)
    if change == "pairs":
        rewards = tuple({"first": row["first"] or 0.0, "second": 0.0} for row in rollout.rewards)
        return replace(rollout, rewards=rewards, group_ids=tuple(row % (ROWS // 2) for row in range(ROWS)))
    return rollout


def outcomes(cell: Cell, dtype: torch.dtype) -> tuple[Outcome, Outcome]:
    """rlgen's and TRL's."""
    recipe = RECIPES.validate_python(cell.words.rlgen)
    rollout = rollout_of(cell.rollout, recipe.updates_per_rollout, dtype)
    return rlgen_outcome(recipe, rollout), oracle(cell.oracle)(rollout, **cell.words.trl).outcome()


def relative_error(ours: Outcome, oracle: Outcome) -> float:
    """The larger of two: the gradient's, relative to its largest element, and the value's, relative to the larger of it and
    the sum of the gradients' magnitudes. The summands of a value are of that size and cancel."""
    gradient, expected = (torch.stack(outcome[1:]).double() for outcome in (ours, oracle))
    of_gradient = (gradient - expected).abs().max() / expected.abs().max()
    of_value = (ours.value - oracle.value).double().abs() / torch.maximum(oracle.value.double().abs(), expected.abs().sum())
    return torch.maximum(of_value, of_gradient).item()


class Findings(NamedTuple):
    worst: dict[torch.dtype, float]  # relative error
    wrong: dict[str, list[str]]  # by cell


def check(cells: Sequence[Cell]) -> Findings:
    """Whether these cells of one loss and one correction agree, and whether each shows something that the others do not."""
    findings = Findings(dict.fromkeys(TOLERANCE, 0.0), {})
    seen: dict[tuple[float, ...], Cell] = {}
    for cell, (dtype, tolerance) in itertools.product(cells, TOLERANCE.items()):
        ours, oracle = outcomes(cell, dtype)
        error = relative_error(ours, oracle)
        findings.worst[dtype] = max(findings.worst[dtype], error)
        said = findings.wrong.setdefault(str(cell), [])
        if not error <= tolerance:  # NaN does not agree
            said.append(f"off by {error:.1e} in {str(dtype).removeprefix('torch.')}")
        if dtype == torch.float64:
            if not oracle.policy_gradient.any():
                said.append("shows nothing: its gradient is 0")
            other = seen.setdefault(tuple(round(x, 12) for x in oracle.policy_gradient.flatten().tolist()), cell)
            if other is not cell and not oracle.entropy_gradient.any():
                said.append(f"shows nothing: its gradient is that of {other}")
    return findings


def report(console: Console) -> bool:
    """Prints the table; whether all cells agree."""
    rows, columns = (list(dict.fromkeys(getattr(cell, of) for cell in CELLS)) for of in ("row", "column"))
    table = Table("", title="cells, and their worst relative error of value or gradient in float64 and float32", box=SIMPLE)
    for column in columns:
        table.add_column(column)
    wrong: dict[str, list[str]] = {}
    for row in rows:
        entries = []
        for column in columns:
            cells = [cell for cell in CELLS if (cell.row, cell.column) == (row, column)]
            worst, said = check(cells)
            wrong |= {name: why for name, why in said.items() if why}
            entries.append(f"{len(cells)}  {' '.join(f'{e:.0e}' for e in worst.values())}" if cells else "")
        table.add_row(row, *entries)
    console.print(table)
    for name, why in wrong.items():
        console.print(f"{name}: {', '.join(why)}")
    console.print(f"{len(CELLS)} cells, {len(CELLS) - len(wrong)} agree with TRL {version('trl')} in value and gradient")
    return not wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(0 if report(Console(width=130)) else 1)
