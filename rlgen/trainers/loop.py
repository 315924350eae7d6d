"""Runs the training loop. There is one, for all algorithms and engines."""

from dataclasses import dataclass
from typing import Any

from rlgen.errors import EngineError, SentinelError
from rlgen.metrics import Metric
from rlgen.models.weights import bits
from rlgen.processes import Processes
from rlgen.run.clock import PhaseClock
from rlgen.run.signals import StopNow, StopRequest
from rlgen.sentinel.sync import send_weights
from rlgen.trainers.callbacks import Callbacks
from rlgen.trainers.collect import Collected, Collector
from rlgen.trainers.evaluate import Evaluator
from rlgen.trainers.groups import Groups
from rlgen.trainers.report import Reporter
from rlgen.trainers.results import StepResult
from rlgen.trainers.saving import Guard, Saver
from rlgen.trainers.train_batch import TrainBatchBuilder
from rlgen.trainers.update import Updater
from rlgen.types import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Runs train batch -> update: what a step learns from its samples, in training and in a replay."""

    builder: TrainBatchBuilder
    update: Updater
    groups: Groups | None  # has run the first update of a step while others were sampled (`rollout.stream`); None: no stream

    def __call__(self, got: Collected, step: int) -> StepResult:
        """Moves the weights. The caller steps the schedule of the learning rate."""
        if self.groups is None:
            train_batch, advantages, measured = self.builder.build(got.learned_from, got.samples, got.epoch)
            updated, skipped = self.update(train_batch, step)
        else:
            (train_batch, advantages, measured), first = self.groups.finish(got.learned_from, got.samples, got.epoch)
            updated, skipped = self.update(train_batch, step, first)
        return StepResult(train_batch=train_batch, advantages=advantages, metrics={**measured, **updated}, skipped=skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Runs sample (prompts -> rollout) -> score -> learn (train batch -> update) -> sync -> save, each one call in `run`.

    With several processes, every process has the table of all rows of a step, and the tokens of those rows only that it samples
    or trains. What is learned does not depend on the number of processes.
    """

    steps: int
    processes: Processes
    collect: Collector
    learn: Learning
    evaluate: Evaluator | None  # None: the recipe evaluates nothing
    report: Reporter
    save: Saver
    callbacks: Callbacks

    def run(self, start: Position, stop: StopRequest) -> None:
        """Trains from position `start` to step `steps`.

        Raises:
            Stopped: a process was asked to stop; a checkpoint of the last trained step is written.
            RlgenError: a part of the step failed; raised in all processes. The last checkpoint is intact, and after a failure
                of the engine it is of the last trained step, unless that is still to be evaluated.
        """
        self.evaluate_first(start, stop)
        guard = Guard(save=self.save, early=self.collect.early, start=start, stop=stop, shared=self.collect.engine_share.shared)
        at = start
        for step in range(start.step + 1, self.steps + 1):
            clock = guard.clock
            with guard.step(at):
                with self.collect.drawing(step, at.prompts, clock, stop) as draw:
                    while draw.wanted:
                        groups = self.collect.sampled(draw)
                        self.collect.score(draw, groups)
                    got = self.collect.collected(draw)
                self.callbacks.rollouts(step, got, self.report.writer, stop)
                with guard.learning():
                    learned = self.learn(got, step)
            at = Position(step, at.prompts + got.prompts, at.nonfinite + 1 if learned.skipped else 0)
            with clock(Metric.TIME_SAVE):
                self.report.rollouts(at, got, learned)
            self.callbacks.measured("on_update", step, learned.metrics, stop)
            refused, measured = self.sync(step, clock)
            version = self.collect.sampler.engine.weight_version
            record, checkup = self.report.metrics(step, got, {**learned.metrics, **measured}, version, clock)
            with guard.saving():  # after the metrics, so that a step with a checkpoint has metrics
                self.save.after_step(at, checkup, refused, guard.clock)
                self.callbacks.measured("on_step", step, record, stop)

    def sync(self, step: int, clock: PhaseClock) -> tuple[EngineError | None, dict[str, Any]]:
        """Sends the weights of `step` to the engine, and evaluates them if that is due. Returns the engine's error or None, and
        the metrics that were measured.

        An engine that does not confirm the weights, or has others, ends the run, but the trained step is kept. So its error is
        returned and not raised: the caller saves first. It is raised if an evaluation is due, which a resumed run must repeat.
        """
        with clock(Metric.TIME_GENERATE):
            self.processes.run_all(self.collect.sampler.before_sync, keepalive=True)
        with clock(Metric.TIME_SYNC):
            probed: dict[str, Any] = {}
            watch, weights = self.learn.update.watch, bits(self.learn.update.policy.model, self.processes)
            # Before the sync: the engine may sample with these weights as soon as it has them.
            self.processes.run_all(lambda: self.collect.sampler.journal.starts_from(step, weights))
            try:
                send_weights(self.collect.sampler.engine, self.learn.update.policy.model, step, self.processes)
                if watch is not None:
                    probed = watch.after_sync(step)
            except EngineError as error:
                if isinstance(error, SentinelError):
                    self.save.invalidate_samples(step + 1)
                if self.evaluate is not None and self.evaluate.due(step):
                    raise  # saved, the step would never be evaluated; a resumed run trains it again, on the same samples
                return error, probed
        return None, {**probed, **self.evaluated(step, clock)}

    def evaluate_first(self, start: Position, stop: StopRequest) -> None:
        """Evaluates the weights before step 1, unless an earlier attempt has. Raises Stopped if the run is asked to stop."""
        directory, processes = self.report.directory, self.processes
        if start.step or self.evaluate is None or processes.on_main(lambda: bool(directory.read_metrics())):
            return
        clock = PhaseClock()
        try:
            stop.check(processes)
            with stop.at_once(processes):
                evaluated = self.evaluated(0, clock)
        except StopNow:
            raise self.save.stopped(start, stop.why) from None
        if evaluated:
            self.report.first_evaluation(evaluated, clock)

    def evaluated(self, step: int, clock: PhaseClock) -> dict[str, Any]:
        """Evaluates the weights of `step`, which the engine has, and returns the metrics; {} if no evaluation is due."""
        if self.evaluate is None or not self.evaluate.due(step):
            return {}
        with clock(Metric.TIME_EVAL):
            self.processes.run_all(self.collect.sampler.drain, keepalive=True)  # one call to the engine at a time
            try:
                return self.evaluate(step)
            except SentinelError:
                self.save.invalidate_samples(step + 1)
                raise

    def close(self) -> None:
        """Ends everything that runs beside the loop: writer, rewards, engine, and the save that is going on."""
        self.report.writer.close()
        try:
            if self.evaluate is not None:
                self.evaluate.close()
            self.collect.scorer.close()
        finally:
            try:
                self.collect.sampler.engine.close()
                if (dialogue := self.collect.sampler.dialogue) is not None:
                    dialogue.turns.close()  # after the engine, which no longer waits for replies
            finally:
                if failed := self.save.checkpoints.close():
                    self.report.console.say(failed)
