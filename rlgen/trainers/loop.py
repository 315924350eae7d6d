"""The loop. There is one, for all algorithms and engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from rlgen.data import PromptStream
from rlgen.engines import Engine
from rlgen.errors import EngineError, SentinelError, Stopped
from rlgen.losses.kl import reward_kl
from rlgen.models.policy import Policy
from rlgen.processes import Processes, Seat
from rlgen.recipe import Recipe
from rlgen.rewards import Scorer
from rlgen.rollout.batch import pad_rows
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.score import score
from rlgen.run.checkpoint import Checkpoints, random_tensors, set_random
from rlgen.run.clock import Clock
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.records import rollout_records, sample_metrics, staleness_metrics
from rlgen.run.signals import StopNow, StopRequest
from rlgen.sentinel.sync import send_weights
from rlgen.trainers.base import Algorithm, Scores, Signal
from rlgen.trainers.update import Updater
from rlgen.trainers.window import Window
from rlgen.types import Group, Sample, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """prompts -> rollout -> rewards -> window -> update -> sync. Each arrow is one call in `run`.

    Of several processes each samples and rewards its share of the prompts, whole groups. Then all have all samples of the step in
    the same order, and what is learned from them does not depend on how many they are. The main process writes and prints.
    """

    recipe: Recipe
    processes: Processes
    seat: Seat
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptStream
    scorer: Scorer
    engine: Engine
    sampler: Sampler
    sampling: Sampling
    policy: Policy
    reference: Policy | None
    algorithm: Algorithm
    update: Updater
    schedule: LRScheduler
    directory: RunDirectory
    checkpoints: Checkpoints
    console: Console

    def run(self, done: int, stop: StopRequest) -> None:
        """Trains from step `done` + 1 to `run.steps`.

        Raises:
            Stopped: `stop` was requested of one process; a checkpoint of the last step that was trained is written.
            RlgenError: as its parts raise, in all processes; the last checkpoint stands.
        """
        recipe, processes, count = self.recipe, self.processes, self.recipe.rollout.prompts_per_step
        for step in range(done + 1, recipe.run.steps + 1):
            clock, draws = Clock(), random_tensors()
            try:
                stop.check(processes, before_step=True)
                with clock("generate"), stop.at_once(processes):
                    groups, dropped = processes.agreed(partial(self.sample, step), talks=self.seat.shared)
                stop.check(processes)
                with clock("reward"), stop.at_once(processes):
                    samples = self.rewarded(groups, step)
                stop.check(processes)
                with clock("train"):
                    window, signal = self.window(samples, epoch=(step - 1) * count / len(self.prompts.entries))
                    learned = self.update(window, step)
                    self.schedule.step()
            except SentinelError:  # nothing of this step was trained on
                if recipe.sentinel.on_drift == "checkpoint_and_stop" and step - 1 > done:
                    self.save(step - 1)
                raise
            except StopNow:  # nor here
                raise self.stopped(step - 1, draws, stop.why) from None
            with clock("generate"):
                self.sampler.before_sync()
            with clock("sync"):
                refused, probed = self.sync(step)
            with clock("save"):
                if processes.is_main:
                    self.directory.write_rollouts(
                        step, rollout_records(step, samples, signal.advantages.tolist(), signal.trained.tolist())
                    )
                if refused or step == recipe.run.steps or step % recipe.checkpoint.every == 0:
                    self.save(step)
            if processes.is_main:
                self.report(step, samples, {**learned, **probed, **staleness_metrics(samples, step - 1, dropped)}, clock)
            if refused:
                raise refused
            if stop.deadline is not None:
                stop.deadline.took(*clock.spent("save"))

    def sample(self, step: int) -> tuple[list[Group], int]:
        """The groups of a step and the number of samples dropped for their age; the engine rests after it."""
        groups, dropped = self.sampler.groups(step)
        self.engine.sleep()
        return groups, dropped

    def rewarded(self, groups: Sequence[Group], step: int) -> list[Sample]:
        """All samples of the step with their rewards, in the order of the prompts, from all processes to all."""

        def score_own() -> list[Sample]:
            scored = self.scorer.score(groups, step) if self.seat.speaks else []
            return [sample for group in scored for sample in group.samples]

        return [sample for samples in self.processes.together(score_own) for sample in samples]

    def sync(self, step: int) -> tuple[EngineError | None, dict[str, Any]]:
        """Sends the weights of `step`; with what was measured after it.

        An engine that does not confirm them, or has others, ends the run, but the step is trained and is kept.
        """
        probed: dict[str, Any] = {}
        try:
            send_weights(self.engine, self.policy.model, step, self.processes)
            if self.update.watch is not None:
                probed = self.update.watch.after_sync(step)
        except EngineError as error:
            return error, probed
        return None, probed

    def window(self, samples: Sequence[Sample], epoch: float) -> tuple[Window, Signal]:
        """What to learn from the samples of a step, with the reference's log-probs where the algorithm needs them."""
        weights = {reward.label: reward.weight for reward in self.scorer.rewards}
        signal = self.algorithm.advantages(
            Scores(
                rewards=torch.tensor([number(sample.reward) for sample in samples], dtype=torch.float64),
                columns=torch.tensor(
                    [[number(sample.rewards[label]) for sample in samples] for label in weights], dtype=torch.float64
                ).T,
                column_weights=torch.tensor(list(weights.values()), dtype=torch.float64),
                group_ids=torch.tensor([sample.group_id for sample in samples], dtype=torch.long),
                sample_index=torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
                truncated=torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool),
                kl=self.kl(samples) if self.algorithm.reference == "reward" else None,
            )
        )
        window = Window.of(samples, signal, epoch, self.recipe.optim.micro_batch_tokens, self.processes)
        if self.algorithm.reference == "loss":
            window.ref_logp.update(enumerate(self.reference_logp(window.samples)))
        return window, signal

    def reference_logp(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """One [L] tensor a sample, at the temperature of the loss."""
        assert self.reference is not None  # built whenever the algorithm names a use for it
        temperature = self.algorithm.loss_temperature or self.sampling.logp_temperature
        return score(self.reference, samples, temperature, self.recipe.optim.micro_batch_tokens, self.processes)

    def kl(self, samples: Sequence[Sample]) -> torch.Tensor:
        """[B] sampled KL of each completion to the reference."""
        if not samples:
            return torch.zeros(0)
        sampler_logp = pad_rows([torch.tensor(sample.sampler_logp) for sample in samples], 0.0)
        mask = pad_rows([torch.tensor(sample.loss_mask) for sample in samples], False)
        return reward_kl(sampler_logp, pad_rows(self.reference_logp(samples), 0.0), mask)

    def close(self) -> None:
        """Ends what runs beside the loop."""
        try:
            self.scorer.close()
        finally:
            self.engine.close()

    def save(self, step: int) -> None:
        """Unless it is saved already."""
        if self.processes.on_main(lambda: self.checkpoints.has(step)):
            return
        self.checkpoints.save(
            step,
            step * self.recipe.rollout.prompts_per_step,
            self.policy.model,
            self.tokenizer,
            self.update.optimizer,
            self.schedule,
        )

    def stopped(self, step: int, draws: dict[str, torch.Tensor], why: str) -> Stopped:
        """Saves the state after `step`, with the random states that it had then."""
        if step:
            set_random(draws)  # rewards of the step that was given up may have drawn
            self.save(step)
        return Stopped(f"stopped {why} after step {step} of {self.recipe.run.steps}; go on with --resume")

    def report(self, step: int, samples: Sequence[Sample], learned: dict[str, Any], clock: Clock) -> None:
        """One object in metrics.jsonl, one line on the console, and the status."""
        record = {
            "step": step,
            **learned,
            **sample_metrics(samples),
            "weights/version": self.engine.weight_version,
            **clock.metrics(),
        }
        self.directory.write_metrics(record)
        self.directory.write_status("running", step, self.recipe.run.steps)
        self.console.step(record)


def number(reward: float | None) -> float:
    """A reward in a tensor: NaN where it does not apply."""
    return float("nan") if reward is None else reward
