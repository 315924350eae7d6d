"""The requests of one step: which of them the journal answers, and where each answer of the engine goes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlgen.engines.base import Finished, FollowUpQueue
from rlgen.rollout.conversations import Conversations
from rlgen.rollout.journal import Journal
from rlgen.types import Completion, Prompt, Request, Sampling


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
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
    prompt_answered: Callable[["Call", Prompt, Sequence[Request], Sequence[Completion]], None] | None = None
    talks: Conversations | None = None  # of the requests of `asked`; None: their completions are one turn
    further: FollowUpQueue | None = None  # requests that may join those of `asked`, and by which they can be given up
    _arrived: dict[int, Completion] = field(default_factory=dict)  # by index into `requests`, of prompts that miss some

    @classmethod
    def of(
        cls,
        step: int,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: Sampling,
        oldest: int,
        journal: Journal,
        all_or_none: bool,
    ) -> "Call":
        """Looks up in the journal which requests are answered by weights from version `oldest` on.

        Args:
            all_or_none: if one answer is missing, all requests go to the engine.
        """
        places = [(prompt.position, index) for prompt in prompts for index in range(len(requests) // len(prompts))]
        found = journal.found(step, places, requests, sampling, oldest)
        missing = [place for place in range(len(requests)) if place not in found]
        return cls(
            step=step,
            prompts=prompts,
            requests=requests,
            sampling=sampling,
            oldest=oldest,
            journal=journal,
            found=found,
            asked=range(len(requests)) if missing and all_or_none else missing,
        )

    @property
    def to_engine(self) -> list[Request]:
        """Returns the requests that go to the engine."""
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
            self.journal.answered(self.step, prompt.position, index, self.requests[place], self.sampling, completion)
        if self.prompt_answered is not None:
            self._arrived[place] = completion
            group = range(which * size, (which + 1) * size)
            if all(one in self._arrived for one in group):
                answers = [self._arrived.pop(one) for one in group]
                self.prompt_answered(self, prompt, [self.requests[one] for one in group], answers)

    def completions(self, answers: Sequence[Completion]) -> list[Completion]:
        """Returns the completions of all requests: the engine's `answers`, and those of the journal, which win."""
        of_place = {**dict(zip(self.asked, answers, strict=True)), **self.found}
        return [of_place[place] for place in range(len(self.requests))]
