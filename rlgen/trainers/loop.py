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
from rlgen.errors import DivergedError, EngineError, SentinelError, Stopped
from rlgen.losses.kl import reward_kl
from rlgen.models.policy import Policy
from rlgen.models.weights import bits
from rlgen.processes import Processes, Seat
from rlgen.recipe import Recipe
from rlgen.rewards.score import Scorer
from rlgen.rollout.batch import pad_rows
from rlgen.rollout.journal import Journal
from rlgen.rollout.sampler import Sampler
from rlgen.rollout.score import score
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.clock import Clock
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory, finite
from rlgen.run.health import Checkup, Health
from rlgen.run.records import nonfinite_records, rollout_records, sample_metrics, staleness_metrics
from rlgen.run.signals import StopNow, StopRequest
from rlgen.run.state import random_tensors, set_random
from rlgen.sentinel.sync import send_weights
from rlgen.trainers.base import Algorithm, Scores, Signal
from rlgen.trainers.update import Skipped, Updater
from rlgen.trainers.window import Window
from rlgen.types import Group, Prompt, Sample, Sampling


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands between two steps. Progress(step=20, position=160)"""

    step: int = 0  # steps done; also the version of the weights
    position: int = 0  # prompts taken from the data's order, over all epochs
    nonfinite: int = 0  # steps in a row, up to this one, without an update because a number was not finite


@dataclass(frozen=True, slots=True)
class Collected:
    """What was sampled for a step, with its rewards, in the order of the prompts."""

    samples: list[Sample]  # to learn from
    replaced: list[Sample]  # of groups without signal whose places others took
    dropped: int  # samples that were too old
    prompts: int  # taken from the data's order


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
    journal: Journal
    sampling: Sampling
    policy: Policy
    reference: Policy | None
    algorithm: Algorithm
    update: Updater
    schedule: LRScheduler
    directory: RunDirectory
    checkpoints: Checkpoints
    health: Health
    console: Console

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
                with clock("train"):
                    window, signal, measured = self.window(got.samples, epoch=at.position / len(self.prompts.entries))
                    learned, skipped = self.update(window, step)
                    self.schedule.step()
            except SentinelError:  # nothing of this step was trained on, nor shall it be when the run goes on
                self.journal.distrust(step)
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
                processes.patiently(self.sampler.before_sync)
            with clock("sync"):
                refused, probed = self.sync(step)
            with clock("save"):
                records = self.rollouts(step, got, signal, skipped)
                processes.on_main(partial(self.directory.write_rollouts, step, records))
            checkup = processes.on_main(partial(self.report, step, got, {**measured, **learned, **probed}, clock))
            seconds, clock = clock.seconds - saving, Clock()
            # After the metrics: those of a step whose checkpoint is there are there too. Its time counts to the next step.
            asked = processes.on_main(self.directory.asked_to_save)
            if refused or asked or checkup.saves or step == recipe.run.steps or step % recipe.checkpoint.every == 0:
                with clock("save"):
                    self.save(at)
            if refused:
                raise refused
            if checkup.ends:
                raise checkup.ends
            saving = clock.seconds
            if stop.deadline is not None:
                stop.deadline.took(seconds, saving)

    def collect(self, step: int, position: int, clock: Clock, stop: StopRequest) -> Collected:
        """Samples the prompts from `position` on; groups without signal give their places to further prompts, if the recipe says.

        All processes see all rewards, and so ask for the same number of further prompts.
        """
        got = Collected([], [], 0, 0)
        wanted, left = self.recipe.rollout.prompts_per_step, self.recipe.rollout.refill
        while wanted:
            prompts = self.seat.share(self.prompts.take(position + got.prompts, wanted))
            with clock("generate"):
                groups, dropped = self.processes.agreed(partial(self.sample, step, prompts, not left), talks=self.seat.shared)
            stop.check(self.processes)
            with clock("reward"):
                samples = self.rewarded(groups, step)
            stop.check(self.processes)
            silent = self.silent(samples) if left else frozenset()
            got = Collected(
                samples=got.samples + [sample for sample in samples if sample.group_id not in silent],
                replaced=got.replaced + [sample for sample in samples if sample.group_id in silent],
                dropped=got.dropped + dropped,
                prompts=got.prompts + wanted,
            )
            if left and not silent:
                self.processes.agreed(self.engine.sleep, talks=self.seat.shared)
            wanted, left = len(silent), left - 1
        return got

    def sample(self, step: int, prompts: Sequence[Prompt], last: bool) -> tuple[list[Group], int]:
        """The groups of `prompts` and the number of samples dropped for their age; after the `last` ones the engine rests."""
        groups, dropped = self.sampler.groups(step, prompts)
        if last:
            self.engine.sleep()
        return groups, dropped

    def silent(self, samples: Sequence[Sample]) -> frozenset[int]:
        """Groups of which no sample has an advantage: nothing can be learned from them. A KL in the reward is no signal."""
        signal = self.algorithm.advantages(self.scores(samples, None))
        teaches = (signal.trained & (signal.advantages != 0)).tolist()
        speaking = {sample.group_id for sample, one in zip(samples, teaches, strict=True) if one}
        return frozenset(sample.group_id for sample in samples) - speaking

    def rewarded(self, groups: Sequence[Group], step: int) -> list[Sample]:
        """All samples of the step with their rewards, in the order of the prompts, from all processes to all."""

        def score_own() -> list[Sample]:
            scored = self.journal.score(step, groups, lambda fresh: self.scorer.score(fresh, step)) if self.seat.speaks else []
            return [sample for group in scored for sample in group.samples]

        return [sample for samples in self.processes.together(score_own) for sample in samples]

    def sync(self, step: int) -> tuple[EngineError | None, dict[str, Any]]:
        """Sends the weights of `step`; with what was measured after it.

        An engine that does not confirm them, or has others, ends the run, but the step is trained and is kept.
        """
        probed: dict[str, Any] = {}
        watch = self.update.watch
        weights = bits(self.policy.model, self.processes)
        self.processes.agreed(lambda: self.journal.starts_from(step, weights, watch.means if watch else ()))
        try:
            send_weights(self.engine, self.policy.model, step, self.processes)
            if watch is not None:
                probed = watch.after_sync(step)
        except EngineError as error:
            if isinstance(error, SentinelError):
                self.journal.distrust(step + 1)
            return error, probed
        return None, probed

    def tolerate(self, skipped: Skipped, window: Window, at: Progress) -> None:
        """Keeps a batch whose update was skipped, for people to look at.

        Raises:
            DivergedError: in all processes, if it is one more in a row than the recipe tolerates.
        """
        old_logp = {row: logp.tolist() for row, logp in skipped.old_logp.items()}
        rows = nonfinite_records(window.samples, window.advantages.tolist(), old_logp, skipped.rows)
        verdict = {"step": at.step, **skipped.verdict()}
        path = self.processes.on_main(lambda: self.directory.write_nonfinite(at.step, [verdict, *rows]))
        most = self.recipe.optim.max_nonfinite
        said = f"step {at.step}: {skipped.words()}: {skipped.consequence()}; the batch is in {path}"
        if at.nonfinite > most:
            raise DivergedError(
                f"{said}. That is {at.nonfinite} in a row, optim.max_nonfinite is {most}. The last checkpoint is good: open it in"
                " a new run (model.path) with a lower optim.learning_rate, or look at what is odd about these samples"
            )
        self.console.say(f"{said}; {at.nonfinite} in a row, {most} are tolerated")

    def window(self, samples: Sequence[Sample], epoch: float) -> tuple[Window, Signal, dict[str, Any]]:
        """What to learn from the samples of a step, with the reference's log-probs where the algorithm needs them.

        The third is what was measured on the way.
        """
        kl = self.kl(samples) if self.algorithm.reference == "reward" else None
        signal = self.algorithm.advantages(self.scores(samples, kl))
        window = Window.of(samples, signal, epoch, self.recipe.optim.micro_batch_tokens, self.processes)
        if self.algorithm.reference == "loss":
            window.ref_logp.update(enumerate(self.reference_logp(window.samples)))
        if kl is None:
            return window, signal, {}
        tokens = sum(sum(sample.loss_mask) for sample in samples)
        return window, signal, {"kl/ref_k1": kl.sum().item() / tokens if tokens else None}

    def scores(self, samples: Sequence[Sample], kl: torch.Tensor | None) -> Scores:
        """What the samples earned, one row each."""
        weights = {reward.label: reward.weight for reward in self.scorer.rewards}
        return Scores(
            rewards=torch.tensor([number(sample.reward) for sample in samples], dtype=torch.float64),
            columns=torch.tensor(
                [[number(None if sample.failed else sample.rewards[label]) for sample in samples] for label in weights],
                dtype=torch.float64,
            ).T,
            column_weights=torch.tensor(list(weights.values()), dtype=torch.float64),
            group_ids=torch.tensor([sample.group_id for sample in samples], dtype=torch.long),
            sample_index=torch.tensor([sample.sample_index for sample in samples], dtype=torch.long),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool),
            kl=kl,
        )

    def reference_logp(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        """One [L] tensor a sample, at the temperature of the loss."""
        assert self.reference is not None  # built whenever the algorithm names a use for it
        temperature = self.algorithm.loss_temperature or self.sampling.logp_temperature
        return score(self.reference, samples, temperature, self.recipe.optim.micro_batch_tokens, self.processes)

    def kl(self, samples: Sequence[Sample]) -> torch.Tensor:
        """[B] sampled KL of each completion to the reference.

        Raises:
            DivergedError: it is not finite: as part of a reward it would pass for a reward that does not apply.
        """
        if not samples:
            return torch.zeros(0)
        sampler_logp = pad_rows([torch.tensor(sample.sampler_logp) for sample in samples], 0.0)
        mask = pad_rows([torch.tensor(sample.loss_mask) for sample in samples], False)
        kl = reward_kl(sampler_logp, pad_rows(self.reference_logp(samples), 0.0), mask)
        if not kl.isfinite().all():
            raise DivergedError("the KL to the reference (trainer.kl k1_in_reward) is not finite: the reference overflows")
        return kl

    def close(self) -> None:
        """Ends what runs beside the loop."""
        try:
            self.scorer.close()
        finally:
            self.engine.close()

    def save(self, at: Progress) -> None:
        """Unless it is saved already."""
        if self.processes.on_main(lambda: self.checkpoints.has(at.step)):
            return
        self.processes.patiently(partial(self.sampler.settle, at.step))
        self.checkpoints.save(
            at.step, at.position, self.policy.model, self.tokenizer, self.update.optimizer, self.schedule, at.nonfinite
        )
        self.processes.on_main(lambda: self.journal.drop(0, self.checkpoints.oldest()))

    def stopped(self, at: Progress, why: str) -> Stopped:
        """Saves what was trained last."""
        if at.step:
            self.save(at)
        return Stopped(f"stopped {why} after step {at.step} of {self.recipe.run.steps}; go on with --resume")

    def rollouts(self, step: int, got: Collected, signal: Signal, skipped: Skipped | None) -> list[dict[str, Any]]:
        """All samples of a step, in the order of their groups. An update that was skipped has trained on none."""
        nothing = skipped is not None and not skipped.update
        trained = [trains and not nothing for trains in signal.trained.tolist()]
        learned_from = rollout_records(step, got.samples, signal.advantages.tolist(), trained)
        others = rollout_records(step, got.replaced, [0.0] * len(got.replaced), [False] * len(got.replaced))
        return sorted(learned_from + others, key=lambda record: (record["group_id"], record["sample_index"]))

    def report(self, step: int, got: Collected, learned: dict[str, Any], clock: Clock) -> Checkup:
        """One object in metrics.jsonl, one line on the console, the status, and what the rules of `health` say."""
        samples = got.samples + got.replaced
        record = {
            "step": step,
            **learned,
            **sample_metrics(samples),
            **staleness_metrics(samples, step - 1, got.dropped),
            "groups/replaced": len({sample.group_id for sample in got.replaced}),
            "weights/version": self.engine.weight_version,
            **clock.metrics(),
        }
        record = finite(record)  # what the rules see now is what they see again when the run is resumed
        checkup = self.health(record)
        self.directory.write_metrics(record | checkup.metrics)
        self.directory.write_status("running", step, self.recipe.run.steps, health=checkup.broken)
        self.console.step(record)
        for line in checkup.news:
            self.console.say(line)
        return checkup


def number(reward: float | None) -> float:
    """A reward in a tensor: NaN where it does not apply."""
    return float("nan") if reward is None else reward
