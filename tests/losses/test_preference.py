"""Pairs by group id, and hand values of the losses on them."""

import math
from functools import partial

import pytest
import torch
from loss_cases import case, tensor, value_and_gradient
from torch.testing import assert_close

from rlgen.algorithms.base import Scores
from rlgen.algorithms.online_dpo import OnlineDPO
from rlgen.losses.inputs import Totals
from rlgen.losses.preference import dpo_loss, select_pairs
from rlgen.recipe.trainers import OnlineDPORecipe

NAN = math.nan
close = partial(assert_close, rtol=1e-9, atol=1e-12)
loss_of = partial(dpo_loss, beta=0.1, loss="sigmoid", lengths="sum")


def pairs(rewards, ids, index, pairing="best_worst", min_margin=0.0, ties="skip"):
    chosen, rejected = select_pairs(
        tensor(rewards), torch.tensor(ids), torch.tensor(index), pairing=pairing, min_margin=min_margin, ties=ties
    )
    return list(zip(chosen.tolist(), rejected.tolist(), strict=True))


@pytest.mark.parametrize(
    "rewards, options, expected",
    [
        ([0.2, 0.9, 0.9, 0.1], {}, [(1, 3)]),  # best twice: the lower index; margin .8
        ([0.2, NAN, 0.9, 0.1], {}, [(2, 3)]),
        ([0.9, 0.1, 0.1], {}, [(0, 2)]),  # worst twice: the higher index
        ([0.5, 0.5], {}, []),
        ([0.5, 0.5], {"ties": "first"}, [(0, 1)]),
        ([0.3, 0.1 + 0.2], {}, []),  # equal but for rounding
        ([0.3, 0.1 + 0.2, 0.3], {"ties": "first"}, [(0, 2)]),
        ([0.5, NAN, 0.5, 0.5], {"ties": "first"}, [(0, 3)]),
        ([1.0, NAN], {"ties": "first"}, []),  # a row is no pair with itself
        ([NAN, NAN], {}, []),
        ([1.0, 0.5], {"min_margin": 0.5}, []),  # more than the margin
        ([1.0, 0.25], {"min_margin": 0.5}, [(0, 1)]),
        ([1.1, 1.0], {"min_margin": 0.1}, []),  # which rounding makes 0.10000000000000009
        # ranked 1, 3, 0, 4, 2: the middle one has no partner
        ([0.5, 0.9, 0.1, 0.8, 0.4], {"pairing": "outside_in"}, [(1, 2), (3, 4)]),
        ([0.5, 0.9, 0.1, 0.5], {"pairing": "outside_in"}, [(1, 2)]),  # the inner pair is a tie
        ([0.5, 0.9, 0.1, 0.5], {"pairing": "outside_in", "ties": "first"}, [(1, 2), (0, 3)]),
    ],
)
def test_select_within_a_group(rewards, options, expected):
    assert pairs(rewards, [3] * len(rewards), list(range(len(rewards))), **options) == expected


def test_best_random_draws_from_all_others_by_the_group_id():
    rewards, index = [0.1, 0.9, 0.3, 0.5] * 40, [0, 1, 2, 3] * 40
    ids = [group for group in range(40) for _ in range(4)]
    found = pairs(rewards, ids, index, "best_random")
    assert [chosen for chosen, _ in found] == [4 * group + 1 for group in range(40)]
    assert {rejected % 4 for _, rejected in found} == {0, 2, 3}
    assert found == pairs(rewards, ids, index, "best_random")


@pytest.mark.parametrize("pairing", ["best_worst", "outside_in", "best_random"])
@pytest.mark.parametrize("seed", range(3))
def test_select_follows_a_permutation(pairing, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 3, (12,), generator=generator).double()
    ids, index = torch.arange(12) % 3, torch.arange(12) // 3
    order = torch.randperm(12, generator=generator)
    select = partial(select_pairs, pairing=pairing, min_margin=0.0, ties="skip")
    chosen, rejected = select(rewards, ids, index)
    shuffled = select(rewards[order], ids[order], index[order])
    assert (order[shuffled[0]].tolist(), order[shuffled[1]].tolist()) == (chosen.tolist(), rejected.tolist())


@pytest.mark.parametrize("penalty, chosen", [(0.0, 0), (1.0, 1)])
def test_a_completion_that_did_not_end_pays(penalty, chosen):
    # [1, .5] with the first truncated: less 1 it is the worse one
    algorithm = OnlineDPO(OnlineDPORecipe(kind="online_dpo", missing_eos_penalty=penalty))
    scores = Scores(
        rewards=tensor([1.0, 0.5]),
        columns=tensor([[1.0], [0.5]]),
        column_weights=tensor([1.0]),
        group_ids=torch.tensor([8, 8]),
        sample_index=torch.tensor([0, 1]),
        truncated=torch.tensor([True, False]),
        kl=None,
    )
    advantages = algorithm.advantages(scores)
    assert advantages.advantages.argmax() == chosen and advantages.pair_id.tolist() == [0, 0]


def one_pair(**given):
    """Chosen gains .5 + .4 over the reference, rejected .2: h = .7."""
    policy = tensor([[-1.0, -1.0], [-2.0, NAN]]).requires_grad_()
    fields = {
        "ref_logp": tensor([[-1.5, -1.4], [-2.2, NAN]]),
        "entropy": tensor([[0.3, 0.5], [1.0, NAN]]),
        "mask": torch.tensor([[True, True], [True, False]]),
        "advantages": tensor([1.0, -1.0]),
        "pair_id": torch.tensor([5, 5]),
    }
    return case(policy, **(fields | given))


@pytest.mark.parametrize(
    "loss, value, slope, printed",
    [
        ("sigmoid", math.log(1 + math.exp(-0.07)), -0.1 / (1 + math.exp(0.07)), 0.65876),
        ("ipo", (0.7 - 5) ** 2, 2 * (0.7 - 5), 18.49),  # 1 / (2 * .1) = 5
        ("hinge", 1 - 0.07, -0.1, 0.93),
    ],
)
def test_dpo(loss, value, slope, printed):
    result, gradient, stats = value_and_gradient(partial(dpo_loss, beta=0.1, loss=loss, lengths="sum"), one_pair())
    close(result, tensor(value))
    assert result.item() == pytest.approx(printed, abs=5e-6)
    close(gradient, tensor([[slope, slope], [-slope, 0.0]]))
    assert {key: stat.value for key, stat in stats.items()} == pytest.approx(
        {
            "dpo/margin": 0.07,
            "dpo/accuracy": 1.0,
            "dpo/chosen_reward": 0.09,
            "dpo/rejected_reward": 0.02,
            "dpo/kept_frac": 1.0,
            "dpo/beta": 0.1,
            # of three tokens, with u = .5, .4 and .2
            "entropy": 0.6,
            "kl/ref_k1": 1.1 / 3,
            "kl/ref_k3": (math.exp(-0.5) + math.exp(-0.4) + math.exp(-0.2) + 1.1 - 3) / 3,
        },
        rel=1e-9,
    )


def test_mean_lengths():
    # (.9 / 2) - .2 = .25; (.25 - 5)^2; slopes 2 (.25 - 5) by 2 tokens and by 1
    result, gradient, _ = value_and_gradient(partial(dpo_loss, beta=0.1, loss="ipo", lengths="mean"), one_pair())
    close(result, tensor(4.75**2))
    close(gradient, tensor([[-4.75, -4.75], [9.5, 0.0]]))


def test_hinge_is_flat_beyond_its_margin():
    result, gradient, _ = value_and_gradient(partial(dpo_loss, beta=2.0, loss="hinge", lengths="sum"), one_pair())
    assert result == 0 and (gradient == 0).all()  # beta h = 1.4


@pytest.mark.parametrize("weight", [tensor([[1.0], [0.0]]), tensor([[0.0], [1.0]]), tensor([[0.0, 0.0], [1.0, 1.0]])])
def test_a_pair_with_a_dropped_row_has_no_loss_and_stays_in_the_mean(weight):
    totals = Totals(sequences=4, tokens=6, kept=6, prompts=2, pairs=2)
    loss, gradient, stats = value_and_gradient(loss_of, one_pair(weight=weight, totals=totals))
    assert loss == 0 and (gradient == 0).all() and stats["dpo/kept_frac"].value == 0
    kept, _, _ = value_and_gradient(loss_of, one_pair(totals=totals))
    assert kept.item() == pytest.approx(0.65876 / 2, abs=5e-6)


def test_swapping_flips_the_margin():
    _, _, stats = value_and_gradient(loss_of, one_pair(advantages=tensor([-1.0, 1.0])))
    assert stats["dpo/margin"].value == pytest.approx(-0.07, rel=1e-9)
    assert stats["dpo/accuracy"].value == 0


@pytest.mark.parametrize("epoch, beta", [(0.5, 0.2), (1.3, 0.1), (5.0, 0.1)])
def test_beta_of_each_epoch(epoch, beta):
    algorithm = OnlineDPO(OnlineDPORecipe(kind="online_dpo", beta=[0.2, 0.1]))
    stats = algorithm.loss(one_pair(epoch=epoch))[1]
    assert stats["dpo/beta"].value == beta and stats["dpo/margin"].value == pytest.approx(0.7 * beta)


@pytest.mark.parametrize(
    "pair_id, advantages",
    [
        ([5, 6], [1.0, -1.0]),
        ([5, 5], [1.0, 1.0]),
        ([5, 5], [0.0, -1.0]),
        ([5, -1], [1.0, -1.0]),
        ([5, 5], [1.0, 0.0]),  # neither chosen nor rejected
        ([5, 5, 5, 5], [1.0, -1.0, 1.0, -1.0]),
    ],
)
def test_a_broken_pair_is_refused(pair_id, advantages):
    logp = torch.zeros(len(pair_id), 2, dtype=torch.float64)
    x = case(logp, ref_logp=logp, pair_id=torch.tensor(pair_id), advantages=tensor(advantages))
    with pytest.raises(ValueError, match="pair 5 has"):
        loss_of(x)
