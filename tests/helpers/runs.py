"""Folders of runs as `rlgen train` leaves them, made in a second: metrics with a trend, rollouts with texts, a tokenizer."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from rlgen.analysis.pack import BYTES
from rlgen.recipe import Recipe, dump_recipe
from rlgen.rollout.parquet import Rollout, write_part
from rlgen.rollout.samples import Ragged, Samples

RECIPE: dict[str, Any] = {
    "run": {"name": "made"},
    "model": {"path": "tiny:qwen3", "dtype": "float32"},
    "data": {"source": "task:arithmetic", "chat": True},
    "rewards": [{"use": "exact_match"}, {"use": "length", "args": {"target": 60}, "weight": 0.1}],
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 96},
}
PHASES = {"generate": 0.55, "reward": 0.03, "train": 0.32, "sync": 0.06, "save": 0.02}
OPENINGS = ("Let me work this out step by step.", "We need the sum of two numbers.", "First I look at the ones.", "This is easy:")
MIDDLES = (
    "{a} + {b} means that I count {b} further from {a}.",
    "The ones give {ones}, so I carry {carry}.",
    "I write {a} as {tens} and {rest}.",
    "Hmm, wait, let me check that again.",
    "The tens are {tens}, and with the carry there are more.",
    "So far that looks right.",
)


def merge(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """`left` with the values of `right`, section by section."""
    both = {key: merge(left[key], right[key]) for key in left.keys() & right.keys() if isinstance(right[key], dict)}
    return {**left, **right, **both}


class Words:
    """A byte-level tokenizer that grows with what it is given: a word with the space before it is a token."""

    def __init__(self, ids: Mapping[str, int] | None = None) -> None:
        self.ids = dict(ids or {"<|im_end|>": 0})

    @classmethod
    def of(cls, folder: Path) -> "Words":
        """The tokenizer that `save` has written."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab())

    def encode(self, text: str) -> list[int]:
        """Ids of the words, with the space before them; every other character is a token of its own."""
        return [self.ids.setdefault(alphabet(piece), len(self.ids)) for piece in re.findall(r" ?\w+|\W", text)]

    def save(self, folder: Path) -> None:
        tokenizer = Tokenizer(BPE(vocab=self.ids, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))


def alphabet(text: str) -> str:
    """The letters that byte-level tokenizers have for the bytes of a text."""
    return "".join(LETTERS[byte] for byte in text.encode())


LETTERS = {byte: letter for letter, byte in BYTES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout to be written. By default a right answer of two words."""

    prompt: str = "What is 1 + 1?"
    completion: str = "It is 2"
    answer: str = "2"
    reward: float | None = 1.0
    exact_match: float | None = None  # the reward of that name; None: the whole reward
    finish_reason: str = "stop"
    advantage: float = 0.5
    trained: bool = True
    gap: float = 1e-3
    error: str | None = None


def write_rows(run: Path, step: int, rows: Sequence[Row], group: int, words: Words, seed: int = 0, **data: Sequence[Any]) -> None:
    """Writes the rollouts of a step: every `group` rows share a prompt. `data`: further columns."""
    rng = np.random.default_rng([seed, step])
    ids = [np.array([*words.encode(row.completion), *([0] if row.finish_reason == "stop" else [])], np.int32) for row in rows]
    sampler = [-rng.exponential(0.6, len(one)).astype(np.float32) for one in ids]
    offsets = np.append(0, np.cumsum([len(one) for one in ids])).astype(np.int64)
    spread = np.repeat([row.gap for row in rows], np.diff(offsets))
    sampler_logp = np.concatenate(sampler)
    policy_logp = np.minimum(sampler_logp + rng.normal(size=len(sampler_logp)) * spread, 0).astype(np.float32)
    count = len(rows)
    exact = [row.reward if row.exact_match is None else row.exact_match for row in rows]
    single = np.array([[np.nan if one is None else one, -0.1 * len(of) / 60] for one, of in zip(exact, ids, strict=True)])
    samples = Samples(
        labels=("exact_match", "length"),
        group_id=(step - 1) * (count // group) + np.arange(count, dtype=np.int64) // group,
        sample_index=np.arange(count, dtype=np.int64) % group,
        prompt_ids=Ragged.of([np.arange(8, dtype=np.int32)] * count, np.int32),
        completion_ids=Ragged(np.concatenate(ids), offsets),
        sampler_logp=Ragged(sampler_logp, offsets),
        spans=Ragged(np.array([(0, len(one), step - 1) for one in ids], np.int64), np.arange(count + 1)),
        truncated=np.array([row.finish_reason == "length" for row in rows]),
        seed=np.arange(count, dtype=np.int64),
        cached_tokens=np.zeros(count, np.int64),
        rewards=single,
        reward=np.array([np.nan if row.reward is None else row.reward for row in rows]),
        reward_errors=tuple({} if row.error is None else {"exact_match": row.error} for row in rows),
    )
    rollout = Rollout(
        step=step,
        samples=samples,
        policy_logp=Ragged(policy_logp, offsets),
        advantage=np.array([row.advantage for row in rows]),
        trained=np.array([row.trained for row in rows]),
    )
    texts = {name: pa.array([getattr(row, name) for row in rows]) for name in ("prompt", "completion", "answer")}
    texts |= {name: pa.array(values) for name, values in data.items()}
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    write_part(run / "rollouts" / f"step_{step:06d}.parquet", rollout, texts, {})


def reasoning(rng: np.random.Generator, a: int, b: int, right: bool, tokens: int) -> str:
    """Reasoning of about that many tokens, and an answer."""
    values = {"a": a, "b": b, "ones": a % 10 + b % 10, "carry": (a % 10 + b % 10) // 10, "tens": a // 10 * 10, "rest": a % 10}
    text = str(rng.choice(OPENINGS))
    while len(text.split()) < tokens * 0.7:
        text += ("\n" if rng.random() < 0.3 else " ") + str(rng.choice(MIDDLES)).format(**values)
    return f"{text}\nThe answer is {a + b if right else a + b + int(rng.choice([-10, -1, 1, 10]))}"


def metrics_of(step: int, rows: Sequence[Row], rng: np.random.Generator, progress: float, gap: float) -> dict[str, Any]:
    """One object of metrics.jsonl that fits the rows."""
    reward = np.array([row.reward for row in rows if row.reward is not None], dtype=float)
    length = np.array([len(row.completion.split()) for row in rows])
    seconds = 2.0 + 0.4 * rng.random() + (3.0 if step % 20 == 0 else 0)
    tokens = int(length.sum())
    return {
        "step": step,
        "loss": float(0.02 * rng.normal()),
        "policy_loss": float(0.02 * rng.normal()),
        "grad_norm": float(0.4 + 0.5 * np.exp(-3 * progress) + 0.1 * rng.random()),
        "learning_rate": 1e-6,
        "updates/done": 1,
        "updates/skipped": 0,
        "reward/mean": float(reward.mean()) if len(reward) else None,
        "reward/std": float(reward.std()) if len(reward) else None,
        "reward/unscored": len(rows) - len(reward),
        "reward/exact_match/mean": float(reward.mean()) if len(reward) else None,
        "reward/length/mean": float(-0.1 * length.mean() / 60),
        "groups/zero_std": float(0.1 + 0.6 * progress * rng.random()),
        "completions/mean_tokens": float(length.mean()),
        "completions/min_tokens": int(length.min()),
        "completions/max_tokens": int(length.max()),
        "completions/truncated": float(np.mean([row.finish_reason == "length" for row in rows])),
        "entropy": float(1.4 * np.exp(-1.5 * progress) + 0.05 * rng.random()),
        "clip/region": float(0.002 * rng.random()),
        "kl/old_k3": 0.0,
        "sampler/delta_mean": float(gap * (0.8 + 0.2 * rng.random())),
        "sampler/delta_p999": float(gap * (3 + rng.random())),
        "sampler/delta_max": float(gap * (4 + 2 * rng.random())),
        "sampler/kl": float(gap**2),
        "is/weight_min": float(1 - 4 * gap),
        "is/weight_mean": 1.0,
        "is/weight_max": float(1 + 4 * gap),
        "is/masked_frac": 0.0,
        "is/ess": float(1 - gap**2),
        "is/ess_raw": float(1 - gap**2),
        "tokens/generated": tokens,
        "tokens/trained": tokens,
        "tokens/padding": int(0.1 * tokens),
        "weights/version": step,
        "time/step": seconds,
        **{f"time/{phase}": share * seconds for phase, share in PHASES.items()},
        "health/reward": False,
        "health/entropy": False,
        "health/truncated": False,
    }


def write_recipe(path: Path, steps: int, seed: int, recipe: Mapping[str, Any] | None) -> Recipe:
    """Makes the folder of a run with `RECIPE` and the values of `recipe` over it."""
    place = {"run": {"name": path.name, "dir": str(path.parent), "seed": seed, "steps": steps}}
    whole = Recipe.model_validate(merge(RECIPE, merge(place, recipe or {})))
    path.mkdir(parents=True)
    (path / "resolved.yaml").write_text(dump_recipe(whole))
    (path / "recipe.yaml").write_text("# the recipe as it was written\n")
    return whole


def bare_run(
    path: Path,
    rewards: Sequence[float | str | None],
    seed: int = 0,
    recipe: Mapping[str, Any] | None = None,
    steps: int | None = None,
    state: str = "done",
    tokens: int = 10,
) -> Path:
    """Writes the folder of a run with these values of reward/mean, two seconds and as many tokens a step, and no rollouts."""
    write_recipe(path, steps or max(1, len(rewards)), seed, recipe)
    same = {"tokens/generated": tokens, "time/step": 2.0}
    records = [{"step": step, "reward/mean": reward, **same} for step, reward in enumerate(rewards, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    status = {"state": state, "step": len(rewards), "steps": steps or len(rewards), "exit_code": None, "message": "", "pid": 1}
    (path / "status.json").write_text(json.dumps({**status, "health": [], "time": 1e9}))
    return path


def make_run(
    path: Path,
    steps: int = 4,
    tokens: int = 40,
    seed: int = 0,
    reach: float = 0.9,
    evaluates: bool = True,
    recipe: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the folder of a run whose share of right answers grows from 0.2 to `reach`."""
    whole = write_recipe(path, steps, seed, recipe)
    prompts, group = whole.rollout.prompts_per_step, whole.rollout.group_size
    rng, words = np.random.default_rng(seed), Words()
    lines, evaluations = [], []
    for step in range(1, steps + 1):
        progress = step / steps
        chance = 0.2 + (reach - 0.2) * (1 - np.exp(-3 * progress)) / (1 - np.exp(-3))
        rows: list[Row] = []
        for _ in range(prompts):
            first, second = rng.integers(11, 99, 2).tolist()
            made = [bool(rng.random() < chance) for _ in range(group)]
            for right in made:
                text = reasoning(rng, first, second, right, int(tokens * (0.6 + 0.8 * rng.random())))
                row = Row(
                    prompt=f"<|im_start|>user\nWhat is {first} + {second}?<|im_end|>\n<|im_start|>assistant\n",
                    completion=text,
                    answer=str(first + second),
                    reward=float(right) - 0.1 * len(text.split()) / 60,
                    exact_match=float(right),
                    finish_reason="length" if rng.random() < 0.04 else "stop",
                    advantage=float(right) - float(np.mean(made)),
                )
                rows.append(row)
        write_rows(path, step, rows, group, words, seed)
        lines.append(metrics_of(step, rows, rng, progress, 1e-3))
        if step == 1 or step % max(1, steps // 6) == 0:
            score = float(np.clip(chance - 0.05 + 0.03 * rng.normal(), 0, 1))
            value = {"eval/reward/mean": score, "eval/reward/mean_low": score - 0.06, "eval/reward/mean_high": score + 0.06}
            value |= {"eval/completions/truncated": 0.02, "eval/prompts": 64}
            evaluations.append({"step": 0 if step == 1 else step, **value})
    if evaluates:
        before, *later = evaluations
        of_step = {line["step"]: line for line in later}
        lines = [before, *({**line, **of_step.get(line["step"], {})} for line in lines)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": "done", "step": steps, "steps": steps, "exit_code": 0, "message": "", "health": [], "pid": 1, "time": 1e9}
    (path / "status.json").write_text(json.dumps(status))
    attempt = {"rlgen": "0.1.0", "time": "2026-01-02T03:04:05+0000", "command": ["rlgen", "train", "demo.yaml"], "git": "abc123"}
    (path / "provenance.json").write_text(json.dumps([{**attempt, "gpus": [], "packages": {"torch": "2.13.0"}}]))
    words.save(path / "checkpoints" / f"step_{steps:06d}")
    return path
