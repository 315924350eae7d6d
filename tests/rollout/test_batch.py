"""Micro-batches: every row once, little padding, within the budget; and what is trained on is what was sampled."""

import random
from typing import Any

import numpy as np
import pytest
from conftest import CPU
from helpers.before import before
from helpers.samples import make_sample

from rlgen.rollout import batch
from rlgen.rollout.batch import Prompts, collate, deal, differencing, even, plan, where_held
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


ATTENTION = 2e-4  # as of Qwen3-0.6B


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_packed_micro_batches_cost_all_processes_the_same_on_long_tails(world: int, steps: int) -> None:
    """Each pass waits for the process that has most to compute; there are 64 groups of 8 rows."""
    rng = np.random.default_rng(world)
    units, group, excess = [[row] for row in range(512)], np.arange(64).repeat(8), []
    for _ in range(steps):
        prompt = rng.integers(50, 400, 64).repeat(8)
        own = np.minimum(4096, 1 + rng.lognormal(5.5, 1.2, 512)).astype(int)
        hands = deal(units, (prompt + own).tolist(), 16384, world, Prompts(group, prompt), ATTENTION)
        assert sorted(row for mine in hands for rows in mine for row in rows) == list(range(512))
        assert len({len(mine) for mine in hands}) == 1 and all(rows for mine in hands for rows in mine), "no empty pass"
        costs = np.array([[cost(rows, group, prompt, own) for rows in mine] for mine in hands])
        excess.append(costs.max(axis=0).sum() / costs.sum(axis=1).mean())
    assert np.mean(excess) <= 1.03 and np.max(excess) <= 1.05 + 0.01 * (world == 8)


def cost(rows: list[int], group: np.ndarray, prompt: np.ndarray, own: np.ndarray) -> float:
    """What packed rows compute, in tokens: each prompt once, and each token attends to those before it."""
    pairs = sum(own[row] * (prompt[row] + own[row] / 2) for row in rows)
    once = {group[row]: prompt[row] for row in rows}
    return sum(own[row] for row in rows) + sum(once.values()) + ATTENTION * (pairs + sum(n * n / 2 for n in once.values()))


@pytest.mark.parametrize("longest", [1.0, 0.7])
def test_a_row_as_costly_as_all_others_leaves_these_within_the_budget(longest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention makes one long row cost as much as a pass of many short ones: the highest cost stays, however many passes."""
    divided, limit = list[Any](), 16384

    def count(*given: Any) -> None:
        divided.append(given)
        assert len(divided) <= 100, "no end"

    before(batch, "balanced", count, monkeypatch.setattr)
    for seed in range(4):
        draws = random.Random(seed)
        own = [min(int(limit * longest) - 200, int(draws.expovariate(1 / (limit * 0.2)))) for _ in range(64)]
        group, prompt = np.arange(8).repeat(8), np.full(64, 200)
        lengths = [200 + tokens for tokens in own]
        hands = deal([[row] for row in range(64)], lengths, limit, 2, Prompts(group, prompt), ATTENTION)
        assert sorted(row for mine in hands for rows in mine for row in rows) == list(range(64))
        for rows in (rows for mine in hands for rows in mine):
            assert len(rows) == 1 or sum(own[row] for row in rows) + 200 * len({row // 8 for row in rows}) <= limit


def test_padded_rows_cost_all_processes_about_the_same() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(4096, 50 + rng.lognormal(5.5, 1.2, 512)).astype(int).tolist()
    hands = deal([[row] for row in range(512)], lengths, 16384, 4, attention=ATTENTION)
    widest = [[max(lengths[row] for row in rows) for rows in mine] for mine in hands]
    tokens = np.array([[len(rows) * width for rows, width in zip(*one, strict=True)] for one in zip(hands, widest, strict=True)])
    costs = tokens * (1 + ATTENTION * np.array(widest) / 2)
    assert tokens.max() <= 16384 and costs.max(axis=0).sum() <= 1.06 * costs.sum(axis=1).mean()
    assert tokens.sum() <= 1.1 * sum(lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_processes_that_share_out_their_tokens_have_their_budgets_together(packed: bool) -> None:
    """Two by two. Rows may be longer than the budget of one; pairs stay in one process, and rows where they are held."""
    rng = np.random.default_rng(0)
    lengths, holder = rng.integers(20, 80, 40), rng.integers(0, 4, 40)
    prompts = Prompts(np.arange(8).repeat(5), np.full(40, 10)) if packed else None
    pairs = [[row, row + 1] for row in range(0, 40, 2)]
    dealt = deal(pairs, (lengths // 2).tolist(), 40, 4, prompts, sharing=2)
    held = where_held(holder, lengths, 40, 4, prompts, 2)
    assert all([row + 1 for row in rows[::2]] == rows[1::2] for mine in dealt for rows in mine)
    assert all(holder[row] == rank for rank, mine in enumerate(held) for rows in mine for row in rows)
    for hands, of_row in ((dealt, lengths // 2), (held, lengths)):
        assert sorted(row for mine in hands for rows in mine for row in rows) == list(range(40))
        assert len({len(mine) for mine in hands}) == 1, "every pass is one of all"
        for one, other in (*zip(*hands[:2], strict=True), *zip(*hands[2:], strict=True)):
            rows, most = one + other, max((of_row[row] for row in one + other), default=0)
            together = (
                sum(of_row[row] - 10 for row in rows) + 10 * len({row // 5 for row in rows}) if packed else len(rows) * most
            )
            assert together <= 80


def test_shares_of_unequal_items_are_nearly_equal() -> None:
    costs = [8, 7, 6, 5, 4]  # the example of Karmarkar and Karp's method: it ends with a difference of 2
    assert sorted(sum(costs[place] for place in share) for share in differencing(costs, 2)) == [14, 16]
    assert even([[0, 1, 2, 3, 4, 5], [6, 7]], 3, size=2) == [[0, 1], [6, 7], [2, 3, 4, 5]]
    assert even([[0]], 3) == [[0], [], []]


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
