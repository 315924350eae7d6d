"""Checks what no single field can check: contradictions between fields."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlgen.recipe.data import TASKS
from rlgen.recipe.engines import RESERVED_ENGINE_ARGUMENTS, ColocatedEngineRecipe, ServerEngineRecipe, VllmRecipe
from rlgen.recipe.evaluation import data_of, rewards_of
from rlgen.recipe.judges import pairwise_places
from rlgen.recipe.models import Recipe, RewardRecipe
from rlgen.recipe.sizes import is_written, least_row
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe, PolicyRecipe, RLOORecipe, TrainerRecipe

LOCAL_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with the field at `path`, such as "trainer.clip_low"."""

    path: str
    what: str
    hint: str | None = None


def is_local_source(source: str) -> bool:
    """Returns whether `data.source` names files rather than a task or a hub id."""
    return not source.startswith("task:") and (
        source.startswith(("/", "./", "../", "~")) or source.endswith(LOCAL_SUFFIXES) or any(c in source for c in "*?[")
    )


def is_local_model(path: str) -> bool:
    """Returns whether `model.path` has the form of a local path."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1  # a name of the hub has one slash at most


def contradictions(recipe: Recipe) -> list[Finding]:
    """Returns the contradictions between fields. Each names both fields and the nearest valid value."""
    engine = recipe.engine
    found = [
        *_group_contradictions(recipe),
        *_truncation_contradictions(recipe),
        *_stop_contradictions(recipe),
        *_size_contradictions(recipe),
        *_ahead_contradictions(recipe),
        *_model_contradictions(recipe),
        *_trainer_contradictions(recipe.trainer),
        *_reward_contradictions(recipe.rewards, "rewards"),
        *_eval_contradictions(recipe),
        *_process_contradictions(recipe),
        *_cluster_contradictions(recipe),
        *_sink_contradictions(recipe),
        *_variables(recipe),
        *_task_contradictions(recipe),
    ]
    if isinstance(engine, VllmRecipe):
        found += _engine_contradictions(recipe, engine)
    if isinstance(engine, ServerEngineRecipe):
        found += _server_contradictions(engine, of_cluster=recipe.cluster is not None and recipe.cluster.servers > 0)
    return found


def _variables(recipe: Recipe) -> list[Finding]:
    """Returns paths that name a variable of the shell."""
    paths = {"run.dir": recipe.run.dir, "model.path": recipe.model.path, "data.source": recipe.data.source}
    hint = "write the value itself, or give it to --set, where the shell fills it in"
    return [
        Finding(key, f"{key}: a recipe knows no variables, but {path} names one", hint)
        for key, path in paths.items()
        if re.search(r"\$\{?\w", path)
    ]


def _sink_contradictions(recipe: Recipe) -> list[Finding]:
    """Returns sinks that repeat a kind: a run has one id in each tracker."""
    kinds = [sink.kind for sink in recipe.sinks]
    return [
        Finding(f"sinks.{place}.kind", f"sinks has a second entry of kind {kind}, but a tracker gets each run once", "remove one")
        for place, kind in enumerate(kinds)
        if kind in kinds[:place]
    ]


def _group_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields settings with which the completions of a group cannot be compared."""
    rollout, trainer = recipe.rollout, recipe.trainer
    if rollout.group_size < 2:
        what = f"rollout.group_size is 1, but trainer.kind {trainer.kind} compares completions of one prompt"
        yield Finding("rollout.group_size", what, "set rollout.group_size to 2 or more")
    if rollout.temperature == 0:
        what = (
            "rollout.temperature is 0: all completions of a prompt are then equal, and"
            f" trainer.kind {trainer.kind} learns by comparing them"
        )
        yield Finding("rollout.temperature", what, "set rollout.temperature to 0.01 or more; 1.0 samples the model as it is")


def _truncation_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields settings with which log-probs of a truncated distribution mean something else on the two sides."""
    rollout, trainer = recipe.rollout, recipe.trainer
    used = [name for name, all_ids in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if getattr(rollout, name) != all_ids]
    for name in used:
        path, remove = f"rollout.{name}", f"remove rollout.{name}"
        if isinstance(trainer, PolicyRecipe) and trainer.beta > 0:
            why = "the reference keeps other ids than the policy, so that trainer.beta would weigh no KL of the two"
            yield Finding(path, f"{path} does not go with trainer.beta: {why}", f"{remove}, or set trainer.beta to 0")
        if recipe.structured_regex is not None:
            why = "the trainer knows what this rule keeps, but not what the regular expression does"
            yield Finding(path, f"{path} does not go with engine.structured_regex: {why}", f"{remove}, or the other key")
        if not recipe.rounds_alike:
            why = "an engine that rounds more than the trainer keeps other ids"
            yield Finding(path, f"{path} needs an engine with the trainer's dtype and weights: {why}", remove)


def _stop_contradictions(recipe: Recipe) -> list[Finding]:
    """Returns what ends completions in its own way, where the recipe names further ends."""
    own = {"tools": recipe.tools, "environment": recipe.environment, "rollout.use": recipe.rollout.use}
    named = [name for name in ("stop", "stop_token_ids") if getattr(recipe.rollout, name)]
    return [
        Finding(
            f"rollout.{name}",
            f"rollout.{name} does not go with {section}: "
            + ("its code" if section == "rollout.use" else "the chat template")
            + " says what ends a turn",
            f"remove rollout.{name}",
        )
        for name in named
        for section, used in own.items()
        if used
    ]


def _size_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields numbers that contradict each other: of tokens, written rollouts and steps."""
    longest, adds_up = least_row(recipe)
    if is_written(recipe, "optim.micro_batch_tokens") and recipe.optim.micro_batch_tokens < longest:
        what = f"optim.micro_batch_tokens is {recipe.optim.micro_batch_tokens}: the longest row would not fit, {adds_up}"
        yield Finding("optim.micro_batch_tokens", what, f"set optim.micro_batch_tokens to {longest} or more")
    if recipe.rollouts.keep is not None and not recipe.rollouts.every:
        what = f"rollouts.keep is {recipe.rollouts.keep}, but rollouts.every 0 writes none"
        yield Finding("rollouts.keep", what, "remove rollouts.keep, or set rollouts.every to 1 or more")
    if recipe.optim.warmup_steps >= recipe.run.steps:
        what = f"optim.warmup_steps is {recipe.optim.warmup_steps}, but run.steps is {recipe.run.steps}"
        yield Finding("optim.warmup_steps", what, f"set optim.warmup_steps to {recipe.run.steps - 1} or less")


def _ahead_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields contradictions of `rollout.async_steps`."""
    rollout, trainer, engine = recipe.rollout, recipe.trainer, recipe.engine
    if rollout.async_steps and engine.kind != "server":
        what = f"rollout.async_steps samples while a step trains, but an engine of kind {engine.kind} cannot do both"
        yield Finding("rollout.async_steps", what, "set engine.kind to server, or remove it")
    if rollout.async_steps > 1 and isinstance(engine, ServerEngineRecipe) and engine.in_flight is False:
        what = "with rollout.async_steps above 1 some request is always being answered: the weights could never change"
        yield Finding("engine.in_flight", what, "remove it, or set rollout.async_steps to 1")
    if rollout.async_steps and not trainer.correction.corrects:
        what = "rollout.async_steps trains on samples from earlier weights, but trainer.correction corrects nothing"
        yield Finding("rollout.async_steps", what, "set trainer.correction.mode, or remove it")
    if rollout.async_steps and rollout.dynamic_sampling:
        what = "rollout.dynamic_sampling waits for a step's rewards, and rollout.async_steps samples the next step by then"
        yield Finding("rollout.dynamic_sampling", what, "remove one of them")


def _model_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields contradictions within the `model` section."""
    if recipe.model.quantization is not None and recipe.model.lora is None:
        what = f"model.quantization {recipe.model.quantization} freezes all weights: without model.lora nothing is trained"
        yield Finding("model.quantization", what, "add `lora: {}` to model, or remove model.quantization")
    engine, model = recipe.engine, recipe.model
    for key, meets in (
        ("optim.packing", recipe.optim.packing is True),
        ("processes.strategy", recipe.processes.strategy == "fsdp"),
        ("model.quantization", model.quantization is not None),
    ):
        if model.compile and meets:
            value = {"optim.packing": "true", "processes.strategy": "fsdp"}.get(key, model.quantization)
            what = f"model.compile needs whole layers and padded rows, but {key} is {value}"
            yield Finding("model.compile", what, f"remove model.compile, or {key}")
    if isinstance(engine, ServerEngineRecipe) and engine.lora == "adapter":
        for key, differs in (
            ("model.quantization", model.quantization),
            ("engine.dtype", engine.dtype not in (None, model.dtype)),
        ):
            if differs:
                what = f"engine.lora adapter: servers merge it into the weights of model.path in model.dtype, not with this {key}"
                yield Finding("engine.lora", what, f"set engine.lora to merged, or remove {key}")


def _reward_contradictions(rewards: Sequence[RewardRecipe], path: str) -> Iterator[Finding]:
    """Yields contradictions between entries of rewards, which stand at `path`."""
    if not any(reward.weight for reward in rewards):
        yield Finding(path, f"every weight in {path} is 0, so that every completion is worth 0", "set one above 0")
    for index, reward in enumerate(rewards):
        try:
            re.compile(str(reward.args.get("pattern", "")) if reward.use == "regex_match" else "")
        except re.error as error:
            what = f"{path}.{index}.args.pattern must be a regular expression of Python ({error})"
            yield Finding(f"{path}.{index}.args.pattern", what, "a `\\` before a sign takes it as it is")
    labels = [reward.label for reward in rewards]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            hint = f"set {path}.{index}.name to another name"
            yield Finding(f"{path}.{index}", f"two rewards are called `{label}`", hint)


def _eval_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields contradictions of the `eval` section."""
    held = recipe.eval
    if held is None:
        return
    data = data_of(recipe, held)
    same = (data.source, data.subset) == (recipe.data.source, recipe.data.subset) and not data.source.startswith("task:")
    if same and (is_local_source(data.source) or data.split == recipe.data.split):
        what = "eval names only rows that are trained on"
        yield Finding("eval.source", what, "set eval.source to a held-out file, or eval.split to another split of the hub")
    if held.temperature == 0 and held.group_size > 1:
        what = f"eval.temperature is 0: all {held.group_size} completions of a prompt are then equal"
        yield Finding("eval.temperature", what, "remove it, or set eval.group_size to 1")
    if held.group_size == 1 and (places := pairwise_places(rewards_of(recipe, held))):
        section = "rewards" if held.rewards is None else "eval.rewards"
        what = f"{section}.{places[0]} is pairwise: it compares completions of a prompt, but eval.group_size is 1"
        yield Finding("eval.group_size", what, "set eval.group_size to 2 or more, or other rewards in eval.rewards")
    if held.rewards is not None:
        yield from _reward_contradictions(held.rewards, "eval.rewards")


def _task_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields contradictions within the options of a task."""
    sections = {"data": recipe.data}
    if recipe.eval is not None and recipe.eval.options is not None:
        sections["eval"] = data_of(recipe, recipe.eval)
    for section, data in sections.items():
        task = TASKS.get(data.source.removeprefix("task:")) if data.source.startswith("task:") else None
        options = task.model_validate(data.options) if task else None
        low, high = getattr(options, "min_length", 0), getattr(options, "max_length", 0)
        if low > high:
            path = f"{section}.options.min_length"
            what = f"{path} {low} is above {section}.options.max_length {high}"
            yield Finding(path, what, f"set {path} to {high} or less")


def _process_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields contradictions of the `processes` section."""
    processes, engine = recipe.processes, recipe.engine
    if processes.strategy == "fsdp" and recipe.model.quantization is not None:
        what = "processes.strategy fsdp cannot shard weights that bitsandbytes packs"
        yield Finding("processes.strategy", what, "remove model.quantization, or set processes.strategy to ddp")
    if processes.strategy == "fsdp" and recipe.optim.kind == "adamw_8bit":
        what = "processes.strategy fsdp shards the moments, but bitsandbytes keeps those of optim.kind adamw_8bit whole"
        yield Finding("optim.kind", what, "set optim.kind to adamw, or processes.strategy to ddp")
    if processes.strategy == "fsdp" and processes.shard == 1:
        what = "processes.shard 1 leaves all weights in each process"
        yield Finding("processes.shard", what, "set processes.shard to 2 or more, or processes.strategy to ddp")
    if processes.count is not None and processes.shard is not None and processes.count % processes.shard:
        what = f"processes.shard {processes.shard} does not divide processes.count {processes.count}"
        yield Finding("processes.shard", what, f"set processes.shard to a divisor of {processes.count}, or remove it")
    if processes.strategy == "fsdp" and processes.count == 1:
        what = "processes.strategy fsdp shards the model over several processes, but processes.count is 1"
        yield Finding("processes.strategy", what, "set processes.strategy to ddp, or processes.count to 2 or more")
    size = engine.tensor_parallel_size if isinstance(engine, ColocatedEngineRecipe) else 1
    if processes.count is not None and processes.count % size:
        what = f"engine.tensor_parallel_size {size} does not divide processes.count {processes.count}"
        yield Finding("engine.tensor_parallel_size", what, f"set processes.count to {size}")


def _cluster_contradictions(recipe: Recipe) -> Iterator[Finding]:
    """Yields settings of processes and servers that a cluster starts differently."""
    cluster, engine, count = recipe.cluster, recipe.engine, recipe.processes.count
    if cluster is None:
        return
    if count is not None and count != cluster.trainers:
        what = f"processes.count is {count}, but cluster.trainers is {cluster.trainers}"
        yield Finding("processes.count", what, "remove processes.count")
    if cluster.address.startswith("ray://"):
        what = "cluster.address is that of a Ray client, which passes no output and no Ctrl-C on"
        yield Finding("cluster.address", what, "start the run on a node of the cluster, with cluster.address auto")
    if isinstance(engine, ServerEngineRecipe) and engine.launch:
        what = "engine.launch starts servers on the machine of rank 0, which the cluster does not know of"
        yield Finding("engine.launch", what, "remove engine.launch, and set cluster.servers")
    if cluster.servers and not isinstance(engine, ServerEngineRecipe):
        what = f"cluster.servers is {cluster.servers}, but engine.kind is {engine.kind}"
        yield Finding("cluster.servers", what, "set engine.kind to server, or remove cluster.servers")
    elif cluster.servers and isinstance(engine, ServerEngineRecipe) and engine.url is not None:
        what = "engine.url names running servers, but cluster.servers would start others"
        yield Finding("cluster.servers", what, "remove one of them")


def _trainer_contradictions(trainer: TrainerRecipe) -> Iterator[Finding]:
    """Yields contradictions within the `trainer` section."""
    correction = trainer.correction
    if isinstance(trainer, PolicyRecipe):
        if trainer.clip_low > trainer.clip_high:
            what = f"trainer.clip_low {trainer.clip_low} is above trainer.clip_high {trainer.clip_high}"
            yield Finding("trainer.clip_low", what, f"set trainer.clip_low to {trainer.clip_high} or less")
        if trainer.delta is not None and trainer.delta <= 1 + trainer.clip_high:
            what = f"trainer.delta {trainer.delta} is not above 1 + trainer.clip_high = {1 + trainer.clip_high}"
            yield Finding("trainer.delta", what, "set it higher; its paper has 4")
    if isinstance(trainer, GRPORecipe) and trainer.combine_rewards == "normalize_then_sum" and trainer.kl == "k1_in_reward":
        what = "trainer.kl k1_in_reward changes the sum of the rewards, but trainer.combine_rewards normalises each by itself"
        yield Finding("trainer.kl", what, "set trainer.kl to k3_is, or trainer.combine_rewards to sum")
    if isinstance(trainer, RLOORecipe):
        if trainer.reward_clip is not None and trainer.reward_clip[0] >= trainer.reward_clip[1]:
            what = f"trainer.reward_clip {list(trainer.reward_clip)} must have the lowest reward before the highest"
            yield Finding("trainer.reward_clip", what, "swap them")
        if trainer.ratio == "sequence" and correction.mode.startswith(("token", "icepop")):
            what = (
                f"trainer.ratio sequence has one ratio for a completion, but trainer.correction.mode {correction.mode} has"
                " one weight for each token"
            )
            yield Finding(
                "trainer.ratio",
                what,
                "set trainer.correction.mode to sequence_truncate, sequence_mask or none, or trainer.ratio to token",
            )
    if correction.min is not None and correction.min >= correction.max and correction.mode != "none":
        what = f"trainer.correction.min {correction.min} is not below trainer.correction.max {correction.max}"
        yield Finding("trainer.correction.min", what, "lower it, or remove it")


def _engine_contradictions(recipe: Recipe, engine: VllmRecipe) -> Iterator[Finding]:
    """Yields contradictions of a vLLM engine."""
    (longest, adds_up), trainer = least_row(recipe), recipe.trainer
    if engine.max_model_len is not None and engine.max_model_len < longest:
        what = f"engine.max_model_len is {engine.max_model_len}, but {adds_up}"
        yield Finding("engine.max_model_len", what, f"set engine.max_model_len to {longest} or more, or remove it")
    if engine.kv_cache_gib is not None and engine.gpu_memory_utilization is not None:
        what = "engine.gpu_memory_utilization has no effect beside engine.kv_cache_gib"
        yield Finding("engine.gpu_memory_utilization", what, "remove one of them")
    structured = isinstance(engine, ColocatedEngineRecipe) and engine.structured_regex is not None
    if structured and (isinstance(trainer, OnlineDPORecipe) or trainer.correction.corrects):
        what = (
            "engine.structured_regex samples from a part of the vocabulary: the engine's log-probs are not the policy's, and"
            " trainer.correction would correct nonsense"
        )
        yield Finding(
            "engine.structured_regex",
            what,
            "set trainer.correction.mode to none with trainer.kind grpo or rloo, or remove engine.structured_regex",
        )
    for name in sorted(engine.extra):
        path = f"engine.extra.{name}"
        if name.replace("-", "_").startswith("data_parallel"):
            what = f"{path} puts several engines behind one address, but vLLM confirms a weight sync for the first only"
            more = "set engine.servers to their number" if isinstance(engine, ServerEngineRecipe) else "start more processes"
            yield Finding(path, what, f"{more}: each engine is then given weights, and checked, by itself")
        elif name.replace("-", "_") in RESERVED_ENGINE_ARGUMENTS:
            yield Finding(path, f"{path} is set by rlgen, which depends on its value", "remove it")
        elif not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield Finding(path, f"{path} is not an argument of vLLM", "write it as vLLM does in Python: lower_case")


def _server_contradictions(engine: ServerEngineRecipe, of_cluster: bool) -> Iterator[Finding]:
    """Yields contradictions within the settings of servers. `of_cluster`: the cluster starts them."""
    urls = servers(engine)
    if not urls and not engine.launch and not of_cluster:
        what = "engine.kind is server, but neither engine.url nor engine.launch is set"
        yield Finding("engine.kind", what, "set engine.url to what `rlgen serve` printed, or engine.launch to true")
    if urls and engine.launch:
        what = "engine.url names a running server, but engine.launch is true: rlgen would start another"
        yield Finding("engine.url", what, "remove one of them")
    if engine.transfer == "nccl" and engine.launch and engine.devices is None:
        what = "engine.transfer nccl needs the server on another GPU than the trainer, but engine.devices names none"
        yield Finding("engine.transfer", what, 'set engine.devices to its number, such as "1", or engine.transfer to files')
    yield from _device_contradictions(engine)
    last = (engine.port or 0) + engine.servers - 1
    if engine.port is not None and last > 65535:
        what = f"engine.port {engine.port} is for the first server; the last of engine.servers {engine.servers} needs port {last}"
        yield Finding("engine.port", what, f"set engine.port to {65536 - engine.servers} or less, or remove it")
    for index, url in enumerate(urls):
        if not is_address(url):
            several = "several are a list: [http://..., http://...]; " if "," in url else ""
            hint = f"{several}write it like http://127.0.0.1:8000; a secret goes into the environment variable {engine.token_env}"
            yield Finding("engine.url", f"engine.url: {url!r} is not the address of a server", hint)
        elif url.rstrip("/") in [other.rstrip("/") for other in urls[:index]]:
            yield Finding("engine.url", f"engine.url names {url} twice", "remove one of them")


def _device_contradictions(engine: ServerEngineRecipe) -> list[Finding]:
    """Returns contradictions of `engine.devices`, whose GPUs are divided equally among the launched servers."""
    gpus, count, size = engine.gpus, engine.servers, engine.tensor_parallel_size
    if not gpus:
        return []
    twice = [name for index, name in enumerate(gpus) if name in gpus[:index]]
    if twice:
        return [Finding("engine.devices", f"engine.devices names {twice[0]} twice", "remove one of them")]
    if len(gpus) % count or len(gpus) < count * size:
        what = (
            f"engine.devices names {len(gpus)} GPUs, but each of engine.servers {count} needs an equal number of them, at least"
            f" engine.tensor_parallel_size {size}"
        )
        return [Finding("engine.devices", what, f"name {count * size} GPUs, or change engine.servers")]
    return []


def servers(engine: ServerEngineRecipe) -> list[str]:
    """Returns the addresses that `engine.url` names."""
    return [engine.url] if isinstance(engine.url, str) else list(engine.url or [])


def is_address(url: str) -> bool:
    """Returns whether the text has the form of a server's address, and holds no secret."""
    try:
        urlsplit(url).port  # noqa: B018 - raises ValueError if the port is not a number
    except ValueError:
        return False
    return re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", url) is not None


def is_loopback(host: str) -> bool:
    """Returns whether `host` can be reached only from this machine."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
