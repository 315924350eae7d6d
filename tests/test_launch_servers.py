"""The templates with servers, run on this machine by stand-ins of `srun`, `scontrol`, a pod and SkyPilot's node.

What the templates call is recorded: `rlgen serve` and `torchrun` are stand-ins too, but for one slow test that trains.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import RECIPE, ROOT, read_jsonl
from helpers.torchrun import nothing_is_left
from helpers.waiting import HANGS, until
from torch.distributed.run import get_args_parser

from rlgen.cli.app import app
from rlgen.files import read_json
from rlgen.recipe import load_recipe
from rlgen.recipe.engines import ServerEngineRecipe, VllmRecipe

__all__ = ["nothing_is_left"]
FOLDER = ROOT / "scripts" / "launch"
COMMANDS = typer.main.get_command(app)
SEEN = ("RLGEN_SERVER_TOKEN", "CUDA_VISIBLE_DEVICES", "NODE", "SLURM_PROCID")
RECORD = f"""\
#!{sys.executable} -S
import json, os, sys
line = json.dumps([sys.argv[1], sys.argv[2:], {{name: os.environ.get(name) for name in {SEEN}}}])
open(os.environ["RECORD"], "a").write(line + "\\n")
"""
# Starts as many tasks as --ntasks says, and ends with the highest of their exit codes.
SRUN = """\
record srun "$@"
for word; do
    case $word in
    --ntasks=*) tasks=${word#*=} ;;
    --*) ;;
    *) break ;;
    esac
    shift
done
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    wait "$pid"
    ended=$?
    ((code = ended > code ? ended : code))
done
exit "$code"
"""
SCONTROL = 'record scontrol "$@"; [[ $1 == requeue ]] || printf "%s\\n" ${3//,/ }'
# One server dies before it is ready, once; the others serve until the folder of addresses is removed.
SERVE = """\
record rlgen "$@"
while [[ $# -gt 0 ]]; do
    case $1 in --host) host=$2 ;; --port) port=$2 ;; --announce) folder=$2 ;; esac
    shift
done
[[ -z ${CODE:-} ]] || exit "$CODE"
if [[ $port == 8001 ]] && mkdir "$RECORD.died" 2>/dev/null; then exit 6; fi
[[ -n ${folder:-} ]] || exit 0
echo "http://$host:$port" >"$folder/$host-${SLURM_PROCID:-0}:$port"
while [[ -d $folder ]]; do sleep 0.02; done
"""
# Trains when there are two servers and all nodes have met: none ends, and removes the servers, while another waits for them.
TORCHRUN = """\
record torchrun "$@"
until [[ -z ${SERVERS:-} || $(ls "$SERVERS" | wc -l) -eq 2 ]]; do sleep 0.02; done
mkdir -p "$RUN_DIR.met" "$RUN_DIR"
touch "$RUN_DIR.met/$NODE"
until [[ $(ls "$RUN_DIR.met" | wc -l) -ge ${NODES:-1} ]]; do sleep 0.02; done
[[ $NODE -ne 0 ]] || printf '{\\n  "exit_code": 75\\n}\\n' >"$RUN_DIR/status.json"
exit 1
"""


@dataclass(frozen=True)
class Call:
    program: str
    words: list[str]
    seen: dict[str, str | None]

    def option(self, name: str) -> str:
        """The value of "--name=value", or of "--name value"."""
        if joined := [word for word in self.words if word.startswith(f"{name}=")]:
            return joined[-1].partition("=")[2]
        return self.words[self.words.index(name) + 1]


class Machine:
    """Stand-ins on PATH, a folder for runs, and what was called."""

    def __init__(self, folder: Path, programs: Mapping[str, str]) -> None:
        self.folder, self.record = folder, folder / "record"
        (folder / "bin").mkdir()
        for name, text in {
            "record": RECORD,
            **{name: f"#!/usr/bin/env bash\n{text}\n" for name, text in programs.items()},
        }.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE + "engine: {kind: colocated, max_num_seqs: 7}\n")
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "RECORD": str(self.record), "AGAIN": "0.05"}
        for name in ("RLGEN_SERVER_TOKEN", "CUDA_VISIBLE_DEVICES"):
            self.environment.pop(name, None)

    def begin(self, *words: object, **environment: object) -> "subprocess.Popen[str]":
        values = {name: str(value) for name, value in environment.items()}
        how = {"env": self.environment | values, "cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([str(word) for word in words], text=True, **how)  # type: ignore[call-overload,no-any-return]

    def calls(self, program: str) -> list[Call]:
        return [call for call in (Call(*line) for line in read_jsonl(self.record)) if call.program == program]


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    said, _ = process.communicate(timeout=HANGS)
    return process.returncode, said


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, {"srun": SRUN, "scontrol": SCONTROL, "rlgen": SERVE, "torchrun": TORCHRUN})


def check(machine: Machine, url: str, transfer: str, trainers: int, gpus: int) -> None:
    """What holds for every template: rlgen takes the words, both sides have one token, and no command line shows it."""
    servers, nodes = machine.calls("rlgen"), machine.calls("torchrun")
    assert len(nodes) == trainers and sorted(call.option("--node-rank") for call in nodes) == [str(n) for n in range(trainers)]
    (token,) = {call.seen["RLGEN_SERVER_TOKEN"] for call in servers + nodes}
    assert token and not any(token in word for call in read_jsonl(machine.record) for word in call[1])
    for call in servers:
        assert call.words[0] == "serve"
        COMMANDS.commands["serve"].make_context("serve", call.words[1:])  # type: ignore[attr-defined]
    for call in nodes:
        launched = get_args_parser().parse_args(call.words)
        assert int(launched.nnodes) == trainers and launched.training_script_args[0] == "train"
        COMMANDS.commands["train"].make_context("train", launched.training_script_args[1:])  # type: ignore[attr-defined]
    for call in servers:
        engine = engine_of(machine, call)
        assert isinstance(engine, VllmRecipe) and (engine.max_num_seqs, engine.tensor_parallel_size) == (7, gpus), "the recipe's"
    for call in nodes:
        engine = engine_of(machine, call)
        assert isinstance(engine, ServerEngineRecipe) and (engine.url, engine.transfer_dir) == (url, transfer)
        assert engine.token_env == "RLGEN_SERVER_TOKEN" and engine.restarts == 100


def engine_of(machine: Machine, call: Call) -> object:
    chosen = [word for before, word in zip(call.words, call.words[1:], strict=False) if before == "--set"]
    return load_recipe(machine.recipe, chosen).recipe.engine


def check_servers_of_a_node(calls: Sequence[Call]) -> None:
    """Two of them share eight GPUs. The second died once, and was started again."""
    places = [(call.option("--port"), call.seen["CUDA_VISIBLE_DEVICES"]) for call in calls]
    assert sorted(places) == [("8000", "0,1,2,3"), ("8001", "4,5,6,7"), ("8001", "4,5,6,7")]


def slurm(machine: Machine, nodes: str, **more: object) -> "subprocess.Popen[str]":
    job = {"SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": nodes, "SLURM_NNODES": len(nodes.split(","))}
    values = job | {"RECIPE": machine.recipe, "RUN_DIR": machine.folder / "run", "SERVERS_PER_NODE": 2} | more
    return machine.begin("bash", FOLDER / "slurm-servers.sbatch", **values)


def test_slurm_starts_servers_and_trainers(machine: Machine) -> None:
    stale = machine.folder / "run.servers" / "node-0:8000"
    stale.parent.mkdir()
    stale.write_text("http://node-0:8000\n")
    code, said = ended(slurm(machine, "node-1,node-2,node-3", SLURM_GPUS_ON_NODE=8))
    assert code == 75, said
    assert [call.words for call in machine.calls("scontrol")] == [["show", "hostnames", "node-1,node-2,node-3"], ["requeue", "7"]]
    for step in machine.calls("srun"):
        serves = "scripts/launch/serve-node.sh" in step.words
        assert (step.option("--nodes"), step.option("--ntasks")) == (("1", "1") if serves else ("2", "2"))
        assert step.option("--nodelist" if serves else "--exclude") == "node-1" and step.option("--kill-on-bad-exit") == "0"
    assert len(machine.calls("srun")) == 2
    check_servers_of_a_node(machine.calls("rlgen"))
    assert {call.option("--master-addr") for call in machine.calls("torchrun")} == {"node-2"}
    assert {call.option("--host") for call in machine.calls("rlgen")} == {"0.0.0.0"}
    assert {call.option("--announce") for call in machine.calls("rlgen")} == {f"{machine.folder}/run.servers"}
    check(machine, f"file://{machine.folder}/run.servers", f"{machine.folder}/run.weights", trainers=2, gpus=4)
    assert not stale.parent.exists() and (machine.folder / "run.weights").is_dir()


def test_several_nodes_may_serve(machine: Machine) -> None:
    ended(slurm(machine, "a,b,c", SLURM_GPUS_ON_NODE=4, SERVER_NODES=2, SERVERS_PER_NODE=1, SERVER_PORT=8100))
    served, trained = machine.calls("srun")
    if "--exclude=a,b" in served.words:  # they start at the same time
        served, trained = trained, served
    assert (served.option("--nodes"), served.option("--nodelist")) == ("2", "a,b")
    assert (trained.option("--nodes"), trained.option("--exclude")) == ("1", "a,b")
    (trainer,) = machine.calls("torchrun")
    assert trainer.option("--master-addr") == "c" and [call.option("--port") for call in machine.calls("rlgen")] == ["8100"] * 2


def serving(machine: Machine, **more: object) -> "subprocess.Popen[str]":
    (machine.folder / "servers").mkdir()
    values = {"RECIPE": machine.recipe, "SERVERS": machine.folder / "servers", "COUNT": 2, "GPUS": 0, "RLGEN_SERVER_TOKEN": "t"}
    return machine.begin("bash", FOLDER / "serve-node.sh", **values | more)


def test_servers_outlive_a_request_to_stop_until_their_folder_is_removed(machine: Machine) -> None:
    process = serving(machine)
    until(lambda: len(list((machine.folder / "servers").glob("*:800?"))) == 2)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    for file in (machine.folder / "servers").iterdir():
        file.unlink()
    (machine.folder / "servers").rmdir()
    assert ended(process)[0] == 0
    assert {call.seen["CUDA_VISIBLE_DEVICES"] for call in machine.calls("rlgen")} == {None}


@pytest.mark.parametrize("code", [2, 3, 4, 70])
def test_a_server_that_would_fail_again_is_not_started_again(machine: Machine, code: int) -> None:
    ended(serving(machine, CODE=code))
    assert len(machine.calls("rlgen")) == 2


def test_gpus_of_a_node_are_divided_evenly(machine: Machine) -> None:
    assert ended(serving(machine, GPUS=3)) == (2, "serve-node.sh: 2 servers cannot divide 3 GPUs evenly\n")


def test_a_server_takes_of_the_gpus_that_the_scheduler_gave(machine: Machine) -> None:
    ended(serving(machine, GPUS=4, CUDA_VISIBLE_DEVICES="3,5,6,7", CODE=2))
    assert {call.seen["CUDA_VISIBLE_DEVICES"] for call in machine.calls("rlgen")} == {"3,5", "6,7"}


# --- SkyPilot and Kubernetes -----------------------------------------------------------------------------------------------


def test_skypilot_starts_servers_and_trainers(machine: Machine) -> None:
    task = yaml.safe_load((FOLDER / "skypilot-servers.yaml").read_text())
    assert task["secrets"] == {"RLGEN_SERVER_TOKEN": None}, "its value comes from the shell of whoever launches"
    told = task["envs"] | {"RECIPE": machine.recipe, "RUN_DIR": machine.folder / "run", "SERVERS_PER_NODE": 2}
    told |= {"RLGEN_SERVER_TOKEN": "f00d" * 8, "SKYPILOT_NUM_NODES": task["num_nodes"], "SKYPILOT_NUM_GPUS_PER_NODE": 8}
    told |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"}
    nodes = [machine.begin("bash", "-c", task["run"], SKYPILOT_NODE_RANK=rank, **told) for rank in range(task["num_nodes"])]
    codes = [ended(process) for process in nodes]
    assert [code for code, _ in codes] == [0, 75, 1], codes
    check_servers_of_a_node(machine.calls("rlgen"))
    assert {call.option("--host") for call in machine.calls("rlgen")} == {"10.0.0.1"}
    assert {call.option("--master-addr") for call in machine.calls("torchrun")} == {"10.0.0.2"}
    check(machine, f"file://{machine.folder}/run.servers", f"{machine.folder}/run.weights", trainers=2, gpus=4)
    assert not (machine.folder / "run.servers").exists()


SECRETS = {("rlgen-server", "token"): "f00d" * 8}


def pods(machine: Machine, job: Mapping[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    """Runs the container of each pod of a job, with its mounts in the machine's folder."""
    (container,) = job["template"]["spec"]["containers"]

    def here(word: str) -> str:
        return word.replace("/recipe/", f"{machine.folder}/") if word.startswith("/recipe/") else word

    for index in range(job["completions"]):
        values = {}
        for entry in container["env"]:
            source = entry.get("valueFrom", {})
            if secret := source.get("secretKeyRef"):
                values[entry["name"]] = SECRETS[secret["name"], secret["key"]]
            elif "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                values[entry["name"]] = str(index)
            else:
                values[entry["name"]] = here(entry["value"])
        values |= {"RUN_DIR": str(machine.folder / "run")} if "RUN_DIR" in values else {}
        yield machine.begin(*[here(word) for word in container["command"] + container["args"]], **values)


def test_kubernetes_starts_servers_and_trainers(machine: Machine) -> None:
    service, jobset = yaml.safe_load_all((FOLDER / "kubernetes-jobset-servers.yaml").read_text())
    jobs = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    for process in [*pods(machine, jobs["server"]), *pods(machine, jobs["train"])]:
        ended(process)
    check(machine, "dns://rlgen-vllm:8000", "/runs/weights", trainers=2, gpus=8)
    assert [(call.option("--host"), call.option("--port")) for call in machine.calls("rlgen")] == [("0.0.0.0", "8000")] * 2
    # The name in engine.url is that of a service without an address of its own, which finds the servers' pods, and no others.
    assert service["metadata"]["name"] == "rlgen-vllm" and service["spec"]["clusterIP"] == "None"
    labels = {name: job["template"].get("metadata", {}).get("labels") for name, job in jobs.items()}
    assert labels == {"server": service["spec"]["selector"], "train": None}
    (container,) = jobs["server"]["template"]["spec"]["containers"]
    assert service["spec"]["ports"] == [{"port": 8000}] and container["ports"] == [{"containerPort": 8000}]
    assert container["readinessProbe"] == {"tcpSocket": {"port": 8000}}
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["train"], "servers do not end by themselves"
    # A lost server is made anew alone; a wrong recipe fails the job, and with it all.
    fails, ignores = jobs["server"]["podFailurePolicy"]["rules"]
    assert jobs["server"]["backoffLimit"] == 100 and fails["onExitCodes"]["values"] == [2, 3, 4, 70]
    assert ignores == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


# --- real servers and real training -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.vllm
def test_slurm_trains_on_two_real_servers(tmp_path: Path) -> None:
    """One node with two vLLM servers, one with two training processes. `srun` starts these when both servers answer."""
    wait = 'case "$*" in *train-node*) until [[ $(ls "$SERVERS" | wc -l) -eq 2 ]]; do sleep 1; done ;; esac\n'
    machine = Machine(tmp_path, {"srun": wait + SRUN, "scontrol": SCONTROL})
    machine.recipe.write_text(RECIPE)
    ports = {"PORT": free_port(), "SERVER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    code, said = ended(slurm(machine, "node-1,localhost", SLURM_GPUS_ON_NODE=2, **ports))
    run = tmp_path / "run"
    assert code == 0 and read_json(run / "status.json")["state"] == "done", said[-6000:]
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2]
    assert len(re.findall(r"ready after \d+ s at http://127\.0\.0\.1:\d+", said)) == 2
    assert len(re.findall(r"stopping: the file with its address was removed", said)) == 2
    assert not (tmp_path / "run.servers").exists()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
