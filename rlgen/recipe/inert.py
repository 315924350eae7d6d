"""Finds the fields that have no effect in a recipe."""

from collections.abc import Iterator

from rlgen.recipe.data import TASK_COLUMNS
from rlgen.recipe.engines import ServerEngineRecipe, VllmRecipe
from rlgen.recipe.evaluation import temperature_of
from rlgen.recipe.health import HealthRule
from rlgen.recipe.models import Recipe
from rlgen.recipe.rules import Finding, is_local_model, is_local_source
from rlgen.recipe.trainers import OWN_SETTINGS, GRPORecipe, OnlineDPORecipe, OwnRecipe, RLOORecipe

# Keys of one section, as in "rollout: max_turns reply_timeout", why they have no effect, and what to do.
Inert = tuple[str, str, str]
REMOVE = "remove it"


def inert(recipe: Recipe) -> list[Finding]:
    """Returns the fields that have no effect: refused if the user set them, and left out of the resolved recipe."""
    found: dict[str, Finding] = {}
    for part in (_in_trainer, _of_sections, _in_health, _of_rows, _in_engine):
        for listed, why, hint in part(recipe):
            section, _, keys = listed.partition(": ")
            for path in (f"{section}.{key}" for key in keys.split()):
                if section not in found and path not in found:  # one reason is enough
                    found[path] = Finding(path, f"{path} has no effect {why}".replace(" :", ":"), hint)
    return list(found.values())


def _of_sections(recipe: Recipe) -> Iterator[Inert]:
    """Yields the fields that have no effect for lack of another section, or beside it."""
    data, model = recipe.data, recipe.model
    if not recipe.rollout.async_steps:
        why = "when rollout.async_steps is 0: every sample is from the current weights"
        yield "rollout: max_staleness", why, REMOVE
        yield "sentinel: probe_every", why, REMOVE
        if isinstance(recipe.engine, ServerEngineRecipe):
            yield "engine: in_flight", why, REMOVE
    elif not recipe.in_flight:
        yield "engine.in_flight: recompute", "when weights change only between requests", REMOVE
    if not recipe.tools:
        yield "data: tool_format", "without tools", "remove it, or add tools"
    if not recipe.talks:
        why = "without tools or an environment: a completion is one turn"
        yield "rollout: max_turns reply_timeout", why, "remove it, or add tools"
    if data.columns.images is None:
        why = "without data.columns.images: no row has images"
        yield "model: train_vision", why, "remove it, or name the column of images"
    if recipe.task and not (data.chat or data.system):
        why = ": the prompts of a task are texts, and no template is applied"
        yield "data: template_args chat_template", why, "remove it, or set data.chat to true"
    if recipe.processes.strategy == "ddp":
        why = "with processes.strategy ddp: each process holds all weights, and sends gradients once"
        yield "processes: shard experts tensor context defer_sync", why, "remove it, or set processes.strategy to fsdp"
    if not recipe.rollouts.every:
        places = " ".join(f"{place}.samples" for place in range(len(recipe.sinks)))
        why = "with rollouts.every 0: tables show the rollouts that are written"
        yield f"sinks: {places}", why, "remove it, or set rollouts.every to 1 or more"
    if not model.gradient_checkpointing:
        why = "without model.gradient_checkpointing: layers then keep all of their tensors"
        yield "model: offload_activations", why, "remove it, or set model.gradient_checkpointing to true"
    if model.path.startswith("tiny:") or is_local_model(model.path):
        yield "model: revision", ": model.path is not a hub id", REMOVE


def _in_engine(recipe: Recipe) -> Iterator[Inert]:
    engine = recipe.engine
    if not isinstance(engine, ServerEngineRecipe):
        return
    if engine.url is not None:
        # All but those that state what the server is expected to have.
        keys = " ".join(key for key in VllmRecipe.model_fields if key not in ("dtype", "max_model_len"))
        why = "beside engine.url: that server already runs, with its own setting"
        yield f"engine: {keys} servers host port start_timeout devices", why, "remove it here, and set it for `rlgen serve`"
    if recipe.cluster is not None and recipe.cluster.servers:
        why = "with cluster.servers: Ray places the servers, each on GPUs of its node"
        yield "engine: servers host port devices", why, "remove it; cluster.servers is the number of servers"
    if engine.transfer == "nccl":
        why = "with engine.transfer nccl, which keeps neither files nor a copy of the weights"
        yield "engine: transfer_dir restarts", why, "remove it, or set engine.transfer to files"
    if recipe.model.lora is None:
        yield "engine: lora", "without model.lora", REMOVE
    elif engine.transfer == "nccl":
        yield "engine: lora", "with engine.transfer nccl: all weights are sent, merged", REMOVE


def _of_rows(recipe: Recipe) -> Iterator[Inert]:
    """Yields the fields of `data`, `eval` and their rewards that have no effect."""
    held, sources = recipe.eval, {"data": recipe.data.source}
    rewards = {"rewards": recipe.rewards}
    if held is not None:
        sources["eval"], rewards["eval.rewards"] = held.source or recipe.data.source, held.rewards or []
        if temperature_of(held, recipe.rollout.temperature) == 0:
            why = ": a greedy completion takes the most probable tokens"
            yield "eval: top_p", why, "remove it, or set eval.temperature"
    for section, source in sources.items():
        task = source.startswith("task:")
        if task:
            pictures = "images" in TASK_COLUMNS.get(source.removeprefix("task:"), ())
            yield f"{section}: {'columns.prompt columns.answer' if pictures else 'columns'}", "with a task: source", REMOVE
        else:
            yield f"{section}: options", "without a task: source", REMOVE
        if task or is_local_source(source):
            yield f"{section}: subset split revision", f"with {'a task: source' if task else 'local files'}", REMOVE
    for section, listed in rewards.items():
        failing = " ".join(f"{place}.max_error_fraction" for place, reward in enumerate(listed) if reward.on_error == "fail")
        why = "when on_error is fail: the first failure ends the run"
        yield f"{section}: {failing}", why, "remove it, or set on_error to skip"


def _in_trainer(recipe: Recipe) -> Iterator[Inert]:
    """Yields the fields of the `trainer` section that have no effect; some with several reasons."""
    trainer = recipe.trainer
    if trainer.correction.mode == "none":
        why = "when trainer.correction.mode is none"
        yield "trainer: correction.min correction.max", why, "remove it, or set a mode"
    if isinstance(trainer, OnlineDPORecipe | OwnRecipe):  # an algorithm of the user's may read any field
        return
    if trainer.beta == 0:
        yield "trainer: kl kl_use_weight", "when trainer.beta is 0", "remove it, or set trainer.beta above 0"
    if trainer.kl == "k1_in_reward":
        yield "trainer: kl_use_weight", "when the KL is in the reward", REMOVE
    if not trainer.correction.corrects:
        yield "trainer: kl_use_weight", "when nothing is corrected: weights are 1", REMOVE
    unmoved = "when trainer.updates_per_rollout is 1: the ratio is 1 until the weights have moved"
    more = "remove it, or set trainer.updates_per_rollout to 2 or more"
    clips = "trainer: clip_low clip_high delta"
    if isinstance(trainer, GRPORecipe):
        if trainer.combine_rewards == "normalize_then_sum":
            why = "with trainer.combine_rewards normalize_then_sum, which scales by itself"
            yield "trainer: scale_rewards", why, REMOVE
        other = f"with trainer.loss {trainer.loss}"
        for loss in OWN_SETTINGS:
            keys = " ".join(key for key in GRPORecipe.model_fields if key.startswith(f"{loss}_"))
            if trainer.loss != loss:
                yield f"trainer: {keys}", other, REMOVE
            elif trainer.updates_per_rollout == 1 and (loss != "vespo" or not trainer.correction.corrects):
                yield f"trainer: {keys}", unmoved, more
        if trainer.loss in OWN_SETTINGS:
            yield clips, other, REMOVE
    if trainer.updates_per_rollout == 1:
        yield clips, unmoved, more
        if isinstance(trainer, RLOORecipe) and trainer.top_entropy == 1:  # otherwise `ratio` decides what the kept tokens weigh
            yield "trainer: ratio", unmoved, more


def _in_health(recipe: Recipe) -> Iterator[Inert]:
    """Yields health rules whose value this recipe never measures, and settings of rules that are ignored."""
    trainer = recipe.trainer
    if isinstance(trainer, OnlineDPORecipe):
        yield "health: clipped", "with trainer.kind online_dpo, which clips nothing", REMOVE
    elif not isinstance(trainer, OwnRecipe):  # an algorithm of the user's may measure anything
        if trainer.beta == 0:
            yield "health: ref_kl", "when trainer.beta is 0: there is no reference", REMOVE
        if isinstance(trainer, GRPORecipe) and trainer.loss in OWN_SETTINGS and trainer.loss != "cispo":
            yield "health: clipped", f"with trainer.loss {trainer.loss}, which clips nothing", REMOVE
        if trainer.updates_per_rollout == 1:
            yield "health: clipped", "when trainer.updates_per_rollout is 1: the ratio is 1", REMOVE
    if recipe.structured_regex is not None:
        why = "with engine.structured_regex: its log-probs are not the policy's"
        yield "health: sampler_delta sampler_kl ess", why, REMOVE
    elif recipe.rollout.async_steps:  # instead, `sentinel.probe_every` samples with current weights
        why = "with rollout.async_steps: samples are from earlier weights, so a difference is expected"
        yield "health: sampler_delta sampler_kl", why, REMOVE
    for name, rule in recipe.health:
        if isinstance(rule, HealthRule) and rule.action == "ignore":
            yield f"health.{name}: threshold steps", f"when health.{name}.action is ignore", REMOVE
