"""What processes send each other in a step: each row's tokens once, to the process that trains it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "traffic_worker.py"
ROLLOUT = "rollout={prompts_per_step: 128, group_size: 4, max_completion_tokens: 400}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "packing", "least", "most"), [(2, "false", 0.3, 1.3), (4, "false", 0.3, 1.3), (2, "true", 0.02, 0.3)]
)
def test_a_process_receives_little_more_than_the_rows_that_it_trains(
    recipe_file: Path, world: int, packing: str, least: float, most: float
) -> None:
    """From the end of one step to that of the next. Sums of gradients are not counted: they do not depend on the samples.

    Packed, groups stay together, most of them where they were sampled.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(WORKER)]
    settings = ["engine={kind: transformers}", ROLLOUT, "run.steps=3"]
    settings += [f"optim={{learning_rate: 1.0e-9, packing: {packing}}}"]  # lengths stay as they are
    options = [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "train", str(recipe_file), "--run-dir", str(recipe_file.parent / "run"), *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [json.loads(found) for found in re.findall(r"TRAFFIC (\{.*?\})", ended.stderr)]  # lines of two processes may be one
    counted = [line for line in told if line["step"] > 1]
    assert len(counted) == 2 * world and all(line["rows"] > 1 << 16 for line in counted)
    for line in counted:
        assert least * line["rows"] < line["received"] <= most * line["rows"], line
