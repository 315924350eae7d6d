"""Numbers that go wrong: what is skipped, what is kept, and what ends a run. Whole runs in this process, with a fault planted."""

import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rollouts import rollout_rows
from helpers.slow import slow_but
from helpers.spread import recipe, run, step_now
from helpers.train_state import equal
from safetensors.torch import load_file
from torch import Tensor

from rlgen.algorithms.base import Scores
from rlgen.algorithms.registry import build_algorithm
from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import DivergedError, Fault, SentinelError
from rlgen.files import read_json
from rlgen.losses.advantages import gdpo_advantages, group_advantages, rloo_advantages, without_signal
from rlgen.models.policy import Policy, PolicyScores
from rlgen.recipe.trainers import RLOORecipe
from rlgen.rollout.read import rollout_steps
from rlgen.rollout.samples import Samples
from rlgen.run.directory import RunDirectory
from rlgen.trainers.collect import Collector
from rlgen.trainers.train_batch import TrainBatch
from rlgen.trainers.update import Updater
from rlgen.types import Group, Sample

__all__ = ["recipe"]
Proof = Callable[[str], None]


def strict(path: Path) -> list[dict[str, Any]]:
    """As JSON has it: without NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{path} holds {name}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def saved(directory: Path, step: int) -> dict[str, Tensor]:
    """Weights and moments."""
    folder = directory / "checkpoints" / f"step_{step:06d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "state" / "optimizer.safetensors")


class Planted:
    """Makes something not finite in some steps, and counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str, steps: Collection[int], value: float = math.nan) -> None:
        self.fired = 0
        self.done: set[int] = set()
        now, forward, run_all = step_now(monkeypatch), Policy.forward, Updater._run

        def wrong_logp(policy: Policy, *arguments: Any) -> PolicyScores:
            scores = forward(policy, *arguments)
            if now() in steps and now() not in self.done and torch.is_grad_enabled():
                self.done.add(now())
                self.fired += 1
                wrong = scores.logp.clone()
                wrong[:, 0, 0] = value
                return PolicyScores(wrong, scores.entropy, scores.sure)
            return scores

        def wrong_part(updater: Updater, train_batch: TrainBatch, update: int) -> Any:
            part = run_all(updater, train_batch, update)
            if now() not in steps:
                return part
            self.fired += 1
            if what == "loss":
                return replace(part, loss=value)
            next(parameter for parameter in updater.policy.parameters() if parameter.grad is not None).grad.view(-1)[3] = value  # type: ignore[union-attr]
            return part

        if what == "log-prob":
            monkeypatch.setattr(Policy, "forward", wrong_logp)
        else:
            monkeypatch.setattr(Updater, "_run", wrong_part)


@pytest.mark.fault(45)
@pytest.mark.parametrize("what", slow_but(["loss", "gradient", "log-prob"], "gradient"))
def test_what_is_not_finite_is_not_trained_on(recipe: Path, monkeypatch: pytest.MonkeyPatch, what: str, proof: Proof) -> None:
    value = math.inf if what == "gradient" else math.nan
    planted = Planted(monkeypatch, what, {2, 4}, value)
    directory = run(recipe, "run.steps=5", "optim.max_nonfinite=1", "trainer.updates_per_rollout=2")
    assert planted.fired == 2  # the second update of a step would see the same, and is not tried
    first, second, third, fourth = (saved(directory, step) for step in (1, 2, 3, 4))
    assert equal(first, second) and equal(third, fourth) and not equal(second, third)
    records = strict(directory / "metrics.jsonl")
    assert [record["updates/skipped"] for record in records] == [0, 2, 0, 2, 0]
    assert [record["updates/done"] for record in records] == [2, 0, 2, 0, 2]
    assert [record["loss"] is None for record in records] == [False, True, False, True, False]
    (verdict,) = strict(directory / "nonfinite" / "step_000002.json")
    rows = rollout_rows(directory, 2)
    assert len(rows) == 8 and all(row["advantage"] is not None and row["sampler_logp"] for row in rows)
    assert len(verdict["rows"]) == (1 if what == "log-prob" else 0)
    if what == "loss":
        assert verdict["loss"] == "nan"
    elif what == "gradient":
        assert verdict["grad_norm"] == "inf" and len(verdict["parameters"]) == 1
    else:
        (odd,) = [row for row in rows if [row["group_id"], row["sample_index"]] == verdict["rows"][0]]
        assert any(map(math.isnan, odd["policy_logp"]))
    for step, trained in enumerate([True, False, True, False, True], 1):
        assert {row["trained"] for row in rollout_rows(directory, step)} == {trained}
    assert read_json(directory / "status.json")["state"] == "done"
    proof(f"{what} {value} in steps 2 and 4: weights and moments bit for bit those before, the run went on")


@pytest.mark.fault(45)
def test_too_many_in_a_row_end_the_run_over_a_resume_too(recipe: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    planted = Planted(monkeypatch, "gradient", {2, 3})
    directory = run(recipe, "run.steps=2", "optim.max_nonfinite=1", "checkpoint.keep=1")
    with pytest.raises(DivergedError, match=r"step 3: .*norm is nan.*in .*nonfinite/step_000003.json.* is 2 in a row") as caught:
        run(recipe, "run.steps=5", "optim.max_nonfinite=1", "checkpoint.keep=1", resume=True)
    assert "optim.learning_rate" in str(caught.value) and caught.value.exit_code == 7 and planted.fired == 2
    status = read_json(directory / "status.json")
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 7, 2)
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000002"]
    assert all(tensor.isfinite().all() for tensor in saved(directory, 2).values())
    whole = run(recipe, "run.steps=1", name="whole")
    assert equal(saved(directory, 2), saved(whole, 1)), "the last good weights are what is kept"
    proof("a gradient of NaN in step 2, a resume, another in step 3: exit 7, the weights of step 1 are kept")


@pytest.mark.fault(45)
def test_none_is_tolerated_if_the_recipe_says_so(recipe: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    planted = Planted(monkeypatch, "loss", {1}, math.inf)
    with pytest.raises(DivergedError, match="step 1: the loss is inf"):
        run(recipe, "run.steps=3", "optim.max_nonfinite=0")
    assert planted.fired == 1 and (recipe.parent / "run" / "nonfinite" / "step_000001.json").exists()
    proof("an infinite loss in step 1 with optim.max_nonfinite 0: exit 7")


@pytest.mark.fault(45)
def test_weights_that_an_optimizer_step_breaks_are_never_saved(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    step, steps = torch.optim.AdamW.step, 0

    def breaking(optimizer: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        done = step(optimizer, *arguments)
        if steps == 3:
            optimizer.param_groups[0]["params"][-1].data.view(-1)[-1] = math.inf
        return done

    monkeypatch.setattr(torch.optim.AdamW, "step", breaking)
    with pytest.raises(DivergedError, match="step 3: the optimizer step made weights that are not finite"):
        run(recipe, "run.steps=5", "checkpoint.keep=1")
    directory = recipe.parent / "run"
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_000002"] and steps == 3
    assert all(tensor.isfinite().all() for tensor in saved(directory, 2).values())
    assert read_json(directory / "status.json")["exit_code"] == 7
    proof("optimizer step 3 wrote inf into a weight: exit 7, and the only checkpoint is that of step 2")


def test_a_token_that_the_policy_never_samples_is_the_sentinels(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted(monkeypatch, "log-prob", {2}, -math.inf)
    with pytest.raises(SentinelError):
        run(recipe, "run.steps=3")
    assert planted.fired == 1 and not (recipe.parent / "run" / "nonfinite").exists()


def test_a_sampler_without_a_number_is_the_sentinels(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = TransformersEngine.generate

    def wrong(engine: TransformersEngine, *arguments: Any) -> Any:
        answers = generate(engine, *arguments)
        return (
            [replace(one, logp=np.append(np.float32(-math.inf), one.logp[1:])) for one in answers]
            if engine.weight_version == 1
            else answers
        )

    monkeypatch.setattr(TransformersEngine, "generate", wrong)
    with pytest.raises(SentinelError) as caught:
        run(recipe, "run.steps=3")
    assert caught.value.fault is Fault.MISSING_LOGPROBS and "infinities" in str(caught.value)
    assert not (recipe.parent / "run" / "nonfinite").exists()


# --- nothing to learn from -------------------------------------------------------------------------------------------


@pytest.mark.fault(33)
def test_equal_rewards_have_an_advantage_of_exactly_zero(proof: Proof) -> None:
    tenths = torch.full((8,), 0.1, dtype=torch.float32)
    assert tenths.std() > 0, "rounding of the mean: eight equal numbers have a standard deviation"
    others = torch.tensor([0.3, 0.1, 0.7, 0.2, 0.9, 0.1, 0.4, 0.55])
    rewards, ids = torch.cat([tenths, others]), torch.arange(16) // 8
    for scale in ("group", "batch", "batch_centered", "none"):
        assert not group_advantages(rewards, ids, scale)[:8].any() and group_advantages(rewards, ids, scale)[8:].all()  # type: ignore[arg-type]
    assert not rloo_advantages(rewards, ids)[:8].any()
    columns = torch.stack([rewards, torch.cat([tenths, others.flip(0)])], dim=1)
    assert not gdpo_advantages(columns, torch.tensor([1.0, 0.3]), ids)[:8].any()
    assert without_signal(rewards, ids).tolist() == [True] * 8 + [False] * 8
    proof("the standard deviation of eight rewards of 0.1 is not 0 in float32; every advantage is")


@pytest.mark.fault(33)
def test_normalising_over_the_batch_keeps_zero_at_zero(proof: Proof) -> None:
    torch.manual_seed(0)
    rewards = torch.cat([torch.full((4,), 0.1), torch.rand(12)]).double()
    algorithm = build_algorithm(RLOORecipe(kind="rloo", normalize_advantages=True))
    scores = Scores(
        rewards=rewards,
        columns=rewards[:, None],
        column_weights=torch.ones(1, dtype=torch.float64),
        group_ids=torch.arange(16) // 4,
        sample_index=torch.arange(16) % 4,
        truncated=torch.zeros(16, dtype=torch.bool),
        kl=None,
    )
    plain = rloo_advantages(rewards, scores.group_ids)
    assert plain.mean() != 0, "zero but for rounding, which normalising would hand to the constant group"
    assert algorithm.advantages(scores).advantages[:4].tolist() == [0.0] * 4
    proof(f"the mean of the advantages is {plain.mean().item():.1e}, that of the constant group exactly 0")


def rewarding(monkeypatch: pytest.MonkeyPatch, change: Callable[[Sample, int], Sample]) -> None:
    """Changes the samples of each step once they are rewarded."""
    rewarded = Collector.rewarded

    def changed(collect: Collector, groups: list[Group], step: int) -> Samples:
        held = rewarded(collect, groups, step)
        return Samples.of([change(held[row], step) for row in range(len(held))], held.labels)

    monkeypatch.setattr(Collector, "rewarded", changed)


@pytest.mark.fault(33, 34, 47)
@pytest.mark.parametrize(
    "trainer", ["{kind: grpo, mask_truncated: true}", "{kind: rloo, beta: 0, zero_variance: drop}", "{kind: online_dpo}"]
)
def test_steps_without_anything_to_learn_move_nothing(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, proof: Proof
) -> None:
    changes: dict[int, Callable[[Sample], Sample]] = {
        2: lambda sample: replace(sample, reward=0.1, rewards={"spread": 0.1}),
        3: lambda sample: replace(sample, reward=None, rewards={"spread": None}),
        4: lambda sample: replace(sample, spans=()),
    }
    if "mask_truncated" in trainer:
        changes[5] = lambda sample: replace(sample, finish_reason="length")
    ended = "stop"  # short as they are, most would be truncated
    rewarding(monkeypatch, lambda s, step: changes.get(step, lambda sample: sample)(replace(s, finish_reason=ended)))  # type: ignore[arg-type]
    last = len(changes) + 2
    directory = run(recipe, f"trainer={trainer}", f"run.steps={last}", "health.no_update.steps=3")
    records = strict(directory / "metrics.jsonl")
    idle = [0] + [1] * len(changes) + [0]
    assert [record["updates/empty"] for record in records] == idle
    assert [record["updates/done"] for record in records] == [1 - one for one in idle]
    states = [saved(directory, step) for step in range(1, last + 1)]
    assert all(equal(state, states[0]) for state in states[1:-1]), "Adam's momentum moves nothing either"
    assert not equal(states[-1], states[0])
    assert records[1]["groups/zero_std"] == 1.0 and records[2]["reward/unscored"] == 8
    assert [record["health/no_update"] for record in records][3] is True and records[-1]["health/no_update"] is False
    assert {row["advantage"] for row in rollout_rows(directory, 2, 3)} == {0.0}
    proof("steps of equal rewards, of none, of masked and truncated completions: counted, and no bit of the weights moved")


# --- refill ----------------------------------------------------------------------------------------------------------


def constant_thirds(sample: Sample, step: int) -> Sample:
    """Every third prompt is answered equally well each time."""
    return replace(sample, reward=0.5, rewards={"spread": 0.5}) if sample.group_id % 3 == 0 else sample


def of_steps(directory: Path) -> list[list[dict[str, Any]]]:
    return [rollout_rows(directory, step) for step in rollout_steps(directory / "rollouts")]


@pytest.mark.slow
@pytest.mark.fault(33)
def test_groups_without_signal_are_replaced_and_the_data_goes_on_exactly(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    rewarding(monkeypatch, constant_thirds)
    options = ["rollout={prompts_per_step: 3, group_size: 2, max_completion_tokens: 8, dynamic_sampling: 2}"]
    whole = run(recipe, *options, "run.steps=4", name="whole")
    assert_steps = [([1, 2, 4], [0, 3], 5), ([5, 7, 8], [6], 9), ([10, 11, 13], [9, 12], 14), ([14, 16, 17], [15], 18)]
    for step, (rows, (kept, replaced, position)) in enumerate(zip(of_steps(whole), assert_steps, strict=True), 1):
        assert sorted({row["group_id"] for row in rows if row["trained"]}) == kept
        assert sorted({row["group_id"] for row in rows if not row["trained"]}) == replaced
        assert {row["advantage"] for row in rows if not row["trained"]} == {0.0}
        assert {row["weight_version"] for row in rows} == {step - 1}
        state = read_json(whole / "checkpoints" / f"step_{step:06d}" / "state" / "state.json")
        assert (state["step"], state["position"]) == (step, position)
    records = strict(whole / "metrics.jsonl")
    assert [record["groups/resampled"] for record in records] == [2, 1, 2, 1]
    assert records[0]["groups/zero_std"] == pytest.approx(2 / 5), "of all groups that were sampled"
    run(recipe, *options, "run.steps=2")
    resumed = run(recipe, *options, "run.steps=4", resume=True)
    assert of_steps(resumed) == of_steps(whole) and equal(saved(resumed, 4), saved(whole, 4))
    proof("every third group was constant: the next prompts took its place, and after a resume too")


@pytest.mark.slow
def test_refill_is_bounded_and_asks_for_as_many_as_are_missing(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewarding(monkeypatch, lambda sample, step: replace(sample, reward=0.5) if sample.group_id not in (1, 3) else sample)
    options = ["rollout={prompts_per_step: 3, group_size: 2, max_completion_tokens: 8, dynamic_sampling: 3}"]
    (rows,) = of_steps(run(recipe, *options, "run.steps=1"))
    # 0 1 2, then 3 4 for two of them, 5 for 4, and 6, which stays though it is constant
    assert sorted({row["group_id"] for row in rows}) == [0, 1, 2, 3, 4, 5, 6]
    assert sorted({row["group_id"] for row in rows if row["advantage"]}) == [1, 3]
    assert sorted({row["group_id"] for row in rows if row["trained"]}) == [1, 3, 6]


def test_records_are_json_whatever_is_in_them(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, None)
    odd = {"step": 1, "loss": math.nan, "is/ratio_max": math.inf, "reward": (0.5, -math.inf), "text": "NaN"}
    plain = {"step": 1, "loss": None, "is/ratio_max": None, "reward": [0.5, None], "text": "NaN"}
    directory.write_metrics(odd)
    assert strict(directory.metrics) == [plain] == directory.read_metrics()
