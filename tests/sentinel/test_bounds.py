"""Bounds follow from what rounding does to the log-probs that are compared, and rounding is measured right."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from helpers.samples import TEXTS, make_sample
from torch import Tensor

from rlgen.losses.logp import head_scores, softmax_errors
from rlgen.models.half import FP8, HALF, WIDER
from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.sentinel.bounds import FLOOR, MOST, MOST_QUANTIZED, POWER, Bounds, Gap, Noise, most_for
from rlgen.sentinel.probe import TrainerSide
from rlgen.types import WHOLE, Distribution, Sample

pytestmark = pytest.mark.usefixtures("one_thread")


def gap(mean: float, rms: float = 0.0, largest: float = 0.0) -> Gap:
    return Gap(max_delta=largest, mean_delta=mean, rms_delta=rms)


def test_a_row_moves_the_rms_and_a_token_does_not() -> None:
    """Of 64 rows of 24 tokens with a noise of 0.03: one row off by 2 nats, or one token, which the model is undecided at."""
    usual = 0.03 * torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    noise, row, token = Noise.of(usual), usual.clone(), usual.clone()
    row[7] += 2.0
    token[7, 7] += 2.0
    assert noise.mean == pytest.approx(0.03 * math.sqrt(2 / math.pi), rel=0.05) and noise.rms == pytest.approx(0.03, rel=0.05)
    bounds = Bounds.by_noise(noise, MOST["bfloat16"])
    assert bounds.words(Gap.of(row)).startswith("RMS of") and Gap.of(row).rms_delta == pytest.approx(0.25, rel=0.05)
    assert not bounds.hold(Gap.of(row)) and bounds.hold(Gap.of(token))


def test_bounds_are_three_times_the_noise_between_a_floor_and_what_no_healthy_engine_shows() -> None:
    most = MOST["bfloat16"]
    bounds = Bounds.by_noise(Noise(0.02, 0.03), most)
    assert bounds.as_json == pytest.approx({"mean_delta": 0.06, "rms_delta": 0.09})
    assert Bounds.by_noise(Noise(0.5, 9.0), most) == most and most.mean_delta == 0.2
    assert Bounds.by_noise(Noise(0.0, 0.0), most) == Bounds(mean_delta=FLOOR, rms_delta=FLOOR)
    assert bounds.hold(gap(0.0599, 0.0899, 40.0)), "no bound of the maximum: it grows with the number of tokens"
    assert not bounds.hold(gap(0.0601)) and not bounds.hold(gap(0.01, 0.091))
    assert not bounds.hold(gap(math.nan)) and not bounds.see(gap(math.nan))
    assert bounds.see(gap(POWER * 0.06 + 1e-6)) and not bounds.see(gap(POWER * 0.06 - 1e-6))
    assert "mean |Δ log-prob| is 0.1 nats, the bound is 0.06" in bounds.words(gap(0.1, 0.1))
    assert "RMS of |Δ log-prob| is 2 nats, the bound is 0.09" in bounds.words(gap(0.1, 2.0))


def test_bounds_of_a_recipe_are_as_it_says() -> None:
    own = Bounds(max_delta=1e-4)
    assert own.hold(gap(0.5, 0.5, 1e-4)) and not own.hold(gap(0.0, 0.0, 1.1e-4)) and own.as_json == {"max_delta": 1e-4}
    assert (
        most_for(("float32", "bfloat16"), False) == MOST["bfloat16"] and most_for(("float32", "float32"), True) == MOST_QUANTIZED
    )


def side(name: str, dtype: torch.dtype, engine: torch.dtype | None = None, holds: torch.dtype | None = None) -> TrainerSide:
    policy = Policy(tiny_model(name), dtype, True)
    engine = engine or dtype
    return TrainerSide(policy=policy, budget=512, processes=Processes.alone(), engine_dtype=engine, engine_holds=holds or engine)


def rows() -> list[Sample]:
    ids = [tuple(5 + (37 * place + 11 * row) % 240 for place in range(30)) for row in range(6)]
    return [
        make_sample(group_id=row, prompt_ids=one[:8], completion_ids=one[8:], sampler_logp=(-1.0,) * 22)
        for row, one in enumerate(ids)
    ]


def directly(model: Any, samples: list[Sample]) -> Tensor:
    """[2, N]: log-probs by the model's own forward pass, row by row; by a softmax in float64, and by one in float32."""
    found = []
    for sample in samples:
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()])
        logits = model(input_ids=ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
        both = torch.stack((logits.double().log_softmax(-1), logits.float().log_softmax(-1).double()))
        found.append(both[:, range(len(logits)), ids[len(sample.prompt_ids) :]])
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_noise_is_the_distance_from_the_same_model_in_a_wider_dtype(name: str, dtype: torch.dtype) -> None:
    """The wider model is computed here by transformers alone, from weights rounded to the dtype."""
    one, samples = side(name, dtype), rows()
    before = torch.cat(one.logp(samples, WHOLE))
    noise = one.noise(samples, (WHOLE,))
    assert noise is not None and torch.equal(torch.cat(one.logp(samples, WHOLE)), before), "nothing is left changed"
    model = tiny_model(name)
    if name == "qwen3_moe" and dtype == torch.float32:
        model.set_experts_implementation("eager")
    with torch.no_grad():
        exact, by_torch = directly(model.to(dtype).to(WIDER[dtype]).eval(), samples)
    expected = (before.double() - exact).abs() + (by_torch - exact).abs()
    assert noise.mean == pytest.approx(expected.mean().item(), rel=0.05)
    assert 1e-7 < noise.mean < 2e-6 if dtype == torch.float32 else 1e-3 < noise.mean < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_other_roundings_of_the_same_model_are_as_far_apart_as_a_wider_dtype(dtype: torch.dtype) -> None:
    one, samples = side("qwen3", dtype), rows()
    before, wider = torch.cat(one.logp(samples, WHOLE)), one.noise(samples, (WHOLE,))
    found = one.noise_of_roundings(samples, WHOLE)
    assert wider is not None and 0.5 * wider.mean < found.mean < 2.5 * wider.mean and found.mean < found.rms < 2 * found.mean
    assert torch.equal(torch.cat(one.logp(samples, WHOLE)), before), "nothing is left changed"


def test_without_a_sure_token_there_is_no_noise() -> None:
    """Of 256 ids that are nearly equally probable, some are always within 0.02 of a sum of 0.5."""
    one, samples, flat = side("qwen3", HALF), rows(), Distribution(temperature=100.0, top_p=0.5)
    sure = one.sure(samples, flat)
    assert sure is not None and not torch.cat(sure).any()
    assert one.noise(samples, (flat,)) is None and one.noise_of_roundings(samples, flat) is None
    assert one.noise(samples, (WHOLE, flat)) == one.noise(samples, (WHOLE,)), "the others are measured"


def test_packed_rows_have_the_noise_of_padded_ones() -> None:
    one, samples = side("qwen3", torch.float32), rows()
    padded = one.noise(samples, (WHOLE,))
    assert one.policy.pack(TEXTS) is None
    packed = one.noise(samples, (WHOLE,))
    assert one.policy.packed and padded and packed and packed.mean == pytest.approx(padded.mean, rel=0.5)


def test_noise_grows_as_the_temperature_falls_and_the_largest_counts() -> None:
    one, samples = side("qwen3", HALF), rows()
    at = {temperature: one.noise(samples, (Distribution(temperature=temperature),)) for temperature in (0.5, 1.0)}
    assert at[0.5].mean == pytest.approx(2 * at[1.0].mean, rel=0.25)
    assert one.noise(samples, (WHOLE, Distribution(temperature=0.5))) == at[0.5]


def test_an_engine_in_another_dtype_is_what_the_trainer_is_compared_with() -> None:
    samples = rows()
    half, fine = (
        side("qwen3", torch.float32, HALF).noise(samples, (WHOLE,)),
        side("qwen3", torch.float32).noise(samples, (WHOLE,)),
    )
    eight = side("qwen3", HALF, HALF, FP8).noise(samples, (WHOLE,))
    own = side("qwen3", HALF).noise(samples, (WHOLE,))
    assert half.mean > 1000 * fine.mean and 2 * own.mean < eight.mean < 0.1, "8-bit weights round more than bfloat16"
    unknown = replace(side("qwen3", HALF), engine_dtype=None)
    assert unknown.noise(samples, (WHOLE,)) is None


def test_softmax_errors_are_those_of_torch_in_float32() -> None:
    """On a peaked distribution over many ids torch's own float32 softmax is off by more than the whole head of the trainer."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 16, generator=generator), 0.7 * torch.randn(60_000, 16, generator=generator)
    ids = torch.randint(60_000, (40,), generator=generator)
    found = softmax_errors(hidden.double(), weight.double(), ids, (WHOLE, Distribution(temperature=0.5)))
    logits = hidden.double() @ weight.double().T
    for k, temperature in enumerate((1.0, 0.5)):
        exact = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        assert torch.allclose(found[0, k], exact, atol=1e-12)
        torch_s = (logits / temperature).float().log_softmax(-1).gather(1, ids[:, None])[:, 0].double()
        assert torch.equal(found[1, k], (torch_s - exact).abs())
    ours = head_scores(hidden, weight, ids, (WHOLE,)).logp[0].double()
    assert (ours - found[0, 0]).abs().mean() < 5e-6
