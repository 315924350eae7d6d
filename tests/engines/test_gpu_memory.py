"""A GPU whose memory others hold: said before vLLM opens. CUDA's numbers are made up here, and so is `nvidia-smi`."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import plan_of
from helpers.engines import server_plan
from helpers.waiting import HANGS
from transformers import PreTrainedConfig

from rlgen.engines import open as opening
from rlgen.engines.launch import ServerPlan, ServerProcess, wait_all_ready
from rlgen.engines.open import build_engine
from rlgen.errors import EngineError, SetupError
from rlgen.models.load import locate
from rlgen.processes import Processes
from rlgen.recipe import Recipe, load_recipe

MIB = 1 << 20
TOTAL = 81920  # MiB
GPU = torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A GPU with so many MiB free, and an nvidia-smi that runs a line of shell."""

    def with_free(free: int, says: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", {GPU: (free * MIB, TOTAL * MIB)}.__getitem__)
        monkeypatch.setattr(torch.cuda, "memory_reserved", {GPU: 7000 * MIB}.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_properties", {GPU: SimpleNamespace(uuid="c0ffee-1")}.__getitem__)
        tool = tmp_path / "nvidia-smi"
        if says is not None:
            tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{says}\n')
            tool.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if says is not None else str(tmp_path))

    return with_free


def opened(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[str]:
    """Opens the colocated engine of a recipe on the GPU, up to vLLM itself."""
    calls: list[str] = []
    monkeypatch.setattr(opening, "ColocatedEngine", lambda plan, wait: calls.append("vLLM"))
    recipe: Recipe = load_recipe(recipe_file, list(overrides)).recipe
    alone = Processes(rank=0, world=1, device=GPU, timeout=0.0, group=None, store=None)
    build_engine(recipe.engine_needs, locate(recipe.model.path), alone, recipe_file.parent, print)
    return calls


@pytest.mark.fault(42)
def test_who_holds_the_memory_is_named_before_vllm_opens(
    gpu: Callable[..., None], recipe_file: Path, monkeypatch: pytest.MonkeyPatch, proof: Callable[[str], None]
) -> None:
    ours = f"{os.getpid()}, 9000, python"
    gpu(20000, f"echo '4711, 51000, /opt/a, b/python'; echo '{ours}'; echo '815, [N/A], Xorg'")
    with pytest.raises(SetupError) as caught:
        opened(recipe_file, monkeypatch)
    said = str(caught.value)
    assert caught.value.exit_code == 3
    assert "engine.gpu_memory_utilization 0.45 needs 36864 MiB of cuda:1, but 20000 of its 81920 MiB are free" in said
    assert "process 4711 (/opt/a, b/python) holds 51000 MiB, process 815 (Xorg) holds [N/A] MiB, this run holds 9000 MiB." in said
    assert f"process {os.getpid()}" not in said, "this run is no stranger"
    assert "lower engine.gpu_memory_utilization to 0.24 at most" in said
    asked = (recipe_file.parent / "asked").read_text()
    assert asked.split()[:2] == ["--id=GPU-c0ffee-1", "--query-compute-apps=pid,used_memory,process_name"]
    proof("a stub of CUDA says that 20000 of 81920 MiB are free, and a made-up nvidia-smi that process 4711 holds 51000")


@pytest.mark.parametrize(
    ("overrides", "free", "fits"),
    [
        ([], 36864, True),  # 0.45 of 81920
        ([], 36863, False),
        (["engine.gpu_memory_utilization=0.2"], 20000, True),
        (["engine.kv_cache_gib=2.0"], 2048, True),  # a cache of a said size needs no share
        (["engine.kv_cache_gib=2.0"], 2047, False),
        (["engine={kind: transformers}"], 0, True),  # asks for no share
    ],
)
def test_what_vllm_would_refuse_is_refused(
    gpu: Callable[..., None], recipe_file: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], free: int, fits: bool
) -> None:
    gpu(free, "true")
    monkeypatch.setattr(opening, "load_model", lambda *_: SimpleNamespace(config=PreTrainedConfig()))
    monkeypatch.setattr(opening, "TransformersEngine", lambda **_: None)
    if fits:
        opened(recipe_file, monkeypatch, *overrides)
        return
    with pytest.raises(SetupError, match="nvidia-smi names no other process, this process has reserved 7000 MiB"):
        opened(recipe_file, monkeypatch, *overrides)


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    ("says", "why"),
    [(None, "No such file or directory: 'nvidia-smi'"), ("exit 9", "exit status 9"), ("exec sleep 60", "timed out after 0.2 s")],
)
def test_an_nvidia_smi_that_does_not_say_changes_no_verdict(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, says: str | None, why: str, proof: Callable[[str], None]
) -> None:
    monkeypatch.setattr(opening, "PATIENCE", 0.2)
    gpu(100, says)
    with pytest.raises(SetupError, match=f"needs 8192 MiB.*nvidia-smi cannot tell which processes.*{re.escape(why)}"):
        opening.require_free(GPU, 0.1, None)
    proof(f"no word from nvidia-smi: {why}")


@pytest.mark.slow
@pytest.mark.fault(41)
def test_a_server_that_finds_no_memory_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Callable[[str], None]
) -> None:
    said = "(EngineCore pid=3) ERROR 11-21 10:00:00 [core.py:12] torch.OutOfMemoryError: CUDA out of memory. Tried to"
    monkeypatch.setattr(ServerPlan, "command", lambda plan: [sys.executable, "-c", f"print({said!r}); exit(1)"])
    plan = server_plan(plan_of("qwen3", max_num_seqs=8, kv_cache_gib=0.1))
    server = ServerProcess(plan, "token", tmp_path / "server.log", HANGS)
    with pytest.raises(EngineError, match=r"ended with exit code 1: torch.OutOfMemoryError: CUDA out of memory") as caught:
        wait_all_ready([server], HANGS)
    server.stop()
    assert re.search(r"; what helps most: --set engine\.kv_cache_gib=0\.05 \(.*engine\.max_num_seqs=4 \(", str(caught.value))
    proof("a log of a server that ended with torch.OutOfMemoryError")
