"""Weights at random among the float32 numbers that round to the same bfloat16: nothing changes, and small moves count."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.spread import SMALL, recipe, run
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlgen.cli.train import train_command
from rlgen.models.dither import dither, move, random_16
from rlgen.models.load import load_model
from rlgen.models.tiny import build_tiny
from rlgen.recipe import load_recipe
from rlgen.run.compare import first_difference

__all__ = ["recipe"]  # a fixture

CPU = torch.device("cpu")
HALF = torch.bfloat16


def of_checkpoint(*shape: int) -> Tensor:
    """Float32 weights that bfloat16 holds, of many sizes and both signs."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(-30, 3, shape, generator=random)
    return torch.ldexp(torch.randn(shape, generator=random), sizes).to(HALF).float()


def dithered(weight: Tensor, first: tuple[int, ...] | None = None, whole: tuple[int, ...] | None = None) -> Tensor:
    moved = weight.clone()
    move(moved, first or (0,) * weight.ndim, whole or tuple(weight.shape), 7)
    return moved


def test_the_rounded_weights_stay_and_the_others_are_anywhere_between() -> None:
    weight = of_checkpoint(300, 400)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-126, -(2.0**-126), torch.finfo(HALF).max, torch.finfo(HALF).min])
    weight[0, : len(special)] = special
    moved = dithered(weight)
    assert torch.equal(moved.to(HALF), weight.to(HALF)) and torch.equal(moved[0, :2], special[:2])
    assert (moved != weight).float().mean() > 0.999
    # Where between its two neighbours each weight is: -0.5 and 0.5 are where it would round otherwise.
    exponent = torch.frexp(weight[1:]).exponent
    between = (moved - weight)[1:] / torch.ldexp(torch.ones_like(weight[1:]), exponent - 8)
    between = between[(weight[1:].abs() > 0) & (torch.frexp(weight[1:]).mantissa.abs() > 0.5)]
    assert between.abs().max() <= 0.5
    assert between.mean().abs() < 0.003 and between.std() == pytest.approx(1 / math.sqrt(12), rel=0.01)
    apart = torch.stack([between[:-1], between[1:]])
    assert torch.corrcoef(apart)[0, 1].abs() < 0.01


def test_a_small_move_reaches_the_rounded_weights_on_average_and_without_dither_none() -> None:
    weight = (1 + torch.rand(200_000, generator=torch.Generator().manual_seed(1)) / 2).to(HALF).float()
    step = 2.0**-7 / 40  # a fortieth of what is between two weights
    assert torch.equal((weight + step).to(HALF), weight.to(HALF))
    reached = (dithered(weight) + step).to(HALF).float() - weight
    assert reached.mean().item() == pytest.approx(step, rel=0.05)
    assert set(reached.unique().tolist()) == {0.0, 2.0**-7}


def test_what_is_no_number_of_bfloat16_is_left_alone() -> None:
    trained = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    trained = trained[(trained.view(torch.int32) & 0xFFFF) != 0]
    assert torch.equal(dithered(trained), trained)
    assert torch.equal(dithered(dithered(trained.to(HALF).float())).to(HALF), trained.to(HALF))


@pytest.mark.parametrize("bounds", [((0, 3), (0, 11)), ((3, 9), (0, 11)), ((2, 7), (4, 9)), ((8, 9), (10, 11))])
def test_a_part_gets_what_the_whole_gets_there(bounds: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = of_checkpoint(9, 11)
    rows, columns = (slice(*bound) for bound in bounds)
    expected = dithered(weight)[rows, columns]
    part = weight[rows, columns].contiguous()
    assert torch.equal(dithered(part, (rows.start, columns.start), (9, 11)), expected)
    monkeypatch.setattr("rlgen.models.dither.AT_A_TIME", 5)  # a row at a time
    assert torch.equal(dithered(part, (rows.start, columns.start), (9, 11)), expected)


def test_random_numbers_are_even() -> None:
    drawn = random_16(torch.arange(1 << 20), 3)
    assert drawn.min() == 0 and drawn.max() == 65_534
    counts = torch.bincount(drawn // 4096, minlength=16)[:16].double()
    assert (counts - 65_536).abs().max() < 6 * 256  # six standard deviations


def small_model(folder: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(folder, None, dtype, "sdpa", CPU)


@pytest.fixture(scope="module")
def in_half(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("half") / "model"
    shutil.copytree(build_tiny("qwen3"), folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=HALF).save_pretrained(folder)
    return str(folder)


def test_only_trained_weights_that_are_rounded_move(in_half: str) -> None:
    model, before = small_model(in_half), small_model(in_half)
    model.model.layers[0].mlp.requires_grad_(False)
    model._keep_in_fp32_modules_strict = {"q_norm"}
    dither(model, 1)
    other = small_model(in_half)
    dither(other, 2)
    for (name, one), two, old in zip(model.named_parameters(), other.parameters(), before.parameters(), strict=True):
        left = "layers.0.mlp" in name or "q_norm" in name
        assert torch.equal(one, old) == left, name
        assert torch.equal(one.to(HALF), old.to(HALF)) and not torch.equal(two, one), name
    frozen = small_model(in_half, HALF)
    dither(frozen, 1)
    assert all(torch.equal(one.float(), old) for one, old in zip(frozen.parameters(), before.parameters(), strict=True))


def trained(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def test_a_run_begins_with_dither_and_resumes_to_the_last_bit(in_half: str, recipe: Path) -> None:
    """With a reference, which is a copy of the policy as it began."""
    settings = [f"model={{path: {in_half}, dtype: bfloat16}}", "optim.learning_rate=1e-6", "trainer={kind: grpo, beta: 0.1}"]
    whole, halted, plain = run(recipe, *settings), recipe.parent / "halted", recipe.parent / "plain"
    for resume in (False, True):
        train_command(recipe, [*SMALL, *settings], resume, False, None if resume else 1, halted)
    assert (difference := first_difference(whole, halted)) is None, str(difference)
    run(recipe, *settings, "model.dither=false", name="plain")
    before = {name: weight.float() for name, weight in load_file(Path(in_half) / "model.safetensors").items()}
    far = {
        kind: torch.cat([(trained(kind, 1)[name] - old).abs().flatten() for name, old in before.items()])
        for kind in (whole, plain)
    }
    assert far[plain].max() < 2e-6, "a step of Adam"
    assert (far[whole] > 2e-6).float().mean() > 0.9
    rounded = torch.cat([(trained(whole, 1)[name].to(HALF) == old).flatten() for name, old in before.items()])
    assert 0.9 < rounded.float().mean() < 1, "some weights are other ones after a single step"


@pytest.mark.parametrize(("setting", "why"), [("model.dtype=float32", "not rounded"), ("model.lora={}", "an adapter")])
def test_dither_without_effect_is_refused(setting: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: tiny:qwen3}\ndata: {source: task:sort, chat: true}\nrewards: [{use: exact_match}]\n")
    load_recipe(path, ["model.dither=true"])
    with pytest.raises(Exception, match=f"model.dither has no effect: .*{why}"):
        load_recipe(path, ["model.dither=true", setting])
