"""Every process of a run asks the servers itself; the main one brings back what any of them finds lost."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import read_jsonl
from helpers.waiting import HANGS
from safetensors.torch import load_file

from rlgen.files import read_json

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.fault(51, 61)
def test_a_server_that_is_killed_under_two_processes(tmp_path: Path, proof: Callable[[str], None]) -> None:
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [*TORCHRUN, str(HERE / "servers_worker.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, env=environment)
    assert ended.returncode == 0, ended.stderr[-5000:]
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


TRAINED = """\
run: {name: test, steps: 2}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "spread.py:spread"}]
rollout: {prompts_per_step: 5, group_size: 4, max_completion_tokens: 12, temperature: 0.9, async_steps: 1}
engine: {kind: server, launch: true}
checkpoint: {every: 2}
optim: {learning_rate: 1.0e-4}
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_two_processes_that_ask_a_server_a_step_ahead_learn_what_one_learns(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(TRAINED)
    (tmp_path / "spread.py").write_text("def spread(completion_ids):\n    return sum(completion_ids) % 97 / 97\n")
    for name, launcher in (("one", [sys.executable]), ("two", TORCHRUN)):
        command = [*launcher, "-m", "rlgen", "train", str(tmp_path / "recipe.yaml"), "--run-dir", str(tmp_path / name)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
        assert ended.returncode == 0, ended.stderr[-5000:]
    one, two = (load_file(tmp_path / name / "checkpoints" / "step_000002" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(((two[name] - one[name]).norm() / one[name].norm()).item() for name in one) <= 1e-5
    ours, theirs = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    for name in ("reward/mean", "completions/mean_tokens", "tokens/generated", "weights/version"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs]), name
