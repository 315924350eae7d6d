"""What is written and said about a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlgen.processes import Processes
from rlgen.run.clock import Clock
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory, finite
from rlgen.run.health import Checkup, Health
from rlgen.run.records import nonfinite_records, rollout_records, sample_metrics, staleness_metrics
from rlgen.trainers.base import Signal
from rlgen.trainers.collect import Collected
from rlgen.trainers.update import Skipped
from rlgen.trainers.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Called by all processes; the main one writes and prints."""

    steps: int  # of the run
    processes: Processes
    directory: RunDirectory
    health: Health
    console: Console

    def rollouts(self, step: int, got: Collected, signal: Signal, skipped: Skipped | None) -> None:
        """Writes all samples of a step, in the order of their groups. An update that was skipped has trained on none."""
        nothing = skipped is not None and not skipped.update
        trained = [trains and not nothing for trains in signal.trained.tolist()]
        learned_from = rollout_records(step, got.samples, signal.advantages.tolist(), trained)
        others = rollout_records(step, got.replaced, [0.0] * len(got.replaced), [False] * len(got.replaced))
        records = sorted(learned_from + others, key=lambda record: (record["group_id"], record["sample_index"]))
        self.processes.on_main(partial(self.directory.write_rollouts, step, records))

    def nonfinite(self, step: int, skipped: Skipped, window: Window) -> Path:
        """Keeps a batch whose update was skipped, for people to look at."""
        old_logp = {row: logp.tolist() for row, logp in skipped.old_logp.items()}
        rows = nonfinite_records(window.samples, window.advantages.tolist(), old_logp, skipped.rows)
        verdict = {"step": step, **skipped.verdict()}
        return self.processes.on_main(lambda: self.directory.write_nonfinite(step, [verdict, *rows]))

    def metrics(self, step: int, got: Collected, measured: Mapping[str, Any], version: int, clock: Clock) -> Checkup:
        """One object in metrics.jsonl, one line on the console, the status, and what the rules of `health` say.

        Args:
            version: of the engine's weights.
        """
        return self.processes.on_main(partial(self._metrics, step, got, measured, version, clock))

    def _metrics(self, step: int, got: Collected, measured: Mapping[str, Any], version: int, clock: Clock) -> Checkup:
        samples = got.samples + got.replaced
        record = {
            "step": step,
            **measured,
            **sample_metrics(samples),
            **staleness_metrics(samples, step - 1, got.dropped),
            "groups/replaced": len({sample.group_id for sample in got.replaced}),
            "weights/version": version,
            **clock.metrics(),
        }
        record = finite(record)  # what the rules see now is what they see again when the run is resumed
        checkup = self.health(record)
        self.directory.write_metrics(record | checkup.metrics)
        self.directory.write_status("running", step, self.steps, health=checkup.broken)
        self.console.step(record)
        for line in checkup.news:
            self.console.say(line)
        return checkup
