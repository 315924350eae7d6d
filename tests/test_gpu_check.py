"""scripts/gpu_check.py on the CPU: its rows run and find values, one that fails or hangs leaves the others alone, and nobody is
misled about what was measured where."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docs
import gpu_check
import pytest
import torch
from conftest import ROOT
from gpu_rows import parity, running, runs, served, update
from gpu_rows.models import LARGE, config_of
from gpu_rows.record import Finding, Place, Row, Value, judged, skipped
from gpu_rows.rows import POLICY, ROWS
from gpu_rows.running import Runner, absent, dependencies, report, table
from gpu_rows.update import Shape, flops, parameters
from helpers.before import before

from rlgen.models import packed_attention
from rlgen.models.policy import Policy
from rlgen.run import state

SCRIPT = ROOT / "scripts" / "gpu_check.py"
CPU = Place(folder="", gpu=False)
# Packages that are not on every machine with torch and transformers.
UNUSUAL = {"pydantic", "msgspec", "datasets", "math_verify", "aiohttp", "pyarrow", "vllm", "trl"}


def check(out: Path, *words: str, path: Path | None = None) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the script as a user does. Returns also what it wrote, by row. `path`: a folder to import from first."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(out), *words]
    found = os.pathsep.join(str(one) for one in (path, os.environ.get("PYTHONPATH")) if one)
    ended = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env={**os.environ, "PYTHONPATH": found})
    return ended, json.loads(out.read_text()) if out.exists() else {}


def values_of(written: dict[str, Any], row: str) -> dict[str, float]:
    """The values of a row, by what they are."""
    (found,) = (one for one in written["rows"] if one["row"] == row)
    return {one["what"]: one["value"] for one in found["values"]}


# --- whole rehearsals ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_rehearsal_of_tier_1(tmp_path: Path) -> None:
    ended, written = check(tmp_path / "found.json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "shows that the rows run, nothing about a GPU" in ended.stdout and ended.stdout.startswith("device: CPU")
    assert [row["row"] for row in written["rows"]] == [row.name for row in ROWS if row.tier == 1]
    for row in written["rows"]:
        assert row["status"] == "ok" and row["values"] and row["seconds"] > 0, row
        assert all(math.isfinite(one["value"]) for one in row["values"]), row
    assert written["rehearsal"] and written["date"] and written["versions"]["torch"] == torch.__version__
    assert 0 < values_of(written, "device")["bfloat16 product"] < 100
    assert 0 < values_of(written, "parity float32")["log-probs: max |Δ| to float64"] < 1e-5
    assert 1e-4 < values_of(written, "parity bfloat16")["log-probs: mean |Δ| to float64"] < 1e-2
    assert values_of(written, "fsdp")["float32: gradient, ‖Δ‖/‖g‖ to the whole policy's"] < 1e-6
    for kind in ("packed", "padded"):
        assert 0 < values_of(written, "update")[f"{kind}: MFU, relative to the measured matrix product"] < 100
    assert len(values_of(written, "memory")) == 9
    assert values_of(written, "learning")["reward of the last 5 steps"] > 0.8


@pytest.mark.slow
def test_rows_whose_packages_are_missing_are_left_out_and_all_others_run(tmp_path: Path) -> None:
    names = ", ".join(map(repr, sorted(UNUSUAL)))
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        f"found, hidden = PathFinder.find_spec, {{{names}}}\n"
        "def find_spec(cls, name, *rest): return None if name.split('.')[0] in hidden else found(name, *rest)\n"
        "PathFinder.find_spec = classmethod(find_spec)\n"
    )
    ended, written = check(tmp_path / "found.json", "--rows", "parity float32,fsdp,update", path=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    missing = "aiohttp, datasets, math-verify, msgspec, pyarrow, pydantic"
    assert f"not installed here, and rows that need them are left out: {missing}" in ended.stdout.splitlines()[1]
    statuses = [(row["row"], row["status"]) for row in written["rows"]]
    assert statuses == [("parity float32", "ok"), ("fsdp", "skipped"), ("update", "skipped")]
    assert written["rows"][2]["sentence"] == "not installed here: pydantic"


@pytest.mark.slow
@pytest.mark.vllm
def test_the_rehearsal_of_rows_with_vllm(tmp_path: Path) -> None:
    ended, written = check(tmp_path / "found.json", "--rows", "vllm tiny float32,checkpoint,sleep,sync,train grpo")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["row"]: row for row in written["rows"]}
    assert [row["status"] for row in rows.values()] == ["ok", "skipped", "skipped", "ok", "ok"]
    assert rows["sleep"]["sentence"] == "the CPU engine cannot sleep"
    assert values_of(written, "vllm tiny float32")["changed weights: max |Δ|"] < 1e-4
    assert values_of(written, "sync")["weights in bfloat16"] > 0
    assert len(rows["train grpo"]["numbers"]["losses"]) == 4


# --- what the numbers are --------------------------------------------------------------------------------------------------


def test_the_large_model_is_qwen3_of_0_6_billion() -> None:
    assert parameters(config_of(Place(folder="", gpu=True))) == 596_049_920
    assert LARGE["vocab_size"] == 151_936 and parameters(config_of(CPU)) < 200_000


def test_the_operations_of_an_update_by_hand() -> None:
    config = config_of(CPU)  # hidden size 64, inner size 128, 2 layers, 2 heads of 32, vocabulary 320
    attention, mlp, norms = 4 * 64 * 64, 3 * 64 * 128, 2 * 64 + 2 * 32
    weights = 2 * (attention + mlp + norms) + 64
    assert parameters(config) == weights + 320 * 64
    shape = Shape(rows=3, length=100)  # of each row 64 tokens are the prompt's
    scores = 3 * (2 * 2 * 32 * 100 * 100 * 2 / 2) * 2  # rows, forward and backward; two products a head, halved; two layers
    assert flops(config, shape, packed=False) == 6 * weights * 300 + 6 * 320 * 64 * (3 * 36) + 3 * scores
    ten, fewer = Shape(rows=16, length=100), 14 * 64  # of 16 prompts in two groups 14 are not computed again
    less = 3 * 14 * (2 * 2 * 32 * 64 * 64 * 2 / 2) * 2
    assert flops(config, ten, packed=False) - flops(config, ten, packed=True) == 6 * weights * fewer + less


def test_a_value_without_a_number_is_out_of_every_bound() -> None:
    assert Value("x", 1.0, "").holds and Value("x", 1.0, "", least=1.0, most=1.0).holds
    assert not Value("x", 1.1, "", most=1.0).holds and not Value("x", 0.9, "", least=1.0).holds
    assert not Value("x", math.nan, "").holds
    wrong = judged([Value("gap", 0.2, "nats", most=1e-4), Value("time", 3.0, "s")], "on 8 tokens")
    assert (wrong.status, wrong.sentence) == ("failed", "gap is 0.2 nats, wanted at most 1.00e-04; on 8 tokens")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_sees_a_device_that_computes_otherwise(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parity.arithmetic(dtype)(CPU).status == "ok"
    calls: list[Any] = []

    def off(model: Any, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:  # float64, the CPU, the device
            with torch.no_grad():  # products in TF32 keep ten bits
                model.model.layers[0].mlp.up_proj.weight.mul_(1 + (2**-3 if dtype == "bfloat16" else 2**-10))

    before(parity, "scored", off, monkeypatch.setattr)
    found = parity.arithmetic(dtype)(CPU)
    assert found.status == "failed" and "gradient" in found.sentence


def test_packed_rows_are_as_near_to_float32_as_padded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parity.packed(CPU)
    bounded = [one.value for one in found.values if one.most]
    assert found.status == "ok" and len(bounded) == 4 and all(0.7 < value < 1.2 for value in bounded)
    assert found.numbers and found.numbers["sliding window"]["layers"] == ["full_attention", "sliding_attention"]
    right, options = packed_attention.flash_backward, packed_attention.Look.options
    monkeypatch.setattr(packed_attention, "flash_backward", lambda *a, **k: [part * 0.9 for part in right(*a, **k)])
    found = parity.packed(CPU)
    assert found.status == "failed" and found.sentence.startswith("full attention: gradient, ‖Δ‖/‖g‖ ÷ that of padded rows is")
    monkeypatch.undo()
    longer = lambda look, like, scale, window: options(look, like, scale, window and window + 1)  # noqa: E731  # a method
    monkeypatch.setattr(packed_attention.Look, "options", longer)
    with pytest.raises(RuntimeError, match="cannot be packed: Qwen3ForCausalLM computes other hidden states"):
        parity.packed(CPU)


def test_shards_are_opened_as_a_run_opens_them_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parity.sharded(Place(folder=str(tmp_path), gpu=False))
    assert found.status == "ok" and found.numbers and found.numbers["bfloat16"]["packed"] == {"whole": True, "sharded": True}
    assert found.values[0].value < 1e-6 and 1e-5 < found.values[3].value < 1e-2
    monkeypatch.setattr(Policy, "pack", lambda policy, prompts: "not today")
    found = parity.sharded(Place(folder=str(tmp_path), gpu=False))
    assert (
        found.status == "failed"
        and "float32: policies whose choice of packed or padded rows differs from a run's is 2" in found.sentence
    )


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.slow
def test_a_run_that_goes_on_is_compared_with_one_that_never_stopped(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lost:
        monkeypatch.setattr(state, "place_optimizer", lambda *_: None)
    found = runs.resume(Place(folder=str(tmp_path), gpu=False))
    assert found.status == ("failed" if lost else "ok")
    assert "resume is not exact here: rollouts/step_000004" in found.sentence if lost else found.values[1].value > 0.1


def test_a_real_checkpoint_is_examined_where_one_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.real(CPU).sentence.startswith("not run: no checkpoint at hand")
    rung = {"name": "same weights", "measured": {"mean_delta": 0.004, "max_delta": 0.2}, "bound": 0.01}
    said = json.dumps({"healthy": True, "rungs": [rung], "seconds": 3.0}, indent=2)
    asked: list[str] = []

    def doctor(command: str, path: Path, *rest: str, environment: dict[str, str]) -> SimpleNamespace:
        asked.append(path.read_text())
        return SimpleNamespace(stdout=f"a line of vLLM\n{said}", returncode=0)

    monkeypatch.setattr(served, "rlgen", doctor)
    found = served.real(Place(folder=str(tmp_path), gpu=True, model="/models/one"))
    assert [(one.what, one.value, one.bound) for one in found.values] == [
        ("same weights: mean |Δ|", 0.004, "at most 0.01"),
        ("same weights: max |Δ|", 0.2, ""),
    ]
    assert "model: {path: /models/one, dtype: bfloat16}" in asked[0] and '"kind": "colocated"' in asked[0]


def test_memory_sees_an_estimate_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "shape_of", lambda place: Shape(2, 64))
    monkeypatch.setattr(update, "phases_of", lambda *_: {"forward": 1 << 40})
    found = update.memory(CPU)
    assert found.status == "failed" and found.sentence.startswith(
        "activations kept, forward: estimate ÷ the 1024.00 GiB measured is"
    )


# --- how rows run ----------------------------------------------------------------------------------------------------------

PROGRAM = """\
import json, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("began", words["--inside"])
if words["--inside"] == "hangs":
    time.sleep(60)
if words["--inside"] == "dies":
    sys.exit("out of luck")
value = {"what": "speed", "value": 2.0, "unit": "m/s", "least": None, "most": 1.0 if words["--inside"] == "too fast" else None}
status = "failed" if value["most"] else "ok"
open(words["--answer"], "w").write(json.dumps({"status": status, "sentence": "as told", "values": [value]}))
"""


def runner(folder: Path, seconds: float = 60) -> Runner:
    """Starts a program that answers, hangs or dies by the name of its row."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    place = Place(folder=str(folder), gpu=True)
    return Runner(program=program, place=place, logs=folder / "logs", until=time.perf_counter() + seconds)


def row(name: str, limit: int = 30, packages: tuple[str, ...] = ()) -> Row:
    return Row(name=name, tier=1, limit=limit, check=lambda place: skipped("not called here"), packages=packages)


def test_a_row_that_hangs_or_dies_is_a_line_of_the_table_with_its_log(tmp_path: Path) -> None:
    unknown = row("unknown", packages=("torch", "no-such-package"))
    rows = [row("hangs", limit=1), row("dies"), row("too fast"), row("works"), unknown]
    found = [(one, runner(tmp_path).run(one)) for one in rows]
    assert [finding.status for _, finding in found] == ["failed", "failed", "failed", "ok", "skipped"]
    assert found[0][1].sentence == "no answer after 1 s: began hangs"
    assert found[1][1].sentence == "its process ended with 1: out of luck"
    assert found[1][1].log == str(tmp_path / "logs" / "dies.log") and found[1][1].log_end == ("began dies", "out of luck")
    assert found[4][1].sentence == "not installed here: no-such-package"
    lines = table(found).splitlines()
    assert lines[0].startswith("hangs     FAILED") and lines[1].strip() == f"its output: {tmp_path / 'logs' / 'hangs.log'}"
    assert sum("<- out of bounds" in line for line in lines) == 1 and lines[-2].split() == ["speed", "2", "m/s"]
    written = report(found, Place(folder="", gpu=True), "a GPU", "abc")
    assert not written["rehearsal"] and written["rows"][2]["values"][0]["bound"] == "at most 1"


def test_when_the_time_is_over_the_rest_is_left_out(tmp_path: Path) -> None:
    assert runner(tmp_path, seconds=3).run(row("works")).sentence.startswith("the time of all rows together is over")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 3
    printed = capsys.readouterr()
    assert "needs a CUDA device" in printed.err and not printed.out


def test_any_failed_row_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["--rehearse", "--rows", "head,update", "--out", str(out), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    monkeypatch.setattr(running.Runner, "run", lambda self, one: Finding(status="failed" if one.name == "update" else "ok"))
    assert gpu_check.main() == 1 and "update  FAILED" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["commit"] == "abc" and [one["status"] for one in written["rows"]] == ["ok", "failed"]
    monkeypatch.setattr(running.Runner, "run", lambda self, one: skipped("so"))
    assert gpu_check.main() == 0


def test_a_row_that_is_not_there_is_refused() -> None:
    assert [one.name for one in gpu_check.chosen_rows(1, ["update", "head"])] == ["head", "update"]
    with pytest.raises(ValueError, match="there is no row 'heed'; there are device, head, "):
        gpu_check.chosen_rows(1, ["heed"])


def test_tier_1_fits_into_eleven_minutes_and_needs_no_vllm() -> None:
    first = [one for one in ROWS if one.tier == 1]
    assert sum(one.limit for one in first) <= gpu_check.FEW == 660
    assert not any({"vllm", "trl"} & set(one.packages) for one in first)
    assert len({one.name for one in ROWS}) == len(ROWS)
    assert {name for one in first for name in one.packages} <= set(dependencies()) | set(POLICY)
    assert absent(["torch", "pyyaml", "no-such-package"]) == ["no-such-package"]


# --- what is kept ----------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_was_measured_and_never_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "MEASURED", tmp_path)
    assert docs.gpu() == "No GPU has been measured yet.\n"
    good = Finding(status="ok", values=(Value("MFU", 12.345, "%"), Value("gap", 2e-6, "nats", most=1e-4)), seconds=31.4)
    found = [(row("update"), good), (row("fsdp"), skipped("not installed here: peft"))]
    written = report(found, Place(folder="", gpu=True), "Some GPU", "abc")
    (tmp_path / "some.json").write_text(json.dumps(written))
    lines = docs.gpu().splitlines()
    assert lines[0] == f"### Some GPU, {written['date']}" and lines[2].startswith(f"Commit abc; python 3.{sys.version_info[1]}")
    assert lines[6:] == [
        "| update | 31 | MFU | 12.3 % |  |",
        "|  |  | gap | 2.00e-06 nats | at most 1.00e-04 |",
        "| fsdp | 0 | skipped: not installed here: peft |  |  |",
    ]
    (tmp_path / "other.json").write_text(json.dumps({**written, "rehearsal": True}))
    with pytest.raises(ValueError, match="is of a rehearsal on the CPU"):
        docs.gpu()
