"""The loop. There is one, for all algorithms and engines."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from rlgen.engines import Engine
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
from rlgen.trainers.collect import Collector
from rlgen.trainers.report import Reporter
from rlgen.trainers.update import Skipped, Updater
from rlgen.trainers.window import Window, WindowBuilder


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands between two steps. Progress(step=20, position=160)"""

    step: int = 0  # steps done; also the version of the weights
    position: int = 0  # prompts taken from the data's order, over all epochs
    nonfinite: int = 0  # steps in a row, up to this one, without an update because a number was not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """collect (prompts -> rollout -> rewards) -> window -> update -> sync. Each arrow is one call in `run`.

    Of several processes all have all samples of the step in the same order, and what is learned from them does not depend on how
    many they are.
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

    def run(self, start: Progress, stop: StopRequest) -> None:
        """Trains from where `start` is to step `run.steps`.

        Raises:
            Stopped: `stop` was requested of one process; a checkpoint of the last step that was trained is written.
            RlgenError: as its parts raise, in all processes; the last checkpoint stands.
        """
        recipe, processes, at = self.recipe, self.processes, start
        clock, saving = Clock(), 0.0
        for step in range(start.step + 1, recipe.run.steps + 1):
            draws = random_tensors()
            try:
                stop.check(processes, before_step=True)
                with stop.at_once(processes):
                    got = self.collect(step, at.position, clock, stop)
                collected = clock.seconds
                with clock("train"):
                    window, signal, measured = self.windows.build(got.samples, got.epoch)
                    learned, skipped = self.update(window, step)
                    self.schedule.step()
            except SentinelError:  # nothing of this step was trained on, nor shall it be when the run goes on
                self.distrust(step)
                set_random(draws)
                if recipe.sentinel.on_drift == "checkpoint_and_stop" and at != start:
                    self.save(at)
                raise
            except StopNow:  # nor here
                set_random(draws)
                raise self.stopped(at, stop.why) from None
            at = Progress(step, at.position + got.prompts, at.nonfinite + 1 if skipped else 0)
            if skipped:
                self.tolerate(skipped, window, at)
            with clock("generate"):
                processes.patiently(self.collect.sampler.before_sync)
            with clock("sync"):
                refused, probed = self.sync(step)
            with clock("save"):
                self.report.rollouts(step, got, signal, skipped)
            checkup = self.report.metrics(step, got, {**measured, **learned, **probed}, self.engine.weight_version, clock)
            seconds, update, clock = clock.seconds - saving, clock.seconds - collected, Clock()
            # After the metrics: those of a step whose checkpoint is there are there too. Its time counts to the next step.
            asked = processes.on_main(self.report.directory.asked_to_save)
            saves = refused or asked or checkup.saves or step == recipe.run.steps or step % recipe.checkpoint.every == 0
            if saves:
                with clock("save"):
                    self.save(at)
            if refused:
                raise refused
            if checkup.ends:
                raise checkup.ends
            saving = clock.seconds
            stop.took(seconds, update, saving if saves else 0.0)

    def sync(self, step: int) -> tuple[EngineError | None, dict[str, Any]]:
        """Sends the weights of `step`; with what was measured after it.

        An engine that does not confirm them, or has others, ends the run, but the step is trained and is kept.
        """
        probed: dict[str, Any] = {}
        watch = self.update.watch
        weights = bits(self.policy.model, self.processes)

        def starts() -> None:
            self.journal.starts_from(step, weights, watch.means if watch else ())

        self.processes.agreed(starts)  # first: the engine may answer with these weights as soon as it has them
        try:
            send_weights(self.engine, self.policy.model, step, self.processes)
            if watch is not None and (probed := watch.after_sync(step)):
                self.processes.agreed(starts)  # with what the sentinel has seen now
        except EngineError as error:
            if isinstance(error, SentinelError):
                self.distrust(step + 1)
            return error, probed
        return None, probed

    def distrust(self, step: int) -> None:
        """What was sampled for `step` is not taken again. That the sentinel has caught it is worth more than a disk's refusal."""
        with suppress(CheckpointError):
            self.processes.agreed(self.journal.close)
            self.processes.on_main(lambda: self.journal.distrust(step))

    def tolerate(self, skipped: Skipped, window: Window, at: Progress) -> None:
        """Says that an update was skipped, and keeps its batch.

        Raises:
            DivergedError: in all processes, if it is one more in a row than the recipe tolerates.
        """
        most, path = self.recipe.optim.max_nonfinite, self.report.nonfinite(at.step, skipped, window)
        said = f"step {at.step}: {skipped.words()}: {skipped.consequence()}; the batch is in {path}"
        if at.nonfinite > most:
            raise DivergedError(
                f"{said}. That is {at.nonfinite} in a row, optim.max_nonfinite is {most}. The last checkpoint is good: open it in"
                " a new run (model.path) with a lower optim.learning_rate, or look at what is odd about these samples"
            )
        self.report.console.say(f"{said}; {at.nonfinite} in a row, {most} are tolerated")

    def close(self) -> None:
        """Ends what runs beside the loop."""
        try:
            self.collect.scorer.close()
        finally:
            self.engine.close()

    def save(self, at: Progress) -> None:
        """Unless it is saved already."""
        if self.processes.on_main(lambda: self.checkpoints.has(at.step)):
            return
        self.processes.patiently(partial(self.collect.sampler.settle, at.step))
        self.checkpoints.save(
            at.step, at.position, self.policy.model, self.tokenizer, self.update.optimizer, self.schedule, at.nonfinite
        )
        self.processes.on_main(lambda: self.journal.drop(0, self.checkpoints.oldest()))

    def stopped(self, at: Progress, why: str) -> Stopped:
        """Saves what was trained last."""
        if at.step:
            self.save(at)
        return Stopped(f"stopped {why} after step {at.step} of {self.recipe.run.steps}; go on with --resume")
