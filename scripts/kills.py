"""A run that is killed at any instant, and resumed, is the run that was never killed, to the last bit.

python scripts/kills.py                  58 instants, 24 of them with vLLM in the process and 34 with a vLLM server
python scripts/kills.py --stream         42 instants of runs that train while they sample (`rollout.stream`)
python scripts/kills.py --only 3,17      some of them
python scripts/kills.py --list           which there are

Each kills a run by SIGKILL, resumes it, and compares metrics without times, rollouts, weights, optimizer, schedule and random
states. Prints a line each; exit 1 if one differs, did not happen, or left a process behind.

Where weights change under requests (`flight`), no two runs are alike: which weights sampled a token is a matter of time. There
the resumed run is compared with what the killed one had: metrics, rollouts and checkpoints of its steps, and the answers of its
journal.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlgen.rollout.frames import AnswerRecord, read_frames
from rlgen.rollout.read import from_rollouts
from rlgen.run.compare import Difference, checkpoint_differences, first_difference, metric_differences, rollout_differences

ROOT = Path(__file__).parent.parent
KILLED = ROOT / "tests" / "run" / "killed.py"
LIMIT = 1200  # seconds for one run
ORPHANS = 300  # seconds in which all processes of a killed run must have ended
# Six steps, three checkpoints, of which two are kept: the last save removes the first one.
RECIPE = """\
run: {name: kills, steps: 6, seed: 3}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards:
  - {use: exact_match}
  - {use: length, args: {target: 6}, weight: 0.1}
rollout: {prompts_per_step: 4, group_size: 4, max_completion_tokens: 12}
optim: {learning_rate: 1.0e-3, warmup_steps: 2, schedule: cosine}
checkpoint: {every: 2, keep: 2}
"""
SERVER = "engine={kind: server, launch: true, start_timeout: 600.0}"
ENGINES = {
    "transformers": ["engine={kind: transformers}"],
    "adapter": ["engine={kind: transformers}", "model.lora={rank: 4}", "rollout.dynamic_sampling=2"],
    "preferences": ["engine={kind: transformers}", "trainer={kind: online_dpo, updates_per_rollout: 2}"],
    "reference": ["engine={kind: transformers}", "trainer={kind: rloo, beta: 0.05}", "rollout.temperature=0.8"],
    "evaluated": ["engine={kind: transformers}", "checkpoint={every: 3, keep: 1}", "eval={limit: 6, every: 1, group_size: 2}"],
    "images": [
        "engine={kind: transformers}",
        "model.path=tiny:idefics3",
        "data={source: 'task:colours', chat: true, columns: {images: images}, options: {texts: 0.4}}",
    ],
    "colocated": [],
    "experts": ["model={path: 'tiny:qwen3_moe', dtype: bfloat16}"],
    "server": [SERVER],
    "stream": ["rollout.stream=true", "rewards=[{use: length, args: {target: 6}}]"],
    "stream-server": [SERVER, "rollout.stream=true", "rewards=[{use: length, args: {target: 6}}]"],
    "ahead": [SERVER, "rollout.async_steps=1", "sentinel.probe_every=2"],
    # Long completions, few at a time: they are under way for several steps.
    "flight": [
        SERVER.replace("}", ", max_num_seqs: 4}"),
        *("rollout={prompts_per_step: 4, group_size: 4, max_completion_tokens: 200, async_steps: 4}", "run.steps=10"),
    ],
}
IN_FLIGHT = ("flight",)
SAVE = "file:/checkpoints/:{at}@4"  # the n-th write of a save, where `at` is a share of all of them
JOURNAL, FRAMES = "rlgen.rollout.journal", "rlgen.rollout.frames"
LOOP, UPDATE, FILES = "rlgen.trainers.loop", "rlgen.trainers.update", "rlgen.run.directory"
EXACT = "rlgen.trainers.groups"


@dataclass(frozen=True, slots=True)
class Kill:
    """One instant of a run. Kill("server", "in mid-update", "half:rlgen.trainers.update:Updater._backward:1@4")"""

    engine: str
    words: str
    instant: str


COMMON = (
    ("between completions", f"after:{JOURNAL}:Journal.answered:5@3"),
    ("in half a record of the journal", f"half:{FRAMES}:append_bytes:9@4"),
    ("before any reward", "before:rlgen.rewards.score:EarlyScoring.result:1@5"),
    ("after all rewards", "after:rlgen.rewards.score:EarlyScoring.result:1@3"),
    ("inside of backward", f"half:{UPDATE}:Updater._backward:1@4"),
    ("between backward and optimizer", f"before:{UPDATE}:Updater._step:1@5"),
    ("after the optimizer", "after:torch.optim.adamw:AdamW.step:1@4"),
    ("in mid-sync", "half:rlgen.engines.base:SyncRecorder.record:1@3"),
    ("in half a line of metrics", f"half:{FILES}:RunDirectory.write_metrics:1@4"),
    ("between metrics and save", f"after:{FILES}:RunDirectory.write_metrics:1@6"),
    ("in the first write of a save", SAVE.format(at=0.0)),
    ("at 40 % of a save", SAVE.format(at=0.4)),
    ("in the last write of a save", SAVE.format(at=1.0)),
)
MID_COLOCATED = ("in mid-generation", "half:rlgen.engines.colocated:ColocatedEngine._run:1@3")
MID_SERVER = ("in mid-generation", "half:rlgen.engines.server:ServerEngine._sample:1@3")
MORE = (
    ("in the first step", f"after:{JOURNAL}:Journal.answered:7@1"),
    ("in half a record of rewards", f"half:{FRAMES}:append_bytes:17@5"),
    ("before a step's rollouts are there", "file:/rollouts/:2@3"),
    ("while the status is written", "file:status.json:2@5"),
    ("at 20 % of a save", SAVE.format(at=0.2)),
    ("at 70 % of a save", SAVE.format(at=0.7)),
)
OF_STREAMING = [
    Kill(engine, *what)
    for engine in ("stream", "stream-server")
    for what in (
        ("between completions", f"after:{JOURNAL}:Journal.answered:9@4"),
        ("while a group runs backward", f"half:{UPDATE}:Updater._backward:2@4"),
        ("before a gradient is added", f"before:{EXACT}:ExactSum.take:2@5"),
        ("after the optimizer", "after:torch.optim.adamw:AdamW.step:1@3"),
    )
]
KILLS = [
    *(Kill("colocated", *what) for what in (MID_COLOCATED, *COMMON, *MORE)),
    *(Kill("server", *what) for what in (MID_SERVER, *COMMON[:1], *COMMON[4:8], *COMMON[9:12])),
    *(
        Kill("ahead", *what)
        for what in (
            ("while the next step is sampled", f"after:{JOURNAL}:Journal.answered:3@4"),
            ("in mid-generation", "half:rlgen.engines.server:ServerEngine._sample:1@5"),
            ("in half a record of the journal", f"half:{FRAMES}:append_bytes:4@5"),
            ("in the first step", f"after:{JOURNAL}:Journal.answered:20@1"),
            ("before any reward", "before:rlgen.rewards.score:EarlyScoring.result:1@3"),
            ("after the optimizer", "after:torch.optim.adamw:AdamW.step:1@3"),  # others have nothing to learn
            ("after the sync", f"after:{LOOP}:send_weights:1@3"),
            ("between metrics and save", f"after:{FILES}:RunDirectory.write_metrics:1@4"),
            ("between journal and save", "before:rlgen.run.checkpoint:Checkpoints.save:1@4"),
            ("at 60 % of a save", SAVE.format(at=0.6)),
            ("while a save is written", "after:rlgen.run.checkpoint:Checkpoints.save:1@4"),
        )
    ),
    *(
        Kill("flight", *what)
        for what in (
            ("while four steps are sampled", f"after:{JOURNAL}:Journal.answered:3@4"),
            ("in half a record of the journal", f"half:{FRAMES}:append_bytes:4@5"),
            ("in the first step", f"after:{JOURNAL}:Journal.answered:20@1"),
            ("before any reward", "before:rlgen.rewards.score:EarlyScoring.result:1@3"),
            ("inside of backward", f"half:{UPDATE}:Updater._backward:1@6"),
            ("after the optimizer", "after:torch.optim.adamw:AdamW.step:1@5"),
            ("before the sync", f"before:{LOOP}:send_weights:1@7"),
            ("after the sync", f"after:{LOOP}:send_weights:1@3"),
            ("between journal and save", "before:rlgen.run.checkpoint:Checkpoints.save:1@4"),
            ("while a save is written", "after:rlgen.run.checkpoint:Checkpoints.save:1@6"),
        )
    ),
    *OF_STREAMING,
]
STREAMED = [
    *(Kill("stream", *what) for what in (MID_COLOCATED, *COMMON, *MORE)),
    *(Kill("stream-server", *what) for what in (MID_SERVER, *COMMON)),
    *OF_STREAMING,
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a kill; `problem` None: the resumed run is the undisturbed one."""

    fired: str
    problem: str | None
    resumed: str


class Kills:
    """Runs under one folder. Undisturbed ones are made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE)

    def command(self, engine: str, run: Path, *, instant: str | None = None, resume: bool = False) -> list[str]:
        settings = [word for setting in ENGINES[engine] for word in ("--set", setting)]
        program = [sys.executable, "-m", "rlgen"] if instant is None else [sys.executable, str(KILLED), instant]
        return [*program, "train", str(self.recipe), "--run-dir", str(run), *settings, *(["--resume"] if resume else [])]

    def start(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **environment}
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=self.folder)

    def undisturbed(self, engine: str) -> Path:
        """The run to compare with, and how many writes its save at step 4 has."""
        run, counted = self.folder / engine, self.folder / f"{engine}.writes"
        if not run.exists():
            ended = self.start(self.command(engine, run, instant=SAVE.format(at=0)), COUNTED=str(counted))
            if ended.returncode:
                raise SystemExit(f"the undisturbed run failed with {ended.returncode}:\n{ended.stderr[-3000:]}")
        return run

    def instant(self, kill: Kill) -> str:
        """With the number of the write that a share of a save stands for."""
        what, _, when = kill.instant.rpartition(":")
        at, _, step = when.partition("@")
        if "." not in at:
            return kill.instant
        writes = int((self.folder / f"{kill.engine}.writes").read_text())
        return f"{what}:{1 + round(float(at) * (writes - 1))}@{step}"

    def __call__(self, kill: Kill, name: str) -> Outcome:
        """Kills a run, resumes it, and compares it with the undisturbed one, or in flight with what was killed."""
        in_flight, run, mark = kill.engine in IN_FLIGHT, self.folder / name, uuid.uuid4().hex
        whole = self.folder / f"{name}.killed" if in_flight else self.undisturbed(kill.engine)
        ended = self.start(self.command(kill.engine, run, instant=self.instant(kill)), KILL=mark)
        fired = next((line for line in ended.stderr.splitlines() if line.startswith("KILLED ")), "")
        if ended.returncode != -9 or not fired:
            return Outcome(fired, f"was not killed: exit {ended.returncode}: {ended.stderr[-1500:]}", "")
        if in_flight:
            shutil.copytree(run, whole)
        again = self.start(self.command(kill.engine, run, resume=True))
        resumed = next((line for line in again.stdout.splitlines() if line.startswith("resuming")), "")
        if again.returncode:
            return Outcome(fired, f"was not resumed: exit {again.returncode}: {again.stderr[-1500:]}", resumed)
        if notices := [line for line in again.stdout.splitlines() if line.startswith("journal:")]:
            return Outcome(fired, f"sampled anew: {notices[0]}", resumed)
        difference = next(lost(whole, run), None) if in_flight else first_difference(whole, run)
        problem = f"differs: {difference}" if difference else left_behind(run, mark)
        return Outcome(fired, problem, resumed)


def lost(killed: Path, run: Path) -> Iterator[Difference | str]:
    """What a killed run had, as far as it is not the same in the run that went on."""
    for found in (
        *rollout_differences("rollouts", killed, run),
        *metric_differences(killed, run),
        *checkpoint_differences(killed, run),
    ):
        later = found.key == "all of it" and found.left is None
        if found.key not in ("file", "lines") and not later:  # only one has it: the killed run ended before, or it was removed
            yield found
    for path in sorted((killed / "journal").glob("step_*.bin")):
        step = int(path.stem.removeprefix("step_"))
        samples = from_rollouts(run, step)
        if samples is None:
            yield f"no rollouts of step {step}"
            return
        has = {(sample.group_id, sample.sample_index): sample for sample in samples}
        for one in read_frames(path).records:
            if isinstance(one, AnswerRecord):
                now = has[one.group_id, one.sample_index]
                theirs = (now.completion_ids.tobytes(), now.sampler_logp.tobytes(), [*map(tuple, now.spans)], now.messages)
                if theirs != (one.token_ids, one.logp, [*map(tuple, one.spans)], one.messages):
                    yield f"step {step}: another answer {one.sample_index} of group {one.group_id} than in the journal"


def left_behind(run: Path, mark: str) -> str | None:
    """Files of nobody, or processes of the killed run."""
    stray = [path for path in run.rglob(".*") if path.name not in (".lock", ".reserve")]
    if stray:
        return f"left {stray[0]}"
    deadline = time.monotonic() + ORPHANS
    while left := marked(mark):
        if time.monotonic() > deadline:
            return f"left process {left[0].pid}: {' '.join(left[0].cmdline())[:100]}"
        time.sleep(0.2)
    return None


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KILL") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", action="store_true", help="kill runs with `rollout.stream`")
    parser.add_argument("--only", help="numbers, with commas between")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for the runs; one that is removed unless said")
    arguments = parser.parse_args()
    of_all = STREAMED if arguments.stream else KILLS
    chosen = [int(number) for number in arguments.only.split(",")] if arguments.only else list(range(1, len(of_all) + 1))
    if arguments.list:
        for number in chosen:
            print(f"{number:3}  {of_all[number - 1].engine:13} {of_all[number - 1].words:38} {of_all[number - 1].instant}")
        return 0
    with tempfile.TemporaryDirectory(prefix="rlgen-kills-") as folder:
        kills = Kills(arguments.keep or Path(folder))
        equal = 0
        for number in chosen:
            kill, start = of_all[number - 1], time.monotonic()
            outcome = kills(kill, f"kill{number:02}")
            equal += outcome.problem is None
            said = outcome.problem or f"equal; {outcome.resumed}"
            print(f"{number:3}  {kill.engine:13} {kill.words:38} {said}  ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{equal} of {len(chosen)} equal")
    return int(equal < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
