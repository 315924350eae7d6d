"""How rows are divided among processes that share out the tokens of their rows."""

import pytest

from rlgen.rollout.batch import deal
from rlgen.trainers.train_batch import each_ones


@pytest.mark.parametrize("size", [1, 2])
def test_processes_that_share_tokens_have_their_budgets_together(size: int) -> None:
    """Two groups of two: a row of nearly two budgets is computed like any other, and pairs stay in one process."""
    lengths = [90, 5, 7, 60, 8, 9, 30, 31, 12, 11, 50, 3, 4, 6, 40, 20]
    units = [list(range(row, row + size)) for row in range(0, len(lengths), size)]
    groups = deal(units, lengths, 50 * 2, 2)
    own = each_ones(groups, 2, size)
    assert len(own) == 4 and len({len(passes) for passes in own}) == 1
    assert sorted(row for passes in own for rows in passes for row in rows) == list(range(len(lengths)))
    for group, passes in enumerate(groups):
        for place, rows in enumerate(passes):
            members = [own[2 * group + member][place] for member in range(2)]
            assert sorted(row for of_member in members for row in of_member) == sorted(rows)
            assert abs(len(members[0]) - len(members[1])) <= size
            assert max((lengths[row] for row in rows), default=0) * len(rows) <= 50 * 2 or len(rows) == size
    assert all(rows[at : at + size] in units for passes in own for rows in passes for at in range(0, len(rows), size))
