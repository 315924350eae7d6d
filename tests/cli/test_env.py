"""`rlgen env`: what a bug report needs, and no secret."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

import rlgen
from rlgen.cli.env import driver, env_command

TOKEN = "hf_" + "planted0" * 4


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    env_command(as_json=False)
    return {name: value.strip() for name, _, value in (line.partition("  ") for line in capsys.readouterr().out.splitlines())}


def test_versions_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    env_command(as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["rlgen"] == rlgen.__version__ and facts["python"] == sys.version.split()[0]
    assert (facts["packages"]["torch"], facts["packages"]["transformers"]) == (torch.__version__, transformers.__version__)
    assert facts["processor"] == torch.backends.cpu.get_cpu_capability() and facts["memory_gib"] > 0
    assert len(facts["gpus"]) == torch.cuda.device_count()
    shown = printed(capsys)
    assert shown["rlgen"] == rlgen.__version__ and shown["torch"] == torch.__version__
    assert shown["gpus"] == (", ".join(facts["gpus"]) or "none")


def test_variables_without_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {
        "HF_TOKEN": TOKEN,
        "WANDB_API_KEY": "abc",  # too short for `redacted`
        "HF_ENDPOINT": "https://me:planted1@hub.example",
        "VLLM_LOGGING_LEVEL": f"DEBUG {TOKEN}",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HOME_OF_SOMEBODY": "not of interest",
    }.items():
        monkeypatch.setenv(name, value)
    env_command(as_json=True)
    said = capsys.readouterr().out
    variables = json.loads(said)["variables"]
    assert variables["HF_TOKEN"] == variables["WANDB_API_KEY"] == "[redacted]"
    assert variables["HF_ENDPOINT"] == "https://[redacted]@hub.example"
    assert variables["VLLM_LOGGING_LEVEL"] == "DEBUG [redacted]" and variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "HOME_OF_SOMEBODY" not in variables and "planted" not in said
    shown = printed(capsys)
    assert shown["HF_TOKEN"] == "[redacted]" and shown["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_torch_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    shown = printed(capsys)
    assert shown["torch_error"].startswith("torch cannot be imported: ") and shown["torch"] == torch.__version__
    assert "processor" not in shown


@pytest.mark.parametrize(
    "script, expected",
    [("echo 570.1; echo 570.1", "570.1"), ("exit 9", "not known: .*"), (None, "None")],
    ids=["two GPUs", "a broken driver", "none"],
)
def test_the_driver(script: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.fullmatch(expected, str(driver()))
