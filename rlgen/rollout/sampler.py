"""Sampling of a run's rollouts, step by step: when a step needs them, or in the background while steps before train."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from rlgen.engines.base import Engine, Finished, Pending, Submit
from rlgen.engines.further import FollowUpQueue
from rlgen.errors import SentinelError
from rlgen.rollout.answers import check_answers
from rlgen.rollout.conversations import Conversations, Dialogue
from rlgen.rollout.custom import CustomRollout
from rlgen.rollout.journal import Journal
from rlgen.rollout.sample import groups_of, requests_for
from rlgen.types import Completion, Group, Prompt, Request, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The requests of one step, split into those that the journal answers and those that go to the engine."""

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    found: Mapping[int, Completion]  # by index into `requests`
    asked: Sequence[int]  # indices into `requests`
    finished: Finished  # called for each completion, with its index into `asked`
    talks: Conversations | None = None  # of the requests of `asked`; None: their completions are one turn
    pending: Pending | None = None  # the engine's future answers, if it answers in the background

    @property
    def to_engine(self) -> list[Request]:
        """Returns the requests that go to the engine."""
        return [self.requests[place] for place in self.asked]


@dataclass(slots=True, kw_only=True)
class Sampler:
    """Samples the completions of each step, and reuses answers from the journal.

    With `submit_to` set, the prompts of step s + `ahead` go to the engine as soon as the answers of step s are back. They are
    then sampled by the weights that step s starts from, `ahead` versions older than the weights they train, or by newer ones,
    which the engine gets meanwhile (`in_flight`). Every token carries the version of its weights; the importance weight corrects
    for the difference. The first steps of a run are asked for at once.

    Each answer is written to the journal as soon as it arrives. A resumed run takes the answers to its requests from there. In
    an earlier attempt, weights that are newer than the present ones may have sampled a part of a step. Such a step is submitted
    only when this attempt has reached these weights: what had been trained is then trained again to the last bit.
    """

    engine: Engine
    prompts_of: Callable[[int], Sequence[Prompt]]  # the prompts of this engine, by step; empty after the last step
    sampling: Sampling
    group_size: int
    run_seed: int
    tokenizer: PreTrainedTokenizerBase
    submit_to: Submit | None  # submits requests in the background, for sampling ahead; None: sample when needed
    ahead: int  # steps whose requests may be under way while one trains; with 2 and more `in_flight` must hold
    max_staleness: int  # versions; samples with an older token are dropped
    in_flight: bool  # weights may change while requests are being decoded
    journal: Journal
    journals: bool  # this process writes its engine's answers to the journal
    # The last bits of an answer depend on the other requests of its batch: if one is missing, the whole step is sampled again.
    all_or_none: bool
    say: Callable[[str], None]
    # Called with each group of a step when all its answers are there, perhaps from another thread; None: nobody needs them early.
    group_finished: Callable[[int, Group], None] | None = None
    dialogue: Dialogue | None = None  # how conversations of several turns are led; None: a completion is one turn
    custom: CustomRollout | None = None  # the user's own sampler, which sends the requests of a step itself
    interruptible: bool = False  # another thread may call `give_up`
    joining: FollowUpQueue | None = None  # further requests of the running call to the engine, by which it can be given up
    given_up: BaseException | None = None
    pending: dict[int, Call] = field(default_factory=dict)

    def groups(self, step: int, prompts: Sequence[Prompt] | None = None) -> tuple[list[Group], int]:
        """Returns the groups of `step`, trained from weights of version `step` - 1, and the number of samples dropped as too old.

        Raises as `Engine.generate` and `check_answers`.

        Args:
            prompts: of this engine; None: `prompts_of` the step.
        """
        prompts, version = self.prompts_of(step) if prompts is None else prompts, step - 1
        if self.submit_to is None:
            call = self.call(step, prompts, oldest=version)
            return self.answered(call, self.generate(call, version) if call.asked else [], version, oldest=version), 0
        if step not in self.pending:
            self.submit(step, self.submit_to)
            if step > 1 and not self.in_flight and (late := len(self.pending[step].asked)):
                self.say(
                    f"journal: {late} answers of step {step} are missing: weights of version {version} sample them, not earlier"
                    " ones as in an uninterrupted run"
                )
        self.fill(range(step + 1, step + self.ahead), version, self.submit_to)
        call = self.pending[step]
        if call.pending is None:
            answers: Sequence[Completion] = []
        else:
            answers = call.pending.result() if call.talks is None else call.talks.sampled(call.pending.result)
        del self.pending[step]  # not earlier: an interrupt during the wait saves a checkpoint, which needs the pending call
        self.fill(range(step + 1, step + 1 + self.ahead), version, self.submit_to)
        groups, dropped = without_stale(self.answered(call, answers, version, oldest=0), version - self.max_staleness)
        if dropped:
            self.journal.keep(step)
        return groups, dropped

    def call(self, step: int, prompts: Sequence[Prompt], oldest: int) -> Call:
        """Builds the requests of `step`, and looks up in the journal which are answered by weights from version `oldest` on."""
        requests = requests_for(prompts, self.group_size, self.run_seed)
        places = [(prompt.position, index) for prompt in prompts for index in range(self.group_size)]
        found = self.journal.found(step, places, requests, self.sampling, oldest)
        missing = [place for place in range(len(requests)) if place not in found]
        whole = self.all_or_none or self.custom is not None
        asked = list(range(len(requests))) if missing and whole else missing
        # What an earlier attempt has of a step may be its rewards, too: they are looked up when all of the step is there.
        group_finished = None if step in self.journal.files else self.group_finished
        arrived: dict[int, Completion] = {}

        def finished(of_call: int, completion: Completion) -> None:
            place = asked[of_call]
            if self.journals and place not in found:
                self.journal.answered(step, *places[place], requests[place], self.sampling, completion)
            if group_finished is not None:
                arrived[place] = completion
                which = place // self.group_size
                of_group = range(which * self.group_size, (which + 1) * self.group_size)
                if all(one in arrived for one in of_group):
                    answers = [arrived.pop(one) for one in of_group]
                    asks = [requests[one] for one in of_group]
                    with suppress(SentinelError):  # `answered` raises it when the whole step is there
                        check_answers(asks, answers, self.sampling, step - 1, oldest, joined=self.dialogue is not None)
                        group_finished(step, *groups_of([prompts[which]], asks, answers, self.sampling, self.tokenizer))

        talks = None
        if self.dialogue is not None and asked:
            of = [(prompts[place // self.group_size], place % self.group_size) for place in asked]
            first = [requests[place] for place in asked]
            talks = Conversations(self.dialogue, of, first, self.sampling, step - 1, oldest, finished)
        return Call(prompts=prompts, requests=requests, found=found, asked=asked, finished=finished, talks=talks)

    def generate(self, call: Call, version: int) -> list[Completion]:
        """Samples what the journal does not answer, turn by turn where there is a dialogue, with the weights of `version`."""
        if self.custom is not None:
            given = call.prompts, call.requests, self.sampling, self.tokenizer, version, call.finished
            return self.custom(self.engine, *given)
        if self.interruptible:
            self.joining = FollowUpQueue() if call.talks is None else call.talks.further
            if self.given_up is not None:
                raise self.given_up
        if (talks := call.talks) is not None:
            return talks.sampled(lambda: self.engine.generate(call.to_engine, self.sampling, talks.finished, talks.further))
        with_further = () if self.joining is None else (self.joining,)
        return self.engine.generate(call.to_engine, self.sampling, call.finished, *with_further)

    def give_up(self, error: BaseException) -> None:
        """Makes the call to the engine in another thread, running or about to begin, raise `error` at its next decode step."""
        self.given_up = error
        if self.joining is not None:
            self.joining.fail(error)

    def answered(self, call: Call, answers: Sequence[Completion], version: int, oldest: int) -> list[Group]:
        """Builds the groups of a call from the engine's answers and those of the journal, which it checks in the same way."""
        joined, free = self.dialogue is not None, self.custom is not None
        check_answers(call.to_engine, answers, self.sampling, version, oldest, joined, free)
        replayed = [call.requests[place] for place in call.found]
        check_answers(replayed, list(call.found.values()), self.sampling, version, oldest, joined, free)
        of_place = {**dict(zip(call.asked, answers, strict=True)), **call.found}
        completions = [of_place[place] for place in range(len(call.requests))]
        return groups_of(call.prompts, call.requests, completions, self.sampling, self.tokenizer)

    def fill(self, steps: Iterable[int], version: int, submit_to: Submit) -> None:
        """Submits those of `steps` that are not under way, and have no journal answers from weights newer than `version`."""
        for step in steps:
            if step not in self.pending and self.journal.newest_version(step) <= version:
                self.submit(step, submit_to)

    def submit(self, step: int, submit_to: Submit) -> None:
        """Submits the requests of `step` to the engine, which answers in the background; does nothing after the last step."""
        if prompts := self.prompts_of(step):
            call = self.call(step, prompts, oldest=0)
            if call.asked:
                hooks = (call.finished,) if call.talks is None else (call.talks.finished, call.talks.further)
                call = replace(call, pending=submit_to(call.to_engine, self.sampling, *hooks))
            self.pending[step] = call

    def before_sync(self) -> None:
        """Waits for the submitted requests, unless the weights may change while they are decoded (`in_flight`)."""
        if not self.in_flight:
            self.drain()

    def drain(self) -> None:
        """Waits for the submitted requests. An error is not raised here but in `groups`, which takes the answers."""
        for call in self.pending.values():
            if call.pending:
                call.pending.exception()

    def flush_pending(self, done: int) -> None:
        """Waits until the journal holds all answers for step `done` + 1, and flushes it; called before the checkpoint of `done`.

        Older weights sampled these answers, so they cannot be sampled again after a resume. Requests to the weights that the
        checkpoint contains can be repeated. Nothing is waited for if the weights change under the requests (`in_flight`): there
        are always some under way, and which weights sample an answer depends on timing in any case.
        """
        call = self.pending.get(done + 1)
        if call is not None and call.pending and not self.in_flight:
            call.pending.exception()
        for step in range(done + 1, done + 1 + max(1, self.ahead)):
            self.journal.flush(step)


def without_stale(groups: Sequence[Group], oldest: int) -> tuple[list[Group], int]:
    """Removes samples of weights older than version `oldest`; returns the groups, some perhaps empty, and the number removed."""
    fresh = [
        replace(group, samples=tuple(sample for sample in group.samples if sample.weight_version >= oldest)) for group in groups
    ]
    return fresh, sum(len(group.samples) for group in groups) - sum(len(group.samples) for group in fresh)
