"""Micro-batches: every row once, little padding, within the budget; and what is trained on is what was sampled."""

import random

import pytest
from conftest import CPU
from helpers.samples import make_sample

from rlgen.rollout.batch import collate, plan
from rlgen.rollout.sample import sample_seed
from rlgen.rollout.samples import Samples


@pytest.mark.parametrize("shape", ["exponential", "log-normal", "uniform"])
@pytest.mark.parametrize("seed", range(5))
def test_long_tails_are_hardly_padded(shape: str, seed: int) -> None:
    rng = random.Random(seed)
    draw = {
        "exponential": lambda: rng.expovariate(1 / 107),
        "log-normal": lambda: rng.lognormvariate(4, 1.2),
        "uniform": lambda: rng.uniform(1, 480),
    }[shape]
    completions = [min(480, 1 + int(draw())) for _ in range(64)]
    lengths = [c + rng.randrange(20, 60) for c in completions]
    batches = plan([[i] for i in range(64)], lengths, 16384)
    assert sorted(row for rows in batches for row in rows) == list(range(64))
    padding = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches) - sum(lengths)
    assert padding <= 0.1 * sum(completions)
    assert len(batches) < 32


def test_the_budget_holds_and_pairs_stay_together() -> None:
    rng = random.Random(1)
    lengths = [rng.randrange(10, 200) for _ in range(40)]
    pairs = [[i, 39 - i] for i in range(20)]
    batches = plan(pairs, lengths, 500)
    assert sorted(row for rows in batches for row in rows) == list(range(40))
    for rows in batches:
        assert len(rows) * max(lengths[row] for row in rows) <= 500
        assert {39 - row for row in rows} == set(rows)
    # a unit that exceeds the budget alone still gets through
    assert plan([[0]], [700], 500) == [[0]]
    assert plan([], [], 500) == []


def test_rows_are_prompt_and_completion_byte_for_byte() -> None:
    rng = random.Random(0)
    rows = [
        make_sample(
            prompt_ids=tuple(rng.choices(range(256), k=rng.randrange(1, 9))),
            completion_ids=(ids := (*rng.choices(range(256), k=rng.randrange(0, 12)), 259)),
            sampler_logp=tuple(-rng.random() for _ in ids),
            loss_mask=tuple(i != 1 for i in range(len(ids))),
        )
        for _ in range(9)
    ]
    batch = collate(Samples.of(rows), [4, 0, 8], CPU)
    for place, row in enumerate((4, 0, 8)):
        s = rows[row]
        whole = [*s.prompt_ids.tolist(), *s.completion_ids.tolist()]
        assert batch.input_ids[place, : len(whole)].tolist() == whole
        assert batch.input_ids[place, len(whole) :].sum() == 0 and batch.prompt_lengths[place] == len(s.prompt_ids)
        n = len(s.completion_ids)
        assert batch.completion_ids[place, :n].tolist() == s.completion_ids.tolist()
        assert batch.mask[place, :n].tolist() == s.loss_mask.tolist() and not batch.mask[place, n:].any()
        assert batch.mask[place, n - 1], "the sampled stop token is trained"
        assert batch.sampler_logp[place, :n].tolist() == s.sampler_logp.tolist()


def test_seeds_follow_from_positions() -> None:
    seeds = {sample_seed(run, group, index) for run in range(3) for group in range(50) for index in range(8)}
    assert len(seeds) == 1200 and sample_seed(0, 1, 2) == sample_seed(0, 1, 2) and max(seeds) < 2**62
