"""Sampling of a run's rollouts, step by step: requests -> engine -> checks -> groups."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, FollowUpQueue
from rlgen.errors import SentinelError
from rlgen.rollout.ahead import Ahead
from rlgen.rollout.answers import check_answers
from rlgen.rollout.call import Call
from rlgen.rollout.conversations import Conversations, Dialogue
from rlgen.rollout.custom import CustomRollout
from rlgen.rollout.journal import Journal
from rlgen.rollout.sample import groups_of, requests_for
from rlgen.types import Completion, Group, Prompt, Request, Sampling


@dataclass(slots=True, kw_only=True)
class Sampler:
    """Samples the completions of each step. What the journal answers is not asked again."""

    engine: Engine
    sampling: Sampling
    group_size: int
    run_seed: int
    tokenizer: PreTrainedTokenizerBase
    journal: Journal
    # If one answer is missing, the whole step is sampled again: its last bits depend on the other requests of its batch.
    all_or_none: bool
    ahead: Ahead | None = None  # samples later steps while one trains; None: each is sampled when it is needed
    # Called with each group of a step when all its answers are there, perhaps from another thread; None: nobody needs them early.
    group_finished: Callable[[int, Group], None] | None = None
    dialogue: Dialogue | None = None  # how conversations of several turns are led; None: a completion is one turn
    custom: CustomRollout | None = None  # the user's own sampler, which sends the requests of a step itself
    interruptible: bool = False  # another thread may call `give_up`
    joining: FollowUpQueue | None = None  # of the running call to the engine, by which it can be given up
    given_up: BaseException | None = None

    def groups(self, step: int, prompts: Sequence[Prompt]) -> tuple[list[Group], int]:
        """Returns the groups of `step`, trained from weights of version `step` - 1, and the number of samples dropped as too old.

        Raises as `Engine.generate` and `check_answers`.

        Args:
            prompts: of this engine.
        """
        if self.ahead is None:
            call = self.call(step, prompts, oldest=step - 1)
            return self.answered(call, self.generate(call) if call.asked else []), 0
        call, answers = self.ahead.take(step, self.call)
        groups, dropped = without_stale(self.answered(call, answers), step - 1 - self.ahead.max_staleness)
        if dropped:
            self.journal.keep(step)
        return groups, dropped

    def call(self, step: int, prompts: Sequence[Prompt], oldest: int) -> Call:
        """Builds the requests of `step`. Weights from version `oldest` on may have sampled the answers of the journal."""
        requests = requests_for(prompts, self.group_size, self.run_seed)
        call = Call.of(step, prompts, requests, self.sampling, oldest, self.journal, self.all_or_none)
        # What an earlier attempt has of a step may be its rewards, too: they are looked up when all of the step is there.
        if self.group_finished is not None and step not in self.journal.files:
            call.prompt_answered = partial(self.tell, self.group_finished)
        if self.dialogue is not None and call.asked:
            places = [(prompts[place // self.group_size], place % self.group_size) for place in call.asked]
            call.talks = Conversations(self.dialogue, places, call.to_engine, self.sampling, step - 1, oldest, call.answered)
            call.further = call.talks.further
        elif self.interruptible:
            call.further = FollowUpQueue()
        return call

    def generate(self, call: Call) -> Sequence[Completion]:
        """Samples what the journal does not answer, turn by turn where there is a dialogue."""
        if self.custom is not None:
            given = call.prompts, call.requests, self.sampling, self.tokenizer, call.step - 1, call.answered
            return self.custom(self.engine, *given)
        if self.interruptible:
            self.joining = call.further
            if self.given_up is not None:
                raise self.given_up
        return call.sampled(lambda: self.engine.generate(call.to_engine, self.sampling, *call.hooks))

    def answered(self, call: Call, answers: Sequence[Completion]) -> list[Group]:
        """Builds the groups of a call from the engine's answers and those of the journal, which it checks in the same way."""
        self.check(call, call.to_engine, answers)
        self.check(call, [call.requests[place] for place in call.found], list(call.found.values()))
        return groups_of(call.prompts, call.requests, call.completions(answers), self.sampling, self.tokenizer)

    def check(self, call: Call, requests: Sequence[Request], answers: Sequence[Completion]) -> None:
        """Checks answers to some requests of a call. Raises as `check_answers`."""
        joined, free = self.dialogue is not None, self.custom is not None
        check_answers(requests, answers, self.sampling, call.step - 1, call.oldest, joined, free)

    def tell(
        self,
        group_finished: Callable[[int, Group], None],
        call: Call,
        prompt: Prompt,
        requests: Sequence[Request],
        answers: Sequence[Completion],
    ) -> None:
        """Passes on the group of a prompt whose answers are all there."""
        with suppress(SentinelError):  # `answered` raises it when the whole step is there
            self.check(call, requests, answers)
            group_finished(call.step, *groups_of([prompt], requests, answers, self.sampling, self.tokenizer))

    def give_up(self, error: BaseException) -> None:
        """Makes the call to the engine in another thread, running or about to begin, raise `error` at its next decode step."""
        self.given_up = error
        if self.joining is not None:
            self.joining.fail(error)

    def before_sync(self) -> None:
        """Waits for the submitted requests, unless the weights may change while they are decoded."""
        if self.ahead is not None and not self.ahead.in_flight:
            self.ahead.drain()

    def drain(self) -> None:
        """Waits for the submitted requests. An error is not raised here but in `groups`, which takes the answers."""
        if self.ahead is not None:
            self.ahead.drain()

    def flush_pending(self, done: int) -> None:
        """Flushes the journal of what follows step `done`; called before the checkpoint of `done`. Waits as `Ahead.flush`."""
        if self.ahead is None:
            self.journal.flush(done + 1)
        else:
            self.ahead.flush(done)


def without_stale(groups: Sequence[Group], oldest: int) -> tuple[list[Group], int]:
    """Removes samples of weights older than version `oldest`; returns the groups, some perhaps empty, and the number removed."""
    fresh = [
        replace(group, samples=tuple(sample for sample in group.samples if sample.weight_version >= oldest)) for group in groups
    ]
    return fresh, sum(len(group.samples) for group in groups) - sum(len(group.samples) for group in fresh)
