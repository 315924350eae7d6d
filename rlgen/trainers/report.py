"""Writes and prints the records of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlgen.algorithms.base import Signal
from rlgen.metrics import Metric
from rlgen.processes import Processes
from rlgen.run.clock import Clock
from rlgen.run.console import Console, Example
from rlgen.run.directory import RunDirectory, finite
from rlgen.run.health import Checkup, Health
from rlgen.run.records import sample_metrics, staleness_metrics, turn_metrics
from rlgen.run.rollouts import Rollout, RolloutWriter
from rlgen.run.sinks.open import Sinks
from rlgen.trainers.collect import Collected
from rlgen.trainers.update import Skipped
from rlgen.trainers.window import Window
from rlgen.types import Ragged, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Records the steps of a run. All processes call its methods; only the main process writes and prints, but for rollouts."""

    steps: int  # of the run
    processes: Processes
    directory: RunDirectory
    health: Health
    console: Console
    writer: RolloutWriter
    sinks: Sinks

    def rollouts(self, step: int, got: Collected, signal: Signal, window: Window, skipped: Skipped | None) -> None:
        """Queues the samples of a step for the writer. Marks none as trained if the step's first update was skipped.

        Each process writes the rows that it trains, and those that it sampled and no process trains.
        """
        nothing = skipped is not None and not skipped.update
        table, rank = got.table, self.processes.rank
        trained, advantage = np.zeros(len(table), dtype=bool), np.zeros(len(table))
        trained[~table.replaced], advantage[~table.replaced] = signal.trained.numpy(), signal.advantages.numpy()
        others = (table.holder == rank) & ~trained
        left = got.samples.take(table.place[others])
        offsets = window.samples.completion_ids.offsets
        policy_logp = Ragged(window.flat("old_at_sampling").numpy(), np.append(offsets, np.repeat(offsets[-1:], len(left))))
        self.processes.agreed(
            partial(
                self.writer.write,
                Rollout(
                    step=step,
                    samples=Samples.join([window.samples, left]),
                    policy_logp=policy_logp,
                    advantage=np.concatenate([signal.advantages[window.rows].numpy(), advantage[others]]),
                    trained=np.append(np.full(len(window.rows), not nothing), np.zeros(len(left), dtype=bool)),
                ),
                always=skipped is not None,
            )
        )

    def nonfinite(self, step: int, skipped: Skipped, got: Collected) -> Path:
        """Writes which numbers of a step were not finite, and returns the file's path. The samples are in the step's rollouts."""
        table = got.learned_from
        rows = [[int(table.group_id[row]), int(table.sample_index[row])] for row in sorted(skipped.rows)]
        verdict = {"step": step, **skipped.verdict(), "rows": rows}
        return self.processes.on_main(lambda: self.directory.write_nonfinite(step, verdict))

    def first_evaluation(self, evaluated: Mapping[str, Any], clock: Clock) -> None:
        """Writes and prints the evaluation before step 1, as the record of step 0."""

        def write() -> None:
            record = finite({Metric.STEP: 0, **evaluated, **clock.metrics()})
            self.directory.write_metrics(record)
            self.sinks.metrics(record)
            self.console.evaluation(record)

        self.processes.on_main(write)

    def metrics(self, step: int, got: Collected, measured: Mapping[str, Any], version: int, clock: Clock) -> Checkup:
        """Writes one object to metrics.jsonl, one line to the console, and the status; returns what the health rules found.

        Args:
            version: weight version of the engine.
        """
        return self.processes.on_main(partial(self._metrics, step, got, measured, version, clock))

    def _metrics(self, step: int, got: Collected, measured: Mapping[str, Any], version: int, clock: Clock) -> Checkup:
        record: dict[str, Any] = {
            Metric.STEP: step,
            **measured,
            **sample_metrics(got.table),
            **({} if got.counts is None else turn_metrics(got.table, got.counts)),
            **staleness_metrics(got.table, step - 1, got.dropped),
            Metric.GROUPS_REPLACED: len(np.unique(got.table.group_id[got.table.replaced])),
            Metric.WEIGHTS_VERSION: version,
            **clock.metrics(),
        }
        record = finite(record)  # the rules see the same values when a resumed run reads metrics.jsonl
        checkup = self.health(record)
        self.directory.write_metrics(record | checkup.metrics)
        self.sinks.metrics(record | checkup.metrics)
        self.directory.write_status("running", step, self.steps, health=checkup.broken)
        self.console.step(record | checkup.metrics, partial(self.examples, got))
        for line in checkup.news:
            self.console.say(line)
        return checkup

    def examples(self, got: Collected) -> list[Example]:
        """Returns the completions of this process with the highest and with the lowest reward, as texts."""
        known = np.flatnonzero(~np.isnan(got.samples.reward))
        if not len(known):
            return []
        ordered = known[np.argsort(got.samples.reward[known], kind="stable")]
        rows = [got.samples[int(row)] for row in dict.fromkeys((ordered[-1], ordered[0]))]
        return [
            Example(
                prompt=self.writer.prompts.at(row.group_id).text,
                completion=self.writer.text_of(row),
                reward=row.reward,
            )
            for row in rows
        ]
