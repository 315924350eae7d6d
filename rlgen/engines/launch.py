"""Starts a vLLM server fit for RL, watches it, and leaves nothing of it behind."""

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

import rlgen
from rlgen.engines import guard, vllm_compat
from rlgen.engines.gate import TOKEN_VARIABLE
from rlgen.errors import EngineError
from rlgen.files import open_log
from rlgen.models.shortage import NO_MEMORY

# Of a launch around this process, which would be taken for the server's own: a launch inside a launch.
FOREIGN_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "VLLM_API_KEY",  # a second lock beside ours, with another key
}
FOREIGN_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "DEEPSPEED_", "OMPI_", "PMI_", "VLLM_DP_")
STOP_SECONDS = guard.GRACE + 10.0
# vLLM tries the chat template at each start, and logs that it cannot.
HARMLESS = "ValueError: Tokenizer not available"
LONGEST_PARENT = 50  # a socket's path has at most 107 characters, and vLLM needs 37 of them below our folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """A server that is to be started. Settings as in `ColocatedEngine`."""

    model: str
    revision: str | None
    dtype: str
    fp32_head: bool
    max_model_len: int
    max_num_seqs: int
    kv_cache_gib: float | None
    gpu_memory_utilization: float | None
    tensor_parallel_size: int
    host: str
    port: int  # 0: a free one
    model_impl: str
    quantization: str | None
    enforce_eager: bool | None
    extra: dict[str, Any]  # further arguments of vLLM
    nccl: bool  # weights may come by vLLM's own transfer over NCCL
    devices: str | None  # the GPUs that it sees, as CUDA_VISIBLE_DEVICES; None: those of this process

    @property
    def url(self) -> str:
        """Where it answers from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def arguments(self) -> dict[str, Any]:
        """vLLM's own, as for an engine in this process."""
        return vllm_compat.arguments(
            on_gpu=torch.cuda.is_available(),
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            fp32_head=self.fp32_head,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_gib=self.kv_cache_gib,
            gpu_memory_utilization=self.gpu_memory_utilization,
            tensor_parallel_size=self.tensor_parallel_size,
            model_impl=self.model_impl,
            quantization=self.quantization,
            structured_outputs=False,
            enforce_eager=self.enforce_eager,
            extra=self.extra,
        )

    def command(self) -> list[str]:
        """The command line. Holds no secret: every user of the machine can read it."""
        arguments = self.arguments() | {
            "host": self.host,
            "port": self.port,
            # The route that takes ids and returns ids.
            "enable_scale_out": True,
            # How much of a prompt came from the prefix cache: the sentinel's probe of that cache must know.
            "enable_prompt_tokens_details": True,
            "worker_extension_cls": "rlgen.engines.worker.Worker",
            "middleware": "rlgen.engines.gate.Gate",
            "disable_uvicorn_access_log": True,
            "weight_transfer_config": {"backend": "nccl"} if self.nccl else None,
        }
        return [sys.executable, "-P", "-m", vllm_compat.SERVER_MODULE, *flags(arguments)]

    def environment(self, token: str) -> dict[str, str]:
        """This process's environment without what belongs to a launch around it, and with what the server needs.

        Raises:
            EngineError: the token is empty.
        """
        if not token:
            raise EngineError("a server needs a token; an empty one would leave it open")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN_NAMES | vllm_compat.ENVIRONMENT.keys() and not name.startswith(FOREIGN_PREFIXES)
        }
        # The workers import this rlgen, wherever it lies.
        path = os.pathsep.join([str(Path(rlgen.__file__).parent.parent), *filter(None, [kept.get("PYTHONPATH")])])
        kept |= {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices}
        return {**kept, **vllm_compat.server_environment(torch.cuda.is_available()), "PYTHONPATH": path, TOKEN_VARIABLE: token}


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """{"max_num_seqs": 8, "enforce_eager": True} -> ["--max-num-seqs=8", "--enforce-eager"]."""
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
    """A vLLM server of ours, with all its processes. It ends with this process, however that ends."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", plan: ServerPlan, token: str, log: Path, folder: Path, lock: int
    ) -> None:
        self.plan = plan  # with the port that it has
        self.log = log
        self._process, self._token, self._folder = process, token, folder
        self._lock: int | None = lock  # held as long as the server may live

    @classmethod
    def start(cls, plan: ServerPlan, token: str, log: Path) -> "ServerProcess":
        """Starts it and returns at once. What it prints goes to `log`.

        Raises:
            SetupError: vLLM is not installed.
            EngineError: the token is empty, or nobody can listen there.
        """
        vllm_compat.require_vllm()
        plan = replace(plan, port=claim(plan.host, plan.port))
        environment = plan.environment(token)
        # What vLLM leaves lying about, sockets and rendezvous files, goes into a folder that is removed with it.
        parent = tempfile.gettempdir()
        parent = parent if len(parent) <= LONGEST_PARENT else "/tmp"
        guard.sweep(parent)
        folder = Path(tempfile.mkdtemp(prefix="rlgen-", dir=parent))
        lock = guard.locked(str(folder))
        environment |= {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder)}
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(lock), str(folder), *plan.command()]
        with open_log(log) as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for us to handle
                pass_fds=[lock],
            )
        return cls(process, plan, token, log, folder, lock)

    @property
    def url(self) -> str:
        return self.plan.url

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout: float) -> float:
        """Returns the seconds it took until the server answered.

        Raises:
            EngineError: it died, with the reason from its log, or did not answer within `timeout` seconds.
        """
        began = time.monotonic()
        headers = {"Authorization": f"Bearer {self._token}"}
        # Proxies of the environment are for the world outside.
        with httpx.Client(base_url=self.url, headers=headers, timeout=5.0, trust_env=False) as client:
            while (waited := time.monotonic() - began) < timeout:
                if not self.alive():
                    raise EngineError(f"the vLLM server {self.last_words()}")
                try:
                    if client.get("/health").status_code == 200:
                        return time.monotonic() - began
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
        raise EngineError(f"the vLLM server {self.last_words()}, {waited:.0f} s after its start")

    def last_words(self) -> str:
        """How it ended, the reason that its log gives, and where the log is: "ended with exit code 1: ... (log: ...)"."""
        code = self._process.poll()
        if code is None:
            how = "does not answer"
        elif code == 128 + signal.SIGKILL:
            how = "was killed, as the system does when memory runs out"
        else:
            how = f"ended with exit code {code}"
        said = reason(self.log.read_text(encoding="utf-8", errors="replace"))
        if NO_MEMORY.search(said):
            said += f"; what helps most: {' or '.join(vllm_compat.what_helps(self.plan.arguments()))}"
        return f"{how}: {said} (log: {self.log})"

    def stop(self) -> None:
        """Ends all its processes, in bounded time. Does nothing the second time."""
        family = self.processes()
        if self.alive():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=5)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            guard.sweep(str(self._folder.parent))  # the guard's work, were it not killed

    def processes(self) -> list[psutil.Process]:
        """The server's processes: guard, HTTP server, engine, workers."""
        try:
            head = psutil.Process(self._process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def new_token() -> str:
    """A secret for one server."""
    return secrets.token_urlsafe(32)


def claim(host: str, port: int) -> int:
    """`port`, if it is free, or with 0 a free one. A server whose owner was killed is given the time that it has to end.

    Raises:
        EngineError: it is taken, or this machine has no such address.
    """
    until = time.monotonic() + STOP_SECONDS
    while is_left_behind(port) and time.monotonic() < until:
        time.sleep(guard.POLL)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does: no wait after an earlier server
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise EngineError(f"no server can listen on {host} port {port}: {error}") from error
        found: int = probe.getsockname()[1]
    return found


def is_left_behind(port: int) -> bool:
    """Whether a server of ours listens there whose owner is gone: its guard is about to end it."""
    with contextlib.suppress(psutil.Error):  # a process that is gone, or another user's
        listening = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"}
        for process in [parent for pid in listening if pid for parent in psutil.Process(pid).parents()]:
            words = process.cmdline()
            if guard.__file__ in words and process.ppid() != int(words[words.index(guard.__file__) + 1]):
                return True
    return False


def reason(log: str) -> str:
    """Why a server ended, in a line or two of its log."""
    # "(EngineCore pid=3) ERROR 11-21 10:00:00 [core.py:12] ValueError: ..." -> "ValueError: ..."
    lines = [re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ [-\d]+ [:\d]+ \[[^\]]*\] ?)?", "", line).rstrip() for line in log.splitlines()]
    lines = [line for line in lines if line.strip()]
    unknown = [line.partition("unrecognized arguments: ")[2] for line in lines if "unrecognized arguments: " in line]
    if unknown:
        return f"this vLLM has no argument {unknown[0]}; correct engine.extra, or use another version"
    errors = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception|Interrupt)\b.*:|.*: error: ", line)]
    errors = [line for line in errors if not line.startswith(HARMLESS)]
    # The HTTP server's own end says only that the engine ended.
    causes = [line for line in errors if not re.search(r"See (stack trace|root cause) \(?above", line)] or errors
    return "; ".join(dict.fromkeys(causes[-2:] or lines[-3:])) or "it said nothing"
