"""A golden run: losses and gradient norms of ten steps of each trainer, to the last bit.

python scripts/golden.py            compares with scripts/golden.json: equal to the last bit on the versions and processor
                                    it was written on, within 1e-5 elsewhere; exit 1 if not
python scripts/golden.py --update   rewrites it: only when a change of numbers is meant, and said in the commit
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from rlgen.metrics import Metric

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "scripts" / "golden.json"
STEPS, TOLERANCE = 10, 1e-5
THREADS = {"OMP_NUM_THREADS": "1"}  # another number adds up in another order
RECIPE = """\
run: {name: golden, seed: 7}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards:
  - {use: "spread.py:spread"}
rollout: {prompts_per_step: 4, group_size: 6, max_completion_tokens: 16, temperature: 0.9}
engine: {kind: transformers}
optim: {learning_rate: 1.0e-4, warmup_steps: 2, schedule: cosine}
"""
# Never the same for two completions, so that each step has something to learn from.
REWARD = """\
def spread(completion_ids):
    return sum(completion_ids) % 97 / 97
"""
TRAINERS = {
    "grpo": "{kind: grpo, updates_per_rollout: 2, beta: 0.02}",
    "rloo": "{kind: rloo, updates_per_rollout: 2, beta: 0.05}",
    "online_dpo": "{kind: online_dpo, pairing: outside_in}",
}


def made_on() -> dict[str, Any]:
    """Everything that may change a last bit."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def processor() -> str:
    """ "Intel(R) Xeon(R) Processor 6/143/8", and a digest of what it can do: a name alone says little in a cloud."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind = "/".join(facts.get(name, "?") for name in ("cpu family", "model", "stepping"))
    flags = hashlib.sha256(facts.get("flags", "").encode()).hexdigest()[:8]
    return f"{facts.get('model name', platform.machine())} {kind} {flags}"


def run(trainer: str) -> list[dict[str, float]]:
    """Loss and gradient norm of each step, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "golden.yaml"
        recipe.write_text(RECIPE)
        recipe.with_name("spread.py").write_text(REWARD)
        overrides = ["--set", f"trainer={trainer}", "--set", f"run.steps={STEPS}", "--run-dir", f"{folder}/run"]
        command = [sys.executable, "-m", "rlgen", "train", str(recipe), *overrides]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **THREADS})
        if ended.returncode:
            sys.exit(f"golden: `rlgen train` ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    if silent := [record[Metric.STEP] for record in records if record[Metric.LOSS] is None]:
        sys.exit(f"golden: nothing was trained in steps {silent}: choose a recipe that always has something to learn from")
    return [{key: record[key] for key in (Metric.STEP, Metric.LOSS, Metric.GRAD_NORM)} for record in records]


def compare(golden: dict[str, Any], runs: dict[str, list[dict[str, float]]]) -> tuple[bool, list[str]]:
    """Whether all is as it was, and a line a trainer."""
    here, there = made_on(), golden["made_on"]
    exact = here == there
    other = [f"{name} {there[name]} -> {here[name]}" for name in here if here[name] != there[name]]
    lines = ["the same versions and processor: to the last bit" if exact else f"within {TOLERANCE}: {', '.join(other)}"]
    good = True
    for name, records in runs.items():
        worst, where, differing = 0.0, "", 0
        for now, before in zip(records, golden["runs"][name], strict=True):
            for key in (Metric.LOSS, Metric.GRAD_NORM):
                differing += now[key] != before[key]
                # A loss near 0 is a difference of terms near 1: below 1, the distance is absolute.
                distance = abs(now[key] - before[key]) / max(1.0, abs(before[key]))
                if distance > worst:
                    worst, where = distance, f" at {key} of step {now['step']}"
        well = differing == 0 if exact else worst <= TOLERANCE
        good &= well
        lines.append(f"{name:<11} {'ok' if well else 'DIFFERS'}: {differing} of {2 * STEPS} differ, at most {worst:.1e}{where}")
    return good, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="rewrite the golden run")
    runs = {}
    update = parser.parse_args().update
    for name, trainer in TRAINERS.items():
        runs[name] = run(trainer)
    if update:
        GOLDEN.write_text(
            json.dumps({"made_on": made_on(), "recipe": RECIPE, "trainers": TRAINERS, "runs": runs}, indent=1) + "\n"
        )
        print(f"{GOLDEN.relative_to(ROOT)} written")
        return
    good, lines = compare(json.loads(GOLDEN.read_text()), runs)
    print("\n".join(lines))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
