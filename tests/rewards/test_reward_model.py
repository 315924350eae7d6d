"""Reward models: their scores are those of transformers, whatever the batches; what is no reward model is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.damage import flip
from helpers.reward_model import make_reward_model
from helpers.scoring import Build, group, totals
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlgen.errors import RewardError
from rlgen.recipe.judges import RewardModelArgs
from rlgen.rewards import reward_model
from rlgen.rewards.reward_model import RewardModel, TooLong, batches, load_parts, model_digest, sigmoid

CHAT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "3+4="}]
TEXTS = ["7", "the sum is seven", "", "7 7 7 7 7 7 7 7 7 7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("scores"))


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for a worker, and this process is none."""
    monkeypatch.setattr(reward_model, "limit_memory", lambda further: None)


def model_of(folder: Path, **settings: Any) -> RewardModel:
    return RewardModel(RewardModelArgs(path=str(folder), **{"dtype": "float32", **settings}), 0)


def scored(model: RewardModel, texts: list[str], messages: Any = None) -> list[float | None]:
    count = len(texts)
    return model.score(prompts=["3+4="] * count, completions=texts, prompt_messages=[messages] * count)


def plain_scores(folder: Path, texts: list[str], messages: Any = None) -> list[float]:
    """What transformers gives, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        whole = f"3+4={text}"
        if messages is not None:
            whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": text}], tokenize=False)
        ids = tokenizer(whole, return_tensors="pt", add_special_tokens=messages is None)
        with torch.inference_mode():
            found.append(model(**ids).logits[0, 0].item())
    return found


@pytest.mark.parametrize("batch_tokens", [1, 40, 16384])
@pytest.mark.parametrize("messages", [None, CHAT])
def test_scores_are_those_of_transformers(folder: Path, messages: Any, batch_tokens: int) -> None:
    found = scored(model_of(folder, batch_tokens=batch_tokens), TEXTS, messages)
    assert found == pytest.approx(plain_scores(folder, TEXTS, messages), abs=1e-5)
    assert len(set(found)) == len(TEXTS)


def test_a_declared_padding_is_used(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path, pad=True)
    assert scored(model_of(folder), TEXTS, CHAT) == pytest.approx(plain_scores(folder, TEXTS, CHAT), abs=1e-5)


@pytest.mark.parametrize(("chat", "given", "shown"), [(False, CHAT, None), (True, None, [{"role": "user", "content": "3+4="}])])
def test_messages_or_text_as_the_recipe_says(folder: Path, chat: bool, given: Any, shown: Any) -> None:
    found = scored(model_of(folder, chat=chat), TEXTS, given)
    assert found == pytest.approx(plain_scores(folder, TEXTS, shown), abs=1e-5)


def test_a_head_in_float32_tells_scores_apart(folder: Path) -> None:
    found = scored(model_of(folder, dtype="bfloat16"), TEXTS)
    assert found == pytest.approx(plain_scores(folder, TEXTS), abs=0.1)
    assert any(value != torch.tensor(value).bfloat16().item() for value in found)


def test_pairwise_is_the_mean_probability_of_winning(folder: Path) -> None:
    one, other, third = plain_scores(folder, TEXTS[:3])
    wins = [(sigmoid(one - other) + sigmoid(one - third)) / 2]
    found = scored(model_of(folder, pairwise=True), TEXTS[:3])
    assert found[0] == pytest.approx(wins[0], abs=1e-5) and sum(found) == pytest.approx(1.5)  # type: ignore[arg-type]
    assert sigmoid(-1000.0) == 0.0 and sigmoid(1000.0) == 1.0 and sigmoid(0.0) == 0.5


def test_a_row_that_is_too_long_is_an_error_or_loses_its_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TooLong, match="prompt and completion have 20 tokens, but the model takes 8; see `overlong`"):
        scored(model_of(folder, max_tokens=8), ["the sum is seven"])
    cut = model_of(folder, max_tokens=8, overlong="truncate")
    found = scored(cut, ["the sum is seven", "7"])
    end = AutoTokenizer.from_pretrained(folder)("3+4=the sum is seven")["input_ids"][-8:]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert found[0] == pytest.approx(model(input_ids=torch.tensor([end])).logits[0, 0].item(), abs=1e-5)
    assert found[1] == pytest.approx(plain_scores(folder, ["7"])[0], abs=1e-5)
    assert [record.getMessage() for record in caplog.records if record.name == reward_model.__name__] == [
        "reward_model: 1 of 2 rows so far had more than 8 tokens"
    ]


def test_a_prompt_with_images_is_read_as_text(folder: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "3+4="}]
    found = scored(model_of(folder), TEXTS, [{"role": "user", "content": parts}])
    assert found == pytest.approx(plain_scores(folder, TEXTS, [{"role": "user", "content": "[image]3+4="}]), abs=1e-5)


def test_what_loses_its_start_keeps_the_token_before_it(folder: Path) -> None:
    """Encoders read the score there."""
    cut = model_of(folder, max_tokens=4, overlong="truncate")
    cut._tokenizer.cls_token = "<|im_start|>"
    first = cut._tokenizer.cls_token_id
    assert cut._ids("<|im_start|>3+4=", None, "seven") == [first, *cut._tokenizer("ven")["input_ids"]]


def test_batches_keep_to_the_budget() -> None:
    assert batches([3, 9, 4, 1, 12], 10) == [[4], [1], [2, 0], [3]]
    assert batches([], 10) == [] and batches([2, 2, 2], 6) == [[0, 1, 2]]


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "two", labels=2)
    with pytest.raises(RewardError, match="has 2 labels; a reward model has one"):
        load_parts(folder, RewardModelArgs(path=str(folder)))
    from rlgen.models.tiny import build_tiny

    policy = build_tiny("qwen3")
    with pytest.raises(RewardError, match=r"has no weights for score\.weight, which would be random"):
        load_parts(policy, RewardModelArgs(path=str(policy)))
    bare = make_reward_model(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(RewardError, match="the prompt is a chat, and the reward model has no chat template"):
        scored(model_of(bare), ["7"], CHAT)
    with pytest.raises(RewardError, match=r"has no chat template; set args\.chat to false"):
        load_parts(bare, RewardModelArgs(path=str(bare), chat=True))
    with pytest.raises(RewardError, match="there is no folder /no/such"):
        RewardModel(RewardModelArgs(path="/no/such"), 0)


def test_the_hash_is_that_of_every_file(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path)
    before = model_digest(folder)
    (folder / "notes.md").write_text("not part of it")
    assert model_digest(folder) == before
    flip(folder / "model.safetensors", 1)
    other = model_digest(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_cache": False}))
    assert len({before, other, model_digest(folder)}) == 3


@pytest.mark.slow
def test_a_model_has_one_worker_with_a_limit_of_its_own(folder: Path, opened: Build) -> None:
    args = {"path": str(folder), "dtype": "float32"}
    entries = [{"use": "exact_match"}, {"use": "reward_model", "args": args, "timeout": 600.0, "weight": 2.0}]
    scorer = opened(entries, {"answer"}, scoring={"memory_gib": 0.25})  # less than torch needs: what is loaded does not count
    groups = [group("7", "the sum", group_id=at) for at in range(4)]
    one, other = plain_scores(folder, ["7", "the sum"])
    assert totals(scorer.score(groups, 1)) == [[pytest.approx(1 + 2 * one, abs=1e-5), pytest.approx(2 * other, abs=1e-5)]] * 4
    (worker,) = scorer.pools[1]._workers
    assert scorer.rewards[1].sha256 == model_digest(folder)
    limits = Path(f"/proc/{worker.process.pid}/limits").read_text()
    (most,) = re.findall(r"^Max data size +(\d+)", limits, re.MULTILINE)
    assert 0.25 * 2**30 < int(most) < 16 * 2**30
