"""Holds the models of a recipe's sections: every field with its bounds and its only default.

It does not import torch, so that `rlgen --help` and `rlgen validate` answer at once.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from rlgen.recipe.data import ColumnsRecipe, DataRecipe
from rlgen.recipe.engines import ColocatedEngineRecipe, EngineNeeds, EngineRecipe, ServerEngineRecipe, VllmRecipe
from rlgen.recipe.fields import Count, Dtype, Moment, Number, Seconds, Share, Strict, Temperature, Text
from rlgen.recipe.health import HealthRecipe
from rlgen.recipe.processes import ClusterRecipe, ProcessesRecipe
from rlgen.recipe.sinks import SinkRecipe
from rlgen.recipe.trainers import GRPORecipe, TrainerRecipe

ASSUMED_PROMPT = 512  # tokens


class RunRecipe(Strict):
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    """Name of the run. Default: the recipe's file name."""
    dir: Text = "runs"
    """Folder that holds the run's folder; relative to the working directory."""
    seed: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] = 0
    """The seed and the position in the run determine each random choice."""
    steps: Count = 100
    """Steps of the run; each samples a rollout and trains on it."""
    probe_max: StrictBool = False
    """Before step 1, run two micro-batches forward and backward: one with the longest rows, one with the most tokens. This shows
    at once whether the memory suffices."""
    deterministic: StrictBool = False
    """Train with torch's deterministic kernels, which give the same bits each time."""
    must_save_by: Moment | None = None
    """Save and stop (exit 75) before this time. Write a time with its zone, or a duration such as 3h50m, which begins anew at
    each start or resume. The first step always starts. A later step starts only if the time left is at least 1.25 * (longest step
    so far + longest save so far) + 2 s. A step is given up if, while it samples, the time left gets below 1.25 * (longest update
    so far + longest save so far) + 2 s; the update is what follows the sampling. A run of one process gives the step up at once,
    a run of several when it has sampled."""


class LoraRecipe(Strict):
    rank: Annotated[StrictInt, Field(ge=1, le=4096)] = 32
    """Rank of the two factors of each adapted layer."""
    alpha: Annotated[float, Field(strict=True, gt=0, le=1e5)] = 64.0
    """The product of the two factors is scaled by alpha / rank."""
    use_rslora: StrictBool = False
    """Scale by alpha / sqrt(rank) instead (2312.03732)."""
    targets: Text | Annotated[list[Text], Field(min_length=1, max_length=10000)] = "all-linear"
    """Layers to adapt. all-linear: every linear layer but the head. A list, such as [q_proj, v_proj]: each layer whose name ends
    with one of these texts."""


class ModelRecipe(Strict):
    path: Text
    """Hub id, folder, or tiny:NAME: a tiny random model for tests, such as tiny:qwen3."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Dtype = "bfloat16"
    """Dtype of the forward pass. Trained weights are always float32."""
    dither: StrictBool | None = None
    """In bfloat16: start each trained float32 weight at a random value that rounds to the loaded bfloat16 weight. Then even small
    updates change some bfloat16 weights from the first step on. None: true, unless lora is set."""
    fp32_head: StrictBool = True
    """Compute logits in float32, whatever the dtype is, in trainer and engine."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention of the trainer."""
    gradient_checkpointing: StrictBool = False
    """Compute activations again in the backward pass instead of keeping them."""
    offload_activations: StrictBool = False
    """With gradient_checkpointing: hold the inputs of layers in the machine's memory, not on the GPU, until the backward pass."""
    compile: StrictBool = False
    """Compile the layers of the trainer's model (`torch.compile`), when the run begins."""
    lora: LoraRecipe | None = None
    """Train low-rank adapters and freeze the model. None: train all weights."""
    quantization: Literal["nf4", "int8"] | None = None
    """Hold the frozen weights under an adapter in 4 or 8 bits (bitsandbytes, GPU only). None: hold them in `dtype`."""
    route_replay: StrictBool | None = None
    """Mixture of experts: the trainer sends each token to the experts that the engine chose. None: true if the engine returns its
    choice; see `rlgen docs sampling`."""
    train_vision: StrictBool = False
    """With data.columns.images: also train the vision tower and the projector. false: train the language model alone."""


BUILT_IN_REWARDS = ("exact_match", "numeric_match", "regex_match", "length", "overlong", "format", "math_verify", "environment")


class RewardRecipe(Strict):
    use: Text
    """Built-in name (see `rlgen docs rewards`), reward_model, judge, file.py:function, or pkg.mod:function."""
    weight: Number = 1.0
    """Factor of this reward in the sum of the rewards."""
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """Name in metrics and rollouts. Default: the function's name."""
    args: dict[StrictStr, Any] = {}
    """Further arguments of the function, by name. Settings of reward_model and judge also stand here, see `rlgen docs judges`."""
    timeout: Seconds = 30.0
    """Seconds that a call may take; then its process is killed."""
    on_error: Literal["fail", "skip", "zero"] = "fail"
    """If a call raises, hangs, dies or returns no number: fail ends the run, skip leaves out its samples, zero gives them 0."""
    max_error_fraction: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.05
    """With on_error skip or zero: largest share of this reward's calls that may fail in a step. If more fail, the run ends. Each
    training process counts its own calls. The allowed number is rounded up."""

    @property
    def label(self) -> str:
        """Returns the name of the reward in metrics: `name`, or the function's name."""
        return self.name or self.use.rpartition(":")[2]


class ToolRecipe(Strict):
    use: Text
    """file.py:function, or pkg.mod:function. The model learns how to call it from its types and its docstring."""
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=64)] | None = None
    """Name by which the model calls it. Default: the function's name."""
    args: dict[StrictStr, Any] = {}
    """Arguments that the model neither sees nor sets, by name."""
    timeout: Seconds = 10.0
    """Seconds that a call may take; then its process is killed, and the answer says so."""
    max_output_tokens: Annotated[StrictInt, Field(ge=16, le=10**6)] = 512
    """Longest answer; a longer one is cut, with a mark. An answer may take at most half of the completion's remaining tokens."""

    @property
    def label(self) -> str:
        """Returns the name of the tool: `name`, or the function's name."""
        return self.name or self.use.rpartition(":")[2]


BUILT_IN_ENVIRONMENTS = ("guess_number", "grid", "calculator", "openenv")
SEED_COLUMN = "seed"  # seed of an environment's random choices, unless the data have such a column
ENVIRONMENT_REWARD = "environment"  # the built-in reward that adds up what the environment gave


class EnvironmentRecipe(Strict):
    """What answers each turn of the model, and rewards it."""

    use: Text
    """Built-in name, file.py:Class, or pkg.mod:Class; see `rlgen docs environments`."""
    args: dict[StrictStr, Any] = {}
    """Arguments of the class, by name. Each conversation gets an object of its own."""
    timeout: Seconds = 10.0
    """Seconds that an answer may take. After that the conversation ends, and the environment's reward counts as failed."""
    max_output_tokens: Annotated[StrictInt, Field(ge=16, le=10**6)] = 512
    """Longest observation; a longer one is cut, with a mark. It may take at most half of the completion's remaining tokens."""
    role: Literal["user", "tool"] = "user"
    """Role of the messages that hold observations."""


class ScoringRecipe(Strict):
    """Settings of the processes that run rewards, tools and environments."""

    workers: Annotated[StrictInt, Field(ge=1, le=1024)] | None = None
    """Largest number of reward processes for each training process. A new one starts only when calls wait. Tools, or an
    environment, have processes of their own, up to the same number. None: the machine's cores divided by its training processes,
    at most 8."""
    memory_gib: Annotated[float, Field(strict=True, ge=0.25, le=10000)] = 4.0
    """Memory limit of each of these processes, in GiB."""
    import_timeout: Annotated[float, Field(strict=True, ge=0.1, le=86400)] = 60.0
    """Seconds that the imports of the functions may take."""
    concurrency: Annotated[StrictInt, Field(ge=1, le=10_000)] = 64
    """Largest number of async reward calls at once, in each training process. A judge has its own `args.concurrency`."""


class RolloutRecipe(Strict):
    prompts_per_step: Count = 8
    """Prompts that a step samples and trains on. The default becomes smaller if the data have fewer."""
    group_size: Count = 8
    """Completions of each prompt."""
    max_completion_tokens: Count = 512
    """Longest completion, with all its turns and replies; sampling stops there. The default becomes smaller if the model has
    fewer positions."""
    max_turns: Annotated[StrictInt, Field(ge=1, le=1000)] = 8
    """Limit on the model's turns in a conversation. If the last turn calls a tool, or the environment is not done, the completion
    counts as truncated."""
    reply_timeout: Seconds = 600.0
    """Seconds that tools or the environment may take to answer a turn, including the wait for a free process. If it takes longer,
    the completion is truncated."""
    use: Text | None = None
    """file.py:function, or pkg.mod:function. Your function, not rlgen, sends the requests to the engine; see `rlgen docs
    rollouts`. None: rlgen sends each prompt as it is."""
    temperature: Temperature = 1.0
    """Sampling temperature. 0 (greedy) is refused, because all completions of a prompt would be equal."""
    top_p: Share = 1.0
    """Sample only from the most probable tokens that together reach this probability. With top_p, top_k or min_p, engine and
    trainer both compute log-probs over the kept tokens; see `rlgen docs sampling`."""
    top_k: Annotated[StrictInt, Field(ge=0)] = 0
    """Sample only from this many of the most probable tokens. 0: from all."""
    min_p: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    """Sample only from tokens with at least this share of the highest probability."""
    stop: Annotated[list[Annotated[StrictStr, Field(min_length=1, max_length=100)]], Field(max_length=16)] = []
    """Texts that end a completion, besides the end token. The text stays in the completion. If it ends inside of a token, the
    whole token stays."""
    stop_token_ids: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(max_length=64)] = []
    """Ids that end a completion, besides the end token. They stay in the completion."""
    async_steps: Annotated[StrictInt, Field(ge=0, le=64)] = 0
    """Steps that the engine samples ahead of the trainer; needs engine.kind server. Each step makes one version of the weights.
    1: the engine samples with weights one version old. 2 or more: its weights change while it samples."""
    max_staleness: Annotated[StrictInt, Field(ge=1, le=100)] | None = None
    """Age limit of a sample's oldest token, in versions. Older samples are dropped and counted. None: rollout.async_steps."""
    dynamic_sampling: Annotated[StrictInt, Field(ge=0, le=100)] = 0
    """Rounds in which a step may sample more prompts. Their groups replace groups whose rewards are all equal."""
    stream: StrictBool = False
    """Run forward and backward on scored groups while other groups of the step are sampled. The result is the same. It takes 8
    bytes more for each trained parameter. Needs one process and vLLM. Refuses settings that need the whole batch."""


class EvalRecipe(Strict):
    """Held-out prompts that the model answers before step 1 and every few steps. Keys that are not set are as in training."""

    source: Text | None = None
    """Source of the held-out rows, in the form of data.source. None: another split of data.source, or other rows of its task."""
    subset: Text | None = None
    """Configuration of a hub data set. None: data.subset if eval reads data.source; otherwise no subset."""
    split: Text = "test"
    """Split of a hub data set."""
    revision: Text | None = None
    """Branch, tag or commit of a hub data set. None: data.revision if eval reads data.source; otherwise the newest."""
    columns: ColumnsRecipe | None = None
    """Columns that hold prompts and answers. They replace all of data.columns. None: data.columns."""
    options: dict[StrictStr, Any] | None = None
    """If the source is task:NAME: settings of this built-in task. None: data.options, if data has the same task."""
    limit: Count | None = None
    """Use the first rows only."""
    max_prompt_tokens: Count | None = None
    """Longest prompt, template included. None: the longest of these rows, or less if the model has too few positions."""
    every: Count = 20
    """Steps between evaluations; the last step is always evaluated."""
    at_start: StrictBool = True
    """Evaluate before step 1, too."""
    best: StrictBool = True
    """Save a checkpoint whenever the mean reward is the highest so far. It is kept in addition to those of checkpoint.keep."""
    group_size: Count = 1
    """Completions of each prompt; several give avg@k and pass@k."""
    temperature: Temperature | None = None
    """0 is greedy. None: 0 if group_size is 1, else rollout.temperature."""
    top_p: Share | None = None
    """Sample only from the most probable tokens that together reach this probability. None: rollout.top_p."""
    max_completion_tokens: Count | None = None
    """Longest completion. None: rollout.max_completion_tokens."""
    rewards: Annotated[list[RewardRecipe], Field(min_length=1, max_length=100)] | None = None
    """What scores the completions. None: the rewards of training."""
    threshold: Number = 1.0
    """For eval/pass@k, a completion is correct if its reward is at least this."""


class OptimRecipe(Strict):
    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw: AdamW of torch; its moments take 8 bytes for each trained weight. adamw_8bit: AdamW of bitsandbytes; its moments
    take 2 bytes for each trained weight."""
    offload: StrictBool = False
    """Hold the moments in the machine's memory, and on the GPU only during an optimizer step."""
    learning_rate: Annotated[float, Field(strict=True, gt=0, le=10)] = 1e-6
    """Learning rate of AdamW after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine reach 0 at the end of the run."""
    warmup_steps: Annotated[StrictInt, Field(ge=0, le=10**9)] = 0
    """Steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(strict=True, ge=0, le=10)] = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Field(strict=True, gt=0, le=1e6)] = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    micro_batch_tokens: Count = 16384
    """Limit on tokens that go through the model together, padding included. Changes memory and speed, never the result. If the
    longest row is longer than 16384 tokens, its length is the default."""
    packing: StrictBool | None = None
    """Lay the rows of a micro-batch end to end, without padding, and compute a group's prompt once. The result is the same. None:
    true if it is faster (on the CPU, and in bfloat16 on a GPU) and the model allows it."""
    max_nonfinite: Annotated[StrictInt, Field(ge=0, le=10**6)] = 3
    """How many steps in a row may skip their update because a number is not finite. One more ends the run."""


class CheckpointRecipe(Strict):
    every: Count = 20
    """Steps between checkpoints; the last step is always saved."""
    keep: Count = 2
    """Newest checkpoints that are kept."""


class RolloutsRecipe(Strict):
    """Selects the samples that are written to rollouts/, one file a step. A step whose update was skipped is always written."""

    every: Annotated[StrictInt, Field(ge=0, le=10**9)] = 1
    """Interval in steps at which samples are written. 0: never."""
    keep: Count | None = None
    """How many of the newest written steps to keep. Steps that a resume may need stay too. None: keep all."""


class SentinelRecipe(Strict):
    max_delta: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    """Largest allowed gap between the log-probs of engine and trainer at a sampled token, in nats. If neither this nor mean_delta
    is set, rlgen bounds the mean and the RMS of the gap by a multiple of the gap that rounding alone causes."""
    mean_delta: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    """Largest allowed mean of this gap over a batch, in nats."""
    on_drift: Literal["warn", "stop", "checkpoint_and_stop"] = "checkpoint_and_stop"
    """If a batch exceeds a bound: warn and train on, stop, or save a checkpoint and stop."""
    probe_every: Count = 10
    """With rollout.async_steps: number of syncs from one check of the sentinel to the next. Training batches come from older
    weights and cannot be compared with the current ones, so each check samples a few completions of its own."""


class Recipe(Strict):
    """A whole recipe, frozen and validated. Validation reads no files."""

    run: RunRecipe
    """Name, length and seed of the run, and where its folder is."""
    model: ModelRecipe
    """The model that is trained."""
    data: DataRecipe
    """The rows: prompts, and the columns that rewards get."""
    rewards: Annotated[list[RewardRecipe], Field(min_length=1, max_length=100)]
    """Functions that score completions; their results are multiplied by their weights and added up."""
    scoring: ScoringRecipe = ScoringRecipe()
    """The processes that run rewards, tools and environments."""
    tools: Annotated[list[ToolRecipe], Field(max_length=100)] = []
    """Functions that the model may call between its turns."""
    environment: EnvironmentRecipe | None = None
    """What answers each turn of the model, and rewards it. None: only tools answer, if there are any."""
    rollout: RolloutRecipe = RolloutRecipe()
    """What a step samples."""
    engine: EngineRecipe = ColocatedEngineRecipe()
    """What samples the completions."""
    trainer: TrainerRecipe = GRPORecipe()
    """The algorithm that learns from the samples."""
    optim: OptimRecipe = OptimRecipe()
    """The optimizer, and how a step is cut into micro-batches."""
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    """When the state of the run is saved, and how many checkpoints are kept."""
    rollouts: RolloutsRecipe = RolloutsRecipe()
    """Which samples are written to rollouts/, one file a step."""
    eval: EvalRecipe | None = None
    """Prompts that are never trained on, and how often they are answered."""
    sinks: Annotated[list[SinkRecipe], Field(max_length=4)] = []
    """Trackers that receive metrics, evaluations and samples, at most one tracker of each kind. If one fails, the run goes on."""
    sentinel: SentinelRecipe = SentinelRecipe()
    """How far engine and trainer may differ, and what happens beyond that."""
    health: HealthRecipe = HealthRecipe()
    """Signs of a failing run, checked after each step."""
    processes: ProcessesRecipe = ProcessesRecipe()
    """The processes that train together."""
    cluster: ClusterRecipe | None = None
    """The machines on which the run's processes are started. None: this machine, or those of your launcher."""

    @property
    def run_path(self) -> Path:
        return Path(self.run.dir).expanduser() / self.run.name

    @property
    def talks(self) -> bool:
        """Returns whether completions are conversations of several turns."""
        return bool(self.tools) or self.environment is not None

    @property
    def rounds_alike(self) -> bool:
        """Returns whether the engine holds the trainer's weights in the dtype in which the trainer computes."""
        same = self.engine.dtype in (None, self.model.dtype) and self.model.quantization is None
        return same and not (isinstance(self.engine, VllmRecipe) and self.engine.quantization)

    @property
    def world(self) -> int | None:
        """Returns how many processes train; None: the recipe leaves it to the launcher."""
        return self.processes.count if self.cluster is None else self.cluster.trainers

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def oldest_sample(self) -> int:
        """Returns how many versions the oldest token of a trained sample may be old."""
        rollout = self.rollout
        return rollout.async_steps if rollout.max_staleness is None else rollout.max_staleness

    @property
    def in_flight(self) -> bool:
        """Returns whether weights change under requests that are being answered."""
        if not isinstance(self.engine, ServerEngineRecipe):
            return False
        return self.rollout.async_steps > 1 if self.engine.in_flight is None else self.engine.in_flight.allowed

    @property
    def max_row_tokens(self) -> int:
        """Returns the tokens of the longest prompt and the longest completion together.

        If the recipe sets no length of prompts and the data have not been read, a prompt counts as `ASSUMED_PROMPT` tokens.
        """
        return (self.data.max_prompt_tokens or ASSUMED_PROMPT) + self.rollout.max_completion_tokens

    @property
    def engine_row_tokens(self) -> int:
        """Returns the tokens of the longest row that the engine samples, those of evaluations included."""
        if self.eval is None:
            return self.max_row_tokens
        prompt = self.eval.max_prompt_tokens or self.data.max_prompt_tokens or ASSUMED_PROMPT
        return max(self.max_row_tokens, prompt + (self.eval.max_completion_tokens or self.rollout.max_completion_tokens))

    @property
    def engine_needs(self) -> EngineNeeds:
        return EngineNeeds(
            engine=self.engine,
            model=self.model,
            rollout=self.rollout,
            samples=self.samples_per_step * max(1, self.rollout.async_steps),
            row_tokens=self.engine_row_tokens,
            images=self.data.columns.images is not None,
            in_flight=self.in_flight,
            patience=self.processes.timeout,
            experts=self.model.route_replay is True,
        )

    @property
    def structured_regex(self) -> str | None:
        """Returns the regular expression that completions are restricted to; None: they are not restricted."""
        return self.engine.structured_regex if isinstance(self.engine, ColocatedEngineRecipe) else None

    @property
    def task(self) -> str | None:
        """Returns NAME of a task:NAME source; None for other sources."""
        return self.data.source.removeprefix("task:") if self.data.source.startswith("task:") else None
