"""Trackers get what metrics.jsonl and rollouts/ have, and none of their failures reaches the run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RECIPE, Proof, read_jsonl
from helpers.recipes import written
from helpers.runs import Row, Words, write_rows
from helpers.slow import slow_but
from helpers.waiting import HANGS, until
from helpers.wandb_file import read_wandb, rows_of
from typer.testing import CliRunner

from rlgen.cli.app import app
from rlgen.errors import SetupError
from rlgen.recipe.sinks import MlflowSink, TensorboardSink
from rlgen.run.compare import first_difference
from rlgen.run.sinks import open as opening
from rlgen.run.sinks.open import ROOM, Outlet, Sinks, numbers_of
from rlgen.run.sinks.tracker import Opening, Table
from rlgen.run.sinks.worker import LONGEST_TEXT, read_table
from rlgen.setup.attempt import train
from rlgen.setup.reopen import TrainOptions

STEPS = 3
KINDS = ("trackio", "wandb", "tensorboard", "mlflow")
OVERRIDES = ["engine={kind: transformers}", "eval={limit: 4, every: 2}", "checkpoint={every: 1, keep: 9}"]


def sinks_of(folder: Path) -> str:
    mlflow = f"{{kind: mlflow, uri: {folder}/mlruns}}"
    return f"sinks=[{{kind: trackio}}, {{kind: wandb, mode: offline}}, {{kind: tensorboard}}, {mlflow}]"


def trained(folder: Path, *overrides: str, steps: int = STEPS, resume: bool = False) -> Path:
    options = TrainOptions(overrides=[*OVERRIDES, *overrides], run_dir=folder / "run", max_steps=steps, resume=resume)
    return train(written(folder, RECIPE), options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without sinks."""
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with every sink, in two attempts."""
    folder = tmp_path_factory.mktemp("sent")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setattr(opening, "PATIENCE", HANGS)
        patch.setattr(opening, "ANSWER", HANGS)
        trained(folder, sinks_of(folder), steps=2)
        return trained(folder, sinks_of(folder), resume=True)


def numbers(run: Path) -> dict[int, dict[str, float]]:
    """What every tracker must have, by step."""
    found = {record["step"]: numbers_of(record) for record in read_jsonl(run / "metrics.jsonl")}
    assert list(found) == [0, 1, 2, 3] and "eval/reward/mean" in found[0] and "loss" in found[3]
    return found


def tables(run: Path) -> dict[int, Table]:
    found = {step: read_table(run / "rollouts" / f"step_{step:06d}.parquet", 8) for step in range(1, STEPS + 1)}
    return {step: table for step, table in found.items() if table is not None}


@pytest.mark.slow
def test_a_run_with_sinks_is_the_run_without(plain: Path, sent: Path) -> None:
    assert first_difference(plain, sent) is None
    assert sorted(path.name for path in (sent / "sinks").glob("*.json")) == sorted(f"{kind}.json" for kind in KINDS)


@pytest.mark.slow
def test_wandb_has_it(sent: Path) -> None:
    files = sorted((sent / "sinks" / "wandb").glob("offline-run-*/run-*.wandb"))
    records = [read_wandb(file) for file in files]
    runs = [next(one.run for one in part if one.WhichOneof("record_type") == "run") for part in records]
    assert [run.run_id for run in runs] == [json.loads((sent / "sinks" / "wandb.json").read_text())["id"]] * 2
    assert [(run.project, run.display_name) for run in runs] == [("rlgen", "run")] * 2
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["recipe"]["rollout"]["group_size"] == 4 and "packages" in config["provenance"]
    rows = [row for part in records for row in rows_of(part)]
    shown = {row["step"]: row["samples/path"] for row in rows if "samples/path" in row}
    logged = [row for row in rows if "samples/path" not in row]
    metrics = {row["step"]: {k: v for k, v in row.items() if k[0] != "_" and k != "step"} for row in logged}
    assert metrics == numbers(sent)
    written = tables(sent)
    assert shown.keys() == written.keys()
    for step, path in shown.items():
        content = json.loads(next((sent / "sinks" / "wandb").glob(f"offline-run-*/files/{path}")).read_text())
        assert (content["columns"], content["data"]) == (list(written[step].columns), [list(row) for row in written[step].rows])
    ends = [one.exit.exit_code for part in records for one in part if one.WhichOneof("record_type") == "exit"]
    assert ends == [0, 0]


@pytest.mark.slow
def test_trackio_has_it(sent: Path) -> None:
    folder = sent.parent / "trackio"
    script = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as storage
print(json.dumps({"runs": storage.get_run_records("rlgen"), "logs": storage.get_logs("rlgen", "run"),
                  "config": storage.get_run_config("rlgen", "run"), "alerts": storage.get_alerts("rlgen", "run")}, default=str))
"""
    found = json.loads(output_of(script, TRACKIO_DIR=str(folder)))
    assert [run["id"] for run in found["runs"]] == [json.loads((sent / "sinks" / "trackio.json").read_text())["id"]]
    metrics: dict[int, dict[str, Any]] = {}
    for row in found["logs"]:
        metrics.setdefault(row.pop("step"), {}).update(row)
    shown = {step: row.pop("samples")["_value"] for step, row in metrics.items() if "samples" in row}
    assert {step: {k: v for k, v in row.items() if k != "timestamp"} for step, row in metrics.items()} == numbers(sent)
    written = tables(sent)
    assert shown.keys() == written.keys()
    for step, rows in shown.items():
        told = [[row[name] for name in written[step].columns] for row in rows]
        assert [list(map(escaped, row)) for row in written[step].rows] == told
    assert found["config"]["recipe"]["run"]["steps"] in (2, STEPS)
    assert [alert["title"] for alert in found["alerts"]] == ["done", "done"]


def escaped(cell: Any) -> Any:
    return escape(cell, quote=False) if isinstance(cell, str) else cell


def output_of(script: str, **environment: str) -> str:
    """What a script prints in a process of its own: a library may read its settings when it is imported."""
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=HANGS, check=True
    )
    return done.stdout.splitlines()[-1]


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return read.Reload()


def scalars(read: Any) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for tag in read.Tags()["scalars"]:
        for event in read.Scalars(tag):
            assert tag not in found.setdefault(event.step, {}), "twice"
            found[event.step][tag] = event.value
    return found


@pytest.mark.slow
def test_tensorboard_has_it(sent: Path) -> None:
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    read = accumulated(sent / "sinks" / "tensorboard")
    of_32_bits = {step: {key: float(np.float32(value)) for key, value in row.items()} for step, row in numbers(sent).items()}
    assert scalars(read) == of_32_bits
    shown = {event.step: make_ndarray(event.tensor_proto) for event in read.Tensors("samples")}
    written = tables(sent)
    assert shown.keys() == written.keys()
    for step, cells in shown.items():
        texts = [["\n".join(line[4:] for line in cell.decode().split("\n")) for cell in row] for row in cells]
        rows = [["" if cell is None else str(cell) for cell in row] for row in written[step].rows]
        assert texts == [list(written[step].columns), *rows]
    hostile = np.array([[b"    <script>![x](http://evil/y.png)"]], dtype=object)
    assert "<img" not in text_array_to_html(hostile, True) and "<script" not in text_array_to_html(hostile, True)
    assert b"done, exit code 0" in make_ndarray(read.Tensors("state")[-1].tensor_proto)[0][0]


@pytest.mark.slow
def test_mlflow_has_it(sent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(f"{sent.parent}/mlruns")
    experiment = client.get_experiment_by_name("rlgen")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((sent / "sinks" / "mlflow.json").read_text())["id"]
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.tags["rlgen.state"] == "done" and run.data.params["rollout.group_size"] == "4"
    found: dict[int, dict[str, float]] = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            found.setdefault(metric.step, {})[key] = metric.value
    assert found == {step: {k.replace("@", "_"): v for k, v in row.items()} for step, row in numbers(sent).items()}
    for step, table in tables(sent).items():
        file = client.download_artifacts(run.info.run_id, f"samples/step_{step:06d}.json")
        assert json.loads(Path(file).read_text()) == {"columns": list(table.columns), "data": [list(row) for row in table.rows]}


@pytest.mark.fault(80)
@pytest.mark.parametrize("how", slow_but(["raises", "hangs", "killed"], "raises"))
def test_a_tracker_that_breaks_in_mid_run_changes_nothing(
    how: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr(
        opening, "START", opening.START.replace("run_tracker()", f"import breaking; breaking.arm({how!r}); run_tracker()")
    )
    monkeypatch.setattr(opening, "PATIENCE", 2.0 if how == "hangs" else HANGS)
    run = trained(tmp_path, sinks_of(tmp_path))
    assert first_difference(plain, run) is None
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: sink")]
    assert sorted(line.split()[2] for line in said) == sorted(KINDS), said
    expected = {"raises": "RuntimeError: broken by a test", "hangs": "has not sent everything", "killed": "is off"}
    assert all(expected[how] in line and "metrics.jsonl and rollouts/ have everything" in line for line in said), said
    proof(f"each tracker {how} at its third record: one warning each, metrics, rollouts and checkpoints as without")


def sink(folder: Path, say: Callable[[str], None], every: int = 1, samples: int = 0) -> Outlet:
    opening = {"name": "demo", "folder": str(folder), "step": 0, "config": {"recipe": {}, "provenance": {}}}
    asked = {"what": "open", "settings": {"kind": "tensorboard"}, "opening": opening}
    return Outlet(kind="tensorboard", opening=asked, memory=folder / "id.json", say=say, every=every, samples=samples)


def test_a_library_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "START", "import time; time.sleep(1e6)")
    said: list[str] = []
    hanging = sink(tmp_path, said.append)
    hanging.answer = 0.1
    hanging.start()
    until(lambda: hanging.off)
    hanging.wait(HANGS)
    assert len(said) == 1 and "its library has not answered for 0.1 s" in said[0]
    hanging.put({"what": "metrics", "step": 1, "numbers": {}})
    assert not hanging._records


def test_a_full_queue_drops_tables_first_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    waiting = sink(tmp_path, said.append)
    for step in range(1, ROOM // 2 + 1):
        waiting.put({"what": "metrics", "step": step})
        waiting.put({"what": "samples", "step": step})
    assert not said and waiting.dropped == 0
    for step in range(ROOM // 2 + 1, ROOM + 3):
        waiting.put({"what": "metrics", "step": step})
    assert [record["step"] for record in waiting._records] == list(range(3, ROOM + 3))
    assert {record["what"] for record in waiting._records} == {"metrics"}
    assert waiting.dropped == ROOM // 2 + 2 and len(said) == 1 and "is slower than the run" in said[0]


def test_a_killed_run_is_told_to_the_tracker(tmp_path: Path) -> None:
    """The process of a sink ends by itself when the run is gone."""
    order = sink(tmp_path, print).opening
    text = json.dumps({**order, "opening": {**order["opening"], "id": None}}) + "\n"
    command = [sys.executable, "-uP", "-c", opening.START, json.dumps(sys.path)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=HANGS)
    assert json.loads(done.stdout) == {"id": str(tmp_path / "tensorboard")}
    cells = accumulated(tmp_path / "tensorboard").Tensors("state")[0].tensor_proto.string_val
    assert list(cells) == [b"    failed, exit code 70"]


def test_tensorboard_shows_a_step_once_that_was_trained_again(tmp_path: Path) -> None:
    from rlgen.run.sinks.tensorboard import TensorboardTracker

    for step, value in ((0, 1.0), (1, 2.0)):
        told = Opening(name="demo", folder=str(tmp_path), id=None, step=step, config={})
        tracker = TensorboardTracker(TensorboardSink(kind="tensorboard"), told)
        for later in range(step + 1, 4):
            tracker.metrics(later, {"loss": value})
        tracker.end("done", 0)
    assert scalars(accumulated(tmp_path / "tensorboard")) == {1: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 2.0}}


def test_mlflow_takes_every_name_and_goes_on_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from rlgen.run.sinks.mlflow import MlflowTracker

    settings, known = MlflowSink(kind="mlflow", uri=str(tmp_path / "mlruns"), tags={"team": "a"}), None
    for step in (0, 1):
        config = {"recipe": {"run": {"steps": 3 + step}, "rewards": [{"use": "exact_match"}], "tags": []}, "provenance": {}}
        tracker = MlflowTracker(settings, Opening(name="demo", folder=str(tmp_path), id=known, step=step, config=config))
        tracker.metrics(2, {"eval/pass@1": 0.5 + step, "reward/längé!/mean": 1.0})
        tracker.end("stopped" if step == 0 else "failed", 75)
        assert known in (None, tracker.id)
        known = tracker.id
    run = tracker.client.get_run(known)
    assert run.data.params == {"run.steps": "3", "rewards.0.use": "exact_match", "tags": "[]"}
    assert run.data.tags["team"] == "a" and run.info.status == "FAILED"
    assert [metric.value for metric in tracker.client.get_metric_history(known, "eval/pass_1")] == [0.5, 1.5]
    assert "reward/längé_/mean" in run.data.metrics


def test_only_numbers_are_sent() -> None:
    record = {"step": 3, "loss": 0.5, "health/reward": True, "reward/mean": None, "is/weight_max": "inf", "tokens/trained": 7}
    assert numbers_of(record) == {"loss": 0.5, "health/reward": 1, "tokens/trained": 7}


def test_a_table_is_small(tmp_path: Path) -> None:
    rows = [Row(completion="x" * (LONGEST_TEXT + place - 4)) for place in range(10)]
    write_rows(tmp_path, 1, rows, 2, Words())
    table = read_table(tmp_path / "rollouts" / "step_000001.parquet", 5)
    assert table is not None
    columns = "prompt completion finish_reason reward/exact_match reward/length reward advantage"
    assert list(table.columns) == columns.split()
    whole, cut = (["x" * (LONGEST_TEXT - less) for less in (4, 2, 0)], "x" * (LONGEST_TEXT - 1) + "…")
    assert [row[1] for row in table.rows] == [*whole, cut, cut]
    assert read_table(tmp_path / "rollouts" / "step_000002.parquet", 5) is None


def test_what_is_due(tmp_path: Path) -> None:
    waiting = sink(tmp_path, print, every=3, samples=4)
    sinks = Sinks(7, [waiting])
    for step in range(8):
        sinks.metrics({"step": step, "loss": 1.0, **({"eval/reward/mean": 0.5} if step == 5 else {})})
        sinks.samples(step, tmp_path)
    found = [(record["what"], record["step"]) for record in waiting._records]
    metrics, samples = ([step for what, step in found if what == kind] for kind in ("metrics", "samples"))
    assert (metrics, samples) == ([0, 3, 5, 6, 7], [0, 3, 6, 7])


def test_a_library_that_is_missing(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    words = [str(recipe_file), "--set", "sinks=[{kind: wandb}, {kind: mlflow}]"]
    for command in ("validate", "train"):
        result = CliRunner().invoke(app, [command, *words])
        assert isinstance(result.exception, SetupError) and result.exception.exit_code == 3
        assert '`pip install "rlgen[wandb,mlflow]"`' in str(result.exception)
    assert not (recipe_file.parent / "runs").exists()
