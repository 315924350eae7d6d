"""`make gpu-check`: what only a GPU can show, in one table and under ten minutes.

    python scripts/gpu_check.py                       # needs one CUDA device; exit 3 without
    python scripts/gpu_check.py --json report.json    # the numbers too
    python scripts/gpu_check.py --rows parity sleep   # some of the rows
    python scripts/gpu_check.py --cpu-rehearsal       # the same rows on tiny models and the CPU, where they make sense

Each row is a process of its own with a time limit: one that fails or hangs leaves the others alone. Exit 1 if a row failed.
Models are random, made here: no network is needed. Where vLLM is not installed the transformers engine stands in.
"""

import argparse
import importlib.util
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
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlgen.metrics import Metric

ROOT = Path(__file__).parent.parent
MOST = 570  # seconds of all rows together
GIB = 1 << 30
RECIPE = """\
run: {name: check}
model: {path: MODEL, dtype: DTYPE}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards: [{use: "spread.py:spread"}]
rollout: {prompts_per_step: PROMPTS, group_size: 8, max_completion_tokens: TOKENS, temperature: 0.9}
engine: ENGINE
optim: {learning_rate: 1.0e-5}
checkpoint: {every: 1000}
"""
# Never the same for two completions, so that each step has something to learn from.
REWARD = """\
def spread(completion_ids):
    return sum(completion_ids) % 97 / 97
"""
STEPS = 4  # of a training; the first warms up and is not timed
# What an estimate of a step's memory may be, as a multiple of what was measured: rather too much. With gradient checkpointing
# one layer, of which the estimate knows the average alone, weighs more.
LEAST, AT_MOST = 0.85, {"whole": 1.4, "checkpointed": 2.0}


@dataclass(frozen=True)
class Place:
    """Where the rows run."""

    folder: str
    gpu: bool
    vllm: bool

    def recipe(self, model: str, dtype: str, engine: dict[str, Any] | None = None) -> Path:
        """A recipe file for the model "tiny" or "mid"."""
        chosen = self.engine() if engine is None else engine
        large = self.gpu and model == "mid"
        values = {
            "MODEL": "tiny:qwen3" if model == "tiny" else str(Path(self.folder) / "mid"),
            "DTYPE": dtype,
            "PROMPTS": "32" if large else "4",
            "TOKENS": "256" if large else "16",
            "ENGINE": json.dumps(chosen),
        }
        text = RECIPE
        for name, value in values.items():
            text = text.replace(name, value)
        path = Path(tempfile.mkdtemp(dir=self.folder)) / "recipe.yaml"
        path.write_text(text)
        path.with_name("spread.py").write_text(REWARD)
        return path

    def engine(self, **changes: Any) -> dict[str, Any]:
        """Colocated vLLM, or what stands in for it."""
        if not self.vllm:
            return {"kind": "transformers"}
        return {"kind": "colocated", **({"gpu_memory_utilization": 0.3} if self.gpu else {}), **changes}

    def said(self) -> str:
        return "" if self.vllm else "vLLM is not installed, the transformers engine stands in: "


@dataclass(frozen=True)
class Finding:
    """What a row found."""

    status: str  # ok, failed or skipped
    sentence: str
    numbers: dict[str, Any]
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    name: str
    limit: int  # seconds
    check: Callable[[Place], Finding]
    rehearsed: bool  # also in a rehearsal


# --- rows ----------------------------------------------------------------------------------------------------------------


def device(place: Place) -> Finding:
    """Versions, and the model of middle size, which later rows open."""
    import torch
    import transformers

    size = make_mid(Path(place.folder) / "mid", place.gpu)
    numbers: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "mid_parameters": size}
    if place.vllm:
        import vllm

        numbers["vllm"] = vllm.__version__
    if place.gpu:
        properties = torch.cuda.get_device_properties(0)
        numbers |= {"device": properties.name, "gib": round(properties.total_memory / GIB, 1), "cuda": torch.version.cuda}
    else:
        numbers["device"] = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return Finding("ok", ", ".join(f"{name} {value}" for name, value in numbers.items()), numbers)


def make_mid(folder: Path, large: bool) -> int:
    """A random Qwen3 of about 0.25 billion parameters (a rehearsal's is small), whose logits are not flat."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

    from rlgen.models.tiny import byte_tokenizer

    tokenizer = byte_tokenizer()
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(
        **(shape if large else small),
        num_key_value_heads=8 if large else 2,
        head_dim=64 if large else 32,
        vocab_size=32_768 if large else 320,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.06)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def parity(model: str, dtype: str) -> Callable[[Place], Finding]:
    """`rlgen doctor`: the log-probs of engine and trainer, at the start and after changed weights were sent."""

    def check(place: Place) -> Finding:
        return examined(place, place.recipe(model, dtype), {})

    return check


def examined(place: Place, recipe: Path, environment: dict[str, str]) -> Finding:
    ended = rlgen(place, "doctor", recipe, "--json", environment=environment)
    try:
        report = json.loads(ended.stdout)
    except ValueError:
        return Finding("failed", f"rlgen doctor ended with {ended.returncode}: {last_output(ended)}", {})
    rungs = {rung["name"]: rung for rung in report["rungs"]}
    measured = {name: rung["measured"] for name, rung in rungs.items() if rung["measured"]}
    deltas = [
        f"{name} mean {measured[name]['mean_delta']:.1e} max {measured[name]['max_delta']:.1e}"
        for name in ("same weights", "changed weights")
        if name in measured
    ]
    numbers = {"healthy": report["healthy"], "measured": measured, "doctor_seconds": report["seconds"]}
    if not report["healthy"]:
        return Finding("failed", report["rungs"][-1]["sentence"], numbers)
    return Finding("ok", f"{place.said()}|Δ| in nats: {', '.join(deltas)}", numbers)


def sleep(place: Place) -> Finding:
    """Level 2 drops the engine's weights; a sync brings them back."""
    if not place.gpu:
        return Finding("skipped", "the CPU engine cannot sleep", {})
    if not place.vllm:
        return Finding("skipped", "vLLM is not installed", {})
    import torch

    from rlgen.opening.data import open_data
    from rlgen.opening.pair import open_pair
    from rlgen.opening.probe import probe_of
    from rlgen.processes import Processes
    from rlgen.recipe import load_recipe
    from rlgen.sentinel.sync import send_weights

    recipe = load_recipe(place.recipe("mid", "bfloat16", place.engine(sleep=True)), []).recipe
    with closing(open_pair(recipe, open_data(recipe), None, Processes.alone(), Path(place.folder), print)) as pair:
        probe = probe_of(recipe, pair)
        awake = probe.trainer.gap(probe.sample(1.0, 32), 1.0)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        probe.engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - before
        gaps, taken = [], 0
        for _ in range(3):  # memory must come back each time, and nothing may be lost with any
            send_weights(probe.engine, probe.policy.model, 0, probe.processes)
            gaps.append(probe.trainer.gap(probe.sample(1.0, 32), 1.0).mean_delta)
            torch.cuda.empty_cache()
            taken = before - torch.cuda.mem_get_info()[0]
            probe.engine.sleep()
    share = 0.3 * torch.cuda.get_device_properties(0).total_memory
    numbers = {"freed_gib": freed / GIB, "not_given_back_gib": taken / GIB, "mean_delta": gaps, "awake": awake.mean_delta}
    well = freed > 0.8 * share and max(gaps) <= max(3 * awake.mean_delta, 1e-3)
    words = f"{freed / GIB:.1f} GiB freed of a share of {share / GIB:.1f}; mean |Δ| {awake.mean_delta:.1e} before,"
    return Finding("ok" if well else "failed", f"{words} {max(gaps):.1e} after three sleeps and syncs", numbers)


def server(place: Place) -> Finding:
    """A vLLM server on the same GPU takes weights and agrees."""
    if not place.vllm:
        return Finding("skipped", "vLLM is not installed", {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"RLGEN_SERVER_TOKEN": secrets.token_hex(16)}
    url = f"http://127.0.0.1:{port}"
    recipe = place.recipe("tiny", "float32", {"kind": "server", "url": [url], "token_env": "RLGEN_SERVER_TOKEN"})
    log = Path(place.folder) / "server.log"
    with log.open("w") as out:
        command = [sys.executable, "-m", "rlgen", "serve", str(recipe), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment}, cwd=ROOT)
    try:
        while not listens(port):
            if process.poll() is not None:
                return Finding("failed", f"rlgen serve ended with {process.returncode}: {log.read_text()[-300:]}", {})
            time.sleep(0.5)
        return examined(place, recipe, environment)
    finally:  # what it leaves ends with this row's group
        process.terminate()
        process.wait(timeout=30)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def memory(place: Place) -> Finding:
    """The most that a train step of the middle model takes, beside what `rlgen estimate` says of it."""
    import torch

    from rlgen.cli.estimate import plan_of
    from rlgen.models.memory import count, needs, peak, read_config
    from rlgen.opening.policy import build_policy
    from rlgen.recipe import load_recipe
    from rlgen.types import Batch

    where = torch.device("cuda" if place.gpu else "cpu")
    found: dict[str, Any] = {}
    for checkpointing in (False, True):
        recipe = load_recipe(
            place.recipe("mid", "bfloat16"), [f"model.gradient_checkpointing={str(checkpointing).lower()}"]
        ).recipe
        plan = replace(plan_of(recipe, None), engine="elsewhere")
        counts = count(read_config(recipe.model.path, None), plan.rows, plan.length, torch.bfloat16, "sdpa")
        phases = needs(counts, plan)
        for parts in phases.values():
            parts.pop("overhead")  # no tensors
            if not place.gpu:
                parts.pop("optimizer scratch", None)  # the step on the CPU goes tensor by tensor
        policy = build_policy(recipe, recipe.model.path, where)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
        ids = torch.randint(0, 256, (plan.rows, plan.length), device=where)
        batch = Batch(
            rows=tuple(range(plan.rows)),
            input_ids=ids,
            prompt_lengths=torch.ones(plan.rows, dtype=torch.long, device=where),
            completion_ids=ids[:, 1:],
            mask=torch.ones_like(ids[:, 1:], dtype=torch.bool),
            sampler_logp=torch.zeros(ids[:, 1:].shape, device=where),
        )

        def step(policy: Any = policy, batch: Any = batch, optimizer: Any = optimizer) -> None:
            for _ in range(2):  # micro-batches
                policy(batch, (0.9,), "value").logp.sum().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        step()  # moments exist from here on
        most = peak_of(step, place.gpu, held=12 * counts.parameters)
        phase, expected = peak(phases)
        kind = "checkpointed" if checkpointing else "whole"
        found[kind] = {"measured": most, "estimated": expected, "phase": phase, "ratio": expected / most}
        del policy, optimizer, batch, ids
    well = all(LEAST <= one["ratio"] <= AT_MOST[kind] for kind, one in found.items())
    words = [
        f"{kind}: {one['measured'] / GIB:.2f} GiB, estimated {one['estimated'] / GIB:.2f} ({one['phase']}, ×{one['ratio']:.2f})"
        for kind, one in found.items()
    ]
    return Finding("ok" if well else "failed", "; ".join(words), found)


def peak_of(step: Callable[[], None], gpu: bool, held: int) -> int:
    """Most bytes of tensors while `step` runs; on the CPU the allocator's, on top of the `held` ones."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = held
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def training(trainer: str) -> Callable[[Place], Finding]:
    """A few steps: finite losses, a silent sentinel, and how many tokens a second."""

    def check(place: Place) -> Finding:
        engine = place.engine(sleep=True) if place.gpu and place.vllm else {"kind": "transformers"}
        recipe = place.recipe("mid", "bfloat16", engine)
        folder = recipe.parent / "run"
        steps = STEPS if place.gpu else 2
        changes = [f"trainer={{kind: {trainer}}}", f"run.steps={steps}"]
        overrides = [word for change in changes for word in ("--set", change)]
        ended = rlgen(place, "train", recipe, "--run-dir", folder, *overrides)
        if ended.returncode:
            return Finding("failed", f"rlgen train ended with {ended.returncode}: {last_output(ended)}", {})
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        timed = records[1:]
        numbers = {
            "losses": [record[Metric.LOSS] for record in records],
            "drift": [record.get(Metric.SENTINEL_DRIFT) for record in records],
            "mean_delta": [record.get(Metric.SAMPLER_DELTA_MEAN) for record in records],
            "generated_per_second": per_second(timed, Metric.TOKENS_GENERATED, Metric.TIME_GENERATE),
            "trained_per_second": per_second(timed, Metric.TOKENS_TRAINED, Metric.TIME_TRAIN),
            "sync_seconds": [record[Metric.TIME_SYNC] for record in records],
        }
        finite = all(loss is not None and math.isfinite(loss) for loss in numbers["losses"])
        well = finite and len(records) == steps and not any(numbers["drift"])
        words = (
            f"{len(records)} steps, losses {'finite' if finite else 'NOT finite'}, sentinel"
            f" {'silent' if not any(numbers['drift']) else 'ALARMED'}; {numbers['generated_per_second']:.0f} tokens/s generated,"
            f" {numbers['trained_per_second']:.0f} trained, sync {max(numbers['sync_seconds']):.2f} s"
        )
        return Finding("ok" if well else "failed", place.said() + words, numbers)

    return check


def per_second(records: list[dict[str, Any]], tokens: str, seconds: str) -> float:
    """NaN where nothing was timed."""
    time_ = sum(record[seconds] for record in records)
    return sum(record[tokens] for record in records) / time_ if time_ else math.nan


ROWS = (
    Row("device", 90, device, rehearsed=True),
    Row("parity tiny float32", 90, parity("tiny", "float32"), rehearsed=True),
    Row("parity tiny bfloat16", 90, parity("tiny", "bfloat16"), rehearsed=False),
    Row("parity mid float32", 150, parity("mid", "float32"), rehearsed=False),
    Row("parity mid bfloat16", 150, parity("mid", "bfloat16"), rehearsed=False),
    Row("sleep", 150, sleep, rehearsed=True),
    Row("server", 180, server, rehearsed=False),
    Row("memory", 90, memory, rehearsed=True),
    Row("train grpo", 150, training("grpo"), rehearsed=True),
    Row("train rloo", 150, training("rloo"), rehearsed=False),
    Row("train online_dpo", 150, training("online_dpo"), rehearsed=False),
)


# --- running them --------------------------------------------------------------------------------------------------------


def rlgen(place: Place, *words: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command line; its time is bounded by that of the row."""
    command = [sys.executable, "-m", "rlgen", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})}, cwd=ROOT)


def last_output(ended: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return " / ".join(lines[-2:])[-400:] or "it said nothing"


def end(process: subprocess.Popen[Any]) -> None:
    """The process and all that it started: it leads a group of its own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_apart(row: Row, place: Place, seconds: float) -> Finding:
    """`row` in a process of its own, which ends with it or with its time."""
    began = time.perf_counter()
    answer = Path(place.folder) / f"{row.name.replace(' ', '-')}.json"
    log = answer.with_suffix(".log")
    command = [sys.executable, __file__, "--inside", row.name, "--place", json.dumps(asdict(place)), "--json", str(answer)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    took = time.perf_counter() - began
    if answer.exists():
        return replace(Finding(**json.loads(answer.read_text())), seconds=took)
    ending = f"no answer after {seconds:.0f} s" if code is None else f"ended with {code}"
    words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:] or ["no output"]
    return Finding("failed", f"{ending}: {words[0][-300:]}", {}, took)


def check_all(rows: list[Row], place: Place, limit: float) -> list[tuple[Row, Finding]]:
    """The rows one after another; those for which no time is left are skipped."""
    until, found = time.perf_counter() + limit, []
    for row in rows:
        left = until - time.perf_counter()
        if left < 5:
            finding = Finding("skipped", f"the {limit:.0f} s of all rows together are over", {})
        else:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            finding = run_apart(row, place, min(row.limit, left))
        found.append((row, finding))
    return found


def table(found: list[tuple[Row, Finding]]) -> str:
    width = max(len(row.name) for row, _ in found)
    return "\n".join(f"{row.name:<{width}}  {f.status.upper():<7}  {f.seconds:5.0f} s  {f.sentence}" for row, f in found)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="rows whose names begin so")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--limit", type=float, default=MOST, help="seconds of all rows together")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        row = next(row for row in ROWS if row.name == arguments.inside)
        finding = row.check(Place(**json.loads(arguments.place)))
        arguments.json.write_text(json.dumps(asdict(finding)))
        return 0
    if not arguments.cpu_rehearsal and not has_gpu():
        print("gpu-check needs a CUDA device, and torch sees none; --cpu-rehearsal runs its rows on the CPU", file=sys.stderr)
        return 3
    chosen = [row for row in ROWS if arguments.rows is None or row.name.startswith(tuple(arguments.rows))]
    if arguments.cpu_rehearsal and arguments.rows is None:
        chosen = [row for row in chosen if row.rehearsed]
    if not chosen:
        parser.error(f"no row begins so; there are {', '.join(row.name for row in ROWS)}")
    if chosen[0].name != "device":
        chosen.insert(0, ROWS[0])  # it makes the model of middle size
    with tempfile.TemporaryDirectory(prefix="rlgen-check-") as folder:
        place = Place(folder=folder, gpu=not arguments.cpu_rehearsal, vllm=importlib.util.find_spec("vllm") is not None)
        found = check_all(chosen, place, arguments.limit)
    if arguments.cpu_rehearsal:
        print("a rehearsal on the CPU: it shows that the rows run, nothing about a GPU")
    print(table(found))
    if arguments.json:
        report = [{"row": row.name, **asdict(finding)} for row, finding in found]
        arguments.json.write_text(json.dumps({"gpu": not arguments.cpu_rehearsal, "rows": report}, indent=1) + "\n")
    return int(any(finding.status == "failed" for _, finding in found))


if __name__ == "__main__":
    sys.exit(main())
