"""Prints what a bug report needs to know about the machine: `rlgen env`."""

import json
import os
import subprocess
from typing import Any

import psutil

from rlgen.cli.groups import AsJson
from rlgen.cli.output import echo
from rlgen.redact import REDACTED, SECRET_VARIABLE, redacted
from rlgen.run.provenance import hardware, software

# First letters of the variables that change what rlgen, or a library that it uses, does.
VARIABLES = (
    *("RLGEN", "CUDA", "NVIDIA", "NCCL", "GLOO", "TORCH", "PYTORCH", "VLLM", "HF_", "HUGGINGFACE", "TRANSFORMERS", "TOKENIZERS"),
    *("OMP_", "MKL_", "KMP_", "LD_", "PYTHON", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "SLURM", "WANDB", "MLFLOW", "TRACKIO"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
PATIENCE = 10.0  # timeout of nvidia-smi in seconds
GIB = 1 << 30


def env_command(as_json: AsJson = False) -> None:
    """Print what a bug report needs. Versions, machine and environment variables, without secrets."""
    # Where a value cannot be found, the reason stands in its place.
    names = sorted(name for name in os.environ if name.upper().startswith(VARIABLES))
    variables = {name: REDACTED if SECRET_VARIABLE.fullmatch(name) else redacted(os.environ[name]) for name in names}
    facts = {**software(), **machine(), "variables": variables}
    if as_json:
        echo(json.dumps(facts))
        return
    rows = {key: value for key, value in facts.items() if not isinstance(value, dict)} | facts["packages"] | variables
    width = max(map(len, rows))
    for name, value in rows.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        echo(f"{name:<{width}}  {'none' if text in (None, '') else text}")


def machine() -> dict[str, Any]:
    found = {"cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / GIB, 1), "driver": driver()}
    try:
        return found | hardware()
    except (ImportError, OSError) as error:  # OSError: a library that torch links is missing
        return found | {"torch_error": f"torch cannot be imported: {redacted(str(error))}"}


def driver() -> str | None:
    """Returns the version of NVIDIA's driver; None if there is no driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return said.partition("\n")[0].strip() or None
