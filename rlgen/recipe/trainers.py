"""Holds the `trainer` section: the settings of three algorithms, with their bounds and defaults."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, model_validator

from rlgen.recipe.fields import Number, Share, Strict, Text


class Preset(Strict):
    """A model in which the value of one field (`choice`) decides the defaults of others (`presets`)."""

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
    """Drops completions whose mean ratio of a token is out of bounds; meant for long ones, whose products of ratios explode."""

    min: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.99
    """Completions whose mean ratio is lower are dropped."""
    max: Annotated[float, Field(strict=True, gt=1, le=1e6)] = 1.01
    """Completions whose mean ratio is higher are dropped."""


class CorrectionRecipe(Preset):
    choice: ClassVar[str] = "mode"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "token_mask": {"min": 0.5},
        "sequence_mask": {"max": 3.0},
        "icepop": {"min": 0.5, "max": 5.0},
    }

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "icepop", "none"] = "token_truncate"
    """Weigh each token, or each whole completion (sequence), by the trainer's probability over the engine's. Outside the caps, a
    weight is moved to the cap (truncate) or set to 0 (mask). icepop is token_mask with its paper's caps."""
    min: Share | None = None
    """Lower cap. Default for token_mask and icepop: 0.5."""
    max: Annotated[float, Field(strict=True, ge=1, le=1e6)] = 2.0
    """Upper cap. Default for sequence_mask: 3, for icepop: 5."""
    geometric: GeometricRecipe | None = None
    """Also drop completions for which the geometric mean of their tokens' ratios, trainer to engine, is outside of these
    bounds."""

    @property
    def of_tokens(self) -> bool:
        """Returns whether each token has a weight of its own."""
        return self.mode in ("token_truncate", "token_mask", "icepop")

    @property
    def corrects(self) -> bool:
        """Returns whether anything is corrected: by weights, or by dropping completions."""
        return self.mode != "none" or self.geometric is not None


class PairCorrectionRecipe(CorrectionRecipe):
    """The correction for preference pairs, which have no weights: a pair is dropped if one of its completions is dropped."""

    mode: Literal["sequence_mask", "none"] = "none"
    """sequence_mask: drop a pair if the ratio of either completion is outside the caps."""


def refuse_k1(value: object) -> object:
    """Returns the value. Raises ValueError for k1, whose gradient in a loss is zero in expectation."""
    if value == "k1":
        raise ValueError("k1 in a loss has an expected gradient of zero; set k3_is, or k1_in_reward")
    return value


KLPlace = Annotated[Literal["k3_is", "k2", "k3", "k1_in_reward"], BeforeValidator(refuse_k1)]
Updates = Annotated[StrictInt, Field(ge=1, le=1000)]


class PolicyRecipe(Strict):
    """Settings that the policy-gradient trainers share."""

    beta: Annotated[float, Field(strict=True, ge=0, le=1000)] = 0.0
    """Weight of the KL to a reference model. With 0, no reference model is loaded."""
    kl: KLPlace = "k3_is"
    """Estimator of the KL. k1_in_reward subtracts the KL from the reward; the others add it to the loss. Older tools use k3; its
    gradient is biased."""
    kl_use_weight: StrictBool = False
    """Multiply the KL in the loss by the weight of `correction`, as the rest of the loss is."""
    clip_low: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.2
    """The ratio is a probability now, divided by that before the first update on the rollout. It is clipped below 1 - clip_low.
    In the first update the ratio is 1, so nothing is clipped."""
    clip_high: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.28
    """The ratio is clipped above 1 + clip_high."""
    delta: Annotated[float, Field(strict=True, gt=1, le=1e6)] | None = None
    """Upper bound of the ratio for negative advantages; clip_high acts on positive ones only. Must be above 1 + clip_high."""
    off_policy_max: Annotated[float, Field(strict=True, ge=0, le=1000)] | None = None
    """Drop a completion with a negative advantage if its mean gap is larger than this. The gap of a token is the engine's
    log-prob minus the policy's, in nats; the mean is over the completion's tokens."""
    top_entropy: Share = 1.0
    """Learn only from this share of the tokens, those of the highest entropy. A value below 1 costs a forward pass."""
    entropy_bonus: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.0
    """Weight of an entropy bonus, the mean entropy of the tokens."""
    mask_truncated: StrictBool = False
    """Learn nothing from completions that reached rollout.max_completion_tokens; their reward stays in the baseline."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Groups with equal rewards teach nothing. keep: they count in the denominators of the loss. drop: they do not."""
    updates_per_rollout: Updates = 1
    """Optimizer steps on each rollout. Each step uses all rows."""
    correction: CorrectionRecipe = CorrectionRecipe()
    """Importance weights for the difference between the engine's and the trainer's log-probs."""


# Losses that have their own settings, prefixed with the loss's name, instead of clip_low, clip_high and delta.
OWN_SETTINGS = ("cispo", "sapo", "vespo")
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
    """grpo: a completion is compared with the mean of its group, and ratios are clipped."""
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "gspo", "gspo_token", "sapo", "luspo", "vespo"] = "dapo"
    """A paper's loss. It sets the defaults of aggregation, scale_rewards and clipping. bnpo is another name of dapo."""
    aggregation: Literal["token_mean", "seq_mean", "fixed", "seq_sum", "prompt_mean"] = "token_mean"
    """How token losses become one loss. token_mean: mean over all tokens. seq_mean: mean over each completion, then over
    completions. prompt_mean: mean over the tokens of all completions of a prompt, then over prompts. seq_sum: sum over each
    completion, then mean over completions. fixed: seq_sum divided by rollout.max_completion_tokens. The default follows from
    `loss`."""
    scale_rewards: Literal["group", "batch", "batch_centered", "none"] = "group"
    """Divide advantages by a standard deviation of rewards. group: that of the group. batch: that of the batch. batch_centered:
    that of the batch, after each group's mean is subtracted. none: do not divide. Default for dr_grpo: none."""
    combine_rewards: Literal["sum", "normalize_then_sum"] = "sum"
    """Several rewards: sum them, or normalise each within its groups first (GDPO)."""
    cispo_max: Annotated[float, Field(strict=True, ge=1, le=1e6)] = 5.0
    """Largest ratio of cispo."""
    sapo_tau_positive: Annotated[float, Field(strict=True, gt=0, le=1000)] = 1.0
    """Steepness of sapo's gate for positive advantages."""
    sapo_tau_negative: Annotated[float, Field(strict=True, gt=0, le=1000)] = 1.05
    """Steepness of sapo's gate for negative advantages."""
    vespo_k_positive: Annotated[float, Field(strict=True, ge=0, le=100)] = 2.0
    """vespo weighs a completion of ratio W by W^k exp(lambda (1 - W)); this is the k of positive advantages."""
    vespo_lambda_positive: Annotated[float, Field(strict=True, ge=0, le=100)] = 3.0
    """The lambda of positive advantages."""
    vespo_k_negative: Annotated[float, Field(strict=True, ge=0, le=100)] = 3.0
    """The k of negative advantages."""
    vespo_lambda_negative: Annotated[float, Field(strict=True, ge=0, le=100)] = 2.0
    """The lambda of negative advantages."""


class RLOORecipe(PolicyRecipe):
    kind: Literal["rloo"]
    """rloo: a completion is compared with the mean of the others of its group."""
    kl: KLPlace = "k1_in_reward"
    """Estimator of the KL. k1_in_reward subtracts the KL from the reward; the others add it to the loss."""
    clip_high: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    ratio: Literal["token", "sequence"] = "token"
    """token: clip the ratio of each token. sequence: clip the product of the ratios of a completion's tokens. The product
    explodes on long completions."""
    reward_clip: tuple[Number, Number] | None = None
    """Lowest and highest reward. Rewards outside are moved to these bounds, before a KL is subtracted."""
    normalize_advantages: StrictBool = False
    """Also centre and scale the advantages over the whole rollout."""


class OwnRecipe(PolicyRecipe):
    kind: Literal["own"]
    """own: an algorithm from a file, see `rlgen docs python`; with `use` you may leave out `kind`."""
    use: Text
    """file.py:Class, or pkg.mod:Class, with the functions `advantages` and `loss`."""
    args: dict[StrictStr, Any] = {}
    """Settings of your algorithm. It reads them from `recipe.args`."""


Beta = Annotated[float, Field(strict=True, gt=0, le=1000)]


class OnlineDPORecipe(Strict):
    kind: Literal["online_dpo"]
    """online_dpo: pairs of a group's completions, the better one preferred."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair: that of DPO (sigmoid), IPO or SLiC (hinge)."""
    beta: Beta | Annotated[list[Beta], Field(min_length=1, max_length=1000)] = 0.1
    """Strength of the pull to the reference. A list: one value for each pass over the data; later passes use the last one."""
    length: Literal["sum", "mean"] = "sum"
    """Log-probs of a completion: summed over its tokens, or their mean."""
    pairing: Literal["best_worst", "outside_in", "best_random"] = "best_worst"
    """Pair the best with the worst of a group. outside_in: also the second best with the second worst, and so on. best_random:
    the best with a random one."""
    min_margin: Annotated[float, Field(strict=True, ge=0, le=1e6)] = 0.0
    """The rewards of a pair must differ by more than this."""
    ties: Literal["skip", "first"] = "skip"
    """Pairs of equal rewards: drop them (skip), or prefer the completion that was sampled first (first)."""
    missing_eos_penalty: Annotated[float, Field(strict=True, ge=0, le=1e6)] = 0.0
    """Subtracted from the reward of a truncated completion."""
    updates_per_rollout: Updates = 1
    """Optimizer steps on each rollout. Each step uses all pairs."""
    correction: PairCorrectionRecipe = PairCorrectionRecipe()
    """Which pairs to drop because their log-probs differ too much between engine and trainer. By default none."""


TrainerRecipe = Annotated[GRPORecipe | RLOORecipe | OnlineDPORecipe | OwnRecipe, Field(discriminator="kind")]
