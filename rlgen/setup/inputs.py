"""Records the data, tokenizer and user's code of each attempt, and checks that a resumed attempt has the same ones."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlgen.algorithms.own import OwnAlgorithm
from rlgen.engines.base import EngineInfo
from rlgen.errors import DataError, UsageError
from rlgen.files import write_json, write_text
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.recipe.load import effective
from rlgen.recipe.trainers import OwnRecipe, TrainerRecipe
from rlgen.recipe.yaml import by_key
from rlgen.rewards.score import Scorer
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.custom import CustomRollout
from rlgen.run.directory import RunDirectory
from rlgen.run.launch import launched_by
from rlgen.run.provenance import provenance
from rlgen.sentinel.verdict import Rung
from rlgen.setup.data import Data, HeldOut
from rlgen.setup.trainer_and_engine import TrainerAndEngine

# Parts of the user's code other than rewards, in words, by what stands before the slash of their names.
PARTS = {"tools": "tool", "environment": "environment", "rollout": "rollout.use", "trainer": "trainer.use"}
# Sizes that decide what is sampled; those of prompts show in their ids.
SIZES = ("rollout.prompts_per_step", "rollout.max_completion_tokens", "eval.max_completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """What runs the code that the recipe names; None: the recipe names none."""

    scorer: Scorer
    judge: Scorer | None  # of evaluations
    dialogue: Dialogue | None  # tools, or an environment
    custom: CustomRollout | None

    def digests(self, trainer: TrainerRecipe) -> dict[str, str | None]:
        """Returns the SHA-256 of the user's code: of each reward by label, of tools as "tools/NAME", of an environment as
        "environment/NAME", of `rollout.use` as "rollout/NAME", of `trainer.use` as "trainer/NAME"; None for what is built in.
        """
        found = {reward.label: reward.sha256 for reward in self.scorer.rewards}
        found |= {f"eval/{reward.label}": reward.sha256 for reward in (self.judge.rewards if self.judge is not None else ())}
        found |= {} if self.custom is None else {f"rollout/{self.custom.use.rpartition(':')[2]}": self.custom.sha256}
        if isinstance(trainer, OwnRecipe):
            found[f"trainer/{trainer.use.rpartition(':')[2]}"] = OwnAlgorithm.load(trainer).sha256
        return found if self.dialogue is None else {**found, **self.dialogue.turns.code}


def ids_in(data: Data) -> dict[str, Any]:
    """Returns what depends on the tokenizer in model.path."""
    return {"prompt_ids": data.prompts.digest, "stop_ids": list(data.stop_ids)}


def facts_of(data: Data | HeldOut) -> dict[str, Any]:
    """Returns what is recorded of the data of training, or of evaluations."""
    rows = data.rows
    return {"kind": rows.kind, "fingerprint": rows.fingerprint, "files": rows.files, **data.prompts.counts}


def same_inputs(directory: RunDirectory, data: Data, now: Mapping[str, str | None]) -> str | None:
    """Checks data, tokenizer and the user's code against the last attempt, and returns the digest of the weights that were then
    in model.path; None if it was not recorded. Raises DataError or UsageError if something differs.
    """
    attempts = directory.attempts(directory.path)
    if not attempts:
        return None
    last = attempts[-1]
    before, fingerprint = last["rewards"], data.rows.fingerprint
    if (was := last["data"]["fingerprint"]) != fingerprint:
        raise DataError(
            f"--resume: the data has changed since the last attempt (fingerprint {was}, now {fingerprint}): the prompts would"
            " come in another order, some of them twice. Bring the data back, or start a new run with model.path at a checkpoint"
            " of this one"
        )
    same_sizes(directory, data)
    held_out = None if data.held_out is None else data.held_out.rows.fingerprint
    if held_out is not None and (was := last.get("eval", {}).get("fingerprint", held_out)) != held_out:
        raise DataError(
            f"--resume: the data of eval has changed since the last attempt (fingerprint {was}, now {held_out}): earlier"
            " and later evaluations could not be compared. Bring the data back, or start a new run"
        )
    for key, ids in ids_in(data).items():
        if (was := last.get(key, ids)) != ids:  # earlier versions did not record them
            raise UsageError(
                f"--resume: {key} have changed since the last attempt (were {was}, now {ids}): tokenizer, chat template or"
                f" generation config in model.path {data.location} differ. Bring them back, or start a new run with"
                " model.path at a checkpoint of this one"
            )
    changed = [
        f"{in_words(name)} (SHA-256 {str(before.get(name))[:12]}, now {str(now[name])[:12]})"
        for name in now
        # A run may get an evaluation, and earlier versions recorded only rewards.
        if before.get(name) != now[name] and (name in before or "/" not in name)
    ]
    if changed:
        raise UsageError(
            f"--resume: the file of {', '.join(changed)}, or a module beside it, was edited since the last attempt:"
            " earlier and later steps would not be comparable. Undo it, or add --allow-changed-rewards"
        )
    return last.get("weights")


def same_sizes(directory: RunDirectory, data: Data) -> None:
    """Raises UsageError if a size is another than in the last attempt: the recipe no longer sets it, and another follows."""
    before, now = (by_key(effective(one)) for one in (load_recipe(directory.resolved, resolved=True).recipe, data.recipe))
    if changed := [key for key in SIZES if before.get(key) not in (None, now.get(key))]:
        told = ", ".join(f"{key} was {before[key]} and is {now.get(key) or 'unset'} now" for key in changed)
        raise UsageError(f"--resume: {told}; set it as it was, or start a new run")


def in_words(name: str) -> str:
    """Returns what the user's code is, by its name in `UserCode.digests`: "tool search", or "reward brevity"."""
    kind, _, own = name.partition("/")
    return f"{PARTS[kind]} {own}" if own and kind in PARTS else f"reward {name}"


def record_attempt(
    directory: RunDirectory,
    both: TrainerAndEngine,
    rewards: Mapping[str, str | None],
    rungs: Sequence[Rung],
    notices: Sequence[str],
    engine: EngineInfo,
) -> None:
    """Appends the facts of this attempt to `provenance.json`, and writes its `resolved.yaml`, with every size."""
    data, held_out = both.data, both.data.held_out
    entry = {
        **provenance(),
        "launcher": launched_by(),
        "engine": {"version": engine.engine, "runner": engine.runner, "dtype": engine.settings.dtype},
        "model": data.location,
        "weights": both.state.models.weights,
        **ids_in(data),
        "data": facts_of(data),
        "eval": {} if held_out is None else {**facts_of(held_out), "trained_on_too": held_out.overlap},
        "rewards": rewards,
        "sentinel": [asdict(rung) for rung in rungs],
        "from_step": both.position.step,
        "notices": list(notices),
    }
    attempts = directory.attempts(directory.path)
    write_text(directory.resolved, dump_recipe(data.recipe))
    write_json(directory.provenance, [*attempts, entry])
