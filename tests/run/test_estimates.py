"""pass@k by counting, intervals that cover, and the metrics of an evaluation from its rows."""

import itertools
import math

import numpy as np
import pytest
from helpers.samples import make_sample

from rlgen.processes import Processes
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable
from rlgen.run.estimates import MeanEstimate, mean_of_prompts, pass_at_k, student
from rlgen.run.records import evaluation_metrics


def test_pass_at_k_is_the_share_of_the_sets_with_a_correct_one() -> None:
    for n in range(1, 7):
        for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
            sets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, sets)) / len(sets), rel=1e-12), (n, correct, k)
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - (100 * 99 * 98) / (200 * 199 * 198), rel=1e-12)


def test_an_interval_by_hand() -> None:
    # mean 1/2, squared deviations 4 x 1/4, variance 1/3, standard error sqrt(1/12), t of 3 degrees 3.1824
    found = mean_of_prompts([0.0, 1.0, 1.0, 0.0])
    assert found.mean == 0.5 and found.high == pytest.approx(0.5 + 3.1824 * math.sqrt(1 / 12), abs=2e-3)
    assert found.low == pytest.approx(1 - found.high)
    assert mean_of_prompts([0.25]) == MeanEstimate(0.25, None, None) and mean_of_prompts([]) == MeanEstimate(None, None, None)
    assert mean_of_prompts([0.3] * 5) == MeanEstimate(0.3, 0.3, 0.3)
    values = [0.1 * i for i in range(30)]
    assert mean_of_prompts(values) == mean_of_prompts(values[::-1]), "the order of processes does not matter"


@pytest.mark.parametrize("prompts", [8, 40, 200])
def test_intervals_cover(prompts: int) -> None:
    """Four completions of each prompt, whose chance of being correct differs: 95 % of the intervals hold the mean chance."""
    rng, trials = np.random.default_rng(0), 1500
    hold = 0
    for _ in range(trials):
        chance = rng.beta(2.0, 3.0, prompts)
        found = mean_of_prompts((rng.random((prompts, 4)) < chance[:, None]).mean(axis=1).tolist())
        assert found.low is not None and found.high is not None
        hold += found.low <= 0.4 <= found.high
    assert 0.93 <= hold / trials <= 0.97


def test_metrics_of_an_evaluation() -> None:
    """Two prompts of four completions; one of the second has no reward, and one was cut off."""
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.25, None]]
    samples = [
        make_sample(
            group_id=group,
            sample_index=index,
            rewards={"right": reward},
            reward=reward,
            reward_errors={} if reward is not None else {"right": "timeout: no answer"},
            finish_reason="length" if (group, index) == (0, 3) else "stop",
            completion_ids=(7,) * (1 + group),
            sampler_logp=(-1.0,) * (1 + group),
        )
        for group, row in enumerate(rewards)
        for index, reward in enumerate(row)
    ]
    table = RowTable.gather(Samples.of(samples), Processes.alone())
    found = evaluation_metrics(table, 4, 1.0)
    assert found["eval/reward/mean"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert found["eval/reward/right/mean"] == found["eval/reward/mean"]
    assert found["eval/pass@1"] == pytest.approx((1 / 4 + 2 / 3) / 2) and found["eval/pass@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["eval/pass@4"] == 1.0 and found["eval/pass@4_low"] is None, "of the first prompt alone"
    half = student(1) * 0.5 / 2  # standard deviation of 1/4 and 3/4 is sqrt(1/8), and that of the mean 1/4
    assert (found["eval/reward/mean_low"], found["eval/reward/mean_high"]) == pytest.approx((0.5 - half, 0.5 + half))
    assert (found["eval/reward/unscored"], found["eval/reward/right/failed"], found["eval/prompts"]) == (1, 1, 2)
    assert (found["eval/completions/mean_tokens"], found["eval/completions/truncated"]) == (1.5, 1 / 8)
    assert evaluation_metrics(table, 4, 0.25)["eval/pass@1"] == pytest.approx((1 / 4 + 1) / 2), "the threshold"
    assert "eval/pass@4" in found and "eval/pass@8" not in found
    of_six = evaluation_metrics(table, 6, 1.0)
    assert [k for k in range(1, 9) if f"eval/pass@{k}" in of_six] == [1, 2, 4]


def test_a_sum_of_rewards_reaches_a_threshold_whatever_the_rounding() -> None:
    total = 0.6 + 0.3 + 0.1
    assert total < 1.0, "as a float"
    table = RowTable.gather(Samples.of([make_sample(reward=total)]), Processes.alone())
    assert evaluation_metrics(table, 1, 1.0)["eval/pass@1"] == 1.0
