"""Decides when a run is saved or stopped, and saves it. Nothing that a resumed run needs is deleted before it is saved."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlgen.errors import CheckpointError, EngineError, SentinelError, Stopped
from rlgen.metrics import Metric
from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.rewards.score import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.clock import PhaseClock
from rlgen.run.health import Checkup
from rlgen.run.signals import StopNow, StopRequest
from rlgen.run.state import random_tensors, set_random
from rlgen.trainers.evaluate import Evaluator
from rlgen.trainers.report import Reporter
from rlgen.types import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Saves positions of a run. All processes call each method together."""

    every: int  # steps between two saves
    on_drift: bool  # also before a drift of the engine ends the run
    processes: Processes
    policy: Policy
    optimizer: Optimizer
    schedule: LRScheduler
    checkpoints: Checkpoints
    sampler: Sampler
    report: Reporter
    evaluate: Evaluator | None

    def after_step(self, at: Position, checkup: Checkup, refused: EngineError | None, clock: PhaseClock) -> None:
        """Saves the position after a step if that is due: by the recipe, on request, as the best one, or because the run ends.

        Raises:
            EngineError: `refused`, after the save.
            DivergedError: a health rule ends the run; raised after the save.
        """
        last = at.step == self.report.steps
        ends = refused or checkup.ends
        asked = self.processes.on_main(self.report.directory.asked_to_save)
        due = last or at.step % self.every == 0
        if due or asked or refused or checkup.saves or at.step == self.pinned:
            with clock(Metric.TIME_SAVE):
                self(at, wait=bool(ends or last))
        if ends:
            raise ends

    def __call__(self, at: Position, wait: bool) -> None:
        """Starts to save the position `at`, unless it is saved already. With `wait`, returns when it is saved."""
        self.finish(wait=True)
        if not self.processes.on_main(lambda: self.checkpoints.folder.has(at.step)):
            flush, alone = partial(self.sampler.flush_pending, at.step), self.processes.world == 1
            if not alone:  # each process has a journal: the thread of the main process knows only its own
                self.processes.run_all(flush, keepalive=True)
            # A run that resumes from it does not write the rollouts of earlier steps again.
            self.processes.run_all(self.report.writer.wait, keepalive=True)
            self.checkpoints.pinned = self.pinned
            settle = flush if alone else lambda: None
            self.checkpoints.save(at, self.policy.model, self.optimizer, self.schedule, settle)
        if wait:
            self.finish(wait=True)

    def finish(self, wait: bool) -> None:
        """Deletes from the journal what a newly completed checkpoint makes unnecessary.

        Raises CheckpointError in all processes if the save failed.
        """
        if self.checkpoints.complete(wait):
            self.processes.on_main(lambda: self.sampler.journal.drop(0, self.checkpoints.oldest()))
            newest = max(self.checkpoints.folder.steps(), default=0)  # another machine may not see the folder yet
            self.report.console.say(f"checkpoint: step {newest} is saved")

    @property
    def pinned(self) -> int | None:
        """Returns the step of the best evaluation, whose checkpoint is kept; None: there is none, or the recipe pins none."""
        return None if self.evaluate is None or self.evaluate.best is None else self.evaluate.best.step

    def invalidate_samples(self, step: int) -> None:
        """Marks the samples for `step` in the journal as not to be reused.

        Ignores errors of the disk: the sentinel's error, which the caller raises, matters more.
        """
        with suppress(CheckpointError):
            self.finish(wait=True)  # completing a save flushes the journal
        with suppress(CheckpointError):
            self.processes.run_all(self.sampler.journal.close)
            self.processes.on_main(lambda: self.sampler.journal.invalidate(step))

    def stopped(self, at: Position, why: str) -> Stopped:
        """Saves the last trained step, if there is one, and returns the error to raise."""
        if at.step:
            self(at, wait=True)
        said = f"stopped {why} after step {at.step} of {self.report.steps}; go on with --resume"
        return Stopped(said, self.report.directory.path)


@dataclass(slots=True, kw_only=True)
class Guard:
    """What surrounds the steps of a run: what ends one before weights move, and the times that a deadline is compared with.

    The time of a save counts to the step after it.
    """

    save: Saver
    early: EarlyScoring
    start: Position  # of the run; what was trained before is saved
    stop: StopRequest
    shared: bool  # several processes call one engine together: its error is raised in one of them only
    clock: PhaseClock = field(default_factory=PhaseClock)  # of the step
    saved: float = 0.0  # seconds of `clock` that the save before it took
    collected: float = 0.0  # seconds of `clock` when all samples were there

    @contextmanager
    def step(self, at: Position) -> Iterator[None]:
        """Handles what ends the step after `at` before it changes a weight: a request to stop, a drift, a lost engine.

        Raises:
            Stopped: the run was asked to stop, and is saved.
            SentinelError: engine and trainer differ. Samples of the step are not reused after a resume.
            EngineError: the engine failed. The run is saved, but for a colocated engine that several processes call together.
        """
        self.stop.step = at.step + 1
        self.save.finish(wait=False)
        draws = random_tensors()
        try:
            yield
        except SentinelError:
            self.early.close()  # that of the next step too
            self.save.invalidate_samples(at.step + 1)
            set_random(draws)
            if self.save.on_drift and at != self.start:
                self.save(at, wait=True)
            raise
        except EngineError:
            self.early.close()
            set_random(draws)
            if at != self.start and not self.shared:
                try:
                    self.save(at, wait=True)
                except Exception as unsaved:  # a GPU that failed under the engine fails here, too: the first error explains more
                    self.save.report.console.say(f"warning: step {at.step} could not be saved: {unsaved}")
            raise
        except StopNow:
            self.early.close()
            set_random(draws)
            raise self.save.stopped(at, self.stop.why) from None

    @contextmanager
    def learning(self) -> Iterator[None]:
        """The block moves the weights; then the learning rate of the next step follows."""
        self.collected = self.clock.seconds
        with self.clock(Metric.TIME_TRAIN):
            yield
            self.save.schedule.step()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Ends the step's time. The block saves, and has the clock of the next step."""
        seconds, update = self.clock.seconds - self.saved, self.clock.seconds - self.collected
        self.clock = PhaseClock()
        yield
        self.saved = self.clock.seconds
        self.stop.took(seconds, update, *self.save.checkpoints.took())
