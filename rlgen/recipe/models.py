"""The recipe: what a user can say, with every bound and every default. Each default exists once, here.

Torch-free: `rlgen --help` and `rlgen validate` answer at once.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator


class Strict(BaseModel):
    """Unknown keys, NaN and infinities are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


Text = Annotated[StrictStr, Field(min_length=1, max_length=4096)]
Count = Annotated[StrictInt, Field(ge=1, le=10**9)]
Scalar = StrictBool | StrictInt | Annotated[float, Field(strict=True)] | StrictStr
Number = Annotated[float, Field(strict=True, ge=-1e6, le=1e6)]
Dtype = Literal["float32", "bfloat16"]


class RunRecipe(Strict):
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    """Name of the run; the recipe's file name unless said."""
    dir: Text = "runs"
    """Folder that holds the run's folder; relative to the working directory."""
    seed: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] = 0
    """Every random choice follows from it and from a position."""
    steps: Count = 100
    """Rollouts to sample and train on."""


class ModelRecipe(Strict):
    path: Text
    """Hub id, folder, or tiny:NAME."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Dtype = "bfloat16"
    """Dtype of the forward pass. The weights that are trained are float32 always."""
    fp32_head: StrictBool = True
    """Compute logits in float32 whatever the dtype, in trainer and engine."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention of the trainer."""
    gradient_checkpointing: StrictBool = False
    """Compute activations again in the backward pass instead of keeping them."""


class ColumnsRecipe(Strict):
    prompt: Text = "prompt"
    """Column of prompts: texts, or lists of messages."""
    answer: Text | None = None
    """Column that rewards receive as `answer`, besides its own name."""


class DataRecipe(Strict):
    source: Text
    """Hub id, path or glob of jsonl, json, csv, parquet or arrow files, or task:NAME."""
    subset: Text | None = None
    """Configuration of a hub data set."""
    split: Text = "train"
    """Split of a hub data set."""
    revision: Text | None = None
    """Branch, tag or commit of a hub data set."""
    columns: ColumnsRecipe = ColumnsRecipe()
    chat: StrictBool = False
    """Put a text prompt into the chat template, as the user's message."""
    system: Text | None = None
    """System message before the user's; implies `chat`."""
    template_args: dict[StrictStr, Scalar] = {}
    """Arguments of the chat template, such as enable_thinking."""
    max_prompt_tokens: Count = 512
    """Longest prompt, template included."""
    overlong: Literal["filter", "error"] = "filter"
    """What happens to a longer one; filtered ones are counted."""
    limit: Count | None = None
    """Use the first rows only."""
    shuffle: StrictBool = True
    """A new order each epoch, from the seed."""
    options: dict[StrictStr, Any] = {}
    """Parameters of a task: source."""


class ArithmeticOptions(Strict):
    size: Annotated[StrictInt, Field(ge=1, le=10**6)] = 1000
    digits: Annotated[StrictInt, Field(ge=1, le=9)] = 2
    terms: Annotated[StrictInt, Field(ge=2, le=6)] = 2
    operators: Annotated[StrictStr, Field(pattern=r"^[-+*]+$", max_length=3)] = "+-"


class ReverseOptions(Strict):
    size: Annotated[StrictInt, Field(ge=1, le=10**6)] = 1000
    min_length: Annotated[StrictInt, Field(ge=1, le=100)] = 3
    max_length: Annotated[StrictInt, Field(ge=1, le=100)] = 5
    alphabet: Text = "abcdefghij"


class SortOptions(ReverseOptions):
    alphabet: Text = "0123456789"


class CountdownOptions(Strict):
    size: Annotated[StrictInt, Field(ge=1, le=10**6)] = 1000
    numbers: Annotated[StrictInt, Field(ge=2, le=6)] = 3
    largest: Annotated[StrictInt, Field(ge=2, le=100)] = 20


TaskOptions = ArithmeticOptions | ReverseOptions | SortOptions | CountdownOptions
TASKS: dict[str, type[ArithmeticOptions | ReverseOptions | SortOptions | CountdownOptions]] = {
    "arithmetic": ArithmeticOptions,
    "reverse": ReverseOptions,
    "sort": SortOptions,
    "countdown": CountdownOptions,
}

BUILT_IN_REWARDS = ("exact_match", "numeric_match", "regex_match", "length", "overlong", "format")


class RewardRecipe(Strict):
    use: Text
    """Built-in name, file.py:function, or pkg.mod:function."""
    weight: Number = 1.0
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """Name in metrics and rollouts; the function's unless said."""
    args: dict[StrictStr, Any] = {}
    """Further arguments of the function, by name."""

    @property
    def label(self) -> str:
        return self.name or self.use.rpartition(":")[2]


class RolloutRecipe(Strict):
    prompts_per_step: Count = 8
    group_size: Count = 8
    """Completions of each prompt."""
    max_completion_tokens: Count = 512
    temperature: Annotated[float, Field(strict=True, ge=0.01, le=2.0)] = 1.0


class ColocatedEngineRecipe(Strict):
    kind: Literal["colocated"] = "colocated"
    dtype: Dtype | None = None
    """None: model.dtype."""
    max_model_len: Count | None = None
    """None: max_prompt_tokens + max_completion_tokens."""
    max_num_seqs: Annotated[StrictInt, Field(ge=1, le=65536)] = 256
    """Completions decoded at the same time."""
    kv_cache_gib: Annotated[float, Field(strict=True, gt=0, le=10000)] | None = None
    """Memory of the KV cache. None: on the CPU what is needed, at most 4 GiB; on a GPU what the share below leaves."""
    gpu_memory_utilization: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Share of the GPU for weights and KV cache. None: 0.45."""
    tensor_parallel_size: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    sleep: StrictBool = False
    """Free the engine's memory while the trainer works. GPU only."""
    model_impl: Literal["auto", "vllm", "transformers"] = "auto"
    quantization: Text | None = None
    structured_regex: Text | None = None
    """Restrict completions to this regular expression."""
    enforce_eager: StrictBool | None = None
    """No graph capture. None: eager on the CPU, graphs on a GPU."""
    extra: dict[StrictStr, Any] = {}
    """Further arguments of vLLM; those that rlgen relies on are refused."""


# What rlgen's promise rests on, or sets from another key.
RESERVED_ENGINE_ARGUMENTS = frozenset(
    [
        *("model", "tokenizer", "revision", "skip_tokenizer_init", "dtype", "seed", "hf_overrides", "load_format"),
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enforce_eager"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization", "tensor_parallel_size", "enable_sleep_mode"),
        *("logprobs_mode", "max_logprobs", "generation_config", "model_impl", "quantization", "trust_remote_code"),
        *("distributed_executor_backend", "async_scheduling", "enable_lora", "use_tqdm_on_load"),
    ]
)


class TransformersEngineRecipe(Strict):
    kind: Literal["transformers"]
    dtype: Dtype | None = None
    """None: model.dtype."""
    max_num_seqs: Annotated[StrictInt, Field(ge=1, le=65536)] = 64
    """Completions decoded at the same time."""


class Preset(Strict):
    """Fields whose defaults depend on another field's value: `choice` names it, `presets` its values' defaults."""

    choice: ClassVar[str]
    presets: ClassVar[dict[str, dict[str, Any]]]

    @model_validator(mode="before")
    @classmethod
    def fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        chosen = data.get(cls.choice, cls.model_fields[cls.choice].default)
        return {**(cls.presets.get(chosen, {}) if isinstance(chosen, str) else {}), **data}


class GeometricRecipe(Strict):
    """Drops completions whose mean ratio of a token is outside; for long completions, whose products of ratios explode."""

    min: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.99
    max: Annotated[float, Field(strict=True, gt=1, le=1e6)] = 1.01


class CorrectionRecipe(Preset):
    choice: ClassVar[str] = "mode"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "token_mask": {"min": 0.5},
        "sequence_mask": {"max": 3.0},
        "icepop": {"min": 0.5, "max": 5.0},
    }

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop", "none"] = "token_truncate"
    """Importance weight between the engine's and the trainer's log-probs: of tokens or of whole completions, moved to the caps
    (truncate) or 0 outside of them (mask). icepop is token_mask with its paper's caps."""
    min: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Lower cap. For token_mask and icepop 0.5 unless said."""
    max: Annotated[float, Field(strict=True, ge=1, le=1e6)] = 2.0
    """Upper cap. For sequence_mask 3 and for icepop 5 unless said."""
    geometric: GeometricRecipe | None = None
    """Also drop completions by their mean ratio."""

    @property
    def corrects(self) -> bool:
        return self.mode != "none" or self.geometric is not None


class PairCorrectionRecipe(CorrectionRecipe):
    """A preference has no weight: a pair is kept, or dropped when one of its completions is."""

    mode: Literal["sequence_mask", "none"] = "none"
    """Drop pairs by the ratio of a whole completion."""


def refuse_k1(value: object) -> object:
    if value == "k1":
        raise ValueError("k1 in a loss has an expected gradient of zero; set k3_is, or k1_in_reward")
    return value


KLPlace = Annotated[Literal["k3_is", "k2", "k3", "k1_in_reward"], BeforeValidator(refuse_k1)]
Updates = Annotated[StrictInt, Field(ge=1, le=1000)]


class PolicyRecipe(Strict):
    """What the policy-gradient trainers share."""

    beta: Annotated[float, Field(strict=True, ge=0, le=1000)] = 0.0
    """Weight of the KL to a reference; a reference is held only above 0."""
    kl: KLPlace = "k3_is"
    """Estimator of the KL, in the loss or taken from the reward. k3 is what older tools have; its gradient is biased."""
    kl_use_weight: StrictBool = False
    """Multiply the KL in the loss by the importance weight, as the rest of the loss."""
    clip_low: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low. Acts from the second update of a rollout on."""
    clip_high: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.28
    """The ratio is clipped above 1 + clip_high."""
    delta: Annotated[float, Field(strict=True, gt=1, le=1e6)] | None = None
    """Upper bound of the ratio where the advantage is negative too; above 1 + clip_high."""
    off_policy_max: Annotated[float, Field(strict=True, ge=0, le=1000)] | None = None
    """Drop completions of negative advantage whose tokens are on average further off the policy, in nats."""
    top_entropy: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    """Learn from this share of the tokens only, those of the highest entropy. Below 1 it costs a forward pass."""
    entropy_bonus: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.0
    """Weight of the mean entropy of the tokens, which the loss rewards."""
    mask_truncated: StrictBool = False
    """Learn nothing from completions that reached rollout.max_completion_tokens; their reward stays in the baseline."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups of equal rewards teach nothing: keep them in the denominators of the loss, or drop them."""
    updates_per_rollout: Updates = 1
    """Optimizer steps on each rollout, all of its rows in each."""
    correction: CorrectionRecipe = CorrectionRecipe()


SEQUENCE_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}


class GRPORecipe(PolicyRecipe, Preset):
    choice: ClassVar[str] = "loss"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "grpo": {"aggregation": "seq_mean"},
        "dr_grpo": {"aggregation": "fixed", "scale_rewards": "none"},
        "gspo": {"aggregation": "seq_mean", **SEQUENCE_CLIP},
        "gspo_token": {"aggregation": "seq_mean", **SEQUENCE_CLIP},
        "luspo": {"aggregation": "seq_sum", **SEQUENCE_CLIP},
        "sapo": {"aggregation": "seq_mean"},
    }

    kind: Literal["grpo"] = "grpo"
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "gspo", "gspo_token", "sapo", "luspo", "vespo"] = "dapo"
    """A paper's loss with its aggregation, scaling and clipping, each of which can be set. bnpo is another name of dapo."""
    aggregation: Literal["token_mean", "seq_mean", "fixed", "seq_sum", "prompt_mean"] = "token_mean"
    """Mean over all tokens, mean over each completion, sum by a fixed length, sum over each completion, mean over each prompt's
    tokens. Unless said as the loss's paper has it: seq_mean for grpo, gspo, gspo_token and sapo, fixed for dr_grpo, seq_sum for
    luspo."""
    scale_rewards: Literal["group", "batch", "batch_centered", "none"] = "group"
    """Standard deviation that advantages are divided by. Unless said none for dr_grpo."""
    combine_rewards: Literal["sum", "normalize_then_sum"] = "sum"
    """Several rewards: sum them, or normalise each within its groups first (GDPO)."""
    cispo_max: Annotated[float, Field(strict=True, ge=1, le=1e6)] = 5.0
    """Largest ratio of cispo."""
    sapo_tau_positive: Annotated[float, Field(strict=True, gt=0, le=1000)] = 1.0
    """Steepness of sapo's gate for positive advantages."""
    sapo_tau_negative: Annotated[float, Field(strict=True, gt=0, le=1000)] = 1.05
    """For negative ones."""
    vespo_k_positive: Annotated[float, Field(strict=True, ge=0, le=100)] = 2.0
    """vespo weighs a completion of ratio W by W^k exp(lambda (1 - W)); this is for positive advantages."""
    vespo_lambda_positive: Annotated[float, Field(strict=True, ge=0, le=100)] = 3.0
    vespo_k_negative: Annotated[float, Field(strict=True, ge=0, le=100)] = 3.0
    """For negative ones."""
    vespo_lambda_negative: Annotated[float, Field(strict=True, ge=0, le=100)] = 2.0


class RLOORecipe(PolicyRecipe):
    kind: Literal["rloo"]
    kl: KLPlace = "k1_in_reward"
    """Estimator of the KL, in the loss or taken from the reward."""
    clip_high: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    ratio: Literal["token", "sequence"] = "token"
    """Clip the ratio of each token, or the product over the whole completion, which explodes on long ones."""
    reward_clip: tuple[Number, Number] | None = None
    """Lowest and highest reward; others are moved there, before any KL is taken off."""
    normalize_advantages: StrictBool = False
    """Also centre and scale the advantages over the whole rollout."""


Beta = Annotated[float, Field(strict=True, gt=0, le=1000)]


class OnlineDPORecipe(Strict):
    kind: Literal["online_dpo"]
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    beta: Beta | Annotated[list[Beta], Field(min_length=1, max_length=1000)] = 0.1
    """How strongly the reference holds. A list: one value for each pass over the data, the last for all after it."""
    length: Literal["sum", "mean"] = "sum"
    """Log-probs of a completion: summed over its tokens, or their mean."""
    pairing: Literal["best_worst", "outside_in", "best_random"] = "best_worst"
    """Pairs of a group: the best and the worst; also the second best and second worst, and so on; the best and any other."""
    min_margin: Annotated[float, Field(strict=True, ge=0, le=1e6)] = 0.0
    """The rewards of a pair differ by more than this."""
    ties: Literal["skip", "first"] = "skip"
    """Completions of equal rewards: no pair, or the first against the last."""
    missing_eos_penalty: Annotated[float, Field(strict=True, ge=0, le=1e6)] = 0.0
    """Taken from the reward of a completion that did not end."""
    updates_per_rollout: Updates = 1
    """Optimizer steps on each rollout, all of its pairs in each."""
    correction: PairCorrectionRecipe = PairCorrectionRecipe()


class OptimRecipe(Strict):
    learning_rate: Annotated[float, Field(strict=True, gt=0, le=10)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine end at 0 with the run."""
    warmup_steps: Annotated[StrictInt, Field(ge=0, le=10**9)] = 0
    weight_decay: Annotated[float, Field(strict=True, ge=0, le=10)] = 0.0
    max_grad_norm: Annotated[float, Field(strict=True, gt=0, le=1e6)] = 1.0
    micro_batch_tokens: Count = 16384
    """Most tokens that go through the model together, padding included. Changes memory and speed, never the result."""


class CheckpointRecipe(Strict):
    every: Count = 20
    """Steps between checkpoints; the last step is saved always."""
    keep: Count = 2
    """The newest ones that stay."""


class SentinelRecipe(Strict):
    max_delta: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    """Most that engine and trainer may differ on any sampled token, in nats. Both None: the dtype's own bounds."""
    mean_delta: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    """Most that they may differ on average."""
    on_drift: Literal["warn", "stop", "checkpoint_and_stop"] = "checkpoint_and_stop"
    """When they differ by more in a batch: train on and say so, stop, or keep a checkpoint of what was trained and stop."""


EngineRecipe = Annotated[ColocatedEngineRecipe | TransformersEngineRecipe, Field(discriminator="kind")]
TrainerRecipe = Annotated[GRPORecipe | RLOORecipe | OnlineDPORecipe, Field(discriminator="kind")]


class Recipe(Strict):
    """A whole recipe: frozen, validated, nothing looked up."""

    run: RunRecipe
    model: ModelRecipe
    data: DataRecipe
    rewards: Annotated[list[RewardRecipe], Field(min_length=1, max_length=100)]
    rollout: RolloutRecipe = RolloutRecipe()
    engine: EngineRecipe = ColocatedEngineRecipe()
    trainer: TrainerRecipe = GRPORecipe()
    optim: OptimRecipe = OptimRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    sentinel: SentinelRecipe = SentinelRecipe()

    @property
    def run_path(self) -> Path:
        return Path(self.run.dir).expanduser() / self.run.name

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def max_row_tokens(self) -> int:
        """Longest prompt and completion together."""
        return self.data.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def task(self) -> str | None:
        """The NAME of a task:NAME source."""
        return self.data.source.removeprefix("task:") if self.data.source.startswith("task:") else None

    @property
    def task_options(self) -> TaskOptions | None:
        """The options of a task: source, with its defaults; None for other sources and unknown tasks."""
        return TASKS[self.task].model_validate(self.data.options) if self.task in TASKS else None
