"""Sampling ahead: the engine answers the requests of later steps while earlier ones train."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rlgen.engines.base import Pending, Submit
from rlgen.rollout.call import Call
from rlgen.rollout.journal import Journal
from rlgen.types import Completion, Prompt

MakeCall = Callable[[int, Sequence[Prompt], int], Call]  # of a step, its prompts, and the oldest version that may have sampled


@dataclass(slots=True, kw_only=True)
class Ahead:
    """The calls to the engine for steps that are not trained yet.

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
    journal: Journal
    pending: dict[int, tuple[Call, Pending | None]] = field(default_factory=dict)  # None: the journal has all answers

    def take(self, step: int, make_call: MakeCall) -> tuple[Call, Sequence[Completion]]:
        """Waits for the call of `step`, and submits those after it. Returns it with the engine's answers. Raises its error."""
        version = step - 1
        if step not in self.pending:
            self.submit(step, make_call)
            if step > 1 and not self.in_flight and (late := len(self.pending[step][0].asked)):
                self.journal.say(
                    f"journal: {late} answers of step {step} are missing: weights of version {version} sample them, not earlier"
                    " ones as in an uninterrupted run"
                )
        self.fill(range(step + 1, step + self.steps), version, make_call)
        call, pending = self.pending[step]
        answers = call.sampled(pending.result) if pending is not None else []
        del self.pending[step]  # not earlier: an interrupt during the wait saves a checkpoint, which needs the pending call
        self.fill(range(step + 1, step + 1 + self.steps), version, make_call)
        return call, answers

    def fill(self, steps: Iterable[int], version: int, make_call: MakeCall) -> None:
        """Submits those of `steps` that are not under way, and have no journal answers from weights newer than `version`."""
        for step in steps:
            if step not in self.pending and self.journal.newest_version(step) <= version:
                self.submit(step, make_call)

    def submit(self, step: int, make_call: MakeCall) -> None:
        """Submits the requests of `step` to the engine, which answers in the background; does nothing after the last step."""
        if prompts := self.prompts_of(step):
            call = make_call(step, prompts, 0)
            self.pending[step] = call, self.submit_to(call.to_engine, call.sampling, *call.hooks) if call.asked else None

    def drain(self) -> None:
        """Waits for the submitted requests. An error is not raised here but in `take`."""
        for _, pending in self.pending.values():
            if pending is not None:
                pending.exception()

    def flush(self, done: int) -> None:
        """Waits until the journal holds all answers for step `done` + 1, and flushes it.

        Older weights sampled these answers, so they cannot be sampled again after a resume. Requests to the weights that the
        checkpoint contains can be repeated. Nothing is waited for if the weights change under the requests (`in_flight`): there
        are always some under way, and which weights sample an answer depends on timing in any case.
        """
        _, pending = self.pending.get(done + 1, (None, None))
        if pending is not None and not self.in_flight:
            pending.exception()
        for step in range(done + 1, done + 1 + self.steps):
            self.journal.flush(step)
