"""The importance weight of every token of stored rollouts, by the function that the loss itself uses.

A weight is stored as a code: most are the token's ratio, a cap or 0, which the reader of the report knows already.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from rlgen.recipe import Recipe
from rlgen.types import Ragged


class Code(IntEnum):
    """How the weight of a token follows from its ratio."""

    NONE = 0  # it has no weight: outside the mask, or not trained
    RATIO = 1
    ZERO = 2
    LOW = 3  # the lower cap
    HIGH = 4  # the upper cap
    ROW = 5  # the weight of its whole completion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """The weights of some rollouts."""

    codes: NDArray[np.uint8]  # [N]
    rows: NDArray[np.float64]  # [B], for `Code.ROW`; NaN for rows without


def weights_of(recipe: Recipe, policy_logp: Ragged, sampler_logp: Ragged, loss_mask: Ragged) -> Weights:
    """Returns the weights that the loss used for these rows.

    Args:
        policy_logp: [B] rows; empty for a row that was not trained.
    """
    import torch

    from rlgen.algorithms.base import correction_of
    from rlgen.losses.correction import importance_weight, log_ratio, ratio_of

    correction = correction_of(recipe.trainer.correction)
    codes = np.full(len(sampler_logp.values), Code.NONE, dtype=np.uint8)
    rows = np.full(len(sampler_logp), np.nan)
    trained = policy_logp.lengths > 0
    for row in trained.nonzero()[0].tolist():
        mask = torch.from_numpy(np.array(loss_mask[row]))[None]
        policy, sampler = (torch.from_numpy(np.array(of[row]))[None] for of in (policy_logp, sampler_logp))
        weight = importance_weight(policy, sampler, mask, correction)
        ratio = ratio_of(log_ratio(policy, sampler, mask), correction)
        place = slice(int(sampler_logp.offsets[row]), int(sampler_logp.offsets[row + 1]))
        if correction.of_rows or correction.mode == "none":
            rows[row] = float(weight[0, 0])
            code = torch.full_like(mask, Code.ROW, dtype=torch.uint8)
        else:
            code = torch.where(weight == ratio, Code.RATIO, torch.where(weight < ratio, Code.HIGH, Code.LOW))
            code = torch.where(weight == 0, Code.ZERO, code)
        codes[place] = torch.where(mask, code, Code.NONE)[0].numpy()
    return Weights(codes=codes, rows=rows)
