"""Starts vLLM servers with the options that rlgen needs, waits until they are ready, and ends all their processes and files."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import rlgen
from rlgen.engines import guard, vllm_compat
from rlgen.engines.gate import PLAN_VARIABLE, TOKEN_VARIABLE
from rlgen.engines.http import PROBE_SECONDS, Server
from rlgen.engines.plan import EnginePlan
from rlgen.errors import EngineError
from rlgen.files import open_log
from rlgen.out_of_memory import NO_MEMORY

# Variables of the launcher of this process, which the server would take for its own.
FOREIGN_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "VLLM_API_KEY",  # a second check beside rlgen's token, with another key
}
FOREIGN_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "DEEPSPEED_", "OMPI_", "PMI_", "VLLM_DP_")
STOP_SECONDS = guard.GRACE + 10.0
# vLLM tries the chat template at each start and logs this error, because rlgen gives it no tokenizer.
HARMLESS = "ValueError: Tokenizer not available"
LONGEST_PARENT = 50  # a socket's path has at most 107 characters, and vLLM needs 37 of them below our folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One server to start: engine settings, address, weight transfer and GPUs."""

    engine: EnginePlan
    host: str
    port: int  # 0: a free one
    nccl: bool  # whether weights can be sent with vLLM's own transfer over NCCL
    devices: str | None  # CUDA_VISIBLE_DEVICES of the server; None: that of this process
    threads: int | None  # OMP_NUM_THREADS of the server; None: that of this process

    @property
    def url(self) -> str:
        """Returns the URL at which this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def command(self) -> list[str]:
        """Returns the command line. It contains no secret: every user of the machine can read it."""
        arguments = vllm_compat.arguments(self.engine) | {
            "host": self.host,
            "port": self.port,
            # Enables the route that takes ids and returns ids.
            "enable_scale_out": True,
            # Reports how many prompt tokens came from the prefix cache, which the sentinel's cache probe checks.
            "enable_prompt_tokens_details": True,
            "worker_extension_cls": "rlgen.engines.worker.Worker",
            "middleware": "rlgen.engines.gate.Gate",
            "disable_uvicorn_access_log": True,
            # With statistics, tokens go to the server's front end after each step: on the CPU that took a third of the time.
            "disable_log_stats": not self.engine.on_gpu,
            "weight_transfer_config": {"backend": "nccl"} if self.nccl else None,
        }
        return [sys.executable, "-P", "-m", vllm_compat.SERVER_MODULE, *flags(arguments)]

    def environment(self, token: str) -> dict[str, str]:
        """Returns this process's environment without the variables of its launcher, with those that the server needs."""
        if not token:
            raise EngineError("a server needs a token; an empty one would leave it open")
        foreign = FOREIGN_NAMES | vllm_compat.ENVIRONMENT.keys()
        kept = {
            name: value for name, value in os.environ.items() if name not in foreign and not name.startswith(FOREIGN_PREFIXES)
        }
        # The workers must import this copy of rlgen.
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(rlgen.__file__).parent.parent), kept.get("PYTHONPATH")]))
        if self.devices is not None:
            kept["CUDA_VISIBLE_DEVICES"] = self.devices
        if self.threads is not None:
            kept["OMP_NUM_THREADS"] = str(self.threads)
        needed = vllm_compat.server_environment(self.engine)
        return {**kept, **needed, TOKEN_VARIABLE: token, PLAN_VARIABLE: self.engine.digest()}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Returns command-line flags: {"max_num_seqs": 8, "enforce_eager": True} -> ["--max-num-seqs=8", "--enforce-eager"]."""
    found: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or value == {}:
            continue
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            found += [flag, *map(str, value)]
        else:
            found.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return found


class ServerProcess:
    """A vLLM server started by rlgen, with all its processes. A guard ends it when this process ends, even if it is killed."""

    def __init__(self, plan: ServerPlan, token: str, log: Path, start_timeout: float, taken: Collection[int] = ()) -> None:
        """Starts the server and returns without waiting for it. Its output goes to `log`.

        Args:
            start_timeout: seconds after which a restarted server must pass its health check.
            taken: ports that other servers will use, although they do not listen yet.

        Raises SetupError if vLLM is not installed, EngineError if the token is empty, or the address or port cannot be used.
        """
        vllm_compat.require_vllm()
        port = claim(plan.host, plan.port)
        while port in taken and plan.port == 0:
            port = claim(plan.host, 0)
        self.plan = replace(plan, port=port)  # with the port that was chosen, never 0
        self.log = log
        self._token, self._start_timeout, self._stopped = token, start_timeout, False
        self._start()

    def _start(self) -> None:
        environment = self.plan.environment(self._token)
        # vLLM leaves sockets and rendezvous files behind; they go into a folder that is removed with the server.
        parent = tempfile.gettempdir()
        parent = parent if len(parent) <= LONGEST_PARENT else "/tmp"
        guard.sweep(parent)
        self._folder = tempfile.mkdtemp(prefix="rlgen-", dir=parent)
        lock = guard.locked(self._folder)
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(lock), self._folder, *self.plan.command()]
        with open_log(self.log) as output:
            self._process = subprocess.Popen(
                command,
                env={**environment, "TMPDIR": self._folder, "VLLM_RPC_BASE_PATH": self._folder},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal must reach only this process
                pass_fds=[lock],
            )
        self._lock: int | None = lock  # held until the server is stopped

    def restart(self) -> None:
        """Ends the server and starts it again at the same host and port. Raises EngineError if it does not start."""
        self._end()
        claim(self.plan.host, self.plan.port)
        self._start()
        try:
            if self._stopped:
                raise EngineError("the server was stopped while it started")
            wait_all_ready([self], self._start_timeout)
        except BaseException:
            self._end()
            raise

    @property
    def url(self) -> str:
        return self.plan.url

    def alive(self) -> bool:
        """Returns whether the server's guard process still runs."""
        return self._process.poll() is None

    def answers(self) -> bool:
        return Server(self.url, self._token, PROBE_SECONDS).health() == 200

    def last_output(self) -> str:
        """Returns how the server ended, the error from its log, and the log's path: "ended with exit code 1: ... (log: ...)"."""
        code = self._process.poll()
        if code is None:
            how = "does not answer"
        elif code == 128 + signal.SIGKILL:
            how = "was killed, as the system does when memory runs out"
        else:
            how = f"ended with exit code {code}"
        said = reason(self.log.read_text(encoding="utf-8", errors="replace"))
        if NO_MEMORY.search(said):
            said += f"; what helps most: {' or '.join(vllm_compat.what_helps(vllm_compat.arguments(self.plan.engine)))}"
        if code not in (None, 128 + signal.SIGKILL) and self.plan.engine.experts and self.plan.engine.on_gpu:
            said += "; if vLLM refuses to return experts, set model.route_replay to false"
        return f"{how}: {said} (log: {self.log})"

    def stop(self) -> None:
        """Ends the server for good, even while another thread restarts it: STOP_SECONDS at most. A second call does nothing."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        """Ends all processes of the server and removes its folder."""
        family = self.processes()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=5)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            guard.sweep(os.path.dirname(self._folder))  # removes the folder if the guard was killed before it could

    def processes(self) -> list[psutil.Process]:
        """Returns the server's processes: guard, HTTP server, engine, workers. Empty if the guard has ended."""
        try:
            head = psutil.Process(self._process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def start_servers(plans: Sequence[ServerPlan], token: str, logs: Sequence[Path], timeout: float) -> list[ServerProcess]:
    """Starts several servers at the same time and returns them when all pass their health check.

    Raises as `ServerProcess` and `wait_all_ready`; all servers are ended then.
    """
    started: list[ServerProcess] = []
    with contextlib.ExitStack() as undo:
        for plan, log in zip(plans, logs, strict=True):
            # A port that was found free is not reserved until its server listens.
            started.append(ServerProcess(plan, token, log, timeout, frozenset(one.plan.port for one in started)))
            undo.callback(started[-1].stop)
        wait_all_ready(started, timeout)
        undo.pop_all()
    return started


def wait_all_ready(servers: Sequence[ServerProcess], timeout: float) -> float:
    """Waits until all servers pass their health check and returns the seconds that took.

    Raises EngineError if a server ended, with the reason from its log, or is not ready within `timeout` seconds.
    """
    began, waiting = time.monotonic(), list(servers)
    while (waited := time.monotonic() - began) < timeout:
        for server in servers:
            if not server.alive():
                raise EngineError(f"the vLLM server {server.last_output()}")
        waiting = [server for server in waiting if not server.answers()]
        if not waiting:
            return time.monotonic() - began
        time.sleep(0.2)
    raise EngineError(f"the vLLM server {waiting[0].last_output()}, {waited:.0f} s after its start")


def new_token() -> str:
    return secrets.token_urlsafe(32)


def claim(host: str, port: int) -> int:
    """Returns `port` if it is free, or a free port if `port` is 0.

    If the server of a killed owner still listens there, waits until its guard has ended it, for STOP_SECONDS at most. Raises
    EngineError if the port is taken, or this machine does not have the address.
    """
    until = time.monotonic() + STOP_SECONDS
    while is_left_behind(port) and time.monotonic() < until:
        time.sleep(guard.POLL)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does, to reuse an earlier server's port at once
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise EngineError(
                f"no server can listen on {host} port {port}: {error}; take another port: engine.port, or `rlgen serve --port N`"
            ) from error
        return int(probe.getsockname()[1])


def is_left_behind(port: int) -> bool:
    """Returns whether rlgen started the server at `port`, and its owner has ended. Its guard will then end it soon."""
    with contextlib.suppress(psutil.Error):  # the process has ended, or belongs to another user
        listening = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"}
        for process in [parent for pid in listening if pid for parent in psutil.Process(pid).parents()]:
            words = process.cmdline()
            if guard.__file__ in words and process.ppid() != int(words[words.index(guard.__file__) + 1]):
                return True
    return False


def reason(log: str) -> str:
    """Returns the reason why a server ended, from one or two lines of its log."""
    # "(EngineCore pid=3) ERROR 11-21 10:00:00 [core.py:12] ValueError: ..." -> "ValueError: ..."
    lines = [re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ [-\d]+ [:\d]+ \[[^\]]*\] ?)?", "", line).rstrip() for line in log.splitlines()]
    lines = [line for line in lines if line.strip()]
    if unknown := re.search(r"unrecognized arguments: (.*)", log):
        return f"this vLLM has no argument {unknown[1]}; correct engine.extra, or use another version"
    found = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception|Interrupt)\b.*:|.*: error: ", line)]
    errors = [line for line in found if not line.startswith(HARMLESS)]
    # The HTTP server's own error only says that the engine ended.
    causes = [line for line in errors if not re.search(r"See (stack trace|root cause) \(?above", line)] or errors
    return "; ".join(dict.fromkeys(causes[-2:] or lines[-3:])) or "its log is empty"
