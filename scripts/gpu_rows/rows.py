"""The rows of `make gpu-check`, in the order in which they run."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from gpu_rows.record import Finding, Place, Row

# Packages that a row needs beside torch. Those of a policy; of the trainer; of a whole run.
POLICY = ("transformers", "accelerate", "peft", "psutil", "safetensors", "tokenizers")
TRAINER = (*POLICY, "pydantic", "pyyaml", "rich")
RUN = (*TRAINER, "aiohttp", "datasets", "msgspec", "pyarrow", "typer")
VLLM = (*RUN, "vllm")


def check(module: str, name: str, *arguments: object) -> Callable[[Place], Finding]:
    """Returns a module's check `name`, or what `name(*arguments)` returns; imports the module when the row runs."""

    def run(place: Place) -> Finding:
        found: Any = getattr(import_module(f"gpu_rows.{module}"), name)
        return found(*arguments)(place) if arguments else found(place)

    return run


# A whole tier 1 takes eleven minutes at most.
ROWS = (
    Row(name="device", tier=1, limit=35, check=check("kernels", "device"), packages=()),
    Row(name="head", tier=1, limit=40, check=check("kernels", "head"), packages=()),
    Row(name="attention", tier=1, limit=35, check=check("kernels", "attention"), packages=("transformers",)),
    Row(name="parity float32", tier=1, limit=70, check=check("parity", "arithmetic", "float32"), packages=POLICY),
    Row(name="parity bfloat16", tier=1, limit=70, check=check("parity", "arithmetic", "bfloat16"), packages=POLICY),
    Row(name="fsdp", tier=1, limit=75, check=check("parity", "sharded"), packages=RUN),
    Row(name="packed", tier=1, limit=40, check=check("parity", "packed"), packages=TRAINER),
    Row(name="update", tier=1, limit=95, check=check("update", "update"), packages=TRAINER),
    Row(name="memory", tier=1, limit=55, check=check("update", "memory"), packages=TRAINER),
    Row(name="learning", tier=1, limit=70, check=check("runs", "learning"), packages=RUN),
    Row(name="resume", tier=1, limit=60, check=check("runs", "resume"), packages=RUN),
    Row(name="vllm tiny float32", tier=2, limit=180, check=check("served", "parity", "tiny:qwen3", "float32"), packages=VLLM),
    Row(name="vllm tiny bfloat16", tier=2, limit=180, check=check("served", "parity", "tiny:qwen3", "bfloat16"), packages=VLLM),
    Row(name="vllm large float32", tier=2, limit=240, check=check("served", "parity", "large", "float32"), packages=VLLM),
    Row(name="vllm large bfloat16", tier=2, limit=240, check=check("served", "parity", "large", "bfloat16"), packages=VLLM),
    Row(name="vllm experts", tier=2, limit=240, check=check("served", "parity", "tiny:qwen3_moe", "bfloat16"), packages=VLLM),
    Row(name="checkpoint", tier=2, limit=300, check=check("served", "real"), packages=VLLM),
    Row(name="smollm2", tier=2, limit=300, check=check("served", "smollm2"), packages=(*VLLM, "math-verify")),
    Row(name="sleep", tier=2, limit=240, check=check("served", "sleep"), packages=VLLM),
    Row(name="sync", tier=2, limit=240, check=check("served", "sync"), packages=VLLM),
    Row(name="server", tier=2, limit=240, check=check("served", "server"), packages=VLLM),
    Row(name="nccl", tier=2, limit=60, check=check("served", "nccl"), packages=VLLM),
    Row(name="train grpo", tier=2, limit=240, check=check("served", "throughput", "grpo"), packages=VLLM),
    Row(name="train rloo", tier=2, limit=240, check=check("served", "throughput", "rloo"), packages=VLLM),
    Row(name="train online_dpo", tier=2, limit=240, check=check("served", "throughput", "online_dpo"), packages=VLLM),
    Row(name="beside TRL", tier=2, limit=300, check=check("served", "beside_trl"), packages=(*VLLM, "trl")),
)
