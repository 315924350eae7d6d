"""Writes and prints the records of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rlgen.errors import DivergedError
from rlgen.metrics import Metric
from rlgen.processes import Processes
from rlgen.rollout.parquet import Rollout
from rlgen.rollout.samples import Ragged, Samples
from rlgen.run.clock import PhaseClock
from rlgen.run.console import Console, Example
from rlgen.run.directory import RunDirectory, without_nonfinite
from rlgen.run.health import Checkup, Health
from rlgen.run.records import sample_metrics, staleness_metrics, turn_metrics
from rlgen.run.rollouts import RolloutWriter
from rlgen.run.sinks.open import Sinks
from rlgen.trainers.collect import Collected
from rlgen.trainers.results import SkippedUpdate, StepResult
from rlgen.types import Position

Reported: TypeAlias = tuple[dict[str, Any], Checkup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Records the steps of a run. All processes call its methods; only the main process writes and prints, but for rollouts."""

    steps: int  # of the run
    max_nonfinite: int  # steps in a row whose updates may be skipped
    processes: Processes
    directory: RunDirectory
    health: Health
    console: Console
    writer: RolloutWriter
    sinks: Sinks

    def rollouts(self, at: Position, got: Collected, learned: StepResult) -> None:
        """Queues the samples of the step before `at` for the writer, and reports if one of its updates was skipped.

        Each process writes the rows that it trains, and those that it sampled and no process trains. None counts as trained if
        the step's first update was skipped.

        Raises DivergedError in all processes if more updates in a row were skipped than the recipe tolerates.
        """
        train_batch, advantages, skipped = learned.train_batch, learned.advantages, learned.skipped
        nothing = skipped is not None and not skipped.update
        table, rank = got.table, self.processes.rank
        trained, advantage = np.zeros(len(table), dtype=bool), np.zeros(len(table))
        trained[~table.replaced], advantage[~table.replaced] = advantages.trained.numpy(), advantages.advantages.numpy()
        others = (table.holder == rank) & ~trained
        left = got.samples.take(table.place[others])
        offsets = train_batch.samples.completion_ids.offsets
        policy_logp = Ragged(train_batch.flat("old_at_sampling").numpy(), np.append(offsets, np.repeat(offsets[-1:], len(left))))
        rollout = Rollout(
            step=at.step,
            samples=Samples.join([train_batch.samples, left]),
            policy_logp=policy_logp,
            advantage=np.concatenate([advantages.advantages[train_batch.rows].numpy(), advantage[others]]),
            trained=np.append(np.full(len(train_batch.rows), not nothing), np.zeros(len(left), dtype=bool)),
        )
        self.processes.run_all(lambda: self.writer.write(rollout, always=skipped is not None))
        if skipped is not None:
            self.skipped(at, got, skipped)

    def skipped(self, at: Position, got: Collected, skipped: SkippedUpdate) -> None:
        """Says that an update was skipped, and writes which samples caused it. Raises DivergedError as `rollouts` does."""
        table = got.learned_from
        rows = [[int(table.group_id[row]), int(table.sample_index[row])] for row in sorted(skipped.rows)]
        verdict = {"step": at.step, **skipped.verdict(), "rows": rows}
        path = self.processes.on_main(lambda: self.directory.write_nonfinite(at.step, verdict))
        said = f"step {at.step}: {skipped.words()}; the batch is in {path}"
        if at.nonfinite > self.max_nonfinite:
            raise DivergedError(
                f"{said}. That is {at.nonfinite} in a row, optim.max_nonfinite is {self.max_nonfinite}. The last checkpoint is"
                " good: open it in a new run (model.path) with a lower optim.learning_rate, or look at what is odd about these"
                " samples"
            )
        self.console.say(f"{said}; {at.nonfinite} in a row, {self.max_nonfinite} are tolerated")

    def first_evaluation(self, evaluated: Mapping[str, Any], clock: PhaseClock) -> None:
        """Writes and prints the evaluation before step 1, as the record of step 0."""

        def write() -> None:
            record = without_nonfinite({Metric.STEP: 0, **evaluated, **clock.metrics()})
            self.directory.write_metrics(record)
            self.sinks.metrics(record)
            self.console.evaluation(record)

        self.processes.on_main(write)

    def metrics(self, step: int, got: Collected, measured: Mapping[str, Any], version: int, clock: PhaseClock) -> Reported:
        """Writes one object to metrics.jsonl, one line to the console, and the status. Returns that object, and what the health
        rules found.
        """

        def write() -> Reported:
            record: dict[str, Any] = {
                Metric.STEP: step,
                **measured,
                **sample_metrics(got.table),
                **({} if got.counts is None else turn_metrics(got.table, got.counts)),
                **staleness_metrics(got.table, step - 1, got.dropped),
                Metric.GROUPS_RESAMPLED: len(np.unique(got.table.group_id[got.table.replaced])),
                Metric.WEIGHTS_VERSION: version,
                **clock.metrics(),
            }
            record = without_nonfinite(record)  # the rules see the same values when a resumed run reads metrics.jsonl
            checkup = self.health(record)
            record |= checkup.metrics
            self.directory.write_metrics(record)
            self.sinks.metrics(record)
            self.directory.write_status("running", step, self.steps, health=checkup.broken)
            self.console.step(record, partial(self.examples, got))
            for line in checkup.news:
                self.console.say(line)
            return record, checkup

        return self.processes.on_main(write)

    def examples(self, got: Collected) -> list[Example]:
        """Returns the completions of this process with the highest and with the lowest reward, as texts."""
        known = np.flatnonzero(~np.isnan(got.samples.reward))
        if not len(known):
            return []
        ordered = known[np.argsort(got.samples.reward[known], kind="stable")]
        rows = [got.samples[int(row)] for row in dict.fromkeys((ordered[-1], ordered[0]))]
        return [
            Example(prompt=self.writer.prompt_at(row.group_id).text, completion=self.writer.text_of(row), reward=row.reward)
            for row in rows
        ]
