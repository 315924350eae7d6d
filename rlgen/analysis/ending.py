"""Says in a few lines how a run went, for the end of `rlgen train`."""

from rlgen.analysis.run import Run, number, tenth
from rlgen.metrics import Metric
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.clock import as_clock
from rlgen.run.directory import Best


def ending_of(run: Run, seconds: float, next_command: str) -> list[str]:
    """Returns at most six lines: steps and time, reward, evaluation, checkpoint, and the next command.

    Args:
        seconds: since the command that ends now.
    """
    step, steps = len(run.metrics), run.recipe.run.steps
    state = "done" if step >= steps else "stopped"
    lines = [f"{state}: {step} of {steps} steps, {as_clock(seconds)} since the command; {run.path}"]
    rewards = [number(record, Metric.REWARD_MEAN) for record in run.metrics]
    first, last = tenth(rewards, last=False), tenth(rewards, last=True)
    if first is not None and last is not None:
        of = "step" if len(rewards) < 20 else f"{len(rewards) // 10} steps"
        lines.append(f"reward: {first:.3f} in the first {of}, {last:.3f} in the last {of}")
    return [*lines, *evaluation_lines(run), *checkpoint_lines(run), f"next: {next_command}"]


def evaluation_lines(run: Run) -> list[str]:
    """Returns the line of the first, the best and the last evaluation; none if nothing was evaluated."""
    found = {record[Metric.STEP]: number(record, Metric.EVAL_REWARD_MEAN) for record in run.evaluations}
    known = {step: reward for step, reward in found.items() if reward is not None}
    if not known:
        return []
    best = Best(run.evaluations).step
    named = dict.fromkeys(step for step in (min(known), best, max(known)) if step is not None)
    words = [f"{known[step]:.3f} {'after' if step else 'before'} step {step or 1}{' (best)' * (step == best)}" for step in named]
    return [f"evaluation: {', '.join(words)}"]


def checkpoint_lines(run: Run) -> list[str]:
    """Returns the line of the checkpoint with the best evaluation, or else of the newest; none if there is none."""
    folder = CheckpointFolder(run.path / "checkpoints")
    steps = list(folder.steps())
    if not steps:
        return []
    best = Best(run.evaluations).step
    which, step = ("best", best) if best in steps else ("newest", max(steps))
    assert step is not None
    return [f"{which} checkpoint: {folder.path(step)}"]
