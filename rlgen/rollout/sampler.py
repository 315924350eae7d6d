"""The rollouts of a run, step after step: sampled when they are needed, or while the step before them trains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, Pending
from rlgen.rollout.answers import check_answers
from rlgen.rollout.sample import groups_of, requests_for
from rlgen.types import Group, Prompt, Request, Sampling

Submit: TypeAlias = Callable[[Sequence[Request], Sampling], Pending]


@dataclass(slots=True, kw_only=True)
class Sampler:
    """What the policy answers to the prompts of a step.

    With `ahead` the prompts of step k + 1 are handed to the engine when those of step k come back, so that they are sampled by
    the weights that step k starts from, one version older than those they are trained on. Every sample carries its version; the
    correction makes up for what lies between. The first step of a run, and of one that is resumed, is not a version old.
    """

    engine: Engine
    prompts_of: Callable[[int], Sequence[Prompt]]  # of this engine, by step; none after the last
    sampling: Sampling
    group_size: int
    run_seed: int
    tokenizer: PreTrainedTokenizerBase
    submit_to: Submit | None  # an engine that answers in the background: sample ahead
    max_staleness: int  # versions; older samples are dropped
    in_flight: bool  # weights may change under requests that are under way
    pending: dict[int, Pending] = field(default_factory=dict)

    def groups(self, step: int, prompts: Sequence[Prompt] | None = None) -> tuple[list[Group], int]:
        """The groups of `step`, whose weights are of version `step` - 1, and the number of samples too old to be among them.

        Args:
            prompts: of this engine; None: `prompts_of` the step.

        Raises:
            EngineError: as `Engine.generate`.
            SentinelError: an answer is not one to its request.
        """
        prompts, version = self.prompts_of(step) if prompts is None else prompts, step - 1
        requests = requests_for(prompts, self.group_size, self.run_seed)
        if self.submit_to is None:
            completions = self.engine.generate(requests, self.sampling)
            check_answers(requests, completions, self.sampling, version)
            return groups_of(prompts, requests, completions, self.sampling.stop_ids, self.tokenizer), 0
        if step not in self.pending:
            self.submit(step, self.submit_to)
        completions = self.pending.pop(step).result()
        self.submit(step + 1, self.submit_to)
        check_answers(requests, completions, self.sampling, version, oldest=0)
        groups = groups_of(prompts, requests, completions, self.sampling.stop_ids, self.tokenizer)
        return without_stale(groups, version - self.max_staleness)

    def submit(self, step: int, submit_to: Submit) -> None:
        """Hands the prompts of `step` to the engine, which answers in the background."""
        if prompts := self.prompts_of(step):
            self.pending[step] = submit_to(requests_for(prompts, self.group_size, self.run_seed), self.sampling)

    def before_sync(self) -> None:
        """Waits for what is being sampled, unless weights may change under it."""
        if not self.in_flight:
            self.rest()

    def rest(self) -> None:
        """Waits for what is being sampled."""
        for pending in self.pending.values():
            pending.exception()


def without_stale(groups: Sequence[Group], oldest: int) -> tuple[list[Group], int]:
    """Groups without samples of weights before version `oldest`, and how many these were; a group may end up empty."""
    fresh = [
        replace(group, samples=tuple(sample for sample in group.samples if sample.weight_version >= oldest)) for group in groups
    ]
    return fresh, sum(len(group.samples) for group in groups) - sum(len(group.samples) for group in fresh)
