"""The records that flow through a run, in the order in which they come to be. All are frozen.

Axis letters, used in every docstring and local name:
    P  prompts of a step            G  completions of a prompt (`rollout.group_size`)
    B  rows, B = P * G              T  completion positions, padded on the right
    S  prompt and completion positions together, padded on the right
    L  one row's own tokens         V  vocabulary
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One data row, templated and tokenised once.

    Prompt(position=17, row=3, text="<|im_start|>user\\nsort 3 1 2...", prompt_ids=(256, 117, 9), columns={"answer": "123"})
    """

    position: int  # place in the run's data order, over all epochs: names the prompt's group
    row: int  # index in the data set, after filtering
    text: str  # what the model sees, as text
    prompt_ids: tuple[int, ...]  # [L] what the model sees
    columns: Mapping[str, Any]  # the data set's columns, for rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an engine is asked for: one completion. Request(prompt_ids=(256, 117, 9), seed=81263)"""

    prompt_ids: tuple[int, ...]  # [L]
    seed: int  # from position, never from call order


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings that all requests of one call share. Sampling(max_tokens=64, temperature=1.0, stop_ids=(257,))"""

    max_tokens: int
    temperature: float  # 0: greedy, always the most probable id, of equal ones the lowest; a request's seed then changes nothing
    stop_ids: tuple[int, ...]  # every id that ends a completion; the sampled one is kept
    regex: str | None = None  # restricts the completions; log-probs are then those of the restricted distribution

    @property
    def logp_temperature(self) -> float:
        """Temperature of the log-probs that the engine reports and the trainer compares: that of sampling, 1 for greedy."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine answers. Completion(token_ids=(9, 4, 257), logp=(-.2, -1.1, -.01), finish_reason="stop", ...)"""

    token_ids: tuple[int, ...]  # [L] includes the sampled stop token: stopping is an action
    logp: tuple[float, ...]  # [L] log-probability of each sampled token, at `Sampling.logp_temperature`
    finish_reason: FinishReason
    weight_version: int  # weights that sampled it
    prompt_ids: tuple[int, ...]  # what the engine says it answered
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of one prompt, from sampling to training: the row that is written to `rollouts/`.

    Sample(group_id=17, sample_index=0, prompt_ids=(256, 117), completion_ids=(9, 4, 257), sampler_logp=(-.2, -1.1, -.01),
           loss_mask=(True, True, True), finish_reason="stop", weight_version=4, seed=81263, completion="bca",
           rewards={"exact_match": 1.0}, reward=1.0)
    """

    group_id: int  # the prompt's position: samples of one prompt share it; nothing else groups them
    sample_index: int  # 0..G-1 within the group
    prompt_ids: tuple[int, ...]  # [L_prompt]
    completion_ids: tuple[int, ...]  # [L] as sampled, never re-tokenised
    sampler_logp: tuple[float, ...]  # [L]
    loss_mask: tuple[bool, ...]  # [L] true for sampled tokens, the stop token included
    finish_reason: FinishReason
    weight_version: int
    seed: int
    completion: str  # text for rewards and people only
    rewards: Mapping[str, float | None]  # by name; None: does not apply, or failed
    reward: float | None  # weighted sum of those that apply; None: not scorable
    cached_tokens: int = 0  # of the prompt, that the engine took from its prefix cache
    reward_errors: Mapping[str, str] = field(default_factory=dict)  # by name: "timeout: no answer within 30 s (r.py:3)"

    @property
    def failed(self) -> bool:
        """Whether a reward that it should have is not known."""
        return any(self.rewards[label] is None for label in self.reward_errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All completions of one prompt."""

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows that go through the model together: a micro-batch. Every row starts with its prompt; padding is on the right."""

    rows: tuple[int, ...]  # [B] index of each row in the step's list of samples
    input_ids: "Tensor"  # [B, S] prompt and completion
    prompt_lengths: "Tensor"  # [B]
    completion_ids: "Tensor"  # [B, T]
    mask: "Tensor"  # [B, T] bool, true on sampled tokens, the stop token included
    sampler_logp: "Tensor"  # [B, T] float32

    @property
    def tokens(self) -> int:
        """Positions of the rectangle, padding included."""
        return self.input_ids.numel()
