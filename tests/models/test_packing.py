"""Rows that are packed into one sequence are computed as they are with padding, none sees another, and prompts are shared."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sweep
import torch
from conftest import CPU, read_jsonl, tiny_model
from helpers.batches import gradients
from helpers.recipes import recipe_for
from helpers.samples import TEXTS, make_sample

from rlgen.errors import SetupError
from rlgen.metrics import Metric
from rlgen.models import packed_attention
from rlgen.models.load import load_model, locate
from rlgen.models.policy import Policy
from rlgen.recipe import Recipe
from rlgen.rollout.batch import Prompts, collate, deal, plan
from rlgen.rollout.samples import Samples
from rlgen.setup import TrainOptions, train
from rlgen.setup.policy import build_policy
from rlgen.setup.settings import TrainSettings
from rlgen.types import WHOLE, MicroBatch

pytestmark = pytest.mark.usefixtures("one_thread")

# A window shorter than a row, learned positions, experts, layers without positions, one head of keys for each of queries.
PACKED = ["qwen3", "mistral", "gemma3_text", "gpt2", "qwen3_moe", "smollm3", "gpt_neox"]
# Group, and tokens of prompt and completion, of seven rows in three groups, in no order. A tiny model's window is 16 tokens.
LENGTHS = ((1, 20, 30), (0, 1, 1), (2, 7, 12), (1, 20, 1), (2, 7, 19), (1, 20, 9), (2, 7, 12))
COMPUTED = (20 + 1 + 7) + sum(completion - 1 for _, _, completion in LENGTHS)


def batch_of(changed: int = -1) -> MicroBatch:
    """Seven rows of other ids; those of the group `changed` begin with another one."""
    rows = []
    for row, (group, prompt, completion) in enumerate(LENGTHS):
        start = 11 * group + (group == changed)
        ids = [start + (7 * place + 13 * row * (place >= prompt)) % 200 for place in range(prompt + completion)]
        rows.append(
            make_sample(
                group_id=group,
                sample_index=row,
                prompt_ids=tuple(ids[:prompt]),
                completion_ids=tuple(ids[prompt:]),
                sampler_logp=(-1.0,) * completion,
                loss_mask=tuple(place % 5 != 1 for place in range(completion)),
            )
        )
    return collate(Samples.of(rows, ()), range(len(rows)), CPU)


def packed_and_padded(name: str) -> tuple[Policy, Policy]:
    packed, padded = (Policy(tiny_model(name), torch.float32, True) for _ in range(2))
    assert packed.pack(TEXTS) is None and packed.packed and not padded.packed
    return packed, padded


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(name: str) -> None:
    packed, padded = packed_and_padded(name)
    (logp, slope), (expected, of_padded) = gradients(packed, batch_of()), gradients(padded, batch_of())
    assert (logp - expected).abs().max() < 1e-5 and logp.abs().max() > 1
    assert (slope - of_padded).abs().max() < 1e-5 * of_padded.abs().max()
    assert packed.padding(batch_of()) == 0
    assert padded.padding(batch_of()) == 7 * 50 - sum(prompt + completion for _, prompt, completion in LENGTHS)


def test_each_prompt_is_computed_once() -> None:
    packed, _ = packed_and_padded("qwen3")
    tokens = []
    packed.model.get_input_embeddings().register_forward_hook(lambda _, ids, states: tokens.append(ids[0].numel()))
    packed(batch_of(), (WHOLE,))
    assert tokens == [COMPUTED]


@pytest.mark.parametrize("name", PACKED)
def test_no_row_sees_another(name: str) -> None:
    packed, _ = packed_and_padded(name)
    with torch.no_grad():
        before, after = (packed(batch_of(changed), (WHOLE,)).logp[0] for changed in (-1, 1))
    of_others, own = ([row for row, (group, *_) in enumerate(LENGTHS) if (group == 1) == is_own] for is_own in (False, True))
    if name == "qwen3_moe":  # experts multiply the tokens of all rows together, in matrices of other sizes
        assert (before[of_others] - after[of_others]).abs().max() < 1e-6
    else:
        assert torch.equal(before[of_others], after[of_others])
    assert all(not torch.equal(before[row], after[row]) for row in own)


def test_half_precision_stays_within_its_rounding() -> None:
    packed, padded = (Policy(tiny_model("qwen3"), torch.bfloat16, True) for _ in range(2))
    assert packed.pack(TEXTS) is None
    gap = gradients(packed, batch_of())[0] - gradients(padded, batch_of())[0]
    assert gap.abs().max() < 0.1


REFUSED = {
    "mamba": "carry their state",
    "qwen3_next": "carry their state",
    "recurrent_gemma": "other hidden states",
    "gpt_oss": "by `eager`",
    "gemma2": "by `eager`",
    "bloom": "by `eager`",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_packed_are_left_as_they_are(name: str, tmp_path: Path) -> None:
    sweep.build(name, tmp_path)
    policy = Policy(load_model(str(tmp_path), None, torch.float32, "sdpa", CPU), torch.float32, True)
    before = policy(batch_of(), (WHOLE,)).logp
    reason = policy.pack(TEXTS)
    assert reason and REFUSED[name] in reason and not policy.packed
    assert torch.equal(policy(batch_of(), (WHOLE,)).logp, before)


def test_a_row_that_sees_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = packed_attention.AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, packed_attention.NAME, mapping["sdpa"])
    reason = Policy(tiny_model("qwen3"), torch.float32, True).pack(TEXTS)
    assert reason and "other hidden states" in reason


def recipe(compiled: bool = False, **optim: object) -> Recipe:
    found = recipe_for("tiny:qwen3", optim=optim)
    return found.model_copy(update={"model": found.model.model_copy(update={"compile": compiled})})


def test_a_recipe_packs_where_it_can_and_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = locate("tiny:qwen3"), ({}, {"packing": False}, {"packing": True})
    assert [build_policy(TrainSettings.of(recipe(**one), folder, TEXTS), CPU).packed for one in said] == [True, False, True]
    with monkeypatch.context() as patch:  # how it compiles is not asked here, and takes longest
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        assert not build_policy(TrainSettings.of(recipe(compiled=True), folder, TEXTS), CPU).packed
    monkeypatch.setattr("rlgen.setup.policy.can_pack", lambda device, dtype: False)
    assert not build_policy(TrainSettings.of(recipe(), folder, TEXTS), CPU).packed
    with pytest.raises(SetupError, match=r"optim\.packing: a GPU packs rows in bfloat16 only"):
        build_policy(TrainSettings.of(recipe(packing=True), folder, TEXTS), CPU)


@pytest.mark.slow
def test_a_model_that_cannot_be_packed_says_so(tmp_path: Path) -> None:
    sweep.build("recurrent_gemma", tmp_path)
    unpacked = build_policy(TrainSettings.of(recipe(), str(tmp_path), TEXTS), CPU)
    assert not unpacked.packed and "other hidden states" in (unpacked.unpacked or "")
    with pytest.raises(SetupError, match=r"optim\.packing: RecurrentGemmaForCausalLM computes other hidden states"):
        build_policy(TrainSettings.of(recipe(packing=True), str(tmp_path), TEXTS), CPU)


def test_packed_micro_batches_are_filled() -> None:
    prompts = Prompts(group=np.array([0, 1, 0, 1, 0, 1, 0, 1]), tokens=np.array([40, 20, 40, 20, 40, 20, 40, 20]))
    lengths = [60, 90, 50, 40, 60, 30, 70, 70]
    # 40 for the prompt, and 20 + 10 + 20 + 30 fill 120; then 20, and 70 + 20 + 10: the last row is one too many.
    assert plan([[row] for row in range(8)], lengths, 120, prompts) == [[0, 2, 4, 6], [1, 3, 5], [7]]
    # The same 120 hold both rows of a pair or none.
    assert plan([[1, 3], [5, 7]], lengths, 120, prompts) == [[1, 3], [5, 7]]
    # A longer budget takes several groups, each with its prompt: 40 + 80 + 20 + 70 + 20.
    assert plan([[row] for row in range(8)], lengths, 230, prompts) == [[0, 2, 4, 6, 1, 3], [5, 7]]
    assert plan([[1]], lengths, 50, prompts) == [[1]], "a row may exceed the budget"


def test_groups_stay_in_one_process_where_the_balance_allows_it() -> None:
    group, lengths = np.repeat(np.arange(4), 8), [110 + 10 * (row % 8) for row in range(32)]
    prompts = Prompts(group=group, tokens=np.full(32, 100))
    units = [[row] for row in range(32)]
    of_two = deal(units, lengths, 10**6, 2, prompts)
    assert [sorted(set(group[rows].tolist())) for hand in of_two for rows in hand] == [[0, 1], [2, 3]], "as they were sampled"
    assert sorted(row for hand in of_two for rows in hand for row in rows) == list(range(32))
    of_three = deal(units, lengths, 10**6, 3, prompts)
    parts = [[row for rows in hand for row in rows] for hand in of_three]
    computed = [sum(lengths[row] - 100 for row in rows) + 100 * len(set(group[rows].tolist())) for rows in parts]
    assert max(computed) - min(computed) <= 100, "no more than a prompt apart"
    assert sum(len(set(group[rows].tolist())) for hand in of_three for rows in hand) <= 8, "no group in more than two processes"
    assert sorted(map(len, deal([[0]], lengths, 10**6, 2, prompts))) == [1, 1], "every process runs as many micro-batches"


@pytest.mark.parametrize(
    ("faster", "engine"), [("optim.packing", "transformers"), pytest.param("model.compile", "colocated", marks=pytest.mark.slow)]
)
def test_a_run_learns_the_same_packed_or_compiled(recipe_file: Path, tmp_path: Path, faster: str, engine: str) -> None:
    found, files = [], []
    same = [f"engine={{kind: {engine}}}", "trainer={kind: grpo, beta: 0.1}", "rewards=[{use: length, args: {target: 6}}]"]
    same += ["optim.micro_batch_tokens=200", "model.compile=false", "optim.packing=false"]
    for name, settings in (("faster", [*same, f"{faster}=true"]), ("plain", same)):
        run = train(recipe_file, TrainOptions(overrides=settings, run_dir=tmp_path / name), say=lambda line: None)
        found.append(read_jsonl(run / "metrics.jsonl"))
        files.append({path.name for path in (run / "checkpoints" / "step_000002").rglob("*")})
    for ours, plain in zip(*found, strict=True):
        assert ours[Metric.TOKENS_PADDING] == (0 if faster == "optim.packing" else plain[Metric.TOKENS_PADDING])
        for key in (Metric.LOSS, Metric.GRAD_NORM, Metric.SAMPLER_KL, Metric.KL_REF_K3, Metric.REWARD_MEAN):
            assert ours[key] == pytest.approx(plain[key], abs=1e-5, rel=1e-5), key
        assert ours[Metric.SENTINEL_DRIFT] is False
    assert any(plain[Metric.TOKENS_PADDING] > 0 for plain in found[1]) or faster != "optim.packing"
    assert files[0] == files[1]
