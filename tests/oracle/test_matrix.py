"""TRL's losses and rlgen's on the same tensors: every cell of `make oracle`."""

import pytest
import torch
from helpers.slow import slow_but
from matrix import CELLS, check, outcomes, relative_error
from replay import oracle, random_rollout, rlgen_outcome

from rlgen.cli.docs import page_text
from rlgen.recipe.trainers import RLOORecipe

BLOCKS = list(dict.fromkeys((cell.row, cell.column) for cell in CELLS))
COLUMNS = {row: [column for other, column in BLOCKS if other == row] for row, _ in BLOCKS}
# Every loss once, with the corrections in turn.
QUICK = [(row, columns[place % len(columns)]) for place, (row, columns) in enumerate(COLUMNS.items())]


@pytest.mark.parametrize("row, column", slow_but(BLOCKS, *QUICK), ids=[" × ".join(block) for block in BLOCKS])
def test_cells_agree(row: str, column: str) -> None:
    wrong = check([cell for cell in CELLS if (cell.row, cell.column) == (row, column)]).wrong
    assert {name: why for name, why in wrong.items() if why} == {}


def test_rloo_of_tokens_has_the_gradient_of_sequences_on_policy() -> None:
    # Not a cell: a sum over tokens has another value than one ratio for all of them.
    rollout = random_rollout("ragged", torch.float64, policy_logp=random_rollout("ragged", torch.float64).old_logp)
    ours = rlgen_outcome(RLOORecipe(kind="rloo", ratio="token", correction={"mode": "none"}), rollout)
    theirs = oracle("RLOO")(rollout, beta=0.0, num_iterations=1).outcome()
    torch.testing.assert_close(ours.policy_gradient, theirs.policy_gradient, rtol=1e-9, atol=1e-12)


def test_cells_have_names_of_their_own() -> None:
    assert len({str(cell) for cell in CELLS}) == len(CELLS)


def test_the_pages_state_the_number_of_cells() -> None:
    assert f"{len(CELLS)} cells" in page_text("oracle")
    assert f"agree in all {len(CELLS)} combinations of settings" in page_text("numbers")


def test_a_difference_would_be_seen() -> None:
    ours, oracle = outcomes(CELLS[0], torch.float64)
    assert relative_error(ours, oracle) < 1e-12
    assert relative_error(ours._replace(value=ours.value * (1 + 1e-6)), oracle) > 1e-9
    moved = ours.policy_gradient.clone()
    moved[0, 0] += 1e-7 * oracle.policy_gradient.abs().max()
    assert relative_error(ours._replace(policy_gradient=moved), oracle) > 1e-9
