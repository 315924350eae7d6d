"""Runs on real Ray nodes, all on this machine: as one process trains, and as if no node had been lost."""

import contextlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import read_jsonl
from helpers.spread import SPREAD
from helpers.torchrun import ENVIRONMENT, farthest, nothing_is_left, same_rollouts, weights
from helpers.waiting import HANGS, until

from rlgen.cluster.driver import RAY_THREAD, Attempts, Command, WithoutRay
from rlgen.files import read_json
from rlgen.recipe import load_recipe
from rlgen.recipe.engines import ServerEngineRecipe
from rlgen.run.compare import first_difference
from rlgen.run.signals import StopRequest

__all__ = ["nothing_is_left"]
# Steps of a second, so that what is to happen within one does.
SLOWLY = "import time\n\ndef spread(completion_ids):\n    time.sleep(0.1)\n    return sum(completion_ids) % 97 / 97\n"
RECIPE = """\
run: {name: run, steps: 4}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "spread.py:spread"}]
rollout: {prompts_per_step: 4, group_size: 4, max_completion_tokens: 12, temperature: 0.9}
optim: {learning_rate: 1.0e-4}
checkpoint: {every: 1, keep: 9}
"""


class Nodes:
    """A Ray cluster of a head without cores, and of nodes that can be added and killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        self.cores: dict[int, int] = {}  # by the pid of a node's raylet

    def add(self, cores: int = 1) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=cores, object_store_memory=80 << 20))
        self.cores[raylet(self.nodes[-1])] = cores

    def running(self, command: str) -> list[Any]:
        """The nodes on which `rlgen COMMAND` runs."""
        return [node for node in self.nodes if any(command in line for line in lines_below(raylet(node)))]

    def kill(self, node: Any) -> None:
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def lines_below(pid: int) -> Iterator[str]:
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield " ".join(process.cmdline())


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    made.add()
    made.add()
    yield made
    made.cluster.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


def filled(folder: Path, reward: str = SPREAD) -> Path:
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "spread.py").write_text(reward)
    return folder


def begin(nodes: Nodes | None, folder: Path, *words: str, name: str = "run") -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rlgen", "train", "recipe.yaml", "--set", f"run.name={name}", *words]
    where = {"RAY_ADDRESS": nodes.cluster.address} if nodes else {}
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT | where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def train(nodes: Nodes | None, folder: Path, *words: str, name: str = "run", code: int = 0) -> str:
    begun = begin(nodes, folder, *words, name=name)
    said, _ = begun.communicate(timeout=HANGS)
    assert begun.returncode == code, said[-6000:]
    return said


TRANSFORMERS = ("--set", "engine={kind: transformers}")
ON_TWO = (*TRANSFORMERS, "--set", "cluster={kind: ray, trainers: 2}")


def test_two_nodes_train_as_one_process_and_survive_the_loss_of_one(nodes: Nodes, folder: Path) -> None:
    train(None, folder, *TRANSFORMERS, name="alone")
    filled(folder, SLOWLY)
    begun = begin(nodes, folder, *ON_TWO)
    run = folder / "runs" / "run"
    until(lambda: (run / "checkpoints" / "step_000001").exists() or begun.poll() is not None)
    node = nodes.running("rlgen train")[0]
    below = psutil.Process(raylet(node)).children(recursive=True)
    assert {process.nice() for process in below if "rlgen train" in " ".join(process.cmdline())} == {psutil.Process().nice()}
    nodes.kill(node)
    nodes.add()  # room for another attempt
    said, _ = begun.communicate(timeout=HANGS)
    assert begun.returncode == 0, said[-6000:]
    assert re.search(r"cluster: rank \d on \S+ is lost; starting again from the newest checkpoint", said)
    assert "2 processes, ddp" in said and "4 of 4 steps" in said and "raylet" not in said
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert farthest(weights(run, 4), weights(folder / "runs" / "alone", 4)) <= 1e-6


def test_nodes_that_cannot_run_it_are_refused(nodes: Nodes, folder: Path) -> None:
    said = train(nodes, folder, *ON_TWO, "--set", "cluster.trainers=9", "--set", "processes.timeout=1", code=9)
    assert "had no room within 1 s" in said and "'CPU': 2.0" in said
    said = train(None, folder, *ON_TWO, "--set", "cluster.address=127.0.0.1:1", code=9)
    assert "no Ray cluster at 127.0.0.1:1; run `ray start --head`" in said
    assert not (folder / "runs" / "run").exists()


def test_what_ray_prints_of_a_lost_node_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    stream = WithoutRay(sys.stdout)
    stream.write("a step\n")
    printed = threading.Thread(target=stream.write, args=("a dump of state\n",), name=RAY_THREAD)
    printed.start()
    printed.join()
    assert capsys.readouterr().out == "a step\n"


def test_settings_of_servers_are_not_repeated_for_the_trainers_that_use_them(folder: Path) -> None:
    path, listing = folder / "recipe.yaml", folder / "sérvers"
    engine = "{kind: server, tensor_parallel_size: 2, max_num_seqs: 4, transfer: nccl, timeout: 9.0}"
    overrides = [f"engine={engine}", "cluster={kind: ray, trainers: 2, servers: 2}"]
    command = Command(recipe=path, overrides=overrides, first=(), again=())
    attempts = Attempts(load_recipe(path, overrides).recipe, command, print, StopRequest(launched=False), listing=listing)
    _, *words = attempts.words()
    served = load_recipe(path, words[1::2]).recipe.engine
    _, *words = attempts.words("cluster=null", attempts.found())
    used = load_recipe(path, words[1::2]).recipe.engine
    assert isinstance(served, ServerEngineRecipe) and isinstance(used, ServerEngineRecipe)
    assert (served.tensor_parallel_size, served.max_num_seqs, served.transfer, served.timeout) == (2, 4, "nccl", 9.0)
    assert (used.url, used.tensor_parallel_size, used.transfer, used.timeout) == (listing.as_uri(), 1, "nccl", 9.0)


LONG = ("--set", "run.steps=8")
TRAINERS = (*LONG, *ON_TWO)
SERVED = (*LONG, "--set", "cluster={kind: ray, trainers: 2, servers: 2}")
SERVED += ("--set", "engine={kind: server, max_num_seqs: 16}")
BEGUN = (r"loading torch", r"sentinel: comparing", r"step 1/8", r"step 2/8", r"step 3/8")  # what a run prints, in this order


@pytest.fixture(scope="module")
def undisturbed(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two trainers, one of two trainers and two servers, and one of a single process and its server."""
    folder = filled(tmp_path_factory.mktemp("undisturbed"), SLOWLY)
    nodes.add(2)  # for servers
    train(nodes, folder, *TRAINERS, name="trainers")
    train(nodes, folder, *SERVED, name="servers")
    train(None, folder, *LONG, "--set", "engine={kind: server, launch: true}", name="alone")
    return folder / "runs"


def killed_at(nodes: Nodes, folder: Path, words: Sequence[str], command: str, instant: int) -> tuple[Path, str]:
    """Trains, and kills a node on which `rlgen COMMAND` runs, a random time after the run has printed BEGUN[instant % 5]."""
    chance = random.Random(instant)
    filled(folder, SLOWLY)
    begun = begin(nodes, folder, *words)
    assert begun.stdout is not None
    said = ""
    for line in begun.stdout:
        said += line
        if re.match(BEGUN[instant % len(BEGUN)], line) and "is lost" not in said:
            time.sleep(chance.random())
            on = nodes.running(f"rlgen {command}")
            if not on:
                break  # it has just ended
            lost = chance.choice(on)
            cores = nodes.cores[raylet(lost)]
            nodes.kill(lost)
            nodes.add(cores)
    said += begun.stdout.read()
    assert begun.wait(300) == 0, said[-6000:]
    return folder / "runs" / "run", said


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(10))
def test_a_trainers_node_is_killed(nodes: Nodes, undisturbed: Path, folder: Path, instant: int) -> None:
    run, said = killed_at(nodes, folder, TRAINERS, "train", instant)
    assert "is lost; starting again" in said
    assert first_difference(run, undisturbed / "trainers") is None, said


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(10))
def test_a_servers_node_is_killed(nodes: Nodes, undisturbed: Path, folder: Path, instant: int) -> None:
    run, said = killed_at(nodes, folder, SERVED, "serve", instant)
    assert re.search(r"cluster: server \d on \S+ is lost; starting another", said), said
    assert first_difference(run, undisturbed / "servers") is None, said
    assert same_rollouts(run, undisturbed / "servers") and farthest(weights(run, 8), weights(undisturbed / "servers", 8)) == 0


@pytest.mark.slow
def test_servers_on_nodes_sample_as_one_here(undisturbed: Path) -> None:
    assert same_rollouts(undisturbed / "servers", undisturbed / "alone")
    within = 2e-6  # twice what the run of four steps is held to: rounding adds up, and two processes add in another order
    assert farthest(weights(undisturbed / "servers", 8), weights(undisturbed / "alone", 8)) <= within


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_goes_on_without_a_cluster(nodes: Nodes, folder: Path) -> None:
    begun = begin(nodes, folder, *ON_TWO)
    until((folder / "runs" / "run" / "checkpoints" / "step_000001").exists)
    begun.send_signal(signal.SIGINT)
    said, _ = begun.communicate(timeout=HANGS)
    assert begun.returncode == 75 and "--resume" in said, said[-6000:]
    assert read_json(folder / "runs" / "run" / "status.json")["state"] == "stopped"
    assert "resuming after step" in train(None, folder, *TRANSFORMERS, "--resume")
