"""Runs the training loop. There is one, for all algorithms and engines."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from rlgen.algorithms.base import Signal
from rlgen.engines.base import Engine
from rlgen.errors import CheckpointError, DivergedError, EngineError, SentinelError, Stopped
from rlgen.models.policy import Policy
from rlgen.models.weights import bits
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout.journal import Journal
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.clock import Clock
from rlgen.run.signals import StopNow, StopRequest
from rlgen.run.state import random_tensors, set_random
from rlgen.sentinel.sync import send_weights
from rlgen.trainers.collect import Collected, Collector
from rlgen.trainers.evaluate import Evaluator
from rlgen.trainers.report import Reporter
from rlgen.trainers.update import Skipped, Updater
from rlgen.trainers.window import Window, WindowBuilder
from rlgen.types import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Runs collect (prompts -> rollout -> rewards) -> window -> update -> sync. Each arrow is one call in `run`.

    With several processes, every process has the table of all rows of a step, and the tokens of those rows only that it samples
    or trains. What is learned does not depend on the number of processes.
    """

    recipe: Recipe
    processes: Processes
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    engine: Engine
    journal: Journal
    collect: Collector
    windows: WindowBuilder
    update: Updater
    schedule: LRScheduler
    checkpoints: Checkpoints
    report: Reporter
    evaluate: Evaluator | None  # None: the recipe evaluates nothing

    def run(self, start: Position, stop: StopRequest) -> None:
        """Trains from position `start` to step `run.steps`.

        Raises:
            Stopped: a process was asked to stop; a checkpoint of the last trained step is written.
            RlgenError: a part of the step failed; raised in all processes. The last checkpoint is intact.
        """
        recipe, processes, at = self.recipe, self.processes, start
        self.evaluate_first(start, stop)
        clock, saving = Clock(), 0.0
        for step in range(start.step + 1, recipe.run.steps + 1):
            stop.step = step
            self.saved(False)
            draws = random_tensors()
            try:
                stop.check(processes, before_step=True)
                with stop.at_once(processes):
                    got = self.collect(step, at.prompts, clock, stop)
                collected = clock.seconds
                with clock("train"):
                    window, signal, measured, learned, skipped = self.learn(got, step)
                    self.schedule.step()
            except SentinelError:  # nothing of this step was trained on, nor must it be after a resume
                self.collect.early.close()  # that of the next step too
                self.distrust(step)
                set_random(draws)
                if recipe.sentinel.on_drift == "checkpoint_and_stop" and at != start:
                    self.save(at, True)
                raise
            except StopNow:  # nothing was trained here either
                self.collect.early.close()
                set_random(draws)
                raise self.stopped(at, stop.why) from None
            at = Position(step, at.prompts + got.prompts, at.nonfinite + 1 if skipped else 0)
            with clock("save"):
                self.report.rollouts(step, got, signal, window, skipped)
            if skipped:
                self.tolerate(skipped, got, at)
            with clock("generate"):
                processes.agreed(self.collect.sampler.before_sync, patient=True)
            with clock("sync"):
                refused, probed = self.sync(step)
            evaluated = {} if refused else self.evaluated(step, clock)
            found = {**measured, **learned, **probed, **evaluated}
            checkup = self.report.metrics(step, got, found, self.engine.weight_version, clock)
            seconds, update, clock = clock.seconds - saving, clock.seconds - collected, Clock()
            # Saves after the metrics, so that a step with a checkpoint has metrics. The time of the save counts to the next step.
            asked = processes.on_main(self.report.directory.asked_to_save)
            saves = refused or asked or checkup.saves or step == self.pinned
            if saves or step == recipe.run.steps or step % recipe.checkpoint.every == 0:
                with clock("save"):
                    self.save(at, bool(refused or checkup.ends or step == recipe.run.steps))
            if refused:
                raise refused
            if checkup.ends:
                raise checkup.ends
            saving = clock.seconds
            stop.took(seconds, update, *self.checkpoints.took())

    def learn(self, got: Collected, step: int) -> tuple[Window, Signal, dict[str, Any], dict[str, Any], Skipped | None]:
        """Takes the optimizer steps of a step. Returns its window and signal, the metrics of both, and the skipped update."""
        stream = self.collect.stream
        if stream is None:
            window, signal, measured = self.windows.build(got.learned_from, got.samples, got.epoch)
            return window, signal, measured, *self.update(window, step)
        window, signal, measured, first = stream.groups.finish(got.learned_from, got.samples, got.epoch)
        return window, signal, measured, *self.update(window, step, first)

    def sync(self, step: int) -> tuple[EngineError | None, dict[str, Any]]:
        """Sends the weights of `step` to the engine. Returns the engine's error or None, and the metrics measured after the sync.

        An engine that does not confirm the weights, or has others, ends the run, but the trained step is kept. So its error is
        returned and not raised: the caller saves first.
        """
        probed: dict[str, Any] = {}
        watch, weights = self.update.watch, bits(self.policy.model, self.processes)
        # Before the sync: the engine may sample with these weights as soon as it has them.
        self.processes.agreed(lambda: self.journal.starts_from(step, weights))
        try:
            send_weights(self.engine, self.policy.model, step, self.processes)
            if watch is not None:
                probed = watch.after_sync(step)
        except EngineError as error:
            if isinstance(error, SentinelError):
                self.distrust(step + 1)
            return error, probed
        return None, probed

    def evaluate_first(self, start: Position, stop: StopRequest) -> None:
        """Evaluates the weights before step 1, unless an earlier attempt has. Raises Stopped if the run is asked to stop."""
        directory, processes = self.report.directory, self.processes
        if start.step or self.evaluate is None or processes.on_main(lambda: bool(directory.read_metrics())):
            return
        clock = Clock()
        try:
            stop.check(processes)
            with stop.at_once(processes):
                evaluated = self.evaluated(0, clock)
        except StopNow:
            raise self.stopped(start, stop.why) from None
        if evaluated:
            self.report.first_evaluation(evaluated, clock)

    def evaluated(self, step: int, clock: Clock) -> dict[str, Any]:
        """Evaluates the weights of `step`, which the engine has, and returns the metrics; {} if no evaluation is due.

        Raises:
            RlgenError: as `Evaluator` raises it. The step is trained again after a resume, and evaluated then.
        """
        if self.evaluate is None or not self.evaluate.due(step):
            return {}
        with clock("eval"):
            self.processes.agreed(self.collect.sampler.rest, patient=True)  # one call to the engine at a time
            try:
                return self.evaluate(step)
            except SentinelError:
                self.distrust(step + 1)
                raise

    @property
    def pinned(self) -> int | None:
        """Returns the step of the best evaluation, whose checkpoint is kept; None: there is none, or the recipe pins none."""
        return None if self.evaluate is None or self.evaluate.best is None else self.evaluate.best.step

    def distrust(self, step: int) -> None:
        """Marks the samples for `step` in the journal as not to be reused.

        Ignores errors of the disk: the sentinel's error, which the caller raises, matters more.
        """
        with suppress(CheckpointError):
            self.saved(True)  # completing a save flushes the journal
        with suppress(CheckpointError):
            self.processes.agreed(self.journal.close)
            self.processes.on_main(lambda: self.journal.distrust(step))

    def tolerate(self, skipped: Skipped, got: Collected, at: Position) -> None:
        """Reports that an update was skipped, and writes which samples caused it.

        Raises:
            DivergedError: more updates in a row were skipped than the recipe tolerates; raised in all processes.
        """
        most, path = self.recipe.optim.max_nonfinite, self.report.nonfinite(at.step, skipped, got)
        said = f"step {at.step}: {skipped.words()}: {skipped.consequence()}; the batch is in {path}"
        if at.nonfinite > most:
            raise DivergedError(
                f"{said}. That is {at.nonfinite} in a row, optim.max_nonfinite is {most}. The last checkpoint is good: open it in"
                " a new run (model.path) with a lower optim.learning_rate, or look at what is odd about these samples"
            )
        self.report.console.say(f"{said}; {at.nonfinite} in a row, {most} are tolerated")

    def close(self) -> None:
        """Ends everything that runs beside the loop: writer, rewards, engine, and the save that is going on."""
        self.report.writer.close()
        try:
            if self.evaluate is not None:
                self.evaluate.close()
            self.collect.scorer.close()
        finally:
            try:
                self.engine.close()
                if (dialogue := self.collect.sampler.dialogue) is not None:
                    dialogue.turns.close()  # after the engine, which no longer waits for replies
            finally:
                if failed := self.checkpoints.close():
                    self.report.console.say(failed)

    def save(self, at: Position, wait: bool) -> None:
        """Starts to save the position `at`, unless it is saved already. With `wait`, returns when it is saved."""
        self.saved(True)
        if not self.processes.on_main(lambda: self.checkpoints.has(at.step)):
            settle: Callable[[], None] = partial(self.collect.sampler.settle, at.step)
            if self.processes.world > 1:  # each process has a journal: the thread of the main process knows only its own
                self.processes.agreed(settle, patient=True)
                settle = nothing
            # A run that resumes from it does not write the rollouts of earlier steps again.
            self.processes.agreed(self.report.writer.wait, patient=True)
            self.checkpoints.pinned = self.pinned
            self.checkpoints.save(
                at,
                self.policy.model,
                self.tokenizer,
                self.update.optimizer,
                self.schedule,
                settle,
                None if self.policy.vision is None else self.policy.vision.processor,
            )
        if wait:
            self.saved(True)

    def saved(self, wait: bool) -> None:
        """Deletes from the journal what a newly completed checkpoint makes unneeded.

        Args:
            wait: wait for the save that is going on.

        Raises:
            CheckpointError: the save failed; raised in all processes.
        """
        if self.checkpoints.complete(wait):
            self.processes.on_main(lambda: self.journal.drop(0, self.checkpoints.oldest()))
            self.report.console.say(f"checkpoint: step {self.checkpoints.newest()} is saved")

    def stopped(self, at: Position, why: str) -> Stopped:
        """Saves the last trained step, if there is one, and returns the error to raise."""
        if at.step:
            self.save(at, True)
        said = f"stopped {why} after step {at.step} of {self.recipe.run.steps}; go on with --resume"
        return Stopped(said, self.report.directory.path)


def nothing() -> None:
    """Does nothing: all that a checkpoint relies on is on disk."""
