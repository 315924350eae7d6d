"""The templates for several nodes: they parse, what they call exists, and the script of a node stops, saves and goes on.

No cluster was at hand: that Slurm, SkyPilot and JobSet do what the templates ask of them is not tested.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import ROOT
from torch.distributed.run import get_args_parser

from rlgen.cli.app import app

FOLDER = ROOT / "scripts" / "launch"
SHELL = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
YAML = sorted(FOLDER.glob("*.yaml"))
NODE = FOLDER / "train-node.sh"
COMMANDS = typer.main.get_command(app)


def words_of(text: str) -> list[str]:
    """Words of a shell line; each variable is a word of its own, "x"."""
    text = re.sub(r"[0-9]*>&?[^ ]*|[&|;]\s*$", "", text)
    return shlex.split(re.sub(r'"?\$\{?[^}"\s]+\}?"?', " x ", text.replace('"${resume[@]}"', "--resume").replace('"$@"', "")))


def containers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield from node.get("containers", []) + node.get("initContainers", [])
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from containers(child)


def calls() -> Iterator[tuple[str, list[str]]]:
    """Every `torchrun` and `rlgen` of the templates, with the file's name."""
    for path in SHELL:
        text = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        for line in text.splitlines():
            for program in ("torchrun", "rlgen"):
                if found := re.search(rf"(?:^|\s){program} [a-z-].*", line):
                    yield path.name, words_of(found[0])
                    break
    for path in YAML:
        for container in containers(list(yaml.safe_load_all(path.read_text()))):
            words = [*container["command"], *container.get("args", [])]
            if words[0] in ("rlgen", "torchrun"):
                yield path.name, words


CALLS = list(calls())


def test_what_is_called_was_found() -> None:
    found = [(name, words[0]) for name, words in CALLS]
    assert found == [("serve-node.sh", "rlgen"), ("train-node.sh", "torchrun"), ("kubernetes-jobset-servers.yaml", "rlgen")]


@pytest.mark.parametrize("name, words", CALLS, ids=[name for name, _ in CALLS])
def test_every_command_and_option_exists(name: str, words: list[str]) -> None:
    words = [word if word != "x" else "1" for word in words]  # some are numbers
    if words[0] == "torchrun":
        launched = get_args_parser().parse_args(words[1:])
        assert launched.module and launched.training_script == "rlgen"
        words = ["rlgen", *launched.training_script_args]
    command = COMMANDS.commands.get(words[1])  # type: ignore[attr-defined]
    assert command is not None
    command.make_context(words[1], words[2:])  # raises on an unknown option


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_scripts_parse(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    if path.suffix == ".sbatch":
        header = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, flags=re.MULTILINE))
        assert {"nodes", "gpus-per-node", "time", "requeue"} <= set(header) and header["ntasks-per-node"] == "1"
        # time to save before the end: more than torchrun's own 30 seconds
        assert header["signal"] == "TERM@300" and 'scontrol requeue "$SLURM_JOB_ID"' in text and "-eq 75" in text


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_manifests_are_consistent(path: Path) -> None:
    *_, manifest = yaml.safe_load_all(path.read_text())
    if path.name.startswith("skypilot"):
        assert "bash scripts/launch/train-node.sh" in manifest["run"] and manifest["num_nodes"] >= 2
        assert manifest["envs"]["RUN_DIR"].startswith(*manifest["volumes"])
        assert subprocess.run(["bash", "-n"], input=manifest["run"], text=True).returncode == 0
        return
    jobs = {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}
    train = jobs["train"]
    pod = train["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(environment["NODES"]) == train["completions"] == train["parallelism"]
    assert int(environment["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert environment["HEAD"] == "{0}-train-0-0.{0}".format(manifest["metadata"]["name"])
    grace = re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", NODE.read_text())
    assert grace and pod["terminationGracePeriodSeconds"] > int(grace[1])
    fatal = train["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert 75 not in fatal and set(fatal) == {2, 3, 4, 5, 7, 70} and pod["restartPolicy"] == "Never"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_secrets_stand_in_no_file() -> None:
    for path in [*SHELL, *YAML]:
        text = path.read_text()
        if "RLGEN_SERVER_TOKEN" in text and path.name != "serve-node.sh":
            assert "openssl rand -hex 32" in text and "trusted networks only" in text
            assert not re.search(r"[0-9a-f]{32}", text)


# --- the script of a node ------------------------------------------------------------------------------------------------


def node(tmp_path: Path, torchrun: str, number: int = 0) -> subprocess.Popen[str]:
    """train-node.sh with a program of our own in the place of torchrun."""
    bin_ = tmp_path / "bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "torchrun").write_text(f"#!/usr/bin/env bash\n{torchrun}\n")
    (bin_ / "torchrun").chmod(0o755)
    values = {"NODES": "2", "NODE": str(number), "HEAD": "localhost", "GPUS": "1", "RECIPE": "r.yaml", "RUN_DIR": str(tmp_path)}
    environment = {**os.environ, **values, "PATH": f"{bin_}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", NODE, "--max-steps", "3"], env=environment, stdout=subprocess.PIPE, text=True)


def status(code: int | None, pid: int = 1) -> str:
    return json.dumps({"state": "stopped", "exit_code": code, "pid": pid}, indent=2)


def writes(tmp_path: Path, code: int | None, pid: int = 1) -> str:
    """A torchrun whose processes end with `code`, and which itself ends with 1."""
    return f"cat > {tmp_path}/status.json <<'END'\n{status(code, pid)}\nEND\nexit 1"


@pytest.mark.parametrize("code", [75, 2, 70])
def test_the_first_node_ends_with_rlgens_code(tmp_path: Path, code: int) -> None:
    assert node(tmp_path, writes(tmp_path, code)).wait(20) == code
    assert node(tmp_path, writes(tmp_path, code, pid=2), number=1).wait(20) == 1


def test_a_code_of_an_earlier_start_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    """Otherwise a run that stops before it writes its status would be queued again for ever."""
    (tmp_path / "status.json").write_text(status(75))
    assert node(tmp_path, "exit 1").wait(20) == 1
    assert node(tmp_path, writes(tmp_path, None)).wait(20) == 1  # killed: it had no time to say why
    assert node(tmp_path, "exit 0").wait(20) == 0


def test_a_run_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    say = 'echo "$@ $TORCH_ELASTIC_SHUTDOWN_TIMEOUT"'
    first = node(tmp_path, say)
    launcher = "--nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr localhost --master-port 29500"
    expected = f"{launcher} -m rlgen train r.yaml --run-dir {tmp_path}"
    assert first.communicate(timeout=20)[0].strip() == f"{expected} --max-steps 3 600"
    (tmp_path / "status.json").write_text(status(4))
    assert node(tmp_path, say).communicate(timeout=20)[0].strip() == f"{expected} --max-steps 3 600", "it had not sampled yet"
    (tmp_path / "provenance.json").write_text("[]")
    assert node(tmp_path, say).communicate(timeout=20)[0].strip() == f"{expected} --resume --max-steps 3 600"


def test_a_stop_is_passed_on_once_and_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    slow = f"trap 'echo term >> {log}' TERM; echo up >> {log}; for i in {{1..20}}; do sleep 0.1; done; echo saved >> {log}"
    process = node(tmp_path, slow)
    while not log.exists():
        time.sleep(0.05)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.wait(20) == 0 and log.read_text().split() == ["up", "term", "saved"]


@pytest.mark.slow
def test_with_the_real_torchrun_it_stops_saves_and_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    """One node, one process: SIGTERM ends it with 75 and a checkpoint, and the same command ends the run."""
    run = tmp_path / "run"
    text = recipe_file.read_text() + "engine: {kind: transformers}\ncheckpoint: {every: 1000}\n"
    recipe_file.write_text(text.replace("steps: 2", "steps: 400"))
    values = {"NODES": "1", "NODE": "0", "HEAD": "127.0.0.1", "GPUS": "1", "RECIPE": str(recipe_file), "RUN_DIR": str(run)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with socket.create_server(("127.0.0.1", 0)) as free:  # two of these tests may run on one machine
        values["PORT"] = str(free.getsockname()[1])
    environment = {**os.environ, **values, "OMP_NUM_THREADS": "1", "PATH": path}
    process = subprocess.Popen(["bash", NODE], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text()):
        assert process.poll() is None and time.monotonic() < until, process.stderr
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    (checkpoint,) = (run / "checkpoints").iterdir()
    done = int(checkpoint.name.removeprefix("step_"))
    assert 1 <= done < 400
    # the recipe said 400 steps: a few more are enough
    again = subprocess.run(
        ["bash", NODE, "--max-steps", str(done + 1)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0 and f"resuming after step {done}" in again.stdout
