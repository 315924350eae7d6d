"""Checks what no single field can check: contradictions between fields, and what is unusual in a valid recipe."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlgen.recipe.data import TASKS
from rlgen.recipe.engines import RESERVED_ENGINE_ARGUMENTS, ServerEngineRecipe, VllmRecipe
from rlgen.recipe.evaluation import data_of, eval_rewards
from rlgen.recipe.judges import pairwise_places
from rlgen.recipe.models import Recipe, RewardRecipe
from rlgen.recipe.processes import ClusterRecipe
from rlgen.recipe.sizes import is_written, least_row
from rlgen.recipe.trainers import GRPORecipe, PolicyRecipe, RLOORecipe

LOCAL_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
LARGE_RATE = 0.01  # learning rates above this are larger than any that trains a language model
LARGE_GROUP, LARGE_BATCH = 1024, 1 << 20  # completions of a prompt, tokens of a micro-batch
SMALL_FOR_LORA = 5e-6  # learning rates below this hardly change an adapter


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with the field at `path`, such as "trainer.clip_low"."""

    path: str
    what: str
    hint: str | None = None


Findings = Iterator[Finding]


def is_local_source(source: str) -> bool:
    """Returns whether `data.source` names files rather than a task or a hub id."""
    return not source.startswith("task:") and (
        source.startswith(("/", "./", "../", "~")) or source.endswith(LOCAL_SUFFIXES) or any(c in source for c in "*?[")
    )


def is_local_model(path: str) -> bool:
    """Returns whether `model.path` has the form of a local path."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1  # a name of the hub has one slash at most


def repeated(names: Sequence[object]) -> list[int]:
    """Returns the indices of the names that stand further in front, too."""
    return [index for index, name in enumerate(names) if name in names[:index]]


def contradictions(recipe: Recipe) -> list[Finding]:
    """Returns the contradictions between fields. Each names both fields and the nearest valid value."""
    found = [*_sampling(recipe), *_sizes(recipe), *_async_steps(recipe), *_model(recipe), *_trainer(recipe)]
    found += [*_rewards(recipe.rewards, "rewards"), *_eval(recipe), *_processes(recipe), *_names(recipe), *_cluster(recipe)]
    if isinstance(recipe.engine, VllmRecipe):
        found += _engine(recipe, recipe.engine)
    if isinstance(recipe.engine, ServerEngineRecipe):
        found += _server(recipe.engine, recipe.cluster)
    return found


def no_routes(recipe: Recipe) -> str | None:
    """Returns why the recipe alone rules out that the trainer replays the experts of the engine; None: it does not."""
    engine, rollout = recipe.engine, recipe.rollout
    if not isinstance(engine, VllmRecipe):
        return f"an engine of kind {engine.kind} does not return the experts of a token; engines with vLLM do"
    if isinstance(engine, ServerEngineRecipe) and not (engine.launch or recipe.model.route_replay):
        return "servers that were started before return the experts of a token only if all recipes set model.route_replay to true"
    used = {
        "engine.tensor_parallel_size": engine.tensor_parallel_size > 1,
        "engine.structured_regex": recipe.structured_regex is not None,
        "engine.in_flight": recipe.in_flight,
        "rollout.use": rollout.use is not None,
        "data.columns.images": recipe.data.columns.images is not None,
        "model.compile": recipe.model.compile,
    }
    return next((f"it does not go with {key}" for key in used if used[key]), None)


def _sampling(recipe: Recipe) -> Findings:
    """Yields settings of `rollout` with which completions cannot be compared, or log-probs mean something else on each side."""
    rollout, trainer = recipe.rollout, recipe.trainer
    if rollout.group_size < 2:
        what = f"rollout.group_size is 1, but trainer.kind {trainer.kind} compares completions of one prompt"
        yield Finding("rollout.group_size", what, "set rollout.group_size to 2 or more")
    if rollout.temperature == 0:
        what = "rollout.temperature is 0: all completions of a prompt are then equal, and trainer.kind"
        hint = "set rollout.temperature to 0.01 or more; 1.0 samples the model as it is"
        yield Finding("rollout.temperature", f"{what} {trainer.kind} learns by comparing them", hint)
    for name, all_ids in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        path, remove = f"rollout.{name}", f"remove rollout.{name}"
        if getattr(rollout, name) == all_ids:
            continue
        if isinstance(trainer, PolicyRecipe) and trainer.beta > 0:
            why = "the reference keeps other ids than the policy, so their KL cannot be computed"
            yield Finding(path, f"{path} does not go with trainer.beta: {why}", f"{remove}, or set trainer.beta to 0")
        if recipe.structured_regex is not None:
            why = "the trainer does not know which ids the regular expression allows"
            yield Finding(path, f"{path} does not go with engine.structured_regex: {why}", f"{remove}, or the other key")
        if not recipe.rounds_alike:
            why = "an engine that rounds more than the trainer keeps other ids"
            yield Finding(path, f"{path} needs an engine with the trainer's dtype and weights: {why}", remove)
    for name in ("stop", "stop_token_ids"):
        for section, used in (("tools", recipe.tools), ("environment", recipe.environment), ("rollout.use", rollout.use)):
            if getattr(rollout, name) and used:
                who = "its code" if section == "rollout.use" else "the chat template"
                what = f"rollout.{name} does not go with {section}: {who} says what ends a turn"
                yield Finding(f"rollout.{name}", what, f"remove rollout.{name}")


def _sizes(recipe: Recipe) -> Findings:
    """Yields numbers that contradict each other: of tokens, written rollouts, steps, and the rows of a task."""
    (longest, adds_up), optim, steps = least_row(recipe), recipe.optim, recipe.run.steps
    longest = -(-longest // recipe.processes.sharing)
    if is_written(recipe, "optim.micro_batch_tokens") and optim.micro_batch_tokens < longest:
        what = f"optim.micro_batch_tokens is {optim.micro_batch_tokens}: the longest row would not fit, {adds_up}"
        yield Finding("optim.micro_batch_tokens", what, f"set optim.micro_batch_tokens to {longest} or more")
    if recipe.rollouts.keep is not None and not recipe.rollouts.every:
        what = f"rollouts.keep is {recipe.rollouts.keep}, but rollouts.every 0 writes none"
        yield Finding("rollouts.keep", what, "remove rollouts.keep, or set rollouts.every to 1 or more")
    if optim.warmup_steps >= steps:
        what = f"optim.warmup_steps is {optim.warmup_steps}, but run.steps is {steps}"
        yield Finding("optim.warmup_steps", what, f"set optim.warmup_steps to {steps - 1} or less")
    sections = {"data": recipe.data}
    if recipe.eval is not None and recipe.eval.options is not None:
        sections["eval"] = data_of(recipe.eval, recipe.data)
    for section, data in sections.items():
        task = TASKS.get(data.source.removeprefix("task:")) if data.source.startswith("task:") else None
        options = task.model_validate(data.options) if task else None
        low, high = getattr(options, "min_length", 0), getattr(options, "max_length", 0)
        if low > high:
            path = f"{section}.options.min_length"
            what = f"{path} {low} is above {section}.options.max_length {high}"
            yield Finding(path, what, f"set {path} to {high} or less")


def _async_steps(recipe: Recipe) -> Findings:
    rollout, engine, path = recipe.rollout, recipe.engine, "rollout.async_steps"
    if not rollout.async_steps:
        return
    if not isinstance(engine, ServerEngineRecipe):
        what = f"{path} samples while a step trains, but an engine of kind {engine.kind} cannot do both"
        yield Finding(path, what, "set engine.kind to server, or remove it")
    elif rollout.async_steps > 1 and not recipe.in_flight:
        what = f"with {path} above 1 requests are always open, so the weights could never change"
        yield Finding("engine.in_flight", what, f"remove it, or set {path} to 1")
    if not recipe.trainer.correction.corrects:
        what = f"{path} trains on samples from earlier weights, but trainer.correction corrects nothing"
        yield Finding(path, what, "set trainer.correction.mode, or remove it")
    if rollout.dynamic_sampling:
        what = f"rollout.dynamic_sampling waits for a step's rewards, but {path} samples the next step before them"
        yield Finding("rollout.dynamic_sampling", what, "remove one of them")


def _model(recipe: Recipe) -> Findings:
    """Yields contradictions of the `model` section, and of what servers do with an adapter."""
    engine, model = recipe.engine, recipe.model
    if model.quantization is not None and model.lora is None:
        what = f"model.quantization {model.quantization} freezes all weights: without model.lora nothing is trained"
        yield Finding("model.quantization", what, "add `lora: {}` to model, or remove model.quantization")
    if model.dither and (model.dtype != "bfloat16" or model.lora is not None):
        what = "model.dither has no effect: " + (
            "an adapter begins at random" if model.lora else "float32 weights are not rounded"
        )
        yield Finding("model.dither", what, "remove it")
    whole = {
        "optim.packing": "true" if recipe.optim.packing else None,
        "processes.strategy": "fsdp" if recipe.processes.strategy == "fsdp" else None,
        "model.quantization": model.quantization,
    }
    for key, value in whole.items():
        if model.compile and value is not None:
            what = f"model.compile needs whole layers and padded rows, but {key} is {value}"
            yield Finding("model.compile", what, f"remove model.compile, or {key}")
    if model.route_replay and (why := no_routes(recipe)):
        yield Finding("model.route_replay", f"model.route_replay: {why}", "remove it: routers then choose by themselves")
    if isinstance(engine, ServerEngineRecipe) and engine.lora == "adapter":
        differs = ["model.quantization"] if model.quantization else []
        differs += ["engine.dtype"] if engine.dtype not in (None, model.dtype) else []
        for key in differs:
            what = f"engine.lora adapter: servers merge it into unquantised weights in model.dtype, but {key} is set"
            yield Finding("engine.lora", what, f"set engine.lora to merged, or remove {key}")


def _cluster(recipe: Recipe) -> Findings:
    """Yields settings of processes and servers that a cluster starts differently."""
    cluster, engine, count = recipe.cluster, recipe.engine, recipe.processes.count
    if cluster is None:
        return
    if count is not None and count != cluster.trainers:
        what = f"processes.count is {count}, but cluster.trainers is {cluster.trainers}"
        yield Finding("processes.count", what, "remove processes.count")
    if cluster.address.startswith("ray://"):
        what = "cluster.address is that of a Ray client, which forwards neither output nor Ctrl-C"
        yield Finding("cluster.address", what, "start the run on a node of the cluster, with cluster.address auto")
    if isinstance(engine, ServerEngineRecipe) and engine.launch:
        what = "engine.launch starts servers on rank 0's machine, outside the cluster"
        yield Finding("engine.launch", what, "remove engine.launch, and set cluster.servers")
    if cluster.servers and not isinstance(engine, ServerEngineRecipe):
        what = f"cluster.servers is {cluster.servers}, but engine.kind is {engine.kind}"
        yield Finding("cluster.servers", what, "set engine.kind to server, or remove cluster.servers")
    elif cluster.servers and isinstance(engine, ServerEngineRecipe) and engine.url is not None:
        what = "engine.url names running servers, but cluster.servers would start others"
        yield Finding("cluster.servers", what, "remove one of them")


def _trainer(recipe: Recipe) -> Findings:
    trainer, correction = recipe.trainer, recipe.trainer.correction
    if isinstance(trainer, PolicyRecipe):
        low, high = trainer.clip_low, trainer.clip_high
        if low > high:
            what = f"trainer.clip_low {low} is above trainer.clip_high {high}"
            yield Finding("trainer.clip_low", what, f"set trainer.clip_low to {high} or less")
        if trainer.delta is not None and trainer.delta <= 1 + high:
            what = f"trainer.delta {trainer.delta} is not above 1 + trainer.clip_high = {1 + high}"
            yield Finding("trainer.delta", what, "set it higher; its paper has 4")
    if isinstance(trainer, GRPORecipe) and trainer.combine_rewards == "normalize_then_sum" and trainer.kl == "k1_in_reward":
        what = "trainer.kl k1_in_reward changes the sum of the rewards, but trainer.combine_rewards normalises each by itself"
        yield Finding("trainer.kl", what, "set trainer.kl to k3_is, or trainer.combine_rewards to sum")
    if isinstance(trainer, RLOORecipe):
        if trainer.reward_clip is not None and trainer.reward_clip[0] >= trainer.reward_clip[1]:
            what = f"trainer.reward_clip {list(trainer.reward_clip)} must have the lowest reward before the highest"
            yield Finding("trainer.reward_clip", what, "swap them")
        if trainer.ratio == "sequence" and correction.of_tokens:
            what = f"trainer.ratio sequence has one ratio for a completion, but trainer.correction.mode {correction.mode}"
            hint = "set trainer.correction.mode to sequence_truncate, sequence_mask or none, or trainer.ratio to token"
            yield Finding("trainer.ratio", f"{what} has one weight for each token", hint)
    if correction.min is not None and correction.min >= correction.max and correction.mode != "none":
        what = f"trainer.correction.min {correction.min} is not below trainer.correction.max {correction.max}"
        yield Finding("trainer.correction.min", what, "lower it, or remove it")


def _rewards(rewards: Sequence[RewardRecipe], path: str) -> Findings:
    """Yields contradictions between entries of rewards, which stand at `path`."""
    if not any(reward.weight for reward in rewards):
        yield Finding(path, f"every weight in {path} is 0, so that every completion is worth 0", "set one above 0")
    for index, reward in enumerate(rewards):
        try:
            re.compile(str(reward.args.get("pattern", "")) if reward.use == "regex_match" else "")
        except re.error as error:
            what = f"{path}.{index}.args.pattern must be a regular expression of Python ({error})"
            yield Finding(f"{path}.{index}.args.pattern", what, "write a `\\` before a character to match it literally")
    for index in repeated([reward.label for reward in rewards]):
        what, hint = f"two rewards are called `{rewards[index].label}`", f"set {path}.{index}.name to another name"
        yield Finding(f"{path}.{index}", what, hint)


def _eval(recipe: Recipe) -> Findings:
    held = recipe.eval
    if held is None:
        return
    data = data_of(held, recipe.data)
    same = (data.source, data.subset) == (recipe.data.source, recipe.data.subset) and not data.source.startswith("task:")
    if same and (is_local_source(data.source) or data.split == recipe.data.split):
        hint = "set eval.source to a held-out file, or eval.split to another split of the hub"
        yield Finding("eval.source", "eval names only rows that are trained on", hint)
    if held.temperature == 0 and held.group_size > 1:
        what = f"eval.temperature is 0: all {held.group_size} completions of a prompt are then equal"
        yield Finding("eval.temperature", what, "remove it, or set eval.group_size to 1")
    if held.group_size == 1 and (places := pairwise_places(eval_rewards(held, recipe.rewards))):
        section = "rewards" if held.rewards is None else "eval.rewards"
        what = f"{section}.{places[0]} is pairwise: it compares completions of a prompt, but eval.group_size is 1"
        yield Finding("eval.group_size", what, "set eval.group_size to 2 or more, or other rewards in eval.rewards")
    if held.rewards is not None:
        yield from _rewards(held.rewards, "eval.rewards")


def _processes(recipe: Recipe) -> Findings:
    count, size = recipe.processes.count, recipe.engine.callers
    if recipe.processes.strategy == "fsdp":
        path, ddp = "processes.strategy", "set processes.strategy to ddp"
        if recipe.model.quantization is not None:
            what = f"{path} fsdp cannot shard weights that bitsandbytes packs"
            yield Finding(path, what, f"remove model.quantization, or {ddp}")
        if recipe.optim.kind == "adamw_8bit":
            what = f"{path} fsdp shards the moments, but bitsandbytes keeps those of optim.kind adamw_8bit whole"
            yield Finding("optim.kind", what, "set optim.kind to adamw, or processes.strategy to ddp")
        if count == 1:
            what = f"{path} fsdp shards the model over several processes, but processes.count is 1"
            yield Finding(path, what, f"{ddp}, or processes.count to 2 or more")
        yield from _divided(recipe, "shard", "weights", "")
        yield from _divided(recipe, "experts", "experts", "processes.shard model.lora")
        yield from _divided(recipe, "tensor", "layers", "processes.shard processes.experts processes.defer_sync model.lora")
        yield from _divided(recipe, "context", "rows", "processes.experts processes.tensor")
    if count is not None and count % size:
        what = f"engine.tensor_parallel_size {size} does not divide processes.count {count}"
        yield Finding("engine.tensor_parallel_size", what, f"set processes.count to {size}")


def _divided(recipe: Recipe, key: str, what: str, untried: str) -> Findings:
    """Yields why the processes of `processes.{key}` cannot divide `what` of the model; `untried` keys do not go with it."""
    path, size, count = f"processes.{key}", getattr(recipe.processes, key), recipe.processes.count
    if size is None:
        return
    for section, _, other in (name.partition(".") for name in untried.split()):
        if getattr(getattr(recipe, section), other):
            hint = f"remove {path}, or {section}.{other}"
            yield Finding(path, f"{path} has not been tried with {section}.{other}", hint)
    if size == 1 or (count is not None and count % size):
        said = f"{path} {size} divides no {what} over {count or 'several'} processes"
        yield Finding(path, said, f"set it to a divisor of the number of processes, or remove {path}")


def _names(recipe: Recipe) -> Findings:
    """Yields sinks that repeat a kind, since a run has one id in each tracker, and paths that name a variable of the shell."""
    kinds = [sink.kind for sink in recipe.sinks]
    for place in repeated(kinds):
        what = f"sinks has a second entry of kind {kinds[place]}, but a tracker gets each run once"
        yield Finding(f"sinks.{place}.kind", what, "remove one")
    for key, path in {"run.dir": recipe.run.dir, "model.path": recipe.model.path, "data.source": recipe.data.source}.items():
        if re.search(r"\$\{?\w", path):
            hint = "write the value itself, or give it to --set, where the shell fills it in"
            yield Finding(key, f"{key}: a recipe knows no variables, but {path} names one", hint)


def _engine(recipe: Recipe, engine: VllmRecipe) -> Findings:
    longest, adds_up = least_row(recipe)
    if engine.max_model_len is not None and engine.max_model_len < longest:
        what = f"engine.max_model_len is {engine.max_model_len}, but {adds_up}"
        yield Finding("engine.max_model_len", what, f"set engine.max_model_len to {longest} or more, or remove it")
    if engine.kv_cache_gib is not None and engine.gpu_memory_utilization is not None:
        what = "engine.gpu_memory_utilization has no effect beside engine.kv_cache_gib"
        yield Finding("engine.gpu_memory_utilization", what, "remove one of them")
    for name in sorted(engine.extra):
        path = f"engine.extra.{name}"
        if name.replace("-", "_").startswith("data_parallel"):
            what = f"{path} puts several engines behind one address, but vLLM confirms a weight sync for the first only"
            more = "set engine.servers to their number" if isinstance(engine, ServerEngineRecipe) else "start more processes"
            yield Finding(path, what, f"{more}: rlgen then syncs and checks each engine")
        elif name.replace("-", "_") in RESERVED_ENGINE_ARGUMENTS:
            yield Finding(path, f"{path} is set by rlgen itself", "remove it")
        elif not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield Finding(path, f"{path} is not an argument of vLLM", "write it as vLLM does in Python: lower_case")


def _server(engine: ServerEngineRecipe, cluster: ClusterRecipe | None) -> Findings:
    """Yields contradictions within the settings of servers, which a cluster may start."""
    urls, count, gpus = servers(engine), engine.servers, engine.gpus
    if not urls and not engine.launch and not (cluster and cluster.servers):
        key, value = ("engine.launch", "true") if cluster is None else ("cluster.servers", "their number")
        what = f"engine.kind is server, but neither engine.url nor {key} is set"
        yield Finding("engine.kind", what, f"set engine.url to what `rlgen serve` printed, or {key} to {value}")
    if urls and engine.launch:
        what = "engine.url names a running server, but engine.launch is true: rlgen would start another"
        yield Finding("engine.url", what, "remove one of them")
    if engine.transfer == "nccl" and engine.launch and engine.devices is None:
        what = "engine.transfer nccl needs the server on another GPU than the trainer, but engine.devices names none"
        yield Finding("engine.transfer", what, 'set engine.devices to its number, such as "1", or engine.transfer to files')
    least = count * engine.tensor_parallel_size
    if twice := repeated(gpus):
        yield Finding("engine.devices", f"engine.devices names {gpus[twice[0]]} twice", "remove one of them")
    elif gpus and (len(gpus) % count or len(gpus) < least):
        what = f"engine.devices names {len(gpus)} GPUs, but each of engine.servers {count} needs an equal number of them"
        minimum = f"at least engine.tensor_parallel_size {engine.tensor_parallel_size}"
        yield Finding("engine.devices", f"{what}, {minimum}", f"name {least} GPUs, or change engine.servers")
    if (last := (engine.port or 0) + count - 1) > 65535 and engine.port is not None:
        what = f"engine.port {engine.port} is for the first server; the last of engine.servers {count} needs port {last}"
        yield Finding("engine.port", what, f"set engine.port to {65536 - count} or less, or remove it")
    for url in urls:
        if not is_server_address(url, alone=isinstance(engine.url, str)):
            several = "several are a list: [http://..., http://...]; " if "," in url else ""
            hint = f"{several}write it like http://127.0.0.1:8000; a secret goes into the environment variable {engine.token_env}"
            yield Finding("engine.url", f"engine.url: {url!r} is not the address of a server", hint)
    right = [url for url in urls if is_server_address(url)]
    for index in repeated([url.rstrip("/") for url in right]):
        yield Finding("engine.url", f"engine.url names {right[index]} twice", "remove one of them")


def warnings(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each setting that is valid, but probably a mistake."""
    rate, columns, group = recipe.optim.learning_rate, recipe.data.columns, recipe.rollout.group_size
    if rate > LARGE_RATE:
        usual = "usual are 1e-6 for all weights, 1e-5 to 1e-4 for adapters"
        yield f"optim.learning_rate {rate:g} destroys a model in a few steps: {usual}"
    if columns.answer is not None and columns.answer == columns.prompt:
        yield f"data.columns: prompt and answer are both `{columns.answer}`: rewards compare completions with the prompt"
    if recipe.data.source in TASKS:
        yield f"data.source {recipe.data.source} is a name of the hub; the task is task:{recipe.data.source}"
    if group > LARGE_GROUP:
        yield f"rollout.group_size {group}: a step samples {recipe.samples_per_step:,} completions; 4 to 64 a prompt are usual"
    if (tokens := recipe.optim.micro_batch_tokens) > LARGE_BATCH:
        yield f"optim.micro_batch_tokens {tokens:,} is more than a GPU holds at once; `rlgen estimate` says what fits"
    if recipe.oldest_sample < (ahead := recipe.rollout.async_steps):
        yield f"rollout.max_staleness is below rollout.async_steps {ahead}: all samples are dropped if the trainer is slower"


def notices(recipe: Recipe) -> Iterator[str]:
    """Yields notes to print: settings that are harmless, and common in templates."""
    trainer, engine, steps, rate = recipe.trainer, recipe.engine, recipe.run.steps, recipe.optim.learning_rate
    if recipe.checkpoint.every > steps:
        yield f"checkpoint.every {recipe.checkpoint.every} is above run.steps {steps}: only the last step is saved"
    if recipe.structured_regex is not None:
        yield "engine.structured_regex: the sentinel checks the engine without it before step 1, and cannot check batches"
    if engine.kind == "colocated" and recipe.rollout.stream:
        what = "engine and trainer share one Python interpreter and wait for each other"
        yield f"rollout.stream with engine.kind colocated: {what}; a server has its own (engine.kind server, engine.launch true)"
    if isinstance(engine, ServerEngineRecipe):
        yield from _of_servers(engine)
    if recipe.model.lora is not None and rate < SMALL_FOR_LORA:
        yield f"optim.learning_rate {rate:g} is usual for full weights; adapters start at zero and need ten times as much or more"
    key, whole = ("loss", ("gspo", "luspo")) if isinstance(trainer, GRPORecipe) else ("ratio", ("sequence",))
    if isinstance(trainer, GRPORecipe | RLOORecipe) and (value := getattr(trainer, key)) in whole:
        one_ratio = f"trainer.{key} {value} has one ratio for a completion; trainer."
        if trainer.correction.of_tokens:
            yield f"{one_ratio}correction.mode {trainer.correction.mode} weighs it by the mean of its tokens' weights"
        if trainer.top_entropy < 1:
            yield f"{one_ratio}top_entropy weighs it by the share of its tokens that are kept, and all of them are learned from"


def _of_servers(engine: ServerEngineRecipe) -> Iterator[str]:
    """Yields notes about servers on other machines."""
    trusted, urls = "use it in a trusted network only", servers(engine)
    hosts = [re.sub(r"^https?://|(:\d+)?(/.*)?$", "", url) for url in urls if url.startswith("http://")]
    hosts += [engine.host] if engine.launch else []
    for host in dict.fromkeys(host for host in hosts if not is_loopback(host)):
        yield f"engine: {host} is another machine, and http is not encrypted: {trusted}"
        if engine.transfer_dir is None and engine.transfer == "files" and not engine.launch:
            yield f"engine: {host} must read the weights from this machine; set engine.transfer_dir to a shared folder"
    outside = [url for url in urls if not is_loopback(urlsplit(url).hostname or "")]
    if engine.transfer == "nccl" and outside:
        yield f"engine.transfer nccl to {outside[0]} has no token and no encryption: {trusted}"


def servers(engine: ServerEngineRecipe) -> list[str]:
    """Returns the addresses that `engine.url` names."""
    return [engine.url] if isinstance(engine.url, str) else list(engine.url or [])


def is_server_address(url: str, alone: bool = False) -> bool:
    """Returns whether the text has the form of a server's address, and holds no secret.

    `alone`: also of a place where addresses are looked up: file:///shared/servers.txt, dns://vllm:8000.
    """
    if alone and re.fullmatch(r"file:///[^\s?#]+|dns://[\w.-]+:\d+", url):
        return True
    try:
        urlsplit(url).port  # noqa: B018 - raises ValueError if the port is not a number
    except ValueError:
        return False
    return re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", url) is not None


def is_loopback(host: str) -> bool:
    """Returns whether `host` can be reached only from this machine."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
