"""One training of `make real-learn` in its own process: python scripts/real_cell.py rlgen FOLDER

The folder holds what `scripts/real.py` wrote: the recipe, or the settings of TRL's config. A line is said before each step, as
`bench_sides.Steps` has it, and one after the trained model and `done.json` are written. SIGTERM: saves, and ends with 75. What
was begun goes on. Nothing is imported for the other tool: the start is timed.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from bench_sides import Steps, rlgen_says, trl_survives

from rlgen.errors import Stopped

STOPPED = 75  # exit code


def train_with_rlgen(folder: Path, steps: Steps) -> tuple[list[float], Path]:
    """Trains as `recipe.yaml` says. Returns the mean reward of each step, and the folder of the trained model or adapter."""
    from rlgen.setup.attempt import train
    from rlgen.setup.reopen import TrainOptions

    run = folder / "run"
    options = TrainOptions(run_dir=run, resume=(run / "status.json").exists(), progress="plain")
    with rlgen_says(steps, run):
        try:
            train(folder / "recipe.yaml", options)
        except Stopped:
            raise SystemExit(STOPPED) from None
    from rlgen.metrics import Metric

    rewards = [json.loads(line)[Metric.REWARD_MEAN] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rewards, max((run / "checkpoints").glob("step_*"))


def train_with_trl(folder: Path, steps: Steps) -> tuple[list[float], Path]:
    """Trains as `settings.json` says. Returns the mean reward of each step, and the folder of the trained model."""
    with trl_survives():
        from transformers import TrainerCallback
        from trl_side import logged_rewards, trainer_of

        from rlgen.rewards.builtin import numeric_match

        asked: list[int] = []  # to stop
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))

        class Says(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                steps.begin()

            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if asked:
                    control.should_save = control.should_training_stop = True

        said = json.loads((folder / "settings.json").read_text())
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        trainer = trainer_of(said["kind"], said["settings"], folder / "model", rows, numeric_match, folder / "trl")
        trainer.add_callback(Says())
        written = [path.parent for path in (folder / "trl").glob("checkpoint-*/trainer_state.json")]
        newest = max(written, key=lambda path: int(path.name.partition("-")[2]), default=None)
        trainer.train(resume_from_checkpoint=newest and str(newest))
        if trainer.state.global_step < trainer.args.max_steps:
            raise SystemExit(STOPPED)
        trainer.save_model(str(folder / "trained"))
        return logged_rewards(trainer), folder / "trained"


def main() -> None:
    tool, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir(folder)
    logging.disable(logging.WARNING)
    steps = Steps()
    rewards, trained = {"rlgen": train_with_rlgen, "TRL": train_with_trl}[tool](folder, steps)
    (folder / "done.json").write_text(json.dumps({"rewards": rewards, "trained": str(trained)}))
    steps.begin()


if __name__ == "__main__":
    main()
