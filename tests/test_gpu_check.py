"""scripts/gpu_check.py on the CPU: its rows run, a row that fails or hangs leaves the others alone, and nobody is misled."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from conftest import ROOT
from gpu_check import ROWS, Finding, Place, Row, check_all, run_apart, table

SCRIPT = str(ROOT / "scripts" / "gpu_check.py")


@pytest.mark.slow
def test_the_rehearsal(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--cpu-rehearsal", "--json", str(report)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "shows that the rows run, nothing about a GPU" in ended.stdout
    rows: dict[str, Any] = {row["row"]: row for row in json.loads(report.read_text())["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "device": "ok",
        "parity tiny float32": "ok",
        "sleep": "skipped",
        "memory": "ok",
        "train grpo": "ok",
    }
    assert rows["parity tiny float32"]["numbers"]["measured"]["changed weights"]["max_delta"] < 1e-4
    assert 0.95 < rows["memory"]["numbers"]["whole"]["ratio"] < 1.2
    trained = rows["train grpo"]["numbers"]
    assert len(trained["losses"]) == 2 and trained["generated_per_second"] > 0 and not any(trained["drift"])


@pytest.mark.skipif(gpu_check.has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3 and "needs a CUDA device" in ended.stderr and not ended.stdout


def row(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


@pytest.mark.slow
def test_a_row_that_hangs_or_fails_is_a_row_of_the_table(tmp_path: Path) -> None:
    place = Place(folder=str(tmp_path), gpu=False, vllm=False)
    hung = run_apart(row("parity tiny float32"), place, seconds=0.5)
    assert (hung.status, hung.sentence[:21]) == ("failed", "no answer after 0 s: ")
    broken = run_apart(row("train grpo"), place, seconds=100)  # the model of middle size was never made
    assert broken.status == "failed" and "model.path: there is no folder" in broken.sentence
    late = check_all([row("sleep")], place, limit=1)
    assert late[0][1].status == "skipped" and "are over" in late[0][1].sentence
    shown = table([(row("sleep"), hung), (row("memory"), broken)])
    assert shown.count("FAILED") == 2 and len(shown.splitlines()) == 2


def test_any_failed_row_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--cpu-rehearsal", "--rows", "device", "memory"])
    monkeypatch.setattr(gpu_check, "run_apart", lambda row, *_: Finding("failed" if row.name == "memory" else "ok", "so", {}))
    assert gpu_check.main() == 1 and "memory  FAILED" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "run_apart", lambda *_: Finding("skipped", "so", {}))
    assert gpu_check.main() == 0


def test_without_vllm_the_transformers_engine_stands_in_and_it_is_said(tmp_path: Path) -> None:
    without, having = (Place(folder=str(tmp_path), gpu=True, vllm=vllm) for vllm in (False, True))
    assert without.engine(sleep=True) == {"kind": "transformers"} and "the transformers engine stands in" in without.said()
    assert having.engine(sleep=True) == {"kind": "colocated", "gpu_memory_utilization": 0.3, "sleep": True} and not having.said()
    assert row("sleep").check(without).sentence == "vLLM is not installed"


def test_the_rows_fit_into_their_ten_minutes_if_none_hangs() -> None:
    assert gpu_check.MOST < 600 and len({row.name for row in ROWS}) == len(ROWS)
