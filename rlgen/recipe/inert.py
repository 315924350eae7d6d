"""Finds the fields that have no effect in a recipe."""

from collections.abc import Iterable, Iterator, Sequence

from rlgen.recipe.data import TASK_COLUMNS
from rlgen.recipe.engines import ColocatedEngineRecipe, ServerEngineRecipe, VllmRecipe
from rlgen.recipe.evaluation import temperature_of
from rlgen.recipe.health import HealthRule
from rlgen.recipe.models import EvalRecipe, Recipe, RewardRecipe
from rlgen.recipe.rules import Finding, is_local_model, is_local_source
from rlgen.recipe.trainers import OWN_SETTINGS, GRPORecipe, OnlineDPORecipe, OwnRecipe, RLOORecipe, TrainerRecipe


def inert(recipe: Recipe) -> list[Finding]:
    """Returns the fields that have no effect: refused if the user set them, and left out of the resolved recipe."""
    data, engine, held = recipe.data, recipe.engine, recipe.eval
    found = [
        *_inert_in_trainer(recipe.trainer),
        *_inert_of_sections(recipe),
        *_inert_in_health(recipe),
        *_inert_of_source("data", data.source),
        *_inert_in_rewards(recipe.rewards, "rewards"),
    ]
    if held is not None:
        found += [*_inert_of_source("eval", held.source or data.source), *_inert_in_eval(recipe, held)]
    if isinstance(engine, ServerEngineRecipe):
        found += _inert_in_server(engine, recipe.model.lora is not None)
    first = {finding.path: finding for finding in reversed(found)}  # one reason is enough
    return [finding for finding in found if finding is first[finding.path]]


def _no_effect(section: str, keys: Iterable[str], why: str, hint: str = "remove it") -> Iterator[Finding]:
    """Yields a finding for each key of a section: "SECTION.KEY has no effect WHY"."""
    for key in keys:
        yield Finding(f"{section}.{key}", f"{section}.{key} has no effect {why}", hint)


def _inert_of_sections(recipe: Recipe) -> Iterator[Finding]:
    """Yields the fields that have no effect for lack of another section, or beside it."""
    data, model = recipe.data, recipe.model
    if not recipe.rollout.async_steps:
        why = "when rollout.async_steps is 0: every sample is from the current weights"
        yield from _no_effect("rollout", ["max_staleness"], why)
        yield from _no_effect("sentinel", ["probe_every"], why)
        if isinstance(recipe.engine, ServerEngineRecipe):
            yield from _no_effect("engine", ["in_flight"], why)
    if not recipe.tools:
        yield from _no_effect("data", ["tool_format"], "without tools", "remove it, or add tools")
    if not recipe.talks:
        why = "without tools or an environment: a completion is one turn"
        yield from _no_effect("rollout", ["max_turns", "reply_timeout"], why, "remove it, or add tools")
    if data.columns.images is None:
        why = "without data.columns.images: no row has images"
        yield from _no_effect("model", ["train_vision"], why, "remove it, or name the column of images")
    if recipe.task and not (data.chat or data.system):
        why = ": the prompts of a task are texts, and no template is applied"
        for path in ("data.template_args", "data.chat_template"):
            yield Finding(path, f"{path} has no effect{why}", "remove it, or set data.chat to true")
    if recipe.processes.strategy == "ddp":
        why = "with processes.strategy ddp: each process holds all weights, and sends gradients once"
        yield from _no_effect("processes", ["shard", "defer_sync"], why, "remove it, or set processes.strategy to fsdp")
    if not recipe.rollouts.every:
        places = [f"{place}.samples" for place in range(len(recipe.sinks))]
        why = "with rollouts.every 0: tables show the rollouts that are written"
        yield from _no_effect("sinks", places, why, "remove it, or set rollouts.every to 1 or more")
    if model.path.startswith("tiny:") or is_local_model(model.path):
        yield Finding("model.revision", "model.revision has no effect: model.path is not a hub id", "remove it")


def _inert_in_server(engine: ServerEngineRecipe, lora: bool) -> Iterator[Finding]:
    """Yields the fields without effect of an engine on servers; `lora`: an adapter is trained."""
    if engine.url is not None:
        # All but dtype, which states what the server is expected to have.
        keys = [*(VllmRecipe.model_fields.keys() - {"dtype"}), "servers", "host", "port", "start_timeout", "devices"]
        why = "beside engine.url: that server already runs, with its own setting"
        yield from _no_effect("engine", keys, why, "remove it here, and set it for `rlgen serve`")
    if engine.transfer == "nccl":
        why = "with engine.transfer nccl, which keeps no files and no copy of the weights to recover a server with"
        yield from _no_effect("engine", ["transfer_dir", "restarts"], why, "remove it, or set engine.transfer to files")
    if not lora:
        yield from _no_effect("engine", ["lora"], "without model.lora")
    elif engine.transfer == "nccl":
        yield from _no_effect("engine", ["lora"], "with engine.transfer nccl: all weights are sent, merged")


def _inert_of_source(section: str, source: str) -> Iterator[Finding]:
    """Yields the fields of `data` or `eval` that have no effect with this source."""
    task, local = source.startswith("task:"), is_local_source(source)
    if not task:
        path = f"{section}.options"
        yield Finding(path, f"{path} has an effect only with a task: source", "remove it")
    else:
        pictures = "images" in TASK_COLUMNS.get(source.removeprefix("task:"), ())
        columns = ["columns.prompt", "columns.answer"] if pictures else ["columns"]
        yield from _no_effect(section, columns, "with a task: source")
    if task or local:
        kind = "a task: source" if task else "local files"
        yield from _no_effect(section, ["subset", "split", "revision"], f"with {kind}")


def _inert_in_rewards(rewards: Sequence[RewardRecipe], section: str) -> Iterator[Finding]:
    """Yields the fields of rewards, which stand at `section`, that have no effect."""
    failing = [f"{index}.max_error_fraction" for index, reward in enumerate(rewards) if reward.on_error == "fail"]
    why = "when on_error is fail: the first failure ends the run"
    yield from _no_effect(section, failing, why, "remove it, or set on_error to skip")


def _inert_in_eval(recipe: Recipe, held: EvalRecipe) -> Iterator[Finding]:
    """Yields the fields of the `eval` section that have no effect, other than those of its source."""
    yield from _inert_in_rewards(held.rewards or (), "eval.rewards")
    if temperature_of(recipe, held) == 0:
        hint = "remove it, or set eval.temperature"
        yield Finding("eval.top_p", "eval.top_p has no effect: a greedy completion takes the most probable tokens", hint)


def _inert_in_trainer(trainer: TrainerRecipe) -> Iterator[Finding]:
    """Yields the fields of the `trainer` section that have no effect; some with several reasons."""
    if trainer.correction.mode == "none":
        keys = ["correction.min", "correction.max"]
        yield from _no_effect("trainer", keys, "when trainer.correction.mode is none", "remove it, or set a mode")
    if isinstance(trainer, OnlineDPORecipe | OwnRecipe):  # an algorithm of the user's may read any field
        return
    uncorrected = trainer.correction.mode == "none" and trainer.correction.geometric is None
    if trainer.beta == 0:
        hint = "remove it, or set trainer.beta above 0"
        yield from _no_effect("trainer", ["kl", "kl_use_weight"], "when trainer.beta is 0", hint)
    if trainer.kl == "k1_in_reward":
        yield from _no_effect("trainer", ["kl_use_weight"], "when the KL is in the reward")
    if uncorrected:
        yield from _no_effect("trainer", ["kl_use_weight"], "when nothing is corrected: weights are 1")
    unmoved = "when trainer.updates_per_rollout is 1: the ratio is 1 until the weights have moved"
    more = "remove it, or set trainer.updates_per_rollout to 2 or more"
    clips = ["clip_low", "clip_high", "delta"]
    if isinstance(trainer, GRPORecipe):
        if trainer.combine_rewards == "normalize_then_sum":
            why = "with trainer.combine_rewards normalize_then_sum, which scales by itself"
            yield from _no_effect("trainer", ["scale_rewards"], why)
        other = f"with trainer.loss {trainer.loss}"
        for loss in OWN_SETTINGS:
            keys = [key for key in GRPORecipe.model_fields if key.startswith(f"{loss}_")]
            if trainer.loss != loss:
                yield from _no_effect("trainer", keys, other)
            elif trainer.updates_per_rollout == 1 and (loss != "vespo" or uncorrected):
                yield from _no_effect("trainer", keys, unmoved, more)
        if trainer.loss in OWN_SETTINGS:
            yield from _no_effect("trainer", clips, other)
    if trainer.updates_per_rollout == 1:
        keys = [*clips, "ratio"] if isinstance(trainer, RLOORecipe) else clips
        yield from _no_effect("trainer", keys, unmoved, more)


def _inert_in_health(recipe: Recipe) -> Iterator[Finding]:
    """Yields health rules whose value this recipe never measures, and settings of rules that are ignored."""
    trainer, engine = recipe.trainer, recipe.engine
    unmeasured: dict[str, str] = {}  # rule -> why
    if isinstance(trainer, OnlineDPORecipe):
        unmeasured["clipped"] = "with trainer.kind online_dpo, which clips nothing"
    else:
        if trainer.beta == 0:
            unmeasured["ref_kl"] = "when trainer.beta is 0: there is no reference"
        if isinstance(trainer, GRPORecipe) and trainer.loss in OWN_SETTINGS and trainer.loss != "cispo":
            unmeasured["clipped"] = f"with trainer.loss {trainer.loss}, which clips nothing"
        elif trainer.updates_per_rollout == 1:
            unmeasured["clipped"] = "when trainer.updates_per_rollout is 1: the ratio is 1"
    if isinstance(engine, ColocatedEngineRecipe) and engine.structured_regex is not None:
        why = "with engine.structured_regex: its log-probs are not the policy's"
        unmeasured |= dict.fromkeys(["sampler_delta", "sampler_kl", "ess"], why)
    elif recipe.rollout.async_steps:  # instead, `sentinel.probe_every` samples with current weights
        why = "with rollout.async_steps: earlier weights sampled, so that a difference is expected"
        unmeasured |= dict.fromkeys(["sampler_delta", "sampler_kl"], why)
    for name, why in unmeasured.items():
        yield from _no_effect("health", [name], why)
    for name, rule in recipe.health:
        if isinstance(rule, HealthRule) and rule.action == "ignore" and name not in unmeasured:
            yield from _no_effect(f"health.{name}", ["threshold", "steps"], f"when health.{name}.action is ignore")
