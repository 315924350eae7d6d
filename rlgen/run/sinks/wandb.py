"""Weights & Biases."""

import uuid

import wandb

from rlgen.recipe.sinks import WandbSink
from rlgen.run.sinks.tracker import Numbers, Opening, Table


class WandbTracker:
    """One run of wandb. Metrics are drawn over `step`, so that steps that are trained again after a resume are accepted."""

    def __init__(self, sink: WandbSink, opening: Opening) -> None:
        self.run = wandb.init(
            project=sink.project,
            entity=sink.entity,
            group=sink.group,
            tags=sink.tags,
            name=opening.name,
            config=opening.config,
            dir=opening.folder,
            id=opening.id or uuid.uuid4().hex[:8],
            resume="allow" if opening.id else None,
            mode=sink.mode,
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True, x_disable_stats=True),
        )
        self.id = self.run.id
        self.run.define_metric("*", step_metric="step")

    def metrics(self, step: int, numbers: Numbers) -> None:
        self.run.log({"step": step, **numbers})

    def samples(self, step: int, table: Table) -> None:
        self.run.log({"step": step, "samples": wandb.Table(columns=table.columns, data=table.rows)})

    def end(self, state: str, exit_code: int) -> None:
        self.run.summary["state"] = state
        self.run.finish(exit_code=exit_code)
        wandb.teardown(exit_code)  # ends the service process of wandb
