"""Runs with images and texts mixed: engine and trainer agree, in one process and in two, and what is frozen stays."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import read_jsonl
from helpers.pictures import MODEL, picture
from helpers.torchrun import ALONE, launch, torchrun, train_words, weights, well
from helpers.waiting import HANGS
from safetensors.torch import load_file

from rlgen.cli.replay import replay_command
from rlgen.cli.train import train_command
from rlgen.errors import DataError, SetupError, UsageError
from rlgen.models.load import load_config, locate
from rlgen.models.vision import Vision

RECIPE = """\
run: {name: images, steps: 3}
model: {path: "tiny:idefics3", dtype: float32}
data: {source: rows.jsonl, columns: {images: pictures}, chat: true, shuffle: false}
rewards: [{use: "r.py:spread"}]
rollout: {prompts_per_step: 2, group_size: 4, max_completion_tokens: 8}
engine: {kind: transformers}
checkpoint: {every: 9}
optim: {learning_rate: 1.0e-3}
"""
REWARD = "def spread(completion_ids, pictures):\n    return (sum(completion_ids) % 97 + len(pictures)) / 97\n"
VISION = ("model.vision_model.", "model.connector.")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows of a picture and of none in turns; the pictures are files beside them."""
    (tmp_path / "pictures").mkdir()
    rows: list[dict[str, Any]] = []
    for place in range(4):
        (tmp_path / "pictures" / f"{place}.png").write_bytes(picture(place))
        rows += [
            {"prompt": f"what is {place}?", "pictures": f"pictures/{place}.png"},
            {"prompt": f"say {place}", "pictures": None},
        ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def train(folder: Path, *overrides: str, run: str = "run", resume: bool = False) -> Path:
    train_command(folder / "recipe.yaml", list(overrides), resume, False, None, folder / run)
    return folder / run


def moved(run: Path, step: int = 3) -> set[str]:
    """The names of the tensors that training has changed."""
    before = load_file(Path(locate(MODEL)) / "model.safetensors")
    return {name for name, tensor in weights(run, step).items() if not torch.equal(tensor, before[name])}


def gaps(run: Path) -> list[float]:
    return [record["sampler/delta_max"] for record in read_jsonl(run / "metrics.jsonl")]


@pytest.mark.usefixtures("one_thread")
def test_pictures_and_texts_are_trained_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(folder)
    assert len(gaps(run)) == 3 and max(gaps(run)) < 1e-4
    names = moved(run)
    assert "lm_head.weight" in names and any(".text_model.layers.0." in name for name in names)
    assert not [name for name in names if name.startswith(VISION)]
    # rollouts name the picture and do not hold it
    rows = pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()
    assert [row["pictures"][0]["path"] if row["pictures"] else None for row in rows[::4]] == [
        str(folder / "pictures" / "0.png"),
        None,
    ]
    assert rows[0]["reward"] - (sum(rows[0]["completion_ids"]) % 97) / 97 == pytest.approx(1 / 97)
    # a checkpoint opens by itself, with its processor
    saved = str(run / "checkpoints" / "step_000003")
    assert Vision.open(saved, None, load_config(saved, None)).ids(picture(0)) == Vision.open(
        locate(MODEL), None, load_config(locate(MODEL), None)
    ).ids(picture(0))
    capsys.readouterr()
    replay_command(run, 2, [], False)
    assert "the same to the last bit" in capsys.readouterr().out
    (folder / "pictures" / "1.png").write_bytes(picture(77))
    with pytest.raises(UsageError, match="its prompts or their images have changed since it was trained"):
        replay_command(run, 2, [], False)
    with pytest.raises(UsageError, match="prompt_ids have changed since the last attempt"):
        train(folder, "run.steps=4", resume=True)


REFUSED = {
    "a model of texts": ("model.path=tiny:qwen3", SetupError, "is a qwen3, which reads no images"),
    "no column": ("data.columns={prompt: prompt}", SetupError, "reads images, but data names no column of images"),
    "another column": ("data.columns.images=picture", DataError, "did you mean `pictures`"),
}


@pytest.mark.parametrize("override, error, said", REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(folder: Path, override: str, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        train(folder, override)


@pytest.mark.slow
@pytest.mark.vllm
def test_five_steps_on_vllm_with_the_vision_tower(folder: Path) -> None:
    run = train(folder, "engine={kind: colocated}", "model.train_vision=true", "run.steps=5")
    assert len(gaps(run)) == 5 and max(gaps(run)) < 1e-4
    assert {prefix for prefix in VISION for name in moved(run, 5) if name.startswith(prefix)} == set(VISION)


@pytest.mark.slow
def test_two_processes_of_which_one_has_no_image(folder: Path) -> None:
    """Pairs stay together, so that one process trains the picture's and the other the text's."""
    settings = ["trainer={kind: online_dpo}", "model.train_vision=true"]
    for run, launcher in (("one", ALONE), ("two", torchrun())):
        words = train_words(folder / "recipe.yaml", folder / run, *settings)
        well(launch("-m", "rlgen", *words, launcher=launcher, timeout=HANGS))
    alone = 0
    for step in range(1, 4):
        parts = sorted((folder / "two" / "rollouts" / f"step_{step:06d}.parquet").glob("part-*.parquet"))
        trained = [[row for row in pq.read_table(part).to_pylist() if row["trained"]] for part in parts]
        pictures = [sum(len(row["pictures"] or ()) for row in rows) for rows in trained]
        assert len(trained) == 2 and all(trained)
        alone += sorted(bool(count) for count in pictures) == [False, True]
    assert alone == 3
    for one, two in zip(*(read_jsonl(folder / run / "metrics.jsonl") for run in ("one", "two")), strict=True):
        assert [one["loss"], one["grad_norm"]] == pytest.approx([two["loss"], two["grad_norm"]], rel=1e-5)
        assert two["sampler/delta_max"] < 1e-4
    assert {prefix for prefix in VISION for name in moved(folder / "two") if name.startswith(prefix)} == set(VISION)
    for name, tensor in weights(folder / "one", 3).items():
        assert torch.allclose(tensor, weights(folder / "two", 3)[name], atol=1e-5), name
