"""Importance weights and the measures of mismatch: the worked example of old [-1, -2, -.5], sampler [-1.2, -1.5, -1.5]."""

import math

import pytest
import torch
from loss_cases import tensor

from rlgen.losses.correction import Correction, Mismatch, importance_weight

NAN = math.nan
OLD, SAMPLER = tensor([[-1.0, -2.0, -0.5]]), tensor([[-1.2, -1.5, -1.5]])
MASK = torch.ones(1, 3, dtype=torch.bool)
# d = [.2, -.5, 1]; of the row exp(.7)
RATIO = [math.exp(0.2), math.exp(-0.5), math.e]
ROW = math.exp(0.7)


def how(
    mode: str, low: float | None = None, high: float | None = None, geometric: tuple[float, float] | None = None
) -> Correction:
    return Correction(mode=mode, low=low, high=high, geometric=geometric)


NONE, TRUNCATE = how("none"), how("token_truncate", high=2.0)


@pytest.mark.parametrize(
    "correction, weight",
    [
        (NONE, [1.0, 1.0, 1.0]),
        (TRUNCATE, [RATIO[0], RATIO[1], 2.0]),
        (how("token_truncate", 0.9, 1.1), [1.1, 0.9, 1.1]),
        (how("token_mask", 0.5, 2.0), [RATIO[0], RATIO[1], 0.0]),
        (how("token_mask", 0.7, 3.0), [RATIO[0], 0.0, RATIO[2]]),
        (how("token_mask", 0.5, 5.0), RATIO),  # icepop: all kept
        (how("sequence_truncate", None, 2.0), [2.0]),
        (how("sequence_mask", None, 2.0), [0.0]),
        (how("sequence_mask", None, 3.0), [ROW]),
        # the mean ratio exp(.7 / 3) = 1.26280
        (how("none", geometric=(0.99, 1.01)), [0.0, 0.0, 0.0]),
        (how("none", geometric=(0.7, 1.2629)), [1.0, 1.0, 1.0]),
        (how("none", geometric=(0.7, 1.2627)), [0.0, 0.0, 0.0]),
        (how("none", geometric=(1.2627, 2.0)), [1.0, 1.0, 1.0]),
        (how("none", geometric=(1.2629, 2.0)), [0.0, 0.0, 0.0]),
        (how("sequence_truncate", None, 2.0, (0.5, 2.0)), [2.0]),
        (how("sequence_truncate", None, 2.0, (0.5, 1.1)), [0.0]),
    ],
)
def test_weights(correction, weight):
    assert importance_weight(OLD, SAMPLER, MASK, correction)[0].tolist() == pytest.approx(weight, abs=1e-12)


def test_unreported_tokens_and_padding_weigh_one():
    sampler, old = torch.tensor([[-1.2, NAN, NAN]]), torch.tensor([[-1.0, -2.0, math.inf]])
    mask = torch.tensor([[True, True, False]])
    assert importance_weight(old, sampler, mask, TRUNCATE)[0].tolist() == pytest.approx([math.exp(0.2), 1.0, 1.0], rel=1e-6)
    assert importance_weight(old, sampler, mask, how("sequence_mask", None, 3.0)).item() == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weight_is_one_where_both_agree_and_for_empty_rows_and_has_no_gradient(mode):
    old = torch.cat([OLD, OLD]).requires_grad_()
    mask = torch.tensor([[True] * 3, [False] * 3])
    weight = importance_weight(old, torch.cat([OLD, OLD + 5]), mask, how(mode, 0.5, 2.0, (0.99, 1.01)))
    assert (weight == 1).all() and not weight.requires_grad


def measured(correction: Correction, old=OLD, sampler=SAMPLER, mask=MASK):
    return Mismatch.of(old, sampler, importance_weight(old, sampler, mask, correction), mask, correction).metrics()


def test_mismatch():
    expected = {
        "sampler/delta_mean": 0.566666667,
        "sampler/delta_max": 1.0,
        "sampler/delta_p999": 1.0,
        "sampler/kl_k1": -0.233333333,
        "sampler/kl": 0.28207,
        "sampler/kl_reverse_k1": 0.88643,
        "sampler/kl_reverse_k3": 0.37103,
        "is/ratio_mean": 1.51541,
        "is/weight_mean": 1.27598,
        "is/weight_max": 2.0,
        "is/weight_min": math.exp(-0.5),
        "is/ratio_max": math.e,
        "is/ratio_min": math.exp(-0.5),
        "is/clipped_frac": 1 / 3,
        "is/masked_frac": 0.0,
        "is/unscored_frac": 0.0,
        "is/ess_raw": 0.74490,
        "is/ess": 0.83355,
        "is/ess_seq": 1.0,
    }
    assert measured(TRUNCATE) == pytest.approx(expected, abs=1e-5)


def test_a_lower_cap_clips_too_and_a_mask_masks_and_does_not_clip():
    assert measured(how("token_truncate", 0.9, 2.0))["is/clipped_frac"] == pytest.approx(2 / 3)
    masked = measured(how("token_mask", 0.5, 2.0))
    assert (masked["is/clipped_frac"], masked["is/masked_frac"]) == (0.0, pytest.approx(1 / 3))
    uncorrected = measured(NONE)
    assert (uncorrected["is/clipped_frac"], uncorrected["is/masked_frac"]) == (0.0, 0.0)
    assert uncorrected["is/ratio_max"] == pytest.approx(math.e) and uncorrected["is/weight_max"] == 1.0


def test_sequence_modes_are_measured_by_rows():
    # rows exp(.7) and exp(-.2), and one without tokens, which counts nowhere
    old = torch.cat([OLD, OLD, OLD])
    sampler = torch.cat([SAMPLER, OLD + tensor([[0.2, 0.0, 9.0]]), OLD])
    mask = torch.tensor([[True] * 3, [True, True, False], [False] * 3])
    found = measured(how("sequence_mask", None, 2.0), old, sampler, mask)
    low = math.exp(-0.2)
    assert [found[f"is/{key}"] for key in ("ratio_min", "ratio_max", "weight_min", "weight_max", "masked_frac")] == pytest.approx(
        [low, ROW, 0.0, low, 0.5]
    )
    # w = [0, .81873]: one of two rows carries everything; the raw rows (a + b)^2 / (2 (a^2 + b^2))
    assert found["is/ess"] == pytest.approx(0.5)
    assert found["is/ess_seq"] == pytest.approx((ROW + low) ** 2 / (2 * (ROW**2 + low**2)))


def test_ess_of_rows_shows_what_tokens_hide():
    # 100 tokens with d = .05 in one row, d = 0 in the other: tokens agree well, the first row's ratio is e^5
    old = torch.zeros(2, 100, dtype=torch.float64)
    sampler = old - tensor([[0.05], [0.0]])
    found = measured(NONE, old, sampler, torch.ones(2, 100, dtype=torch.bool))
    assert found["is/ess_raw"] > 0.99
    assert found["is/ess_seq"] == pytest.approx((math.e**5 + 1) ** 2 / (2 * (math.e**10 + 1)))


def test_unreported_tokens_are_counted_and_leave_the_gap():
    sampler = tensor([[-1.2, NAN, -1.5]])
    found = measured(TRUNCATE, sampler=sampler)
    assert found["is/unscored_frac"] == pytest.approx(1 / 3)
    assert found["sampler/delta_mean"] == pytest.approx(0.6)  # of .2 and 1
    assert found["is/ratio_mean"] == pytest.approx((RATIO[0] + 1 + RATIO[2]) / 3)
    nothing = measured(TRUNCATE, sampler=torch.full_like(OLD, NAN))
    assert nothing["sampler/delta_max"] is None and nothing["is/unscored_frac"] == 1.0 and nothing["is/ratio_max"] == 1.0


def test_p999_is_the_nearest_rank():
    old = torch.zeros(1, 2000, dtype=torch.float64)
    sampler = -torch.arange(1, 2001, dtype=torch.float64)[None] / 1000
    found = measured(NONE, old, sampler, torch.ones(1, 2000, dtype=torch.bool))
    # rank 1998 of 2000, as float32
    assert (found["sampler/delta_p999"], found["sampler/delta_max"]) == (torch.tensor(1.998).item(), 2.0)


def test_an_empty_window_measures_nothing():
    assert measured(TRUNCATE, mask=torch.zeros_like(MASK)) == dict.fromkeys(measured(TRUNCATE))
    assert Mismatch.of_train_batch([]).metrics() == dict.fromkeys(measured(TRUNCATE)), "no micro-batch at all"
