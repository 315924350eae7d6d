"""Every metric of a run by name: the keys of `metrics.jsonl`, each with its unit and a one-sentence description.

A key that is written or read anywhere is a member of `Metric`, or comes from a member of `Family`, so a name cannot be
mistyped. `rlgen docs metrics` prints the glossary, which `scripts/docs.py` writes from this file.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Self

NATS = "nats a token"
# Which recipes write a metric.
POLICY = "`trainer.kind`: grpo, rloo"
FAILING = "rewards that failed in the step"
# What holds for all keys that begin so, unless a member or an earlier entry says something else.
WHEN = {
    "clip/": "losses that clip the ratio",
    "dpo/": "`trainer.kind`: online_dpo",
    "eval/sampler/": "`eval`, if engine and trainer can be compared",
    "eval/": "`eval`",
    "kl/old_": POLICY,
    "kl/ref_": "`trainer.beta` above 0",
    "opsm/": "`trainer.off_policy_max` set",
    "turns/": "`tools` or `environment`",
}


class Explained(StrEnum):
    """A name with its explanation."""

    unit: str  # "" for a number without a unit
    what: str
    when: str  # which recipes write it; "" for all of them

    def __new__(cls, key: str, unit: str, what: str, when: str = "") -> Self:
        member = str.__new__(cls, key)
        member._value_, member.unit, member.what = key, unit, what
        member.when = when or next((said for start, said in WHEN.items() if key.startswith(start)), "")
        return member


class Metric(Explained):
    """A key of `metrics.jsonl`. A value of None means that there was nothing to measure in this step.

    Metric.SAMPLER_KL == "sampler/kl"; Metric.SAMPLER_KL.unit == "nats a token"
    """

    STEP = "step", "steps", "Number of the step, from 1; 0 is an evaluation before step 1."

    LOSS = "loss", "", "The loss that the optimizer minimises: its mean over the updates of the step."
    POLICY_LOSS = "policy_loss", "", "Loss without the KL and the entropy bonus.", POLICY
    GRAD_NORM = "grad_norm", "", "Norm of the gradient of the last update, before it is clipped."
    LEARNING_RATE = "learning_rate", "", "Learning rate of the updates of this step."
    UPDATES_DONE = "updates/done", "updates", "Optimizer steps that were taken."
    UPDATES_EMPTY = "updates/empty", "updates", "Updates with nothing to learn: no tokens, or a gradient of exactly zero."
    UPDATES_SKIPPED = "updates/skipped", "updates", "Updates that were not made because a number was not finite."

    REWARD_MEAN = "reward/mean", "reward", "Mean of the weighted sums of the rewards; samples without a reward do not count."
    REWARD_STD = "reward/std", "reward", "Standard deviation of the same sums."
    REWARD_UNSCORED = "reward/unscored", "samples", "Samples without a reward: no reward applies, or one has failed."
    GROUPS_ZERO_STD = "groups/zero_std", "share", "Groups of equal rewards, among those with two scored samples or more."
    GROUPS_RESAMPLED = "groups/resampled", "groups", "Groups without an advantage, which `rollout.dynamic_sampling` replaced."

    COMPLETIONS_MEAN_TOKENS = "completions/mean_tokens", "tokens", "Mean length of a completion: the tokens that were sampled."
    COMPLETIONS_MIN_TOKENS = "completions/min_tokens", "tokens", "Length of the shortest completion."
    COMPLETIONS_MAX_TOKENS = "completions/max_tokens", "tokens", "Length of the longest completion."
    COMPLETIONS_TRUNCATED = (
        "completions/truncated",
        "share",
        "Completions cut off at `rollout.max_completion_tokens`; with tools or an environment also at `rollout.max_turns` or"
        " `rollout.reply_timeout`.",
    )
    TURNS_MEAN = "turns/mean", "turns", "Mean number of the model's turns in a completion."
    TURNS_MAX = "turns/max", "turns", "Largest number of these turns."
    TURNS_REPLY_TOKENS = "turns/reply_tokens", "tokens", "Mean number of reply tokens in a completion; they were not sampled."

    TOKENS_GENERATED = "tokens/generated", "tokens", "Completion tokens that were sampled."
    TOKENS_TRAINED = "tokens/trained", "tokens", "Completion tokens that the loss learned from."
    TOKENS_PADDING = "tokens/padding", "tokens", "Padding positions of the micro-batches of one update, over all processes."

    ENTROPY = "entropy", NATS, "Mean entropy of the sampling distribution at the trained tokens."
    ENTROPY_KEPT = "entropy_mask/kept_frac", "share", "Tokens that `trainer.top_entropy` keeps.", POLICY
    KL_OLD_K1 = (
        "kl/old_k1",
        NATS,
        "KL from the weights before the first update to the current ones, estimated by the mean of -log ratio.",
    )
    KL_OLD_K3 = "kl/old_k3", NATS, "The same KL, estimated by the mean of ratio - 1 - log ratio, which is never negative."
    KL_REF_K1 = (
        "kl/ref_k1",
        NATS,
        "KL to the reference, estimated by the mean of policy_logp - ref_logp; with `trainer.kl`: k1_in_reward, by that of"
        " sampler_logp - ref_logp.",
    )
    KL_REF_K3 = (
        "kl/ref_k3",
        NATS,
        "The same KL, estimated by the mean of exp(-u) + u - 1 with u = policy_logp - ref_logp.",
        "`trainer.beta` above 0 and `trainer.kl` not k1_in_reward",
    )

    CLIP_LOW = "clip/low", "share", "Tokens or completions of negative advantage whose ratio is below 1 - `clip_low`."
    CLIP_HIGH = "clip/high", "share", "Tokens or completions of positive advantage whose ratio is above 1 + `clip_high`."
    CLIP_REGION = "clip/region", "share", "The sum of `clip/low` and `clip/high`."
    CISPO_CLIPPED = "cispo/clipped", "share", "Tokens whose ratio is above `trainer.cispo_max`.", "`trainer.loss`: cispo"
    VESPO_PHI_MEAN = "vespo/phi_mean", "", "Mean weight that vespo gives a completion.", "`trainer.loss`: vespo"
    OPSM_DROPPED = "opsm/dropped_frac", "share", "Completions that `trainer.off_policy_max` drops."

    DPO_MARGIN = "dpo/margin", "nats", "Margin of a pair: `dpo/chosen_reward` minus `dpo/rejected_reward`."
    DPO_ACCURACY = "dpo/accuracy", "share", "Pairs whose margin is above 0."
    DPO_CHOSEN_REWARD = "dpo/chosen_reward", "nats", "Beta times the log-ratio of policy to reference, for the chosen completion."
    DPO_REJECTED_REWARD = "dpo/rejected_reward", "nats", "Beta times the same log-ratio, for the rejected completion."
    DPO_KEPT = "dpo/kept_frac", "share", "Pairs that `trainer.correction` keeps."
    DPO_BETA = "dpo/beta", "", "The value of `trainer.beta` in this pass over the data."

    SAMPLER_DELTA_MEAN = "sampler/delta_mean", "nats", "Mean of abs(old_logp - sampler_logp): how far trainer and engine differ."
    SAMPLER_DELTA_MAX = "sampler/delta_max", "nats", "Largest abs(old_logp - sampler_logp) of all tokens."
    SAMPLER_DELTA_P999 = "sampler/delta_p999", "nats", "The 99.9th percentile of abs(old_logp - sampler_logp)."
    SAMPLER_KL = "sampler/kl", NATS, "KL from the engine to the trainer, estimated by the mean of ratio - 1 - log ratio."
    SAMPLER_KL_K1 = "sampler/kl_k1", NATS, "The same KL, estimated by the mean of sampler_logp - old_logp."
    SAMPLER_KL_REVERSE_K1 = (
        "sampler/kl_reverse_k1",
        NATS,
        "KL from the trainer to the engine, estimated by the mean of ratio x log ratio.",
    )
    SAMPLER_KL_REVERSE_K3 = (
        "sampler/kl_reverse_k3",
        NATS,
        "The same KL, estimated by the mean of ratio x log ratio - ratio + 1.",
    )
    IS_RATIO_MIN = (
        "is/ratio_min",
        "ratio",
        "Smallest ratio exp(old_logp - sampler_logp) before any cap: of a token, or of a completion in"
        " a sequence_ mode of `trainer.correction`.",
    )
    IS_RATIO_MEAN = "is/ratio_mean", "ratio", "Mean of these ratios."
    IS_RATIO_MAX = "is/ratio_max", "ratio", "Largest of these ratios."
    IS_WEIGHT_MIN = "is/weight_min", "ratio", "Smallest importance weight that the loss uses."
    IS_WEIGHT_MEAN = "is/weight_mean", "ratio", "Mean of these weights."
    IS_WEIGHT_MAX = "is/weight_max", "ratio", "Largest of these weights."
    IS_CLIPPED = "is/clipped_frac", "share", "Ratios that a truncating correction moved to a cap."
    IS_MASKED = "is/masked_frac", "share", "Importance weights of 0."
    IS_UNSCORED = "is/unscored_frac", "share", "Tokens for which the engine reported no log-prob."
    IS_ESS = "is/ess", "share", "Effective sample size as a share, (sum w)^2 / (N sum w^2), of importance weights w."
    IS_ESS_RAW = "is/ess_raw", "share", "The same share, of the ratios before any cap."
    IS_ESS_SEQ = "is/ess_seq", "share", "The same share, of the ratios of whole completions before any cap."

    SENTINEL_DRIFT = (
        "sentinel/drift",
        "true or false",
        "Whether engine and trainer differ by more than the bounds of page `sentinel`; null if no compared token was"
        " sampled with the current weights.",
        "engines that the trainer can be compared with",
    )
    SENTINEL_PROBE_DELTA = (
        "sentinel/probe_delta",
        "nats",
        "Largest log-prob difference on extra completions, sampled every `sentinel.probe_every` steps to check a sync.",
        "`rollout.async_steps`",
    )

    ROLLOUT_STALENESS_MEAN = (
        "rollout/staleness_mean",
        "versions",
        "Mean age of the step's samples, in versions of the weights; a sample is as old as its oldest token.",
    )
    ROLLOUT_STALENESS_MAX = "rollout/staleness_max", "versions", "Age of the oldest token."
    ROLLOUT_MIXED = "rollout/mixed", "share", "Samples whose tokens come from several versions of the weights."
    ROLLOUT_DROPPED_STALE = (
        "rollout/dropped_stale",
        "samples",
        "Samples dropped because their oldest token was older than `rollout.max_staleness`.",
    )
    WEIGHTS_VERSION = "weights/version", "version", "Version of the engine's weights after the sync: the number of the step."

    EVAL_REWARD_MEAN = (
        "eval/reward/mean",
        "reward",
        "Mean reward of an evaluation: the weighted sums of rewards, averaged over a prompt's completions, then over prompts.",
    )
    EVAL_REWARD_LOW = "eval/reward/mean_low", "reward", "Lower end of its 95 % interval."
    EVAL_REWARD_HIGH = "eval/reward/mean_high", "reward", "Upper end of its 95 % interval."
    EVAL_REWARD_UNSCORED = "eval/reward/unscored", "samples", "Completions of an evaluation that got no reward."
    EVAL_MEAN_TOKENS = "eval/completions/mean_tokens", "tokens", "Mean length of a completion of an evaluation."
    EVAL_TRUNCATED = (
        "eval/completions/truncated",
        "share",
        "Completions of an evaluation cut off at `eval.max_completion_tokens`.",
    )
    EVAL_TURNS_MEAN = (
        "eval/turns/mean",
        "turns",
        "Mean number of the model's turns in an evaluation.",
        "`eval`, and `tools` or `environment`",
    )
    EVAL_PROMPTS = "eval/prompts", "prompts", "Prompts that were evaluated."
    EVAL_DELTA_MEAN = (
        "eval/sampler/delta_mean",
        "nats",
        "Mean difference between log-probs of engine and trainer, on a few completions of an evaluation.",
    )
    EVAL_DELTA_MAX = "eval/sampler/delta_max", "nats", "Largest difference on the same completions."

    TIME_STEP = "time/step", "seconds", "The whole step; the times below are parts of it."
    TIME_GENERATE = (
        "time/generate",
        "seconds",
        "Sampling, or waiting for samples. With `rollout.stream`, training that runs meanwhile counts here.",
    )
    TIME_REWARD = "time/reward", "seconds", "Scoring."
    TIME_TRAIN = "time/train", "seconds", "Forward, backward and optimizer steps, after sampling has ended."
    TIME_SYNC = "time/sync", "seconds", "Sending weights to the engine."
    TIME_SAVE = "time/save", "seconds", "Writing rollouts, and the previous step's checkpoint."
    TIME_EVAL = "time/eval", "seconds", "Evaluating.", "`eval`"


class Family(Explained):
    """A pattern of keys with one metric per reward, health rule or k of pass@k, such as `reward/exact_match/mean`.

    Family.REWARD_FAILED.of("judge") == "reward/judge/failed"
    """

    REWARD_MEAN = "reward/<name>/mean", "reward", "Mean of one reward over the samples that it applies to."
    REWARD_STD = "reward/<name>/std", "reward", "Standard deviation of one reward."
    REWARD_FAILED = "reward/<name>/failed", "samples", "Samples whose reward failed, whatever the cause."
    REWARD_ERRORS = "reward/<name>/errors", "samples", "Of these, calls that raised.", FAILING
    REWARD_TIMEOUTS = "reward/<name>/timeouts", "samples", "Of these, calls that took too long.", FAILING
    REWARD_DIED = "reward/<name>/died", "samples", "Of these, calls whose process died.", FAILING
    REWARD_MEMORY = (
        "reward/<name>/memory",
        "samples",
        "Of these, calls that needed more memory than `scoring.memory_gib`.",
        FAILING,
    )
    TOOLS = (
        "tools/<name>",
        "",
        "Events of this name in a step: `calls`, `malformed`, `steps`, `timeouts` and others. `unanswered`: no turns or tokens"
        " were left for a reply. `late`: no reply came within `rollout.reply_timeout`.",
        "`tools` or `environment`, for events that occurred",
    )
    EVAL_REWARD = "eval/reward/<name>/mean", "reward", "Mean of one reward in an evaluation, over completions, then prompts."
    EVAL_FAILED = "eval/reward/<name>/failed", "samples", "Completions of an evaluation whose reward failed."
    EVAL_PASS = (
        "eval/pass@<name>",
        "share",
        "Chance that at least one of k completions of a prompt is correct (`eval.threshold`).",
        "`eval`. The name is k: 1, 2, 4, … up to `eval.group_size`",
    )
    EVAL_PASS_LOW = "eval/pass@<name>_low", "share", "Lower end of the 95 % interval of this chance."
    EVAL_PASS_HIGH = "eval/pass@<name>_high", "share", "Upper end of the 95 % interval of this chance."
    HEALTH = (
        "health/<name>",
        "true or false",
        "Whether the rule `health.<name>` is broken. Absent until the rule has measured something.",
    )

    def of(self, name: str) -> str:
        return self.value.replace("<name>", name)

    def keys(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Returns the keys of this family in one object of `metrics.jsonl`."""
        before, _, after = self.value.partition("<name>")
        for key in record:
            if key.startswith(before) and key.endswith(after) and len(key) > len(before) + len(after):
                yield key


# Names that metrics had in files of earlier versions.
RENAMED = {
    "is/raw_min": Metric.IS_RATIO_MIN,
    "is/raw_mean": Metric.IS_RATIO_MEAN,
    "is/raw_max": Metric.IS_RATIO_MAX,
    "groups/replaced": Metric.GROUPS_RESAMPLED,
}
