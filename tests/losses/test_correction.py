"""Importance weights and the measures of mismatch: the worked example of old [-1, -2, -.5], sampler [-1.2, -1.5, -1.5]."""

import math

import pytest
import torch

from rlgen.losses.correction import importance_weight, mismatch

OLD = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
SAMPLER = torch.tensor([[-1.2, -1.5, -1.5]], dtype=torch.float64)
MASK = torch.ones(1, 3, dtype=torch.bool)


def test_token_truncate() -> None:
    # d = [.2, -.5, 1], exp(d) = [1.2214, .60653, 2.71828], capped at 2
    weight = importance_weight(OLD, SAMPLER, MASK, 2.0)
    assert weight[0].tolist() == pytest.approx([math.exp(0.2), math.exp(-0.5), 2.0], abs=1e-12)


def test_no_correction_is_ones() -> None:
    assert importance_weight(OLD, SAMPLER, MASK, None).tolist() == [[1.0, 1.0, 1.0]]


def test_unreported_tokens_and_padding_weigh_one() -> None:
    sampler = torch.tensor([[-1.2, math.nan, math.nan]])
    old = torch.tensor([[-1.0, -2.0, math.inf]])
    weight = importance_weight(old, sampler, torch.tensor([[True, True, False]]), 2.0)
    assert weight[0].tolist() == pytest.approx([math.exp(0.2), 1.0, 1.0], rel=1e-6)


def test_weight_is_one_where_both_agree_and_has_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    weight = importance_weight(old, OLD, MASK, 2.0)
    assert weight.tolist() == [[1.0, 1.0, 1.0]] and not weight.requires_grad


def test_mismatch() -> None:
    measured = mismatch(OLD, SAMPLER, importance_weight(OLD, SAMPLER, MASK, 2.0), MASK, corrected=True)
    expected = {
        "sampler/delta_mean": 0.566666667,
        "sampler/delta_max": 1.0,
        "sampler/delta_p999": 1.0,
        "sampler/kl_k1": -0.233333333,
        "sampler/kl": 0.28207,
        "sampler/kl_reverse_k1": 0.88643,
        "sampler/kl_reverse_k3": 0.37103,
        "is/raw_mean": 1.51541,
        "is/weight_mean": 1.27598,
        "is/weight_max": 2.0,
        "is/raw_max": math.e,
        "is/raw_min": math.exp(-0.5),
        "is/clipped_frac": 1 / 3,
        "is/masked_frac": 0.0,
        "is/unscored_frac": 0.0,
        "is/ess_raw": 0.74490,
        "is/ess": 0.83355,
        "is/ess_seq": 1.0,
    }
    assert {key: measured[key] for key in expected} == pytest.approx(expected, abs=1e-5)


def test_p999_is_the_nearest_rank() -> None:
    # of 2000 gaps 1/2000 .. 1 the 1998th
    gaps = torch.arange(1, 2001, dtype=torch.float64)[None] / 2000
    measured = mismatch(gaps, torch.zeros_like(gaps), torch.ones_like(gaps), torch.ones_like(gaps).bool(), corrected=False)
    assert measured["sampler/delta_p999"] == pytest.approx(1998 / 2000)


def test_nothing_to_average_is_none() -> None:
    assert set(mismatch(OLD, SAMPLER, torch.ones(1, 3), ~MASK, corrected=True).values()) == {None}


def test_an_engine_that_reports_nothing_is_no_agreement() -> None:
    measured = mismatch(OLD, torch.full_like(SAMPLER, math.nan), torch.ones(1, 3), MASK, corrected=True)
    assert measured["sampler/delta_max"] is None and measured["is/unscored_frac"] == 1.0 and measured["is/raw_mean"] == 1.0
