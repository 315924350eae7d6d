"""What is exported is the policy that was trained: for transformers, for vLLM, whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, RECIPE, Proof, Run, open_vllm, read_jsonl
from helpers.damage import flip
from helpers.recipes import written
from helpers.samples import answered, request
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlgen.cli.export import adapted_and_merged, export_command
from rlgen.cli.train import train_command
from rlgen.errors import CheckpointError, SetupError, UsageError
from rlgen.models import load, weights
from rlgen.models.lora import base_weight, without_adapter
from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.rollout.score import score
from rlgen.types import WHOLE, Sampling

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
EXACT = 1e-5  # of logits and log-probs in float32
SETTINGS = ["engine={kind: transformers}", "run.steps=4", "checkpoint.every=2"]


def trained(folder: Path, *overrides: str) -> Path:
    train_command(written(folder, RECIPE), [*SETTINGS, *overrides], False, False, None, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = ["model.lora={rank: 8, alpha: 16}", "optim.learning_rate=0.01"]
    return trained(tmp_path_factory.mktemp("adapter"), *overrides)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("full"), "eval={every: 2, limit: 4}")


def gap_to_vllm(policy: Policy, folder: Path) -> float:
    """Between `policy` and vLLM on the exported folder."""
    engine = open_vllm("qwen3", model=str(folder), max_model_len=64, max_num_seqs=8)
    try:
        asked = [request([10, 20, 30 + index], index) for index in range(8)]
        answers = engine.generate(asked, Sampling(max_tokens=24, temperature=1.0, stop_ids=(257, 259)))
    finally:
        engine.close()
    samples = [answered(one, answer) for one, answer in zip(asked, answers, strict=True)]
    logp = score(policy, samples, WHOLE, 4096, Processes.alone())
    return max((torch.from_numpy(s.sampler_logp) - own).abs().max().item() for s, own in zip(samples, logp, strict=True))


def gap_to_transformers(model: Any, folder: Path) -> float:
    """Largest difference of the logits of `model` and of transformers on the exported folder."""
    ids = torch.randint(0, 256, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        opened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return float((model(ids).logits - opened(ids).logits).abs().max())


@pytest.mark.vllm
def test_a_merged_export_is_the_adapted_policy_in_vllm_too(adapter_run: Path, tmp_path: Path) -> None:
    export_command(adapter_run, tmp_path / "out")
    policy = Policy(adapted_and_merged(adapter_run / "checkpoints/step_000004", CPU)[0], torch.float32, True)
    gaps = gap_to_transformers(policy.model, tmp_path / "out"), gap_to_vllm(policy, tmp_path / "out")
    print(f"adapter: {gaps}")
    assert max(gaps) <= EXACT
    with without_adapter(policy.model):
        assert gap_to_transformers(policy.model, tmp_path / "out") > 0.1, "the adapter has an effect"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert not [path.name for path in (tmp_path / "out").iterdir() if "adapter" in path.name or path.suffix in (".bin", ".pt")]


@pytest.mark.slow
@pytest.mark.vllm
def test_exported_full_weights_are_the_policy_in_vllm_too(full_run: Path, tmp_path: Path) -> None:
    """A weight that is a thousandth off shows on both sides."""
    export_command(full_run, tmp_path / "out", "last")
    checkpoint = full_run / "checkpoints" / "step_000004"
    policy = Policy(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), torch.float32, True)
    gaps = gap_to_transformers(policy.model, tmp_path / "out"), gap_to_vllm(policy, tmp_path / "out")
    print(f"full: {gaps}")
    assert max(gaps) <= EXACT
    weights.own_tensors(policy.model)["model.norm.weight"].detach()[3] += 1e-3
    assert min(gap_to_transformers(policy.model, tmp_path / "out"), gap_to_vllm(policy, tmp_path / "out")) > 2 * EXACT


def test_the_best_checkpoint_is_the_one_that_the_evaluation_chose(full_run: Path, tmp_path: Path, capsys: Captured) -> None:
    run = Path(shutil.copytree(full_run, tmp_path / "run"))
    records = read_jsonl(run / "metrics.jsonl")
    for record in records:
        record["eval/reward/mean"] = {0: 3.0, 2: 2.0, 4: 1.0}.get(record["step"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step, expected in {"best": 2, "last": 4, "4": 4}.items():
        export_command(run, tmp_path / step, step, as_json=True)
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == expected
    assert "| `eval/reward/mean` | 3 | 2 " in (tmp_path / "best" / "README.md").read_text()


def test_bfloat16_rounds_the_merged_weights_and_says_what_it_costs(adapter_run: Path, tmp_path: Path, capsys: Captured) -> None:
    for dtype in ("float32", "bfloat16"):
        export_command(adapter_run, tmp_path / dtype, "2", dtype, as_json=True)
        report = json.loads(capsys.readouterr().out)
        assert (report["step"], report["adapter"], report["dtype"]) == (2, True, dtype)
        assert report["checkpoint"].endswith("step_000002") and report["max_delta"] <= 1e-4
    assert 1e-4 < report["rounding_mean_delta"] < 0.03
    wide, narrow = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert set(wide) == set(narrow)
    assert all(torch.equal(narrow[name], wide[name].to(torch.bfloat16)) for name in wide)


def test_full_weights_are_copied(full_run: Path, tmp_path: Path) -> None:
    newest = full_run / "checkpoints" / "step_000004"
    export_command(newest, tmp_path / "out")
    saved, written = load_file(newest / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == set(written) and all(torch.equal(saved[name], written[name]) for name in saved)
    names = {path.name for path in newest.iterdir()} - {"state", "manifest.json"} | {"README.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_a_run_is_exported_by_its_name_with_a_card(full_run: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(full_run, tmp_path / "runs" / "mine")
    (tmp_path / "mine").mkdir()  # a folder that is no run, such as that of `rlgen init mine`
    export_command(Path("mine"), Path("out"), "2", "bfloat16")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# mine\n" in card and "step 2 of 4, weights in bfloat16" in card and "\n| 2 to 2 |" in card
    assert "| 3 to 3 |" not in card, "what came after the checkpoint"
    assert str(tmp_path) not in card and str(full_run.parent) not in card
    assert "model card: README.md" in capsys.readouterr().out
    shutil.copytree(tmp_path / "runs/mine/checkpoints/step_000004", tmp_path / "alone")
    export_command(Path("alone"), Path("out2"))
    assert "model card: none, since the checkpoint is not in a run" in capsys.readouterr().out
    assert not (tmp_path / "out2" / "README.md").exists()


class Hub:
    """Records its calls; a folder is listed when it is sent."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = error

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        self.calls.append(("create", repo_id, private, exist_ok))
        return f"https://hub.example/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.calls.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir()), commit_message))
        if self.error is not None:
            raise self.error


def test_an_export_is_sent_to_the_hub(full_run: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    taken = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: taken)
    export_command(full_run, tmp_path / "out", push_to_hub="me/mine", as_json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pushed"] == "https://hub.example/me/mine"
    create, upload = taken.calls
    assert create == ("create", "me/mine", True, True) and (*upload[:2], upload[3]) == ("upload", "me/mine", "Step 4, by rlgen")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(upload[2])


def test_what_the_hub_does_not_take_stays(full_run: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    refusing = Hub(ConnectionError("no route to host"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: refusing)
    said = rf"me/mine was not sent: no route to host; log in .* send the written folder: `hf upload me/mine {tmp_path}/out`"
    with pytest.raises(SetupError, match=said):
        export_command(full_run, tmp_path / "out", push_to_hub="me/mine")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(UsageError, match="--push-to-hub: "):
        export_command(full_run, tmp_path / "out2", push_to_hub="a name/with/slashes")
    assert not (tmp_path / "out2").exists() and len(refusing.calls) == 2


OPENED = load.load_model


def other_norm(location: str, *arguments: Any) -> Any:
    """Opens a model; what was exported has another weight then."""
    model = OPENED(location, *arguments)
    if location.endswith(".writing_out"):
        weights.own_tensors(model)["model.norm.weight"][3] += 1e-3
    return model


@pytest.mark.fault(72)
@pytest.mark.parametrize(
    "module, name, other, said",
    [
        (
            weights,
            "merged_weight",
            lambda layer: base_weight(layer).float(),
            "the merged model is not the policy that was trained",
        ),
        (load, "load_model", other_norm, r"different values in model\.norm\.weight"),
        (weights, "base_digest", lambda model: "another", "does not fit the weights of model.path"),
    ],
    ids=["a wrong merge", "a written file that differs", "another base than the trained one"],
)
def test_what_differs_is_not_exported(
    adapter_run: Path, tmp_path: Path, monkeypatch: Patch, module: Any, name: str, other: Any, said: str, proof: Proof
) -> None:
    monkeypatch.setattr(module, name, other)
    with pytest.raises(CheckpointError, match=said) as caught:
        export_command(adapter_run, tmp_path / "out")
    assert caught.value.exit_code == 8 and list(tmp_path.iterdir()) == []
    proof(f"{name} changed: exit 8, nothing written")


@pytest.mark.slow
@pytest.mark.fault(72)
def test_an_interrupted_export_leaves_nothing_that_looks_like_one(adapter_run: Path, tmp_path: Path, proof: Proof) -> None:
    code = f"""
import os, signal
from pathlib import Path
from rlgen import files
files.flush_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
from rlgen.cli.export import export_command
export_command(Path({str(adapter_run)!r}), Path({str(tmp_path / "out")!r}))
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, env={**os.environ})
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".writing_out"]
    (tmp_path / ".writing_out" / "junk").touch()
    export_command(adapter_run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out" / "junk").exists()
    proof("SIGKILL before the rename, exit -9: no folder of that name; the next export sweeps and succeeds")


@pytest.mark.fault(65, 72)
def test_a_damaged_checkpoint_is_not_exported(full_run: Path, tmp_path: Path, proof: Proof) -> None:
    run = Path(shutil.copytree(full_run, tmp_path / "run"))
    flip(run / "checkpoints" / "step_000004" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step_000004: model\.safetensors has other bytes than were written") as caught:
        export_command(run, tmp_path / "out")
    assert caught.value.exit_code == 8 and [path.name for path in tmp_path.iterdir()] == ["run"]
    proof("one bit of the weights flipped: exit 8, nothing written")


def test_what_cannot_be_exported(adapter_run: Path, tmp_path: Path, rlgen: Run) -> None:
    (tmp_path / "taken").mkdir()
    for source, step, out, words in [
        (adapter_run, None, "taken", "exists already"),
        (adapter_run, "3", "out", "has no checkpoint of step 3; there are 2, 4"),
        (adapter_run, "best", "out", r"has no best checkpoint: no evaluation has chosen one \(`eval`, `eval.best`\)"),
        (adapter_run, "first", "out", "--step first: give the number of a step, best or last"),
        (adapter_run / "checkpoints" / "step_000002", "2", "out", "is one checkpoint"),
        (tmp_path, None, "out", "neither a checkpoint nor the directory of a run"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            export_command(source, tmp_path / out, step)
        assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    result = rlgen("export", adapter_run, "--out", tmp_path / "out", "--json")
    assert result.returncode == 0 and json.loads(result.stdout)["step"] == 4 and "Traceback" not in result.stderr
    again = rlgen("export", adapter_run, "--out", tmp_path / "out")
    assert again.returncode == 2 and "exists already" in again.stderr
