"""Rows that are packed into one sequence are computed as they are with padding, and none sees another."""

from pathlib import Path

import pytest
import sweep
import torch
from conftest import CPU, read_jsonl, tiny_model
from helpers.samples import make_sample
from torch import Tensor

from rlgen.errors import SetupError
from rlgen.metrics import Metric
from rlgen.models import packing
from rlgen.models.load import load_model, locate
from rlgen.models.policy import Policy
from rlgen.opening import TrainOptions, train
from rlgen.opening.policy import build_policy, checkpoint_activations
from rlgen.recipe import Recipe
from rlgen.rollout.batch import collate, deal, plan
from rlgen.types import Batch, Samples

pytestmark = pytest.mark.usefixtures("one_thread")

# A window shorter than a row, learned positions, experts, layers without positions, one head of keys for each of queries.
PACKED = ["qwen3", "mistral", "gemma3_text", "gpt2", "qwen3_moe", "smollm3", "gpt_neox"]
LENGTHS = ((5, 30), (1, 1), (7, 12), (3, 19))  # of prompt and completion; the window of a tiny model is 16


def batch_of(first_ids: int = 3) -> Batch:
    """Four rows; the ids of the first begin at `first_ids`."""
    rows = []
    for row, (prompt, completion) in enumerate(LENGTHS):
        ids = [(first_ids if row == 0 else 11 * row) + (7 * place) % 200 for place in range(prompt + completion)]
        rows.append(
            make_sample(
                prompt_ids=tuple(ids[:prompt]),
                completion_ids=tuple(ids[prompt:]),
                sampler_logp=(-1.0,) * completion,
                loss_mask=tuple(place % 5 != 1 for place in range(completion)),
            )
        )
    return collate(Samples.of(rows, ()), range(len(rows)), CPU)


def packed_and_padded(name: str) -> tuple[Policy, Policy]:
    packed, padded = (Policy(tiny_model(name), torch.float32, True) for _ in range(2))
    assert packed.pack() is None and packed.packed and not padded.packed
    return packed, padded


def gradients(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs [B, T], and the gradient of a sum of them that weighs every token differently, as one vector."""
    logp = policy(batch, (0.9,), "value").logp[0]
    (logp * torch.linspace(0.5, 1.5, logp.numel()).view_as(logp)).sum().backward()
    return logp.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(name: str) -> None:
    packed, padded = packed_and_padded(name)
    (logp, slope), (expected, of_padded) = gradients(packed, batch_of()), gradients(padded, batch_of())
    assert (logp - expected).abs().max() < 1e-5 and logp.abs().max() > 1
    assert (slope - of_padded).abs().max() < 1e-5 * of_padded.abs().max()
    assert packed.positions(batch_of()) == 78 and padded.positions(batch_of()) == 4 * 35


@pytest.mark.parametrize("name", PACKED)
def test_no_row_sees_another(name: str) -> None:
    packed, _ = packed_and_padded(name)
    with torch.no_grad():
        before, after = (packed(batch_of(first), (1.0,)).logp[0] for first in (3, 4))
    if name == "qwen3_moe":  # experts multiply the tokens of all rows together, in matrices of other sizes
        assert (before[1:] - after[1:]).abs().max() < 1e-6
    else:
        assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_activations_that_are_computed_again_are_those_of_packed_rows() -> None:
    model = tiny_model("mistral")
    checkpoint_activations(model)
    again = Policy(model, torch.float32, True)
    assert again.pack() is None
    packed, _ = packed_and_padded("mistral")
    assert torch.equal(gradients(again, batch_of())[1], gradients(packed, batch_of())[1])


def test_half_precision_stays_within_its_rounding() -> None:
    packed, padded = (Policy(tiny_model("qwen3"), torch.bfloat16, True) for _ in range(2))
    assert packed.pack() is None
    gap = gradients(packed, batch_of())[0] - gradients(padded, batch_of())[0]
    assert gap.abs().max() < 0.1


REFUSED = {
    "mamba": "carry what they have read",
    "qwen3_next": "carry what they have read",
    "recurrent_gemma": "other hidden states",
    "gpt_oss": "by `eager`",
    "gemma2": "by `eager`",
    "bloom": "by `eager`",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_packed_are_left_as_they_are(name: str, tmp_path: Path) -> None:
    sweep.build(name, tmp_path)
    policy = Policy(load_model(str(tmp_path), None, torch.float32, "sdpa", CPU), torch.float32, True)
    before = policy(batch_of(), (1.0,)).logp
    reason = policy.pack()
    assert reason and REFUSED[name] in reason and not policy.packed
    assert torch.equal(policy(batch_of(), (1.0,)).logp, before)


def test_a_row_that_sees_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    together = packing.attention

    def leaking(*args: object, **kwargs: object) -> object:
        return together(*args, **{**kwargs, "row_lengths": None})

    monkeypatch.setitem(packing.AttentionInterface._global_mapping, packing.NAME, leaking)
    reason = Policy(tiny_model("qwen3"), torch.float32, True).pack()
    assert reason and "other hidden states" in reason


def recipe(**optim: object) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "packed"},
            "model": {"path": "tiny:qwen3", "dtype": "float32"},
            "data": {"source": "task:sort"},
            "rewards": [{"use": "exact_match"}],
            "optim": optim,
        }
    )


def test_a_recipe_packs_where_there_is_a_kernel_and_where_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgen.opening.policy.kernel_for", lambda device, dtype: device.type == "cuda")
    folder = locate("tiny:qwen3")
    assert [build_policy(recipe(**said), folder, CPU).packed for said in ({}, {"packing": False}, {"packing": True})] == [
        False,
        False,
        True,
    ]
    monkeypatch.setattr("rlgen.opening.policy.kernel_for", lambda device, dtype: True)
    assert build_policy(recipe(), folder, CPU).packed
    sweep.build("recurrent_gemma", tmp_path)
    unpacked = build_policy(recipe(), str(tmp_path), CPU)
    assert not unpacked.packed and "other hidden states" in (unpacked.unpacked or "")
    with pytest.raises(SetupError, match=r"optim\.packing: RecurrentGemmaForCausalLM computes other hidden states"):
        build_policy(recipe(packing=True), str(tmp_path), CPU)


def test_packed_micro_batches_are_filled() -> None:
    lengths = [10, 90, 30, 40, 60, 20, 50, 70]
    batches = plan([[row] for row in range(8)], lengths, 128, packed=True)
    assert sorted(row for rows in batches for row in rows) == list(range(8))
    sums = [sum(lengths[row] for row in rows) for rows in batches]
    assert max(sums) <= 128 and len(batches) <= len(plan([[row] for row in range(8)], lengths, 128))
    pairs = [rows for hand in deal([[0, 1], [2, 3], [4, 5]], lengths, 128, 2, packed=True) for rows in hand]
    assert sorted(map(tuple, pairs)) == [(0, 1), (2, 3), (4, 5), ()][:3] or all(len(rows) % 2 == 0 for rows in pairs)


RUN = """\
run: {{name: {name}, steps: 2, dir: "{folder}"}}
model: {{path: "tiny:qwen3", dtype: float32}}
data: {{source: "task:sort", chat: true, max_prompt_tokens: 64}}
rewards: [{{use: length, args: {{target: 6}}}}]
rollout: {{prompts_per_step: 4, group_size: 4, max_completion_tokens: 12}}
engine: {{kind: transformers}}
trainer: {{kind: grpo, beta: 0.1}}
optim: {{learning_rate: 1.0e-3, packing: {packing}, micro_batch_tokens: 200}}
"""


def test_a_run_learns_the_same_without_padding(tmp_path: Path) -> None:
    found = {}
    for packing_of_run in ("true", "false"):
        path = tmp_path / f"{packing_of_run}.yaml"
        path.write_text(RUN.format(name=f"packed-{packing_of_run}", folder=tmp_path, packing=packing_of_run))
        found[packing_of_run] = read_jsonl(train(path, TrainOptions(), say=lambda line: None) / "metrics.jsonl")
    for packed, padded in zip(found["true"], found["false"], strict=True):
        assert packed[Metric.TOKENS_PADDING] == 0 < padded[Metric.TOKENS_PADDING]
        for name in (Metric.LOSS, Metric.GRAD_NORM, Metric.SAMPLER_KL, Metric.KL_REF_K3, Metric.REWARD_MEAN):
            assert packed[name] == pytest.approx(padded[name], abs=1e-5, rel=1e-5), name
        assert packed[Metric.SENTINEL_DRIFT] is False
