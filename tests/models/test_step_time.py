"""The simulated time of a step follows from lengths and rates, by hand where nothing is drawn."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlgen.models.step_time import Rates, Work, decoding_steps, drawn_lengths, fit, simulate

# 6 completions of exactly 10 tokens.
WORK = Work(
    completions=6,
    prompts=2,
    prompt_tokens=4,
    packed=True,
    mean_tokens=10,
    spread=0.0,
    most_tokens=10,
    engines=1,
    slots=6,
    waves=True,
    processes=1,
    micro_batch_tokens=1000,
    updates=1,
    ahead=0,
    in_flight=False,
)
RATES = Rates(decode_step=1.0, decode_token=0.1, reward=0.5, train_token=0.25, micro_batch=0.0, update=2.0, sync=3.0, rest=1.0)
# 10 steps and 60 tokens; 60 tokens and two prompts of 4 are trained
SAMPLES, TRAINS = 10 + 6.0, 0.25 * 68 + 2


def test_a_step_by_hand() -> None:
    found = simulate(WORK, RATES)
    assert found == pytest.approx(
        {"step": SAMPLES + 3 + TRAINS + 3 + 1, "generate": SAMPLES, "reward": 3, "train": TRAINS, "sync": 3, "save": 1}
    )
    assert found == simulate(WORK, RATES)


# name -> (changes of the work, of the rates, phase, seconds)
CHANGED: dict[str, tuple[dict[str, Any], dict[str, float], str, float]] = {
    "two batches of an engine": ({"slots": 3}, {}, "generate", 2 * 10 + 6),
    "two engines": ({"engines": 2}, {}, "generate", 10 + 3),
    "more engines than completions": ({"engines": 12}, {}, "generate", 10 + 1),
    "two processes": ({"processes": 2}, {}, "train", 0.25 * 34 + 2),
    "padded": ({"packed": False}, {}, "train", 0.25 * (60 + 24) + 2),
    "two passes": ({"updates": 2}, {}, "train", 2 * TRAINS),
    "sending takes longer than computing": ({"micro_batch_tokens": 34}, {"micro_batch": 20.0}, "train", 2 * 20 + 2),
    "sending takes less": ({"micro_batch_tokens": 34}, {"micro_batch": 1.0}, "train", TRAINS),
    # the engine samples while the trainer scores and trains, 22 seconds
    "one ahead": ({"ahead": 1}, {}, "generate", 0),
    "one ahead, waits": ({"ahead": 1}, {"decode_step": 3.0}, "generate", 36 - 22),
    # without waiting for a sync, it samples during the sync and the save, too
    "two ahead, in flight": ({"ahead": 2, "in_flight": True}, {"decode_step": 3.0}, "generate", 36 - 26),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_phase_by_hand(name: str) -> None:
    work, rates, phase, seconds = CHANGED[name]
    assert simulate(replace(WORK, **work), replace(RATES, **rates))[phase] == pytest.approx(seconds)


def test_an_engine_fills_a_free_place_and_transformers_wait_for_the_longest() -> None:
    tokens = [9, 1, 1, 1]
    assert decoding_steps(tokens, 2, waves=False) == 9 and decoding_steps(tokens, 2, waves=True) == 9 + 1
    assert decoding_steps(tokens, 1, waves=False) == 12 == decoding_steps(tokens, 1, waves=True)


@pytest.mark.parametrize("mean", [20, 100, 190])
def test_lengths_have_the_mean_and_a_tail_that_is_cut_off(mean: int) -> None:
    drawn = drawn_lengths(replace(WORK, mean_tokens=mean, spread=0.6, most_tokens=200), np.random.default_rng(3), 20_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.02) and drawn.min() >= 1 and drawn.max() <= 200
    assert (drawn == 200).mean() == pytest.approx({20: 0.0, 100: 0.09, 190: 0.8}[mean], abs=0.01)


def test_a_long_tail_takes_longer_than_its_mean() -> None:
    alike, uneven = (replace(WORK, mean_tokens=50, most_tokens=400, spread=spread) for spread in (0.0, 0.8))
    first, second = (simulate(work, RATES) for work in (alike, uneven))
    assert first["generate"] == pytest.approx(50 + 30) and second["generate"] > 1.5 * first["generate"]
    assert second["train"] == pytest.approx(first["train"], rel=0.3)


def test_a_fit_finds_both_parts_where_steps_differ() -> None:
    sure, doubted = np.array([10.0, 20, 30, 10, 20]), np.array([100.0, 50, 400, 300, 10])
    assert fit(sure, doubted, 0.3 * sure + 0.02 * doubted, 0.0) == pytest.approx((0.3, 0.02), rel=0.1)
    assert fit(sure, doubted, 0.5 * sure, 0.0) == pytest.approx((0.5, 0.0), abs=1e-6)
    only = fit(sure, doubted, 0.02 * doubted - 0.1 * sure, 0.0)
    assert only[0] == 0 and only[1] > 0


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_fit_of_equal_steps_divides_as_is_assumed(share: float) -> None:
    first, second = fit(np.full(5, 10.0), np.full(5, 100.0), np.array([2.0, 2.1, 1.9, 2.0, 2.0]), share)
    assert (10 * first, 100 * second) == pytest.approx((2 - 2 * share, 2 * share), abs=1e-9)
