"""What a run says at its end: in at most six lines, the last of which is the next command."""

import json
from pathlib import Path

from helpers.runs import bare_run

from rlgen.analysis.run import read_run
from rlgen.analysis.summary import ending_of
from rlgen.cli.train import last_lines


def with_evaluations(run: Path, **rewards: float | None) -> Path:
    """Adds evaluations after these steps; that of step 0 is a record of its own."""
    file = run / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = {int(step.removeprefix("step")): reward for step, reward in rewards.items()}
    records = [{"step": 0}] * (0 in found) + records
    lines = [{**one, **({"eval/reward/mean": found[one["step"]]} if one["step"] in found else {})} for one in records]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_run_that_is_done(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "mine", [step / 40 for step in range(40)])
    with_evaluations(run, step0=0.1, step10=0.7, step20=0.6, step40=0.65)
    for step in (10, 40):
        (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert ending_of(read_run(run), 3723.0, "rlgen report mine") == [
        f"done: 40 of 40 steps, 1h02m since the command; {run}",
        "reward: 0.038 in the first 4 steps, 0.938 in the last 4 steps",
        "evaluation: 0.100 before step 1, 0.700 after step 10 (best), 0.650 after step 40",
        f"best checkpoint: {run}/checkpoints/step_000010",
        "next: rlgen report mine",
    ]


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "mine", [0.25, None, 0.5], steps=100)
    (run / "checkpoints" / "step_000003").mkdir(parents=True)
    assert ending_of(read_run(run), 5.0, "rlgen train r.yaml --resume") == [
        f"stopped: 3 of 100 steps, 0:05 since the command; {run}",
        "reward: 0.250 in the first step, 0.500 in the last step",
        f"newest checkpoint: {run}/checkpoints/step_000003",
        "next: rlgen train r.yaml --resume",
    ]


def test_nothing_was_trained(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "mine", [], steps=4)
    assert ending_of(read_run(run), 5.0, "x") == [f"stopped: 0 of 4 steps, 0:05 since the command; {run}", "next: x"]
    with_evaluations(bare_run(tmp_path / "other", [0.5], steps=4), step0=None)
    only = with_evaluations(bare_run(tmp_path / "third", [0.5], steps=1), step1=0.5)
    assert ending_of(read_run(only), 5.0, "x")[2] == "evaluation: 0.500 after step 1 (best)"


def test_a_folder_that_another_command_has_taken_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{")
    for run in (tmp_path / "gone", tmp_path):
        assert last_lines(run, 1.0) == [f"the run has ended; another command uses {run} now"]
