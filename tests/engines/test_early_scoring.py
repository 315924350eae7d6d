"""A real server: rewards are computed while it samples, and what is learned is the same to the last bit."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import read_jsonl
from helpers.rollouts import rollout_rows
from safetensors.torch import load_file

from rlgen.cli.train import train_command
from rlgen.rewards.score import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.types import Completion, Group

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# One prompt is decoded after the other: the first group is there long before the last one.
RECIPE = """\
run: {name: test, steps: 3}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "spread.py:spread"}]
rollout: {prompts_per_step: 6, group_size: 4, max_completion_tokens: 48, temperature: 0.9}
engine: {kind: server, launch: true, max_num_seqs: 4}
optim: {learning_rate: 1.0e-4}
"""
REWARD = """\
import time

def spread(completion_ids, step):
    with open("FOLDER/calls", "a") as calls:
        calls.write(f"{step} {time.monotonic()}\\n")
    return sum(completion_ids) % 97 / 97
"""
TIMES = ("time/", "speed/", "memory/", "throughput", "gpu/", "cpu/")


def trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, early: bool
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Trains in `folder`; by step, when rewards were computed and when the last answer was there."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "spread.py").write_text(REWARD.replace("FOLDER", str(folder)))
    answered: dict[int, float] = {}
    real = Sampler.answered

    def noting(self: Sampler, call: Any, answers: Sequence[Completion]) -> list[Group]:
        answered[call.step] = time.monotonic()
        return real(self, call, answers)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "answered", noting)
        if not early:
            patch.setattr(EarlyScoring, "add", lambda self, step, group: None)
        train_command(folder / "recipe.yaml", [f"rollout.async_steps={ahead}"], False, False, None, folder / "run")
    calls: dict[int, list[float]] = {}
    for line in (folder / "calls").read_text().splitlines():
        step, at = line.split()
        calls.setdefault(int(step), []).append(float(at))
    return calls, answered


@pytest.mark.parametrize("ahead", [0, 1])
def test_rewards_are_computed_while_a_server_samples_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    calls, answered = trained(early, monkeypatch, ahead, True)
    assert {step: len(times) for step, times in calls.items()} == {1: 24, 2: 24, 3: 24}, "each answer once"
    for step, times in calls.items():
        assert min(times) < answered[step], f"step {step}: the first reward began while others were sampled"
    calls, answered = trained(late, monkeypatch, ahead, False)
    for step, times in calls.items():
        assert len(times) == 24 and min(times) > answered[step]
    one, two = ([dict(row) for row in rollout_rows(folder / "run")] for folder in (early, late))
    assert one == two and len(one) == 72
    ours, theirs = (read_jsonl(folder / "run" / "metrics.jsonl") for folder in (early, late))
    for mine, other in zip(ours, theirs, strict=True):
        differing = {name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)}
        assert differing <= {name for name in mine if name.startswith(TIMES)}, differing
    weights, others = (load_file(folder / "run/checkpoints/step_000003/model.safetensors") for folder in (early, late))
    assert all(weights[name].equal(others[name]) for name in weights)
