"""Model of the section `health`: each rule has a threshold. `rlgen.run.health` says what is measured."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, model_validator

from rlgen.recipe.fields import Strict


class HealthRule(Strict):
    threshold: Annotated[float, Field(strict=True, ge=0, le=1e9)]
    """A value beyond this one is a bad sign."""
    steps: Annotated[StrictInt, Field(ge=1, le=10000)]
    """rlgen acts if the sign is there in this number of steps in a row. For `reward_std`, it acts if the sign is there in more
    than half of this number of steps. Steps that do not measure the value are skipped."""
    action: Literal["ignore", "warn", "stop", "checkpoint_and_stop"] | None = None
    """None: health.action."""


class HealthRecipe(Strict):
    """Rules for signs of a failing run, checked after each step. A rule that is set in part keeps its other defaults."""

    action: Literal["warn", "stop", "checkpoint_and_stop"] = "warn"
    """What rlgen does if a sign below is seen: warn and go on, stop, or save a checkpoint and stop."""
    reward: HealthRule = HealthRule(threshold=0.0, steps=20)
    """The absolute value of the mean reward is at or below the threshold."""
    reward_std: HealthRule = HealthRule(threshold=0.0, steps=10)
    """The standard deviation of a step's rewards is at or below the threshold, in more than half of the last `steps` steps."""
    reward_failed: HealthRule = HealthRule(threshold=0.0, steps=1)
    """The number of failed rewards in a step is above the threshold. If one call scores a whole group and fails, it counts once
    for each sample of the group."""
    unscored: HealthRule = HealthRule(threshold=1.0, steps=1)
    """The share of a step's samples without a reward is at or above the threshold."""
    zero_std: HealthRule = HealthRule(threshold=0.8, steps=10)
    """The share of groups with equal rewards is at or above the threshold."""
    no_update: HealthRule = HealthRule(threshold=0.0, steps=5)
    """The number of optimizer steps in a step is at or below the threshold."""
    entropy: HealthRule = HealthRule(threshold=0.01, steps=5)
    """The mean entropy of a token, in nats, is below the threshold."""
    ref_kl: HealthRule = HealthRule(threshold=2.0, steps=5)
    """The KL to the reference, in nats a token, is above the threshold."""
    grad_norm: HealthRule = HealthRule(threshold=10.0, steps=5)
    """The norm of the gradient before clipping is above the threshold."""
    clipped: HealthRule = HealthRule(threshold=0.3, steps=5)
    """The share of tokens whose ratio was clipped is above the threshold."""
    truncated: HealthRule = HealthRule(threshold=0.8, steps=10)
    """The share of truncated completions is above the threshold."""
    length: HealthRule = HealthRule(threshold=0.9, steps=10)
    """The mean length of a completion is above this share of rollout.max_completion_tokens."""
    sampler_delta: HealthRule = HealthRule(threshold=0.1, steps=3)
    """The mean difference between engine's and trainer's log-probs, in nats, is above the threshold."""
    sampler_kl: HealthRule = HealthRule(threshold=0.015, steps=20)
    """The KL between engine and trainer, in nats a token, is above the threshold."""
    ess: HealthRule = HealthRule(threshold=0.3, steps=5)
    """The effective sample size, as a share of the sample size, is below the threshold. It follows from the ratios, trainer to
    engine, before any cap."""

    @model_validator(mode="before")
    @classmethod
    def fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        return {
            name: {**defaults[name].model_dump(), **value}
            if isinstance(value, dict) and isinstance(defaults.get(name), HealthRule)
            else value
            for name, value in data.items()
        }
