"""Trains on a Ray cluster: Ray places, starts and watches the processes of a run; each does what torchrun would have it do.

The caller's process is the driver. It compares the nodes, starts servers and trainers, prints what rank 0 prints, and passes
signals on. When a trainer or its node is lost, it starts all again from the newest checkpoint. When a server is lost, the
trainers go on with the others (`rlgen.engines.fleet`), and the driver starts one in its place, on any node. Trainers find the
servers in a file, which the driver writes anew.
"""

import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rlgen.cluster.member import Member
from rlgen.engines.launch import new_token
from rlgen.errors import EngineError, ProcessError, RlgenError, SetupError, Stopped
from rlgen.files import write_text
from rlgen.recipe import LoadedRecipe, Recipe
from rlgen.recipe.engines import ServerEngineRecipe
from rlgen.recipe.load import effective
from rlgen.run.directory import in_use
from rlgen.run.find import holds_run
from rlgen.run.launch import IN_CLUSTER
from rlgen.run.signals import StopRequest

# Variables of the caller that the run's processes get. They travel as arguments of a call, which Ray does not show.
PASSED_ON = re.compile(r"(RLGEN|HF|HUGGINGFACE|TRANSFORMERS|WANDB|MLFLOW|TRACKIO|VLLM|NCCL|GLOO|OMP|TORCH)_\w+|PYTHONPATH|TERM")
READY = b"ready after"  # what `rlgen serve` prints
KILLED, INTERRUPTED = 128, 130  # exit codes above KILLED are of processes that a signal has ended, but for Ctrl-C
ENDING = 30.0  # seconds for the others to end by themselves when one process of the run has ended
TAIL = 4000  # bytes of its last output that are kept of each process
TICK = 0.2  # seconds
OF_LOSS = (EngineError.exit_code, ProcessError.exit_code)  # with which trainers end that miss a server, or each other
NOTICED = 20.0  # seconds in which Ray notices that a node is gone; its processes often end earlier
LEFT = 120.0  # seconds for the processes of a lost node to end, or for a network file system to give their locks back
CONNECT = 10.0  # seconds for the head of the cluster to answer
NOT_NICE = {"env_vars": {"RAY_worker_niceness": "0"}}  # else Ray gives all other programs of a node the right of way (15)
RAY_THREAD = "ray_listen_error_messages"


@dataclass(slots=True)
class Place:
    """A process of the run on a node."""

    name: str  # "rank 0", "server 1"
    actor: Any
    begin_again: Callable[[], Any]  # returns another actor in its place
    host: str = ""
    url: str = ""  # of a server that is ready
    port: int = 0
    said: bytes = b""  # the end of its output
    code: int | None = None  # its exit code; None: it runs
    gone: bool = False  # its actor has ended, or its node

    @property
    def lost(self) -> bool:
        """Whether something from outside has ended it."""
        return self.gone or (self.code is not None and self.code > KILLED and self.code != INTERRUPTED)

    def words(self) -> str:
        return f"{self.name} on {self.host} " + ("is lost" if self.code is None else f"ended with exit code {self.code}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What `rlgen train` was called with."""

    recipe: Path  # absolute
    overrides: Sequence[str]  # "section.key=value"
    first: Sequence[str]  # its other options
    again: Sequence[str]  # those with which a later attempt goes on


def train_on_cluster(loaded: LoadedRecipe, command: Command, say: Callable[[str], None], stop: StopRequest) -> Path:
    """Trains as `train` does, with the processes on the nodes of the recipe's cluster. Returns the run's folder.

    Raises:
        SetupError: Ray is not installed.
        ProcessError: there is no such cluster, its nodes differ or lack the room, or processes were lost too often.
        EngineError: a server ended before it was ready.
        RlgenError: with the exit code of rank 0, which has printed why; Stopped if the run was asked to stop.
    """
    if find_spec("ray") is None:
        raise SetupError("cluster: Ray is not installed; run `pip install 'rlgen[ray]'` on all nodes")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else its main thread prints, at the end, what its own thread has held back
    import ray

    recipe = loaded.recipe
    assert recipe.cluster is not None
    address = recipe.cluster.address
    address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    with redirect_stdout(WithoutRay(sys.stdout)):
        try:
            if ":" in address:  # Ray itself would try for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECT).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError) as error:
            raise ProcessError(
                f"cluster.address: no Ray cluster at {address}; run `ray start --head` on one machine and"
                " `ray start --address=HOST:6379` on the others, and start the run on one of them"
            ) from error
        try:
            code = Attempts(recipe, command, say, stop).run()
        finally:
            ray.shutdown()
    if code:
        said = f"rank 0 ended with exit code {code}"
        ended = Stopped(said, recipe.run_path) if code == Stopped.exit_code else RlgenError(said)
        ended.exit_code, ended.told = code, True
        raise ended
    return recipe.run_path


class WithoutRay:
    """A stream without what Ray's own thread prints: a dump of state when a node is lost, for which `Attempts` has a sentence."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread().name == RAY_THREAD else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(slots=True)
class Attempts:
    """The attempts of one run: each starts all its processes anew."""

    recipe: Recipe
    command: Command
    say: Callable[[str], None]
    stop: StopRequest
    token: str = field(default_factory=new_token)
    calls: dict[Any, Place] = field(default_factory=dict)  # of `read`, and of `address` of servers that are started again
    servers: Sequence[Place] = ()  # those that are started again when they are lost
    listing: Path = Path()  # the file of the servers' addresses, in the folder that all nodes share
    losses: int = 0
    asked: bool = False  # the trainers have been asked to stop

    @property
    def settings(self) -> Any:
        return self.recipe.cluster

    def run(self) -> int:
        """Returns the exit code of rank 0, of the first attempt in which no trainer was lost."""
        folder = self.recipe.run_path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.listing = folder.absolute() / f".cluster-{secrets.token_hex(4)}"
        self.listing.touch()
        try:
            options = self.command.first
            while (code := self.attempt(options)) is None:
                # A process of a lost attempt, on a node that Ray has lost, may live on for a while.
                until = time.monotonic() + LEFT
                while in_use(self.recipe.run_path) and not self.stop.why and time.monotonic() < until:
                    time.sleep(TICK)
                options = self.command.again if holds_run(self.recipe.run_path) else self.command.first
            return code
        finally:
            self.listing.unlink()

    def attempt(self, options: Sequence[str]) -> int | None:
        """Returns the exit code of rank 0; None if a trainer was lost, and all is to be started again."""
        with self.placed() as (trainers, servers):
            self.compare([*trainers, *servers])
            self.serve(servers)
            self.start(trainers, options)
            self.servers = servers
            self.watch(lambda: any(one.lost or one.code is not None for one in trainers))
            self.servers = ()
            self.watch(lambda: all(one.gone or one.code is not None for one in trainers), seconds=ENDING)
            if any(one.code in OF_LOSS for one in trainers):
                self.watch(lambda: any(one.lost for one in trainers), seconds=NOTICED)
            lost = [one for one in trainers if one.lost]
        if not lost and trainers[0].code is not None:
            return trainers[0].code
        words = " and ".join(one.words() for one in lost or trainers)
        if self.stop.why or self.losses == self.settings.restarts:
            raise ProcessError(
                f"{words}; cluster.restarts is {self.settings.restarts}. To go on from the newest checkpoint, add --resume to"
                " the command"
            )
        self.losses += 1
        self.say(f"cluster: {words}; starting again from the newest checkpoint")
        return None

    @contextmanager
    def placed(self) -> Iterator[tuple[list[Place], list[Place]]]:
        """Reserves room on the nodes for trainers and servers, yields them, and ends all of them."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus = float("GPU" in ray.cluster_resources()) if self.settings.gpus is None else self.settings.gpus
        engine = self.recipe.engine
        size = engine.tensor_parallel_size if isinstance(engine, ServerEngineRecipe) and gpus else 0
        needs = [(f"rank {rank}", gpus) for rank in range(self.settings.trainers)]
        needs += [(f"server {number}", size) for number in range(self.settings.servers)]
        bundles = [{"CPU": self.settings.cpus, **({"GPU": count} if count else {})} for _, count in needs]
        group = placement_group(bundles, strategy="PACK")
        places: list[Place] = []
        try:
            self.await_room(group, bundles)
            for number, (name, count) in enumerate(needs):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
                how = {"num_cpus": self.settings.cpus, "num_gpus": count, "max_concurrency": 4, "scheduling_strategy": where}
                how["runtime_env"] = NOT_NICE
                begin = partial(ray.remote(Member).options(**how).remote)
                places.append(Place(name, begin(), begin))
            yield places[: self.settings.trainers], places[self.settings.trainers :]
        finally:
            self.calls.clear()
            for one in places:
                ray.kill(one.actor)
            remove_placement_group(group)

    def await_room(self, group: Any, bundles: Sequence[Mapping[str, float]]) -> None:
        """Waits for free nodes, for `processes.timeout` at most."""
        import ray

        until, told = time.monotonic() + self.recipe.processes.timeout, False
        while not group.wait(1):
            if not told:
                self.say(f"cluster: waiting for room for {len(bundles)} processes …")
                told = True
            if self.stop.why or time.monotonic() > until:
                raise ProcessError(
                    f"the Ray cluster had no room within {self.recipe.processes.timeout:g} s (processes.timeout): the run needs"
                    f" {list(bundles)}, and there is {countable(ray.cluster_resources())}, of which"
                    f" {countable(ray.available_resources())} is free. Add nodes, or lower cluster.trainers or cluster.servers"
                )

    def compare(self, places: Sequence[Place]) -> None:
        """Checks that all nodes have the same versions and recipe, and see the folder of the run."""
        files = str(self.command.recipe), str(self.listing)
        found = results_of([one.actor.facts.remote(*files) for one in places])
        for one, address in zip(places, results_of([one.actor.address.remote() for one in places]), strict=True):
            one.host, one.port = address
        here = Member().facts(*files)
        for one, there in zip(places, found, strict=True):
            if there["shared"] == "none":
                folder = self.listing.parent
                raise ProcessError(f"node {one.host} does not see {folder}: set run.dir to a folder that all nodes share")
            if differ := [f"{name} is {there[name]} there and {here[name]} here" for name in here if there[name] != here[name]]:
                raise ProcessError(
                    f"node {one.host} differs from this machine: {', '.join(differ)}; make them the same on all nodes"
                )

    def serve(self, servers: Sequence[Place]) -> None:
        """Starts the servers, and waits until all answer."""
        for one in servers:
            self.begin_server(one)
        if servers:
            self.say(f"cluster: starting {len(servers)} vLLM servers …")
            self.watch(lambda: any(one.gone or one.code is not None for one in servers) or all(one.url for one in servers))
        for one in servers:
            if not one.url:
                last = one.said.decode(errors="replace").strip().rpartition("\n")[2]
                raise EngineError(f"{one.words()} before it was ready: {last}")
        self.publish(servers)

    def begin_server(self, one: Place) -> None:
        self.begin(one, ["serve", *self.words(), "--host", one.host, "--port", str(one.port)])

    def publish(self, servers: Sequence[Place]) -> None:
        """Writes the addresses of the servers that are ready, for the trainers to find."""
        write_text(self.listing, "".join(f"{one.url}\n" for one in servers if one.url))

    def revive(self, one: Place) -> None:
        """Starts a server in the place of one that is lost: on another node if its own is gone."""
        if self.losses == self.settings.restarts:
            if one.url:
                self.say(f"cluster: {one.words()}, and cluster.restarts is {self.settings.restarts}: the others go on without it")
                one.url = ""
                self.publish(self.servers)
            return
        self.losses += 1
        self.say(f"cluster: {one.words()}; starting another")
        one.url, one.said, one.code, one.gone = "", b"", None, False
        self.publish(self.servers)
        one.actor = one.begin_again()
        self.calls[one.actor.address.remote()] = one

    def start(self, trainers: Sequence[Place], options: Sequence[str]) -> None:
        ((host, port),) = results_of([trainers[0].actor.address.remote()])
        words = ["train", *self.words("cluster=null", *([self.found()] if self.settings.servers else [])), *options]
        launch = {"WORLD_SIZE": str(len(trainers)), "LOCAL_RANK": "0", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        terminal = tuple(shutil.get_terminal_size()) if sys.stdout.isatty() else None
        for rank, one in enumerate(trainers):
            self.begin(one, words, launch | {"RANK": str(rank)}, None if rank else terminal)
        self.asked = False

    def words(self, *more: str) -> list[str]:
        """Returns the recipe and the settings of each process of the run."""
        settings = (*self.command.overrides, *more)
        return [str(self.command.recipe), *(word for setting in settings for word in ("--set", setting))]

    def found(self) -> str:
        """Returns the override by which trainers find the servers: their engine, without the settings that servers alone have."""
        engine = self.recipe.engine.model_copy(update={"url": self.listing.as_uri()})
        of_trainers = effective(self.recipe.model_copy(update={"engine": engine}))["engine"]
        return f"engine={json.dumps(of_trainers, ensure_ascii=False)}"

    def begin(
        self, one: Place, words: Sequence[str], more: Mapping[str, str] | None = None, terminal: tuple[int, ...] | None = None
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)} | {IN_CLUSTER: "1"}
        if isinstance(self.recipe.engine, ServerEngineRecipe) and self.settings.servers:
            environment[self.recipe.engine.token_env] = self.token
        results_of([one.actor.start.remote(words, os.getcwd(), {**environment, **(more or {})}, terminal)])
        self.calls[one.actor.read.remote()] = one

    def watch(self, done: Callable[[], bool], seconds: float = math.inf) -> None:
        """Passes on what the processes print, and a request to stop, until `done`, all have ended, or the seconds are over."""
        import ray

        until = time.monotonic() + seconds
        while self.calls and not done() and time.monotonic() < until:
            for call in ray.wait(list(self.calls), timeout=TICK)[0]:
                one = self.calls.pop(call)
                try:
                    self.hear(one, ray.get(call))
                except ray.exceptions.RayError:
                    one.gone = True
                except ProcessError as error:  # its node differs
                    self.say(f"cluster: {error}")
                    one.gone = True
            for one in self.servers:
                if one.gone or one.code is not None:
                    self.revive(one)
            if self.stop.why and not self.asked:
                self.asked = True
                for one in self.calls.values():
                    if one.name.startswith("rank"):
                        one.actor.send.remote(signal.SIGTERM)

    def hear(self, one: Place, said: Any) -> None:
        """Takes what a call has returned: output, the exit code after the last of it, or the address of another server."""
        if isinstance(said, int):
            one.code = said
            return
        if isinstance(said[0], str):
            self.compare([one])
            self.begin_server(one)
            return
        show(one.name, *said)
        one.said = (one.said + said[1])[-TAIL:]
        self.calls[one.actor.read.remote()] = one
        if READY in one.said and not one.url and one.name.startswith("server"):
            one.url = f"http://{one.host}:{one.port}"
            self.publish(self.servers)


def results_of(calls: Sequence[Any]) -> list[Any]:
    """Returns what calls of actors return. Raises ProcessError if an actor or its node has ended."""
    import ray

    try:
        return list(ray.get(list(calls)))
    except ray.exceptions.RayError as error:
        raise ProcessError(
            f"a process did not start on its node of the cluster: {str(error).strip().splitlines()[-1]}"
        ) from error


def countable(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources[name] for name in ("CPU", "GPU") if name in resources}


def show(name: str, stream: int, said: bytes) -> None:
    """Prints what rank 0 prints; of others, only what they print of errors, with their name."""
    if name == "rank 0":
        out = sys.stdout if stream == 1 else sys.stderr
        out.buffer.write(said)
        out.flush()
    elif stream == 2:
        for line in said.decode(errors="replace").splitlines():
            sys.stderr.write(f"[{name}] {line}\n")
