"""What processes send each other in a step: each row's tokens once, to the process that trains it."""

import json
import re
from pathlib import Path

import pytest
from helpers.torchrun import launch, torchrun, train_words, well

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
    settings = ["engine={kind: transformers}", ROLLOUT, "run.steps=3"]
    settings += [f"optim={{learning_rate: 1.0e-9, packing: {packing}}}"]  # lengths stay as they are
    words = train_words(recipe_file, recipe_file.parent / "run", *settings)
    ended = well(launch(WORKER, *words, launcher=torchrun(world), timeout=900))
    told = [json.loads(found) for found in re.findall(r"TRAFFIC (\{.*?\})", ended.stderr)]  # lines of two processes may be one
    counted = [line for line in told if line["step"] > 1]
    assert len(counted) == 2 * world and all(line["rows"] > 1 << 16 for line in counted)
    for line in counted:
        assert least * line["rows"] < line["received"] <= most * line["rows"], line
