"""Runs that sample from a real server: every process asks it itself, and rewards are computed while it samples.

The main process brings back what any of them finds lost.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import read_jsonl
from helpers.before import before
from helpers.rollouts import rollout_rows
from helpers.torchrun import ALONE, PRECISE, farthest, launch, torchrun, train_words, weights, well
from helpers.train_state import equal
from helpers.waiting import HANGS

from rlgen.cli.train import train_command
from rlgen.files import read_json
from rlgen.rewards.score import EarlyScoring
from rlgen.rollout.sampler import Sampler

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.fault(51, 61)
def test_a_server_that_is_killed_under_two_processes(tmp_path: Path, proof: Callable[[str], None]) -> None:
    well(launch(Path(__file__).with_name("servers_worker.py"), tmp_path, timeout=HANGS))
    main, other = read_json(tmp_path / "0.json"), read_json(tmp_path / "1.json")
    assert main["receipt"] == other["receipt"] and main["receipt"][::2] == [1, 1] and main["receipt"][1] > 10
    for one in (main, other):
        assert len(one["undisturbed"]) == 24 and len({str(answer) for answer in one["undisturbed"]}) == 24
        assert one["killed by process 1"] == one["undisturbed"], "ids, log-probs and versions, to the last bit"
        assert one["recoveries"] == [2, 2]
        _, code, words = one["error"]
        assert code == 6 and "Servers were recovered 2 times, as often as engine.restarts allows" in words
    assert main["killed while the main process waits"] == []
    assert other["killed while the main process waits"] == other["undisturbed"]
    assert len(main["said"]) == 4 and other["said"] == [], "the main process says what it did, twice in two lines"
    assert not set(map(str, main["undisturbed"])) & set(map(str, other["undisturbed"])), "each has its own share"
    proof("SIGKILL to a real server by process 1 of 2, three times: two recoveries by process 0, and a refusal in both")


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


def written(folder: Path) -> Path:
    """The recipe, in its folder with its reward."""
    folder.mkdir(exist_ok=True)
    (folder / "spread.py").write_text(REWARD.replace("FOLDER", str(folder)))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


def test_two_processes_that_ask_a_server_a_step_ahead_learn_what_one_learns(tmp_path: Path) -> None:
    recipe = written(tmp_path)
    less = ["run.steps=2", "checkpoint.every=2", "engine.max_num_seqs=256", "rollout.async_steps=1"]
    less += ["rollout.prompts_per_step=5", "rollout.max_completion_tokens=12"]
    for name, launcher in (("one", ALONE), ("two", torchrun())):
        well(launch("-m", "rlgen", *train_words(recipe, tmp_path / name, *less), launcher=launcher, timeout=HANGS))
    assert farthest(weights(tmp_path / "two"), weights(tmp_path / "one")) <= PRECISE
    ours, theirs = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    for name in ("reward/mean", "completions/mean_tokens", "tokens/generated", "weights/version"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs]), name


def trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, early: bool
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Trains in `folder`; by step, when rewards were computed and when the last answer was there."""
    answered: dict[int, float] = {}
    with monkeypatch.context() as patch:
        before(Sampler, "answered", lambda _, call, *__: answered.update({call.step: time.monotonic()}), patch.setattr)
        if not early:
            patch.setattr(EarlyScoring, "add", lambda self, step, group: None)
        train_command(written(folder), [f"rollout.async_steps={ahead}"], False, False, None, folder / "run")
    calls: dict[int, list[float]] = {}
    for line in (folder / "calls").read_text().splitlines():
        step, at = line.split()
        calls.setdefault(int(step), []).append(float(at))
    return calls, answered


@pytest.mark.parametrize("ahead", [0, 1])
# One prompt is decoded after the other: the first group is there long before the last one.
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
    assert equal(*(weights(folder / "run", 3) for folder in (early, late)))
