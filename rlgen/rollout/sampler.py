"""The rollouts of a run, step after step: sampled when they are needed, or while the step before them trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, Finished, Pending
from rlgen.rollout.answers import check_answers
from rlgen.rollout.journal import Journal
from rlgen.rollout.sample import groups_of, requests_for
from rlgen.types import Completion, Group, Prompt, Request, Sampling

Submit: TypeAlias = Callable[[Sequence[Request], Sampling, Finished], Pending]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a step asks for: what the journal has of it, and what the engine is asked."""

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    found: Mapping[int, Completion]  # by place
    asked: Sequence[int]  # places
    finished: Finished
    pending: Pending | None = None  # the engine's answers, if it answers in the background


@dataclass(slots=True, kw_only=True)
class Sampler:
    """What the policy answers to the prompts of a step.

    With `ahead` the prompts of step k + 1 are handed to the engine when those of step k come back, so that they are sampled by
    the weights that step k starts from, one version older than those they are trained on. Every sample carries its version; the
    correction makes up for what lies between. The first step of a run is not a version old.

    Each answer is in the journal as soon as it is there. A run that is resumed takes from it what its steps ask for.
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
    journal: Journal
    journals: bool  # this process writes what its engine answers
    # The last bits of an answer depend on which others are decoded with it: if one is missing, all of a step are asked for again.
    all_or_none: bool
    say: Callable[[str], None]
    pending: dict[int, Call] = field(default_factory=dict)

    def groups(self, step: int, prompts: Sequence[Prompt] | None = None) -> tuple[list[Group], int]:
        """The groups of `step`, whose weights are of version `step` - 1, and the number of samples too old to be among them.

        Args:
            prompts: of this engine; None: `prompts_of` the step.

        Raises:
            EngineError: as `Engine.generate`.
            SentinelError: an answer is not one to its request.
        """
        prompts, version = self.prompts_of(step) if prompts is None else prompts, step - 1
        if self.submit_to is None:
            call = self.call(step, prompts, oldest=version)
            asked = [call.requests[place] for place in call.asked]
            answers = self.engine.generate(asked, self.sampling, call.finished) if asked else []
            return self.answered(call, answers, version, oldest=version), 0
        if step not in self.pending:
            self.submit(step, self.submit_to)
            if step > 1 and (late := len(self.pending[step].asked)):
                self.say(
                    f"journal: {late} answers of step {step} are not in it: weights of version {version} sample them, and not"
                    " earlier ones as in a run that is not disturbed"
                )
        call = self.pending[step]
        answers = call.pending.result() if call.pending else []
        del self.pending[step]  # not before: who stops while these are waited for saves, and so settles them
        self.submit(step + 1, self.submit_to)
        return without_stale(self.answered(call, answers, version, oldest=0), version - self.max_staleness)

    def call(self, step: int, prompts: Sequence[Prompt], oldest: int) -> Call:
        """What `step` asks for, with what the journal has of weights from version `oldest` on."""
        requests = requests_for(prompts, self.group_size, self.run_seed)
        places = [(prompt.position, index) for prompt in prompts for index in range(self.group_size)]
        found = self.journal.found(step, places, requests, self.sampling, oldest)
        missing = [place for place in range(len(requests)) if place not in found]
        asked = list(range(len(requests))) if missing and self.all_or_none else missing

        def finished(of_call: int, completion: Completion) -> None:
            place = asked[of_call]
            if self.journals and place not in found:
                self.journal.answered(step, *places[place], requests[place], self.sampling, completion)

        return Call(prompts=prompts, requests=requests, found=found, asked=asked, finished=finished)

    def answered(self, call: Call, answers: Sequence[Completion], version: int, oldest: int) -> list[Group]:
        """The groups of a call; what is from the journal is checked as what is new.

        Raises:
            SentinelError: an answer is not one to its request.
        """
        check_answers([call.requests[place] for place in call.asked], answers, self.sampling, version, oldest)
        replayed = [call.requests[place] for place in call.found]
        check_answers(replayed, list(call.found.values()), self.sampling, version, oldest)
        of_place = {**dict(zip(call.asked, answers, strict=True)), **call.found}
        completions = [of_place[place] for place in range(len(call.requests))]
        return groups_of(call.prompts, call.requests, completions, self.sampling.stop_ids, self.tokenizer)

    def submit(self, step: int, submit_to: Submit) -> None:
        """Hands the prompts of `step` to the engine, which answers in the background."""
        if prompts := self.prompts_of(step):
            call = self.call(step, prompts, oldest=0)
            if call.asked:
                asked = [call.requests[place] for place in call.asked]
                call = replace(call, pending=submit_to(asked, self.sampling, call.finished))
            self.pending[step] = call

    def before_sync(self) -> None:
        """Waits for what is being sampled, unless weights may change under it."""
        if not self.in_flight:
            self.rest()

    def rest(self) -> None:
        """Waits for what is being sampled. An error is raised where the answers are taken."""
        for call in self.pending.values():
            if call.pending:
                call.pending.exception()

    def settle(self, done: int) -> None:
        """Before a checkpoint of step `done`: the journal must have what earlier weights answered to the prompts of the next one.

        They cannot be asked again. What is asked of the weights that are saved can be.
        """
        call = self.pending.get(done + 1)
        if call is not None and call.pending:
            call.pending.exception()
        self.journal.flush(done + 1)


def without_stale(groups: Sequence[Group], oldest: int) -> tuple[list[Group], int]:
    """Groups without samples of weights before version `oldest`, and how many these were; a group may end up empty."""
    fresh = [
        replace(group, samples=tuple(sample for sample in group.samples if sample.weight_version >= oldest)) for group in groups
    ]
    return fresh, sum(len(group.samples) for group in groups) - sum(len(group.samples) for group in fresh)
