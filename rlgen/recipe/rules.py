"""What no single field can know: contradictions between fields, and fields without an effect."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlgen.recipe.models import (
    RESERVED_ENGINE_ARGUMENTS,
    ColocatedEngineRecipe,
    HealthRule,
    Recipe,
    ServerEngineRecipe,
    VllmRecipe,
)
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, PolicyRecipe, RLOORecipe, TrainerRecipe

SMALL_FOR_LORA = 5e-6  # learning rates below it hardly move an adapter
LOCAL_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the field at `path` ("trainer.clip_low")."""

    path: str
    what: str
    hint: str | None = None


def is_local_source(source: str) -> bool:
    """Whether `data.source` names files rather than a task or a hub id."""
    return not source.startswith("task:") and (
        source.startswith(("/", "./", "../", "~")) or source.endswith(LOCAL_SUFFIXES) or any(c in source for c in "*?[")
    )


def is_local_model(path: str) -> bool:
    """Whether `model.path` says that it is a folder."""
    return path.startswith(("/", "./", "../", "~"))


def contradictions(recipe: Recipe) -> list[Finding]:
    """Each names both fields and the nearest valid value."""
    found: list[Finding] = []
    rollout, trainer, engine, longest = recipe.rollout, recipe.trainer, recipe.engine, recipe.max_row_tokens
    both = f"data.max_prompt_tokens + rollout.max_completion_tokens = {longest}"
    if rollout.group_size < 2:
        found.append(
            Finding(
                "rollout.group_size",
                f"rollout.group_size is 1, but trainer.kind {trainer.kind} compares completions of one prompt",
                "set rollout.group_size to 2 or more",
            )
        )
    if rollout.temperature == 0:
        found.append(
            Finding(
                "rollout.temperature",
                "rollout.temperature is 0: all completions of a prompt are then equal, and"
                f" trainer.kind {trainer.kind} learns by comparing them",
                "set rollout.temperature to 0.01 or more; 1.0 samples the model as it is",
            )
        )
    if recipe.optim.micro_batch_tokens < longest:
        found.append(
            Finding(
                "optim.micro_batch_tokens",
                f"optim.micro_batch_tokens is {recipe.optim.micro_batch_tokens}: the longest row would not fit, {both}",
                f"set optim.micro_batch_tokens to {longest} or more",
            )
        )
    if recipe.optim.warmup_steps >= recipe.run.steps:
        found.append(
            Finding(
                "optim.warmup_steps",
                f"optim.warmup_steps is {recipe.optim.warmup_steps}, but run.steps is {recipe.run.steps}",
                f"set optim.warmup_steps to {recipe.run.steps - 1} or less",
            )
        )
    if rollout.ahead and engine.kind != "server":
        what = f"rollout.ahead {rollout.ahead} samples while a step trains, which an engine of kind {engine.kind} cannot"
        found.append(Finding("rollout.ahead", what, "set engine.kind to server, or remove it"))
    if rollout.ahead and not trainer.correction.corrects:
        what = "rollout.ahead trains on samples of earlier weights, and trainer.correction corrects nothing"
        found.append(Finding("rollout.ahead", what, "set trainer.correction.mode, or remove it"))
    if rollout.ahead and rollout.refill:
        what = "rollout.refill asks for further prompts once a step's rewards are known, but with rollout.ahead the next step's"
        found.append(Finding("rollout.refill", f"{what} are under way by then", "remove one of them"))
    if recipe.model.quantization is not None and recipe.model.lora is None:
        found.append(
            Finding(
                "model.quantization",
                f"model.quantization {recipe.model.quantization} holds weights that cannot be trained, without model.lora",
                "add `lora: {}` to model, or remove model.quantization",
            )
        )
    found += _trainer_contradictions(trainer)
    weights = [reward.weight for reward in recipe.rewards]
    if not any(weights):
        found.append(Finding("rewards", "every weight in rewards is 0, so that nothing is learned", "set one above 0"))
    labels = [reward.label for reward in recipe.rewards]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            found.append(
                Finding(f"rewards.{index}", f"two rewards are called `{label}`", f"set rewards.{index}.name to another name")
            )
    found += _process_contradictions(recipe)
    if isinstance(engine, VllmRecipe):
        found += _engine_contradictions(recipe, engine, both)
    if isinstance(engine, ServerEngineRecipe):
        found += _server_contradictions(engine)
    if (options := recipe.task_options) is not None:
        low, high = getattr(options, "min_length", 0), getattr(options, "max_length", 0)
        if low > high:
            found.append(
                Finding(
                    "data.options.min_length",
                    f"data.options.min_length {low} is above data.options.max_length {high}",
                    f"set data.options.min_length to {high} or less",
                )
            )
    return found


def _process_contradictions(recipe: Recipe) -> list[Finding]:
    processes, engine = recipe.processes, recipe.engine
    found: list[Finding] = []
    if processes.strategy == "fsdp" and recipe.model.lora is not None:
        what = "processes.strategy fsdp shards what is trained, and model.lora trains little: its base stays whole"
        found.append(Finding("processes.strategy", what, "set processes.strategy to ddp"))
    if processes.strategy == "fsdp" and processes.count == 1:
        what = "processes.strategy fsdp shards the model over several processes, but processes.count is 1"
        found.append(Finding("processes.strategy", what, "set processes.strategy to ddp, or processes.count to 2 or more"))
    size = engine.tensor_parallel_size if isinstance(engine, ColocatedEngineRecipe) else 1
    if processes.count is not None and processes.count % size:
        what = f"engine.tensor_parallel_size {size} does not divide processes.count {processes.count}"
        found.append(Finding("engine.tensor_parallel_size", what, f"set processes.count to {size}"))
    return found


def _trainer_contradictions(trainer: TrainerRecipe) -> list[Finding]:
    found: list[Finding] = []
    correction = trainer.correction
    if isinstance(trainer, PolicyRecipe):
        if trainer.clip_low > trainer.clip_high:
            found.append(
                Finding(
                    "trainer.clip_low",
                    f"trainer.clip_low {trainer.clip_low} is above trainer.clip_high {trainer.clip_high}",
                    f"set trainer.clip_low to {trainer.clip_high} or less",
                )
            )
        if trainer.delta is not None and trainer.delta <= 1 + trainer.clip_high:
            found.append(
                Finding(
                    "trainer.delta",
                    f"trainer.delta {trainer.delta} is not above 1 + trainer.clip_high = {1 + trainer.clip_high}",
                    "set it higher; 4 is what its paper has",
                )
            )
    if isinstance(trainer, GRPORecipe) and trainer.combine_rewards == "normalize_then_sum" and trainer.kl == "k1_in_reward":
        what = "trainer.kl k1_in_reward changes the sum of the rewards, but trainer.combine_rewards normalises each by itself"
        found.append(Finding("trainer.kl", what, "set trainer.kl to k3_is, or trainer.combine_rewards to sum"))
    if isinstance(trainer, RLOORecipe):
        if trainer.reward_clip is not None and trainer.reward_clip[0] >= trainer.reward_clip[1]:
            what = f"trainer.reward_clip {list(trainer.reward_clip)} is not lowest before highest"
            found.append(Finding("trainer.reward_clip", what, "swap them"))
        if trainer.ratio == "sequence" and correction.mode.startswith(("token", "icepop")):
            found.append(
                Finding(
                    "trainer.ratio",
                    f"trainer.ratio sequence has one ratio for a completion, trainer.correction.mode {correction.mode} one weight"
                    " for each token",
                    "set trainer.correction.mode to sequence_truncate, sequence_mask or none, or trainer.ratio to token",
                )
            )
    if correction.min is not None and correction.min >= correction.max and correction.mode != "none":
        found.append(
            Finding(
                "trainer.correction.min",
                f"trainer.correction.min {correction.min} is not below trainer.correction.max {correction.max}",
                "lower it, or remove it",
            )
        )
    return found


def _engine_contradictions(recipe: Recipe, engine: VllmRecipe, both: str) -> list[Finding]:
    found: list[Finding] = []
    longest, trainer = recipe.max_row_tokens, recipe.trainer
    if engine.max_model_len is not None and engine.max_model_len < longest:
        found.append(
            Finding(
                "engine.max_model_len",
                f"engine.max_model_len is {engine.max_model_len}, but {both}",
                f"set engine.max_model_len to {longest} or more, or remove it",
            )
        )
    if engine.kv_cache_gib is not None and engine.gpu_memory_utilization is not None:
        found.append(
            Finding(
                "engine.gpu_memory_utilization",
                "engine.gpu_memory_utilization has no effect beside engine.kv_cache_gib",
                "remove one of them",
            )
        )
    structured = isinstance(engine, ColocatedEngineRecipe) and engine.structured_regex is not None
    if structured and (isinstance(trainer, OnlineDPORecipe) or trainer.correction.corrects):
        found.append(
            Finding(
                "engine.structured_regex",
                "engine.structured_regex samples from a part of the vocabulary, so that the engine's log-probs are not the"
                " policy's and trainer.correction would correct nonsense",
                "set trainer.correction.mode to none with trainer.kind grpo or rloo, or remove engine.structured_regex",
            )
        )
    for name in sorted(engine.extra):
        path = f"engine.extra.{name}"
        if name.replace("-", "_") in RESERVED_ENGINE_ARGUMENTS:
            found.append(Finding(path, f"{path} is set by rlgen: its promise rests on it", "remove it"))
        elif not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            found.append(Finding(path, f"{path} is no argument of vLLM", "write it as vLLM does in Python: lower_case"))
    return found


def _server_contradictions(engine: ServerEngineRecipe) -> list[Finding]:
    found: list[Finding] = []
    urls = servers(engine)
    if not urls and not engine.launch:
        what = "engine.kind server, but neither engine.url nor engine.launch says which"
        found.append(Finding("engine.kind", what, "set engine.url to what `rlgen serve` printed, or engine.launch to true"))
    if urls and engine.launch:
        what = "engine.url names a server that runs already, but engine.launch is true: rlgen would start another"
        found.append(Finding("engine.url", what, "remove one of them"))
    if engine.transfer == "nccl" and engine.launch and engine.devices is None:
        what = "engine.transfer nccl needs the server on another GPU than the trainer, and engine.devices does not say which"
        found.append(
            Finding("engine.transfer", what, 'set engine.devices to its number, such as "1", or engine.transfer to files')
        )
    for index, url in enumerate(urls):
        if not is_address(url):
            hint = f"write it like http://127.0.0.1:8000; a secret goes into the environment variable {engine.token_env}"
            found.append(Finding("engine.url", f"engine.url: {url!r} is no address of a server", hint))
        elif url.rstrip("/") in [other.rstrip("/") for other in urls[:index]]:
            found.append(Finding("engine.url", f"engine.url names {url} twice", "remove one of them"))
    return found


def servers(engine: ServerEngineRecipe) -> list[str]:
    """The addresses that `engine.url` names."""
    return [engine.url] if isinstance(engine.url, str) else list(engine.url or [])


def is_address(url: str) -> bool:
    """Whether it has the form of a server's address, and holds no secret."""
    try:
        urlsplit(url).port  # noqa: B018 - raises where the port is none
    except ValueError:
        return False
    return re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", url) is not None


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach `host`."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def inert(recipe: Recipe) -> list[Finding]:
    """Fields without an effect in this recipe. Set by the user they are refused; the resolved recipe leaves them out."""
    found: list[Finding] = []
    trainer, data, model = recipe.trainer, recipe.data, recipe.model
    found += _inert_in_trainer(trainer)
    if not recipe.rollout.ahead:
        on_policy = "when rollout.ahead is 0: every sample is of the present weights"
        paths = ["rollout.max_staleness", "sentinel.probe_every"]
        for path in [*paths, "engine.in_flight"] if isinstance(recipe.engine, ServerEngineRecipe) else paths:
            found.append(Finding(path, f"{path} has no effect {on_policy}", "remove it"))
    found += _inert_in_health(recipe)
    task, local = recipe.task, is_local_source(data.source)
    if task is None:
        found.append(Finding("data.options", "data.options has an effect only with a task: source", "remove it"))
    useless = ["columns", "subset", "split", "revision"] if task else ["subset", "split", "revision"] if local else []
    kind = "a task: source" if task else "local files"
    found += [Finding(f"data.{key}", f"data.{key} has no effect with {kind}", "remove it") for key in useless]
    if task and not (data.chat or data.system):
        why = "data.template_args has no effect: the prompts of a task are texts, and no template is applied"
        found.append(Finding("data.template_args", why, "remove it, or set data.chat to true"))
    if isinstance(recipe.engine, ServerEngineRecipe) and recipe.engine.url is not None:
        # All but the dtype, which says what the server is expected to have.
        for key in [*(VllmRecipe.model_fields.keys() - {"dtype"}), "host", "port", "start_timeout", "devices"]:
            path = f"engine.{key}"
            why = f"{path} has no effect beside engine.url: that server runs already, with its own"
            found.append(Finding(path, why, "remove it, and give it to `rlgen serve`"))
    if isinstance(recipe.engine, ServerEngineRecipe) and recipe.engine.transfer == "nccl":
        why = "has no effect with engine.transfer nccl: there are no files, nor a copy of the weights to bring a server back with"
        for path in ("engine.transfer_dir", "engine.restarts"):
            found.append(Finding(path, f"{path} {why}", "remove it, or set engine.transfer to files"))
    for index, reward in enumerate(recipe.rewards):
        if reward.on_error == "fail":
            path = f"rewards.{index}.max_error_fraction"
            why = f"{path} has no effect when on_error is fail: the first failure ends the run"
            found.append(Finding(path, why, "remove it, or set on_error to skip"))
    if model.path.startswith("tiny:") or is_local_model(model.path):
        found.append(Finding("model.revision", "model.revision has no effect: model.path is no hub id", "remove it"))
    return found


def _inert_in_trainer(trainer: TrainerRecipe) -> list[Finding]:
    found: list[Finding] = []

    def no_effect(keys: Sequence[str], why: str, hint: str = "remove it") -> None:
        said = {finding.path for finding in found}
        paths = [f"trainer.{key}" for key in keys]
        found.extend(Finding(path, f"{path} has no effect {why}", hint) for path in paths if path not in said)

    if trainer.correction.mode == "none":
        no_effect(["correction.min", "correction.max"], "when trainer.correction.mode is none", "remove it, or set a mode")
    if isinstance(trainer, OnlineDPORecipe):
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
        for loss in ("cispo", "sapo", "vespo"):
            keys = [key for key in GRPORecipe.model_fields if key.startswith(f"{loss}_")]
            if trainer.loss != loss:
                no_effect(keys, other)
            elif trainer.updates_per_rollout == 1 and (loss != "vespo" or uncorrected):
                no_effect(keys, unmoved, more)
        if trainer.loss in ("cispo", "sapo", "vespo"):
            no_effect(["clip_low", "clip_high", "delta"], other)
    if trainer.updates_per_rollout == 1:
        no_effect(["clip_low", "clip_high", "delta"], unmoved, more)
        if isinstance(trainer, RLOORecipe):
            no_effect(["ratio"], unmoved, more)
    return found


def _inert_in_health(recipe: Recipe) -> list[Finding]:
    """Rules about what this recipe never measures, and settings of rules that are ignored."""
    found: list[Finding] = []
    trainer, engine = recipe.trainer, recipe.engine

    def nothing(rules: Sequence[str], why: str) -> None:
        paths = [f"health.{rule}" for rule in rules]
        found.extend(Finding(path, f"{path} has no effect {why}", "remove it") for path in paths)

    if isinstance(trainer, OnlineDPORecipe):
        nothing(["clipped"], "with trainer.kind online_dpo, which clips nothing")
    else:
        if trainer.beta == 0:
            nothing(["ref_kl"], "when trainer.beta is 0: no reference is held")
        if isinstance(trainer, GRPORecipe) and trainer.loss in ("sapo", "vespo"):
            nothing(["clipped"], f"with trainer.loss {trainer.loss}, which clips nothing")
        elif trainer.updates_per_rollout == 1:
            nothing(["clipped"], "when trainer.updates_per_rollout is 1: the ratio is 1")
    if isinstance(engine, ColocatedEngineRecipe) and engine.structured_regex is not None:
        nothing(["sampler_delta", "sampler_kl", "ess"], "with engine.structured_regex: its log-probs are not the policy's")
    elif recipe.rollout.ahead:  # `sentinel.probe_every` looks at present weights
        nothing(["sampler_delta", "sampler_kl"], "with rollout.ahead: earlier weights sampled, which differ for an honest reason")
    said = {finding.path for finding in found}
    for name, rule in recipe.health:
        path = f"health.{name}"
        if isinstance(rule, HealthRule) and rule.action == "ignore" and path not in said:
            why = f"has no effect when {path}.action is ignore"
            found += [Finding(f"{path}.{key}", f"{path}.{key} {why}", "remove it") for key in ("threshold", "steps")]
    return found


def notices(recipe: Recipe) -> list[str]:
    """What is announced: harmless, and often in templates."""
    said: list[str] = []
    if recipe.checkpoint.every > recipe.run.steps:
        said.append(f"checkpoint.every {recipe.checkpoint.every} is above run.steps {recipe.run.steps}: only the end is saved")
    if recipe.engine.kind == "colocated" and recipe.engine.structured_regex is not None:
        said.append(
            "engine.structured_regex: the sentinel checks the engine before step 1 without it; batches cannot be compared"
        )
    if isinstance(recipe.engine, ServerEngineRecipe):
        hosts = [re.sub(r"^https?://|(:\d+)?(/.*)?$", "", url) for url in servers(recipe.engine) if url.startswith("http://")]
        hosts += [recipe.engine.host] if recipe.engine.launch else []
        for host in dict.fromkeys(host for host in hosts if not is_loopback(host)):
            said.append(f"engine: {host} is beyond this machine, and http is not encrypted: for networks that you trust only")
            if recipe.engine.transfer_dir is None and recipe.engine.transfer == "files" and not recipe.engine.launch:
                said.append(f"engine: {host} must see the weights of this machine; set engine.transfer_dir to a folder of both")
        outside = [url for url in servers(recipe.engine) if not is_loopback(urlsplit(url).hostname or "")]
        if recipe.engine.transfer == "nccl" and outside:
            said.append(f"engine.transfer nccl to {outside[0]} has no token and no encryption: for networks that you trust only")
    if recipe.model.lora is not None and recipe.optim.learning_rate < SMALL_FOR_LORA:
        said.append(
            f"optim.learning_rate {recipe.optim.learning_rate:g} is usual for full weights; adapters start at zero and take ten"
            " times as much or more"
        )
    trainer = recipe.trainer
    if isinstance(trainer, GRPORecipe) and trainer.loss in ("gspo", "luspo") and "token" in trainer.correction.mode:
        said.append(
            f"trainer.loss {trainer.loss} has one ratio for a completion; trainer.correction.mode {trainer.correction.mode}"
            " weighs it by the mean of its tokens' weights"
        )
    return said


# Keys that a published version had: "trainer.old": "renamed to `new` in version 0.2.0". None so far. An item of a list is `*`.
RENAMED: dict[str, str] = {}

# Keys that people look for and rlgen does not have on purpose.
REFUSED = {
    "model.trust_remote_code": "rlgen runs no code of a model's repository; take a model whose architecture transformers has",
    "model.allow_pickle": "rlgen opens no pickled weights; convert them to safetensors once",
    "data.trust_remote_code": "rlgen runs no code of a data set; convert it to files",
    "extends": "it stands at the top of a recipe file, not in --set",
    "rollout.top_p": "rlgen samples the full distribution: the log-probs of a truncated one are not the trainer's",
    "rollout.top_k": "rlgen samples the full distribution: the log-probs of a truncated one are not the trainer's",
    "rollout.min_p": "rlgen samples the full distribution: the log-probs of a truncated one are not the trainer's",
    "rollout.repetition_penalty": "rlgen samples the model's own distribution, which a penalty changes",
    "rollout.num_generations": "say rollout.group_size",
    "rollout.batch_size": "say rollout.prompts_per_step and rollout.group_size",
    "trainer.num_generations": "say rollout.group_size",
    "trainer.epsilon": "say trainer.clip_low and trainer.clip_high",
    "model.lora.dropout": "what is scored must be what was sampled: a forward is a function of ids and weights, without dropout",
    "model.lora.r": "did you mean `rank`?",
    "model.lora.lora_alpha": "did you mean `alpha`?",
    "model.lora.target_modules": "did you mean `targets`?",
    "model.load_in_4bit": "say model.quantization: nf4, with model.lora",
    "model.load_in_8bit": "say model.quantization: int8, with model.lora",
    "optim.batch_size": "say rollout.prompts_per_step and rollout.group_size; micro-batches follow from micro_batch_tokens",
    "optim.per_device_train_batch_size": "say rollout.prompts_per_step; micro-batches follow from micro_batch_tokens",
    "optim.gradient_accumulation_steps": "micro-batches follow from optim.micro_batch_tokens and change no result",
    "optim.lr": "did you mean `learning_rate`?",
    "engine.url": "an engine of this kind has no server; set engine.kind to server",
}
REFUSED_BY_KIND = {
    "rloo": {
        "trainer.loss": "RLOO has one loss; trainer.kind grpo has a family of them",
        "trainer.aggregation": "RLOO sums over each completion; trainer.kind grpo has a choice",
        "trainer.scale_rewards": "RLOO does not divide by a standard deviation; see normalize_advantages",
    },
    "online_dpo": {"trainer.kl": "the reference is in the loss itself; trainer.beta says how strongly it holds"},
}
