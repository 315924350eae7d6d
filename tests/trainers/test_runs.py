"""Whole runs in this process, on both engines: what is trained on is what was sampled."""

import math
import os
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import read_jsonl
from helpers.before import before
from helpers.rollouts import rollout_rows
from helpers.slow import slow_but

from rlgen.cli.train import train_command
from rlgen.engines.transformers import TransformersEngine
from rlgen.files import read_json
from rlgen.models.policy import Policy
from rlgen.rewards.score import EarlyScoring
from rlgen.rollout.sampler import Sampler
from rlgen.run import clock
from rlgen.run.rollouts import RolloutWriter
from rlgen.run.writing import Writer
from rlgen.setup import trainer
from rlgen.trainers import loop, update
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater
from rlgen.types import MicroBatch

KINDS = ["grpo", "rloo", "online_dpo"]
ENGINES = ["colocated", "transformers"]


def run(recipe: Path, *overrides: str, resume: bool = False) -> Path:
    directory = recipe.parent / "run"
    train_command(recipe, list(overrides), resume, False, None, directory)
    return directory


class Forwards:
    """Counts trained tokens by policy, and keeps the rows that went through each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: Counter[str] = Counter()
        self.rows: list[tuple[int, ...]] = []
        self.started = False
        before(Policy, "forward", self.count, monkeypatch.setattr)
        record_attempt = trainer.record_attempt

        def recorded(*arguments: Any) -> None:
            record_attempt(*arguments)
            self.started = True  # the probes of the sentinel are not training

        monkeypatch.setattr(trainer, "record_attempt", recorded)

    def count(self, policy: Policy, batch: MicroBatch, *_: Any) -> None:
        if not self.started:
            return
        frozen = not any(p.requires_grad for p in policy.parameters())
        self.tokens["reference" if frozen else "policy"] += int(batch.mask.sum())
        if not frozen:
            for row, start, mask in zip(batch.input_ids, batch.prompt_lengths, batch.mask, strict=True):
                self.rows.append(tuple(row[: int(start) + int(mask.sum())].tolist()))


@pytest.mark.parametrize("engine", slow_but(ENGINES, "transformers"))
@pytest.mark.parametrize("size", slow_but([2, 4], 4))
def test_pairs_share_their_prompt_and_the_chosen_outscores(recipe_file: Path, engine: str, size: int) -> None:
    overrides = ["trainer={kind: online_dpo}", f"engine={{kind: {engine}}}", f"rollout.group_size={size}", "run.steps=8"]
    (recipe_file.parent / "r.py").write_text("def f(completion_ids): return len(completion_ids) + sum(completion_ids) % 3\n")
    overrides += ["data.options={min_length: 1, max_length: 12}", "rewards=[{use: 'r.py:f'}]", "rollout.max_completion_tokens=80"]
    directory = run(recipe_file, *overrides)
    rows = rollout_rows(directory)
    assert len({len(row["prompt_ids"]) for row in rows}) > 2 and len({len(row["completion_ids"]) for row in rows}) > 5
    pairs = 0
    for group_id in {row["group_id"] for row in rows}:
        group = [row for row in rows if row["group_id"] == group_id]
        assert len(group) == size and [row["sample_index"] for row in group] == list(range(size))
        assert len({tuple(row["prompt_ids"]) for row in group}) == 1
        for row in group:
            assert len(row["completion_ids"]) == len(row["sampler_logp"]) == len(row["loss_mask"])
            assert row["finish_reason"] == ("stop" if row["completion_ids"][-1] in (257, 259) else "length")
            assert row["finish_reason"] == "stop" or len(row["completion_ids"]) == 80
            assert row["reward"] == len(row["completion_ids"]) + sum(row["completion_ids"]) % 3
        trained = [row for row in group if row["trained"]]
        rewards = [row["reward"] for row in group]
        if max(rewards) == min(rewards):
            assert not trained
            continue
        pairs += 1
        chosen, rejected = sorted(trained, key=lambda row: -row["advantage"])
        assert (chosen["advantage"], rejected["advantage"]) == (1.0, -1.0)
        assert chosen["reward"] == max(rewards) > min(rewards) == rejected["reward"]
    assert pairs > 4
    records = read_jsonl(directory / "metrics.jsonl")
    assert abs(records[0]["kl/ref_k3"]) < 1e-9 and records[-1]["kl/ref_k3"] > 1e-6, "the policy begins as its reference"
    assert all(0 < record["entropy"] < math.log(300) for record in records)
    for record in records:
        of_step = [row for row in rows if row["step"] == record["step"] and row["trained"]]
        assert record["tokens/trained"] == sum(len(row["completion_ids"]) for row in of_step)


@pytest.mark.parametrize(
    ("kind", "updates", "beta"),
    slow_but(
        [*((kind, updates, 0) for kind in KINDS for updates in (1, 3)), ("grpo", 1, 0.1), ("rloo", 1, 0.1)],
        *[("grpo", 3, 0), ("online_dpo", 1, 0), ("rloo", 1, 0.1)],
    ),
)
def test_one_policy_forward_a_trained_token_and_update(
    recipe_file: Path, kind: str, updates: int, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference costs one forward, and without a beta there is none."""
    forwards = Forwards(monkeypatch)
    trainer = f"{{kind: {kind}, updates_per_rollout: {updates}{f', beta: {beta}' if beta else ''}}}"
    directory = run(recipe_file, f"trainer={trainer}", "engine={kind: transformers}", "rollout.temperature=0.9")
    records = read_jsonl(directory / "metrics.jsonl")
    trained = sum(record["tokens/trained"] for record in records)
    assert forwards.tokens["policy"] == updates * trained > 0
    assert forwards.tokens["reference"] == (trained if kind == "online_dpo" or beta else 0)
    # byte for byte: what went through the policy is prompt and sampled completion, the stop token included
    sampled = [tuple(row["prompt_ids"] + row["completion_ids"]) for row in rollout_rows(directory) if row["trained"]]
    assert Counter(forwards.rows) == Counter(sampled * updates)
    assert all(all(row["loss_mask"]) for row in rollout_rows(directory))
    if kind == "grpo" and beta:  # the policy is the reference at first, and leaves it
        assert records[0]["kl/ref_k3"] == pytest.approx(0, abs=1e-9) and records[-1]["kl/ref_k3"] > 1e-6


@pytest.mark.parametrize("kind", slow_but(KINDS, "grpo"))
def test_a_run_on_vllm_leaves_everything_behind(recipe_file: Path, kind: str) -> None:
    directory = run(recipe_file, f"trainer={{kind: {kind}}}", "run.steps=3", "checkpoint={every: 1, keep: 2}")
    assert (directory / "recipe.yaml").read_text() == recipe_file.read_text()
    assert read_json(directory / "status.json")["state"] == "done"
    assert [path.name for path in sorted((directory / "checkpoints").iterdir())] == ["step_000002", "step_000003"]
    records = read_jsonl(directory / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["sampler/delta_max"] <= 1e-4 and record["weights/version"] == record["step"]
        times = [value for key, value in record.items() if key.startswith("time/") and key != "time/step"]
        assert len(times) >= 4 and min(times) > 0 and sum(times) <= record["time/step"] + 1e-4
        assert {"loss", "grad_norm", "reward/mean", "reward/std", "reward/exact_match/mean", "is/ess"} <= set(record)
    assert {row["weight_version"] for row in rollout_rows(directory) if row["step"] == 3} == {2}
    facts = read_json(directory / "provenance.json")[0]
    assert facts["packages"]["torch"] == torch.__version__
    assert {rung["number"]: rung["power"] for rung in facts["sentinel"]}[3] > 1e-2


def test_the_seconds_of_a_step_are_those_of_its_phases(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which only what a step is made of takes time. The time of a save counts to the step after it."""
    now = 0.0

    def takes(seconds: float, owner: Any, name: str) -> None:
        def pass_time(*_: Any) -> None:
            nonlocal now
            now += seconds

        before(owner, name, pass_time, monkeypatch.setattr)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    takes(1.0, Sampler, "groups")
    takes(2.0, EarlyScoring, "result")
    takes(4.0, TrainBatch, "of")
    takes(8.0, Updater, "_run")
    takes(16.0, RolloutWriter, "write")
    takes(32.0, Sampler, "before_sync")
    takes(64.0, loop, "send_weights")
    takes(128.0, Writer, "start")
    directory = run(recipe_file, "engine={kind: transformers}", "checkpoint.every=1")
    records = read_jsonl(directory / "metrics.jsonl")
    found = [{key[5:]: value for key, value in record.items() if key.startswith("time/")} for record in records]
    first = {"generate": 1.0 + 32.0, "reward": 2.0, "train": 4.0 + 8.0, "save": 16.0, "sync": 64.0}
    assert found == [{**first, "step": 127.0}, {**first, "save": 16.0 + 128.0, "step": 255.0}]


@pytest.mark.slow  # what else runs on a machine takes time between two phases
@pytest.mark.timed
def test_the_phases_of_a_step_are_nearly_all_of_it(recipe_file: Path) -> None:
    for record in read_jsonl(run(recipe_file, "run.steps=3", "checkpoint={every: 1, keep: 2}") / "metrics.jsonl"):
        phases = sum(value for key, value in record.items() if key.startswith("time/") and key != "time/step")
        assert phases == pytest.approx(record["time/step"], rel=0.05)


def test_the_saved_model_opens_with_transformers_alone(recipe_file: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = run(recipe_file, "engine={kind: transformers}")
    folder = directory / "checkpoints" / "step_000002"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and AutoTokenizer.from_pretrained(folder).eos_token_id == 259
    start = AutoModelForCausalLM.from_pretrained(read_json(directory / "provenance.json")[0]["model"])
    moved = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert min(moved) > 0, "every tensor was trained"


def test_old_logp_is_frozen_at_the_first_update(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[int, ...], torch.Tensor]] = []
    get = update.TrainBatch.get

    def kept(train_batch: update.TrainBatch, name: str, batch: MicroBatch) -> torch.Tensor:
        values = get(train_batch, name, batch)
        if name in ("old_logp", "old_at_sampling"):
            seen.append((batch.rows, values))
        return values

    monkeypatch.setattr(update.TrainBatch, "get", kept)
    directory = run(recipe_file, "trainer={updates_per_rollout: 3}", "engine={kind: transformers}", "run.steps=1")
    by_rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for rows, logp in seen:
        by_rows.setdefault(rows, []).append(logp)
    assert by_rows and sum(map(len, by_rows)) == 16
    for values in by_rows.values():  # for the loss and for the correction, which have one temperature here
        assert len(values) == 3 * 2 and all(torch.equal(values[0], value) for value in values)
    record = read_jsonl(directory / "metrics.jsonl")[0]
    assert record["kl/old_k3"] > 0, "the policy moved away from old_logp"


@pytest.mark.parametrize(
    ("kind", "one", "other", "close"),
    [
        ("grpo", "optim.micro_batch_tokens=76", "optim.micro_batch_tokens=16384", 1e-5),  # of each loss: losses/test_splits.py
        ("online_dpo", "optim.micro_batch_tokens=76", "optim.micro_batch_tokens=16384", 1e-5),
        pytest.param("rloo", "optim.micro_batch_tokens=76", "optim.micro_batch_tokens=16384", 1e-5, marks=pytest.mark.slow),
        ("grpo", "model.gradient_checkpointing=false", "model.gradient_checkpointing=true", 1e-6),
    ],
)
def test_what_saves_memory_changes_no_gradient(recipe_file: Path, kind: str, one: str, other: str, close: float) -> None:
    norms = []
    for change in (one, other):
        directory = run(recipe_file, f"trainer={{kind: {kind}}}", "engine={kind: transformers}", "run.steps=1", change)
        norms.append(read_jsonl(directory / "metrics.jsonl")[0]["grad_norm"])
        directory.rename(directory.with_name(change))
    assert norms[0] == pytest.approx(norms[1], rel=close) and norms[0] > 0


@pytest.mark.path("grpo", "colocated", "one process", "bfloat16", "packed", "full")
def test_bfloat16_runs_within_its_bounds(recipe_file: Path) -> None:
    directory = run(recipe_file, "model.dtype=bfloat16")
    gaps = [record["sampler/delta_mean"] for record in read_jsonl(directory / "metrics.jsonl")]
    assert len(gaps) == 2 and all(1e-6 < gap < 0.03 for gap in gaps)


@pytest.mark.slow
def test_vllm_on_transformers_model_code_spares_the_trainers_model(recipe_file: Path) -> None:
    directory = run(recipe_file, "engine={kind: colocated, model_impl: transformers}")
    gaps = [record["sampler/delta_max"] for record in read_jsonl(directory / "metrics.jsonl")]
    assert len(gaps) == 2 and max(gaps) <= 1e-4


@pytest.mark.slow
def test_structured_output_restricts_the_rollouts_and_is_not_compared(recipe_file: Path) -> None:
    directory = run(recipe_file, "engine={kind: colocated, structured_regex: '[0-9]{3}'}", "trainer={correction: {mode: none}}")
    texts = [row["completion"] for row in rollout_rows(directory)]
    assert len(texts) == 2 * 16 and all(len(text) == 3 and text.isdigit() for text in texts)
    gaps = [record["sampler/delta_max"] for record in read_jsonl(directory / "metrics.jsonl")]
    assert len(gaps) == 2 and min(gaps) > 0.1


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_kernels_are_for_the_updates_alone(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    seen: dict[str, set[bool]] = {"update": set(), "engine": set()}
    for what, owner, name in (("update", Updater, "_backward"), ("engine", TransformersEngine, "generate")):
        note = partial(lambda where, *_: seen[where].add(torch.are_deterministic_algorithms_enabled()), what)
        before(owner, name, note, monkeypatch.setattr)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run(recipe_file, f"run.deterministic={str(wanted).lower()}", "engine={kind: transformers}", "run.steps=1")
    assert seen == {"update": {wanted}, "engine": {False}} and not torch.are_deterministic_algorithms_enabled()
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None) == (":4096:8" if wanted else None)


def test_a_correction_compares_log_probs_of_one_temperature(recipe_file: Path) -> None:
    """Online DPO's loss is at temperature 1 whatever the sampling is at. These samples are on-policy: no pair is masked."""
    correction = "{mode: sequence_mask, max: 1.001, min: 0.999, geometric: {min: 0.9999, max: 1.0001}}"
    trainer = f"trainer={{kind: online_dpo, updates_per_rollout: 2, correction: {correction}}}"
    engine = ["engine={kind: transformers}", "run.steps=1"]
    (record,) = read_jsonl(run(recipe_file, trainer, "rollout.temperature=0.7", *engine) / "metrics.jsonl")
    assert record["dpo/kept_frac"] == 1.0 and record["is/masked_frac"] == 0.0


@pytest.mark.parametrize(
    ("schedule", "rates"),
    slow_but(
        [("constant", [0.0, 0.5, 1.0, 1.0]), ("linear", [0.0, 0.5, 1.0, 0.5]), ("cosine", [0.0, 0.5, 1.0, 0.5])],
        ("linear", [0.0, 0.5, 1.0, 0.5]),
    ),
)
def test_the_warm_up_is_that_of_the_recipe(recipe_file: Path, schedule: str, rates: list[float]) -> None:
    optim = f"optim={{learning_rate: 1.0, schedule: {schedule}, warmup_steps: 2, max_grad_norm: 1.0e-9}}"
    directory = run(recipe_file, "engine={kind: transformers}", "run.steps=4", optim)
    assert [record["learning_rate"] for record in read_jsonl(directory / "metrics.jsonl")] == pytest.approx(rates)
