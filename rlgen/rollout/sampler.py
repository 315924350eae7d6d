"""Sampling of a run's rollouts, step by step, perhaps ahead of the training: requests -> engine -> checks -> groups."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, Finished, FollowUpQueue, Pending, Submit
from rlgen.errors import SentinelError
from rlgen.rollout.answers import check_answers
from rlgen.rollout.conversations import Conversations, Dialogue
from rlgen.rollout.custom import CustomRollout
from rlgen.rollout.journal import Journal
from rlgen.rollout.sample import build_groups, in_request_order, requests_for, sample_of
from rlgen.types import Completion, Group, Prompt, Request, Sampling


@dataclass(slots=True, kw_only=True, eq=False)
class StepCall:
    """The requests of one step, split into those that the journal answers and those that go to the engine.

    Each answer of the engine is written to the journal as soon as it arrives (`answered`).
    """

    step: int
    prompts: Sequence[Prompt]
    requests: Sequence[Request]  # as `requests_for` returns them
    sampling: Sampling
    oldest: int  # version of the weights that may have sampled
    journal: Journal
    found: Mapping[int, Completion]  # by index into `requests`
    asked: Sequence[int]  # indices into `requests`
    # Called when the engine has answered all requests of a prompt: with this call, the prompt, its requests and their answers.
    prompt_answered: Callable[["StepCall", Prompt, Sequence[Request], Sequence[Completion]], None] | None = None
    talks: Conversations | None = None  # of the requests of `asked`; None: their completions are one turn
    further: FollowUpQueue | None = None  # requests that may join those of `asked`, and by which they can be given up
    _arrived: dict[int, Completion] = field(default_factory=dict)  # by index into `requests`, of prompts that miss some

    @property
    def to_engine(self) -> list[Request]:
        return [self.requests[place] for place in self.asked]

    @property
    def hooks(self) -> tuple[Finished] | tuple[Finished, FollowUpQueue]:
        """Returns what the engine is given together with the requests."""
        finished = self.answered if self.talks is None else self.talks.finished
        return (finished,) if self.further is None else (finished, self.further)

    def sampled(self, engine: Callable[[], Sequence[Completion]]) -> Sequence[Completion]:
        """Has the engine answer, turn by turn where there are conversations, and returns the completions of `asked`."""
        return engine() if self.talks is None else self.talks.sampled(engine)

    def answered(self, number: int, completion: Completion) -> None:
        """Handles the engine's answer to the request `asked[number]`, perhaps from another thread."""
        place, size = self.asked[number], len(self.requests) // len(self.prompts)
        which, index = divmod(place, size)
        prompt = self.prompts[which]
        if place not in self.found:
            sample = sample_of(prompt, index, self.requests[place].seed, completion, text="")
            # With the prompt that the engine reports: an answer to another one must not be reused.
            self.journal.answered(self.step, replace(sample, prompt_ids=completion.prompt_ids), self.sampling)
        if self.prompt_answered is not None:
            self._arrived[place] = completion
            group = range(which * size, (which + 1) * size)
            if all(one in self._arrived for one in group):
                answers = [self._arrived.pop(one) for one in group]
                self.prompt_answered(self, prompt, [self.requests[one] for one in group], answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """How the engine is called for steps that are not trained yet.

    The prompts of step s + `steps` go to the engine as soon as the answers of step s are back. They are then sampled by the
    weights that step s starts from, `steps` versions older than the weights they train, or by newer ones, which the engine gets
    meanwhile (`in_flight`). Every token carries the version of its weights; the importance weight corrects for the difference.
    The first steps of a run are asked for at once.

    A resumed run takes the answers of an earlier attempt from the journal. There, weights that are newer than the present ones
    may have sampled a part of a step. Such a step is submitted only when this attempt has reached these weights: what had been
    trained is then trained again to the last bit.
    """

    submit_to: Submit
    prompts_of: Callable[[int], Sequence[Prompt]]  # the prompts of this engine, by step; empty after the last step
    steps: int  # whose requests may be under way while one trains; with 2 and more `in_flight` must hold
    max_staleness: int  # versions; samples with an older token are dropped
    in_flight: bool  # weights may change while requests are being decoded


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
    # Calls to the engine for steps that are not trained yet, by step. None: the journal has all answers.
    pending: dict[int, tuple[StepCall, Pending | None]] = field(default_factory=dict)
    joining: FollowUpQueue | None = None  # of the running call to the engine, by which it can be given up
    given_up: BaseException | None = None

    def groups(self, step: int, prompts: Sequence[Prompt]) -> tuple[list[Group], int]:
        """Returns the groups of `step`, trained from weights of version `step` - 1, and the number of samples dropped as too old.
        `prompts`: of this engine. Raises as `Engine.generate` and `check_answers`.
        """
        if self.ahead is None:
            call = self.call(step, prompts, oldest=step - 1)
            return self.answered(call, self.generate(call) if call.asked else []), 0
        call, answers = self.take(self.ahead, step)
        groups, dropped = without_stale(self.answered(call, answers), step - 1 - self.ahead.max_staleness)
        if dropped:
            self.journal.kept.add(step)
        return groups, dropped

    def take(self, ahead: Ahead, step: int) -> tuple[StepCall, Sequence[Completion]]:
        """Waits for the call of `step`, and submits those after it. Returns it with the engine's answers. Raises its error."""
        version = step - 1
        if step not in self.pending:
            self.submit(ahead, step)
            if step > 1 and not ahead.in_flight and step in self.pending and (late := len(self.pending[step][0].asked)):
                self.journal.say(
                    f"journal: {late} answers of step {step} are missing: weights of version {version} sample them, not earlier"
                    " ones as in an uninterrupted run"
                )
        self.fill(ahead, range(step + 1, step + ahead.steps), version)
        # A process without a share of the prompts has nothing to ask.
        call, pending = self.pending.get(step) or (self.call(step, (), oldest=0), None)
        answers = call.sampled(pending.result) if pending is not None else []
        self.pending.pop(step, None)  # not earlier: an interrupt during the wait saves a checkpoint, which needs the pending call
        self.fill(ahead, range(step + 1, step + 1 + ahead.steps), version)
        return call, answers

    def fill(self, ahead: Ahead, steps: Iterable[int], version: int) -> None:
        """Submits those of `steps` that are not under way, and have no journal answers from weights newer than `version`."""
        for step in steps:
            if step not in self.pending and self.journal.newest_version(step) <= version:
                self.submit(ahead, step)

    def submit(self, ahead: Ahead, step: int) -> None:
        """Submits the requests of `step` to the engine, which answers in the background; does nothing after the last step."""
        if prompts := ahead.prompts_of(step):
            call = self.call(step, prompts, oldest=0)
            self.pending[step] = call, ahead.submit_to(call.to_engine, self.sampling, *call.hooks) if call.asked else None

    def call(self, step: int, prompts: Sequence[Prompt], oldest: int) -> StepCall:
        """Builds the requests of `step`. Weights from version `oldest` on may have sampled the answers of the journal."""
        requests = requests_for(prompts, self.group_size, self.run_seed)
        places = in_request_order(prompts, self.group_size)
        found = self.journal.found(step, [(prompt.position, index) for prompt, index in places], requests, self.sampling, oldest)
        missing = [place for place in range(len(requests)) if place not in found]
        call = StepCall(
            step=step,
            prompts=prompts,
            requests=requests,
            sampling=self.sampling,
            oldest=oldest,
            journal=self.journal,
            found=found,
            asked=range(len(requests)) if missing and self.all_or_none else missing,
        )
        # What an earlier attempt has of a step may be its rewards, too: they are looked up when all of the step is there.
        if self.group_finished is not None and step not in self.journal.files:
            call.prompt_answered = self.tell
        if self.dialogue is not None and call.asked:
            asked = [places[place] for place in call.asked]
            call.talks = Conversations(self.dialogue, asked, call.to_engine, self.sampling, step - 1, oldest, call.answered)
            call.further = call.talks.further
        elif self.interruptible:
            call.further = FollowUpQueue()
        return call

    def generate(self, call: StepCall) -> Sequence[Completion]:
        """Samples what the journal does not answer, turn by turn where there is a dialogue."""
        if self.custom is not None:
            given = call.prompts, call.requests, self.sampling, self.tokenizer, call.step - 1, call.answered
            return self.custom(self.engine, *given)
        if self.interruptible:
            self.joining = call.further
            if self.given_up is not None:
                raise self.given_up
        return call.sampled(lambda: self.engine.generate(call.to_engine, self.sampling, *call.hooks))

    def answered(self, call: StepCall, answers: Sequence[Completion]) -> list[Group]:
        """Builds the groups of a call from the engine's answers and those of the journal, which it checks in the same way."""
        self.check(call, call.to_engine, answers)
        self.check(call, [call.requests[place] for place in call.found], list(call.found.values()))
        of_place = {**dict(zip(call.asked, answers, strict=True)), **call.found}  # answers of the journal win
        completions = [of_place[place] for place in range(len(call.requests))]
        if any(len(completion.experts) for completion in completions):
            self.journal.kept.add(call.step)  # rollouts have no experts
        return build_groups(call.prompts, call.requests, completions, self.sampling, self.tokenizer)

    def check(self, call: StepCall, requests: Sequence[Request], answers: Sequence[Completion]) -> None:
        """Checks answers to some requests of a call. Raises as `check_answers`."""
        joined, free = self.dialogue is not None, self.custom is not None
        check_answers(requests, answers, self.sampling, call.step - 1, call.oldest, joined, free)

    def tell(self, call: StepCall, prompt: Prompt, requests: Sequence[Request], answers: Sequence[Completion]) -> None:
        """Passes on the group of a prompt whose answers are all there."""
        with suppress(SentinelError):  # `answered` raises it when the whole step is there
            self.check(call, requests, answers)
            if self.group_finished is not None:
                self.group_finished(call.step, *build_groups([prompt], requests, answers, self.sampling, self.tokenizer))

    def give_up(self, error: BaseException) -> None:
        """Makes the call to the engine in another thread, running or about to begin, raise `error` at its next decode step."""
        self.given_up = error
        if self.joining is not None:
            self.joining.fail(error)

    def before_sync(self) -> None:
        """Waits for the submitted requests, unless the weights may change while they are decoded."""
        if self.ahead is not None and not self.ahead.in_flight:
            self.drain()

    def drain(self) -> None:
        """Waits for the submitted requests. An error is not raised here but in `groups`, which takes the answers."""
        for _, pending in self.pending.values():
            if pending is not None:
                pending.exception()

    def flush_pending(self, done: int) -> None:
        """Flushes the journal of what follows step `done`; called before the checkpoint of `done`.

        Waits until it holds all answers for step `done` + 1. Older weights sampled these answers, so they cannot be sampled again
        after a resume. Requests to the weights that the checkpoint contains can be repeated. Nothing is waited for if the weights
        change under the requests (`in_flight`): there are always some under way, and which weights sample an answer depends on
        timing in any case.
        """
        _, pending = self.pending.get(done + 1, (None, None))
        if pending is not None and self.ahead is not None and not self.ahead.in_flight:
            pending.exception()
        for step in range(done + 1, done + 1 + (1 if self.ahead is None else self.ahead.steps)):
            self.journal.flush(step)


def without_stale(groups: Sequence[Group], oldest: int) -> tuple[list[Group], int]:
    """Removes samples of weights older than version `oldest`; returns the groups, some perhaps empty, and the number removed."""
    fresh = [replace(group, samples=tuple(one for one in group.samples if one.weight_version >= oldest)) for group in groups]
    return fresh, sum(len(group.samples) for group in groups) - sum(len(group.samples) for group in fresh)
