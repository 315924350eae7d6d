"""Evaluates the policy on held-out prompts, with the engine that samples for training."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlgen.data import PromptStream
from rlgen.engines.base import Engine
from rlgen.metrics import Metric
from rlgen.processes import EngineShare, Processes
from rlgen.recipe.models import EvalRecipe
from rlgen.rewards.score import Scorer
from rlgen.rollout.conversations import Dialogue
from rlgen.rollout.sample import first_tokens, rollout
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.directory import Best
from rlgen.run.records import evaluation_metrics
from rlgen.run.rollouts import RolloutWriter
from rlgen.sentinel.watch import Watch
from rlgen.trainers.collect import untrained
from rlgen.types import Group, Sample, Sampling

COMPARED = 8  # completions of each process whose log-probs are compared with the trainer's


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Runs held-out prompts -> completions -> rewards -> metrics. Changes nothing that training depends on.

    It has seeds, prompts and an order of its own, and writes nothing to the journal: an evaluation that is repeated samples the
    same completions. Its seeds are the same at every step, so that other draws explain no difference between steps.

    With several processes, each samples and scores its share of the prompts; all get the same metrics.
    """

    settings: EvalRecipe
    steps: int  # of the run
    processes: Processes
    engine_share: EngineShare
    prompts: PromptStream
    engine: Engine
    sampling: Sampling
    seed: int
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    watch: Watch | None  # None: engine and trainer cannot be compared
    budget: int  # tokens of a row that is compared
    writer: RolloutWriter | None  # None: the samples are not written
    best: Best | None  # None: no checkpoint is pinned
    dialogue: Dialogue | None = None  # how conversations of several turns are led; None: a completion is one turn

    def due(self, step: int) -> bool:
        """Returns whether the weights after `step` are evaluated; those of step 0 are the ones that the run begins with."""
        if step == 0:
            return self.settings.at_start
        return step % self.settings.every == 0 or step == self.steps

    def __call__(self, step: int) -> dict[str, Any]:
        """Evaluates the weights of version `step`, and returns the metrics. All processes must call this together.

        The samples are on disk when this returns.
        """
        groups = self.processes.run_all(partial(self.groups, step), has_collectives=self.engine_share.shared, keepalive=True)
        samples = self.processes.run_all(partial(self.scored, groups, step), keepalive=True)
        table = RowTable.gather(samples, self.processes)
        compared = {} if self.watch is None else self.watch.aside(self.sampling).evaluated(self.compared(groups), step)
        self.processes.run_all(partial(self.write, samples, step), keepalive=True)
        metrics = {**evaluation_metrics(table, self.settings.group_size, self.settings.threshold), **compared}
        if self.dialogue is not None:
            metrics[Metric.EVAL_TURNS_MEAN] = float(table.turns.mean())
        if self.best is not None:
            self.best.look(step, metrics)
        return metrics

    def groups(self, step: int) -> list[Group]:
        """Samples this engine's share of the prompts, and checks that weights of version `step` gave each answer."""
        places = self.engine_share.share(range(len(self.prompts)))
        prompts = self.prompts.take(places[0], len(places)) if places else []
        return rollout(
            self.engine, prompts, self.sampling, self.settings.group_size, self.seed, step, self.tokenizer, self.dialogue
        )

    def scored(self, groups: Sequence[Group], step: int) -> Samples:
        """Returns the samples of this process with their rewards; processes that share an engine leave them to the first."""
        scored = self.scorer.score(groups, step) if self.engine_share.first else []
        return Samples.of([sample for group in scored for sample in group.samples], list(self.scorer.weights))

    def compared(self, groups: Sequence[Group]) -> list[Sample]:
        """Returns a few completions of each process, the first of a prompt, in every process; they are cut to `budget` tokens."""
        own = [group.samples[0] for group in groups[:COMPARED]] if self.engine_share.first else []
        return self.processes.gather([first_tokens(one, self.budget) for one in own if len(one.prompt_ids) < self.budget])

    def write(self, samples: Samples, step: int) -> None:
        """The samples are on disk when this returns. None of them is trained."""
        if self.writer is not None:
            self.writer.write(untrained(step, samples))
            self.writer.wait()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.scorer.close()
