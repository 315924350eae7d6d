"""Rows that need vLLM."""

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from gpu_rows.models import config_of, random_model, saved_model
from gpu_rows.record import GIB, Finding, Place, Value, failed, judged, skipped
from gpu_rows.runs import ROOT, last_output, per_second, recipe, rlgen, trained

SHARE = 0.3  # of the GPU's memory, for vLLM
CACHE = 4.0  # GiB for keys and values in rows that are not timed: they may run side by side
NO_MODEL = "not run: no checkpoint at hand; name its folder with --model or RLGEN_REAL_MODEL"
STEPS = 4  # of a training; the first warms up and is not timed
TOKEN = "RLGEN_SERVER_TOKEN"


def engine_of(place: Place, **changes: Any) -> dict[str, Any]:
    """Returns colocated vLLM as a recipe says it."""
    share = {"gpu_memory_utilization": SHARE} if place.gpu and "kv_cache_gib" not in changes else {}
    return {"kind": "colocated", **share, **changes}


def path_of(place: Place, model: str) -> str:
    """Returns a `model.path`; `large` is Qwen3-0.6B with random weights."""
    return str(saved_model(place)) if model == "large" else model


def parity(model: str, dtype: str) -> Callable[[Place], Finding]:
    """`rlgen doctor` on colocated vLLM: both sides at the start, and after changed weights were sent."""

    def check(place: Place) -> Finding:
        return examined(recipe(place, path_of(place, model), engine_of(place, kv_cache_gib=CACHE), DTYPE=dtype), {})

    return check


def real(place: Place) -> Finding:
    """`rlgen doctor` on a real checkpoint in bfloat16: trained weights have outliers that random ones have not."""
    if place.model is None:
        return skipped(NO_MODEL)
    return examined(recipe(place, place.model, engine_of(place, kv_cache_gib=CACHE), DTYPE="bfloat16"), {})


def smollm2(place: Place) -> Finding:
    """The recipe of that name, on a real checkpoint in bfloat16: it learns, and the sentinel stays silent."""
    if place.model is None:
        return skipped(NO_MODEL)
    path = Path(tempfile.mkdtemp(dir=place.folder)) / "smollm2.yaml"
    path.write_text((ROOT / "recipes" / path.name).read_text())
    records = trained(path, f"model.path={place.model}", "model.dtype=bfloat16", f"run.steps={60 if place.gpu else 2}")
    if isinstance(records, Finding):
        return records
    greedy = [record["eval/reward/mean"] for record in records if "eval/reward/mean" in record]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    steps = [record for record in records if record["step"] > 1]
    values = [
        Value("sampled reward of the first 5 steps", fmean(rewards[:5]), ""),
        Value("sampled reward of the last 5 steps", fmean(rewards[-5:]), "", least=0.3 if place.gpu else None),
        Value("greedy, held out, before", greedy[0], ""),
        Value("greedy, held out, after", greedy[-1], "", least=greedy[0] if place.gpu else None),
        Value("steps with an alarm of the sentinel", sum(bool(r["sentinel/drift"]) for r in steps), "", most=0),
        Value("a step", median(record["time/step"] for record in steps), "s"),
    ]
    numbers = {"rewards": rewards, "greedy": greedy, "mean_delta": [record["sampler/delta_mean"] for record in steps]}
    return judged(values, f"{len(steps) + 1} steps of 64 completions of up to 24 tokens", numbers)


def examined(path: Path, environment: dict[str, str]) -> Finding:
    """Runs `rlgen doctor`, whose own bounds decide."""
    ended = rlgen("doctor", path, "--json", environment=environment)
    try:
        report = json.loads(ended.stdout[ended.stdout.index("{\n") :])  # vLLM may print lines before it
    except ValueError:
        return failed(f"rlgen doctor ended with {ended.returncode}: {last_output(ended)}")
    rungs = {rung["name"]: rung for rung in report["rungs"] if rung["measured"]}
    measured = {name: rung["measured"] for name, rung in rungs.items()}
    values = []
    for name in ("same weights", "changed weights"):
        for place, kind in enumerate(measured.get(name, ())):  # the bound is of the first one
            what, value = f"{name}: {kind.removesuffix('_delta')} |Δ|", measured[name][kind]
            values.append(Value(what, value, "nats", most=rungs[name]["bound"] if place == 0 else None))
    if not report["healthy"]:
        return failed(report["rungs"][-1]["sentence"])
    return judged(values, numbers={"measured": measured, "doctor_seconds": report["seconds"]})


@contextmanager
def opened(place: Place, engine: dict[str, Any]) -> Iterator[Any]:
    """Opens trainer and engine on the large model in bfloat16, and yields the probe that compares both."""
    from rlgen.processes import Processes
    from rlgen.recipe import load_recipe
    from rlgen.setup.data import open_data
    from rlgen.setup.probe import probe_of
    from rlgen.setup.trainer_and_engine import open_trainer_and_engine

    path = recipe(place, path_of(place, "large"), engine, DTYPE="bfloat16")
    loaded = load_recipe(path, []).recipe
    with closing(open_trainer_and_engine(open_data(loaded), None, Processes.alone(), Path(place.folder), print)) as both:
        yield probe_of(both)


def gap_of(probe: Any) -> float:
    """Returns the mean |Δ| of 32 tokens a prompt, in nats."""
    from rlgen.types import WHOLE

    return float(probe.trainer.gap(probe.sample(WHOLE, 32), WHOLE).mean_delta)


def sleep(place: Place) -> Finding:
    """Level 2 drops the engine's weights, and a sync brings them back; three times, so that what is lost adds up."""
    if not place.gpu:
        return skipped("the CPU engine cannot sleep")
    from rlgen.sentinel.sync import send_weights

    with opened(place, engine_of(place, sleep=True)) as probe:
        awake = gap_of(probe)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        probe.engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - before
        gaps, lost = [], 0
        for _ in range(3):
            send_weights(probe.engine, probe.policy.model, 0, probe.processes)
            gaps.append(gap_of(probe))
            torch.cuda.empty_cache()
            lost = before - torch.cuda.mem_get_info()[0]
            probe.engine.sleep()
    share = SHARE * torch.cuda.get_device_properties(0).total_memory
    values = [
        Value("freed, of vLLM's share of the memory", 100 * freed / share, "%", least=80),
        Value("mean |Δ| before", awake, "nats"),
        Value("mean |Δ| after three sleeps and syncs", max(gaps), "nats", most=max(3 * awake, 1e-3)),
        Value("memory that these sleeps and syncs have leaked", lost / GIB, "GiB"),
    ]
    return judged(values)


def sync(place: Place) -> Finding:
    """How long it takes to send all weights to vLLM in this process, and that both sides agree after it."""
    from rlgen.sentinel.sync import send_weights

    with opened(place, engine_of(place)) as probe:
        before = gap_of(probe)
        times = []
        for _ in range(4):
            began = time.perf_counter()
            send_weights(probe.engine, probe.policy.model, 0, probe.processes)
            times.append(time.perf_counter() - began)
        after = gap_of(probe)
        size = 2 * sum(parameter.numel() for parameter in probe.policy.parameters())
    seconds = median(times[1:])
    values = [
        Value("a sync", 1e3 * seconds, "ms"),
        Value("weights in bfloat16", size / seconds / 1e9, "GB/s"),
        Value("mean |Δ| before", before, "nats"),
        Value("mean |Δ| after four syncs", after, "nats", most=max(3 * before, 1e-3)),
    ]
    return judged(values, f"{size // 2 / 1e6:.1f} million parameters")


def server(place: Place) -> Finding:
    """A vLLM server on the same device takes weights through files, and agrees."""
    return beside_server(place, {}, {})


def beside_server(place: Place, settings: dict[str, Any], devices: dict[str, str]) -> Finding:
    """Starts `rlgen serve` with the engine's `settings` and the environment `devices`, and examines it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {TOKEN: secrets.token_hex(16)}
    engine = {"kind": "server", "url": [f"http://127.0.0.1:{port}"], "token_env": TOKEN, **settings}
    path = recipe(place, "tiny:qwen3", engine, DTYPE="bfloat16" if place.gpu else "float32")
    log = path.with_name("server.log")
    command = [sys.executable, "-m", "rlgen", "serve", str(path), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment, **devices}, cwd=ROOT)
    try:
        while not listens(port):
            if process.poll() is not None:
                return failed(f"rlgen serve ended with {process.returncode}: {log.read_text()[-300:]}")
            time.sleep(0.5)
        return examined(path, environment)
    finally:  # what it leaves ends with this row's group
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def listens(port: int) -> bool:
    """Returns whether a server takes connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def nccl(place: Place) -> Finding:
    """With two GPUs: weights to a server on the second over NCCL. With one: a group of one process broadcasts packed buckets.

    Two NCCL ranks cannot share a GPU, so with one this shows only that NCCL loads and what packing costs.
    """
    if place.gpu and torch.cuda.device_count() > 1:
        return beside_server(place, {"transfer": "nccl"}, {"CUDA_VISIBLE_DEVICES": "1"})
    from rlgen.engines.nccl import BUCKET_BYTES, bucket_bytes
    from rlgen.engines.transfer import buckets

    if place.gpu:
        torch.cuda.set_device(torch.device(place.device))
    dist.init_process_group("nccl" if place.gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = random_model(config_of(place), place.device).to(torch.bfloat16)
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    began, sent, alike = time.perf_counter(), 0, True
    for bucket in buckets(weights, BUCKET_BYTES):
        whole = bucket_bytes(list(bucket.values()))
        dist.broadcast(whole, src=0)
        sent += whole.nbytes
        parts = whole.split([tensor.nbytes for tensor in bucket.values()])
        pairs = zip(parts, bucket.values(), strict=True)
        alike = alike and all(torch.equal(part.view(one.dtype).view(one.shape), one) for part, one in pairs)
    if place.gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    dist.destroy_process_group()
    values = [
        Value("bytes that arrived unlike", float(not alike), "", most=0),
        Value("packed, broadcast, compared", sent / seconds / 1e9, "GB/s"),
    ]
    return judged(values, f"one device: a group of one process, {sent / GIB:.2f} GiB; two ranks cannot share a GPU")


def throughput(trainer: str) -> Callable[[Place], Finding]:
    """A few steps on vLLM: finite losses, a silent sentinel, and how many tokens a second."""

    def check(place: Place) -> Finding:
        engine = engine_of(place, **({"sleep": True} if place.gpu else {}))
        records = trained(run_recipe(place, engine), f"trainer={{kind: {trainer}}}", f"run.steps={STEPS}")
        if isinstance(records, Finding):
            return records
        timed = records[1:]
        losses = [record["loss"] for record in records]
        wrong = sum(loss is None or not math.isfinite(loss) for loss in losses)
        values = [
            Value("losses that are not finite", wrong, "", most=0),
            Value("steps with an alarm of the sentinel", sum(bool(r["sentinel/drift"]) for r in records), "", most=0),
            Value("a step", median(record["time/step"] for record in timed), "s"),
            Value("generated", per_second(timed, "tokens/generated", "time/generate"), "tokens/s"),
            Value("trained", per_second(timed, "tokens/trained", "time/train"), "tokens/s"),
            Value("sync", median(record["time/sync"] for record in timed), "s"),
        ]
        return judged(values, numbers={"losses": losses, "mean_delta": [r["sampler/delta_mean"] for r in records]})

    return check


def run_recipe(place: Place, engine: dict[str, Any]) -> Path:
    """Returns a recipe of 32 × 8 completions of up to 256 tokens on the large model in bfloat16; of 4 × 8 in a rehearsal."""
    sizes = {"PROMPTS": 32, "TOKENS": 256} if place.gpu else {}
    return recipe(place, path_of(place, "large"), engine, DTYPE="bfloat16", **sizes)


def beside_trl(place: Place) -> Finding:
    """A step of GRPO with rlgen and with TRL, on the same model and completions, with an engine of the same kind."""
    engine = engine_of(place, sleep=True) if place.gpu else {"kind": "transformers"}
    path = run_recipe(place, engine)
    records = trained(path, "trainer={kind: grpo}", f"run.steps={STEPS}")
    if isinstance(records, Finding):
        return records
    seconds = median(record["time/step"] for record in records[1:])
    theirs, lengths = trl_steps(place, path_of(place, "large"), path.with_name("trl"))
    values = [
        Value("a step of rlgen", seconds, "s"),
        Value("a step of TRL", median(theirs[1:]), "s"),
        Value("rlgen's by TRL's", seconds / median(theirs[1:]), "×"),
    ]
    numbers = {
        "rlgen_mean_tokens": [record["completions/mean_tokens"] for record in records],
        "trl_mean_tokens": lengths,
        "trl_seconds": theirs,
    }
    return judged(values, "both with vLLM in the process" if place.gpu else "both with transformers", numbers)


def trl_steps(place: Place, model: str, folder: Path) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step of TRL's GRPO, generation included, and the mean tokens of its completions."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlgen.data.tasks import generate
    from rlgen.recipe.data import SortOptions

    class Clock(TrainerCallback):
        """Notes when each step ends."""

        def __init__(self) -> None:
            self.at = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.at.append(time.perf_counter())

    prompts, tokens = (32, 256) if place.gpu else (4, 16)
    rows = generate("sort", SortOptions(size=STEPS * prompts), 1)
    sampling = {"use_vllm": False, "use_cpu": True}
    if place.gpu:
        sampling = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": SHARE,
            "vllm_enable_sleep_mode": True,
        }
    config = GRPOConfig(
        output_dir=str(folder),
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=STEPS,
        per_device_train_batch_size=prompts,
        gradient_accumulation_steps=8,
        num_generations=8,
        max_completion_length=tokens,
        temperature=0.9,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=True,
        gradient_checkpointing=False,
        **sampling,
    )
    clock = Clock()

    def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=[spread],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]),
        callbacks=[clock],
    )
    clock.at = [time.perf_counter()]
    trainer.train()
    lengths = [record["completions/mean_length"] for record in trainer.state.log_history if "completions/mean_length" in record]
    return [late - early for early, late in zip(clock.at, clock.at[1:], strict=False)], lengths
