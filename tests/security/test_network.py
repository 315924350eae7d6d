"""No telemetry, no connection that the recipe does not name: runs in a namespace with loopback only, and a list of all calls."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from conftest import RECIPE, ROOT, Proof, read_jsonl

from rlgen.files import read_json
from rlgen.models.tiny import build_tiny

# Brings up loopback in a new network namespace, then becomes the command.
ENTER = """
import ctypes, fcntl, os, socket, struct, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
    sys.exit(f"no namespace: {os.strerror(ctypes.get_errno())}")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14s", b"lo", 0x1 | 0x40, b""))  # SIOCSIFFLAGS: up, running
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
# Python runs it at every start, in every process of the run.
WATCH = """
import os, sys
def watch(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        what = args[1] if event in ("socket.connect", "socket.sendto") else args[0]
        with open(os.environ["RLGEN_TEST_CALLS"], "a") as file:
            print(event, repr(what), file=file)
sys.addaudithook(watch)
with open(os.environ["RLGEN_TEST_CALLS"], "a") as file:
    print("watched", os.getpid(), file=file)
"""
COMMIT = "0123456789abcdef" * 2 + "01234567"
INSIDE = ("127.0.0.1", "localhost", "::1", "None", "''", "0.0.0.0")


def namespaces() -> bool:
    return subprocess.run([sys.executable, "-c", ENTER, "-c", ""], capture_output=True).returncode == 0


ENGINES = ["{kind: transformers}", "{kind: colocated}", "{kind: server, launch: true}"]


@pytest.mark.fault(15, 92)
@pytest.mark.skipif(not namespaces(), reason="may not make a network namespace")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_needs_no_network_and_asks_for_none(tmp_path: Path, engine: str, proof: Proof) -> None:
    watch, calls, recipe = tmp_path / "watch", tmp_path / "calls", tmp_path / "recipe.yaml"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    recipe.write_text(RECIPE + f"engine: {engine}\n")
    path = os.pathsep.join([str(watch), str(ROOT)])
    offline = [name for name in os.environ if name.endswith(("OFFLINE", "DO_NOT_TRACK", "NO_USAGE_STATS", "TELEMETRY"))]
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    done = subprocess.run(
        [sys.executable, "-c", ENTER, "-m", "rlgen", "train", str(recipe), "--run-dir", str(tmp_path / "run")],
        env={**environment, "PYTHONPATH": path, "RLGEN_TEST_CALLS": str(calls)},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "run" / "status.json")["state"] == "done" and len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 2
    said = calls.read_text().splitlines()
    watched, made = ([line for line in said if line.startswith("watched ") is it] for it in (True, False))
    assert len(watched) > 1, "the run, and what scores its samples"
    outside = [call for call in made if not any(host in call for host in INSIDE) and "'/" not in call and "b'\\x00" not in call]
    assert outside == []
    proof(f"engine {json.dumps(engine)}: {len(watched)} processes without a network made {len(made)} calls, none to outside")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """What the hub's libraries leave of `org/tiny` and `org/rows`."""
    home, lines = tmp_path / "cache", tmp_path / "lines.jsonl"
    model = home / "hub" / "models--org--tiny"
    shutil.copytree(build_tiny("qwen3"), model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    lines.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "7"}) + "\n" for n in range(4)))
    datasets.load_dataset("json", data_files=str(lines), cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made" / "json").glob("*/*/*/")
    rows = home / "datasets" / "org___rows" / "default" / "0.0.0" / COMMIT[::-1]
    shutil.copytree(made, rows)
    (rows / "json-train.arrow").rename(rows / "rows-train.arrow")
    return home


@pytest.mark.slow
@pytest.mark.fault(25)
@pytest.mark.skipif(not namespaces(), reason="may not make a network namespace")
def test_without_the_hub_a_run_takes_what_is_cached_and_says_so(recipe_file: Path, cache: Path, proof: Proof) -> None:
    settings = ["model.path=org/tiny", "data={source: org/rows, revision: v2, columns: {answer: answer}, max_prompt_tokens: 64}"]
    settings += ["engine={kind: transformers}", "run.steps=1"]
    command = ["-m", "rlgen", "train", recipe_file, "--run-dir", cache / "run", *(w for s in settings for w in ("--set", s))]
    done = subprocess.run(
        [sys.executable, "-c", ENTER, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    model = f"offline: model.path org/tiny is taken from the cache, commit {COMMIT}"
    data = f"offline: data.source org/rows is taken from the cache, commit {COMMIT[::-1]}"
    said = [line for line in done.stdout.splitlines() if line.startswith("offline")]
    assert said == [model, f"{data}; it may differ from data.revision v2"]
    proof(f"one step in a namespace without network; {model}")


def test_the_watch_sees_a_connection(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    code = "import socket\ntry: socket.create_connection(('192.0.2.1', 9), 0.1)\nexcept OSError: pass"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RLGEN_TEST_CALLS": str(tmp_path / "calls")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert "socket.connect ('192.0.2.1', 9)" in (tmp_path / "calls").read_text()
