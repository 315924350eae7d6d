"""Finds the fields that have no effect in a recipe."""

from collections.abc import Iterator, Sequence

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
    return found


def _inert_of_sections(recipe: Recipe) -> Iterator[Finding]:
    """Yields the fields that have no effect for lack of another section, or beside it."""
    data, model = recipe.data, recipe.model
    if not recipe.rollout.async_steps:
        paths = ["rollout.max_staleness", "sentinel.probe_every"]
        for path in [*paths, "engine.in_flight"] if isinstance(recipe.engine, ServerEngineRecipe) else paths:
            why = "when rollout.async_steps is 0: every sample is from the current weights"
            yield Finding(path, f"{path} has no effect {why}", "remove it")
    if not recipe.tools:
        yield Finding("data.tool_format", "data.tool_format has no effect without tools", "remove it, or add tools")
    if not recipe.talks:
        for path in ("rollout.max_turns", "rollout.reply_timeout"):
            what = f"{path} has no effect without tools or an environment: a completion is one turn"
            yield Finding(path, what, "remove it, or add tools")
    if data.columns.images is None:
        what = "model.train_vision has no effect without data.columns.images: no row has images"
        yield Finding("model.train_vision", what, "remove it, or name the column of images")
    if recipe.task and not (data.chat or data.system):
        for path in ("data.template_args", "data.chat_template"):
            what = f"{path} has no effect: the prompts of a task are texts, and no template is applied"
            yield Finding(path, what, "remove it, or set data.chat to true")
    if recipe.processes.strategy == "ddp":
        for path in ("processes.shard", "processes.defer_sync"):
            what = f"{path} has no effect with processes.strategy ddp: each process holds all weights, and sends gradients once"
            yield Finding(path, what, "remove it, or set processes.strategy to fsdp")
    if not recipe.rollouts.every:
        for place in range(len(recipe.sinks)):
            path = f"sinks.{place}.samples"
            what = f"{path} has no effect with rollouts.every 0: tables show the rollouts that are written"
            yield Finding(path, what, "remove it, or set rollouts.every to 1 or more")
    if model.path.startswith("tiny:") or is_local_model(model.path):
        yield Finding("model.revision", "model.revision has no effect: model.path is not a hub id", "remove it")


def _inert_in_server(engine: ServerEngineRecipe, lora: bool) -> Iterator[Finding]:
    """Yields the fields without effect of an engine on servers; `lora`: an adapter is trained."""
    if engine.url is not None:
        # All but dtype, which states what the server is expected to have.
        for key in [*(VllmRecipe.model_fields.keys() - {"dtype"}), "servers", "host", "port", "start_timeout", "devices"]:
            path = f"engine.{key}"
            why = f"{path} has no effect beside engine.url: that server already runs, with its own setting"
            yield Finding(path, why, "remove it here, and set it for `rlgen serve`")
    if engine.transfer == "nccl":
        why = "has no effect with engine.transfer nccl, which keeps no files and no copy of the weights to recover a server with"
        for path in ("engine.transfer_dir", "engine.restarts"):
            yield Finding(path, f"{path} {why}", "remove it, or set engine.transfer to files")
    if not lora or engine.transfer == "nccl":
        why = "with engine.transfer nccl: all weights are sent, merged" if lora else "without model.lora"
        yield Finding("engine.lora", f"engine.lora has no effect {why}", "remove it")


def _inert_of_source(section: str, source: str) -> Iterator[Finding]:
    """Yields the fields of `data` or `eval` that have no effect with this source."""
    task, local = source.startswith("task:"), is_local_source(source)
    if not task:
        path = f"{section}.options"
        yield Finding(path, f"{path} has an effect only with a task: source", "remove it")
    useless = ["subset", "split", "revision"] if task or local else []
    if task:
        pictures = "images" in TASK_COLUMNS.get(source.removeprefix("task:"), ())
        useless = [*(["columns.prompt", "columns.answer"] if pictures else ["columns"]), *useless]
    kind = "a task: source" if task else "local files"
    yield from (Finding(f"{section}.{key}", f"{section}.{key} has no effect with {kind}", "remove it") for key in useless)


def _inert_in_rewards(rewards: Sequence[RewardRecipe], section: str) -> Iterator[Finding]:
    """Yields the fields of rewards, which stand at `section`, that have no effect."""
    for index, reward in enumerate(rewards):
        if reward.on_error == "fail":
            path = f"{section}.{index}.max_error_fraction"
            why = f"{path} has no effect when on_error is fail: the first failure ends the run"
            yield Finding(path, why, "remove it, or set on_error to skip")


def _inert_in_eval(recipe: Recipe, held: EvalRecipe) -> Iterator[Finding]:
    """Yields the fields of the `eval` section that have no effect, other than those of its source."""
    yield from _inert_in_rewards(held.rewards or (), "eval.rewards")
    if temperature_of(recipe, held) == 0:
        hint = "remove it, or set eval.temperature"
        yield Finding("eval.top_p", "eval.top_p has no effect: a greedy completion takes the most probable tokens", hint)


def _inert_in_trainer(trainer: TrainerRecipe) -> list[Finding]:
    """Returns the fields of the `trainer` section that have no effect."""
    found: list[Finding] = []

    def no_effect(keys: Sequence[str], why: str, hint: str = "remove it") -> None:
        said = {finding.path for finding in found}
        paths = [f"trainer.{key}" for key in keys]
        found.extend(Finding(path, f"{path} has no effect {why}", hint) for path in paths if path not in said)

    if trainer.correction.mode == "none":
        no_effect(["correction.min", "correction.max"], "when trainer.correction.mode is none", "remove it, or set a mode")
    if isinstance(trainer, OnlineDPORecipe | OwnRecipe):  # an algorithm of the user's may read any field
        return found
    uncorrected = trainer.correction.mode == "none" and trainer.correction.geometric is None
    if trainer.beta == 0:
        no_effect(["kl", "kl_use_weight"], "when trainer.beta is 0", "remove it, or set trainer.beta above 0")
    if trainer.kl == "k1_in_reward":
        no_effect(["kl_use_weight"], "when the KL is in the reward")
    if uncorrected:
        no_effect(["kl_use_weight"], "when nothing is corrected: weights are 1")
    unmoved = "when trainer.updates_per_rollout is 1: the ratio is 1 until the weights have moved"
    more = "remove it, or set trainer.updates_per_rollout to 2 or more"
    if isinstance(trainer, GRPORecipe):
        if trainer.combine_rewards == "normalize_then_sum":
            no_effect(["scale_rewards"], "with trainer.combine_rewards normalize_then_sum, which scales by itself")
        other = f"with trainer.loss {trainer.loss}"
        for loss in OWN_SETTINGS:
            keys = [key for key in GRPORecipe.model_fields if key.startswith(f"{loss}_")]
            if trainer.loss != loss:
                no_effect(keys, other)
            elif trainer.updates_per_rollout == 1 and (loss != "vespo" or uncorrected):
                no_effect(keys, unmoved, more)
        if trainer.loss in OWN_SETTINGS:
            no_effect(["clip_low", "clip_high", "delta"], other)
    if trainer.updates_per_rollout == 1:
        no_effect(["clip_low", "clip_high", "delta"], unmoved, more)
        if isinstance(trainer, RLOORecipe):
            no_effect(["ratio"], unmoved, more)
    return found


def _inert_in_health(recipe: Recipe) -> list[Finding]:
    """Returns health rules whose value this recipe never measures, and settings of rules that are ignored."""
    found: list[Finding] = []
    trainer, engine = recipe.trainer, recipe.engine

    def nothing(rules: Sequence[str], why: str) -> None:
        paths = [f"health.{rule}" for rule in rules]
        found.extend(Finding(path, f"{path} has no effect {why}", "remove it") for path in paths)

    if isinstance(trainer, OnlineDPORecipe):
        nothing(["clipped"], "with trainer.kind online_dpo, which clips nothing")
    else:
        if trainer.beta == 0:
            nothing(["ref_kl"], "when trainer.beta is 0: there is no reference")
        if isinstance(trainer, GRPORecipe) and trainer.loss in OWN_SETTINGS and trainer.loss != "cispo":
            nothing(["clipped"], f"with trainer.loss {trainer.loss}, which clips nothing")
        elif trainer.updates_per_rollout == 1:
            nothing(["clipped"], "when trainer.updates_per_rollout is 1: the ratio is 1")
    if isinstance(engine, ColocatedEngineRecipe) and engine.structured_regex is not None:
        nothing(["sampler_delta", "sampler_kl", "ess"], "with engine.structured_regex: its log-probs are not the policy's")
    elif recipe.rollout.async_steps:  # instead, `sentinel.probe_every` samples with current weights
        why = "with rollout.async_steps: earlier weights sampled, so that a difference is expected"
        nothing(["sampler_delta", "sampler_kl"], why)
    said = {finding.path for finding in found}
    for name, rule in recipe.health:
        path = f"health.{name}"
        if isinstance(rule, HealthRule) and rule.action == "ignore" and path not in said:
            why = f"has no effect when {path}.action is ignore"
            found += [Finding(f"{path}.{key}", f"{path}.{key} {why}", "remove it") for key in ("threshold", "steps")]
    return found
