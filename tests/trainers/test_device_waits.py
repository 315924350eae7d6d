"""How often an update makes the program wait for the device: never more often because there are more micro-batches."""

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import tiny_model
from helpers.before import before
from helpers.learning import learning
from helpers.samples import make_sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlgen.algorithms.base import Algorithm
from rlgen.algorithms.registry import build_algorithm
from rlgen.models.policy import Policy
from rlgen.processes import Processes
from rlgen.recipe.trainers import GRPORecipe, OnlineDPORecipe
from rlgen.rollout.samples import Samples
from rlgen.rollout.table import RowTable

ROWS, UPDATES = 16, 2
# Operations for which the program waits on a GPU: a number is read, or decides how large a result is.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "item", "equal")


class Waits(TorchDispatchMode):
    """Counts the operations that read what a device has computed.

    A CPU is asked as a GPU would be, but for copies from one to the other: tensors that `onto` sends, and those that `cpu` brings
    back, stay where they are. Indexing by a mask is one of `nonzero`'s disguises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or by_mask:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def waits(algorithm: Algorithm, budget: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """What an update waits for, copies to the CPU included, and its number of micro-batches."""
    policy, reference = (Policy(tiny_model("qwen3"), torch.float32, fp32_head=True) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    learn = learning(algorithm, policy, reference, optimizer, budget, UPDATES, max_grad_norm=1.0)
    samples = [
        make_sample(
            group_id=row // 4,
            sample_index=row % 4,
            prompt_ids=tuple(range(3, 9)),
            completion_ids=tuple(range(10, 13 + row % 5)),
            sampler_logp=(-5.0,) * (3 + row % 5),
            loss_mask=(True,) * (3 + row % 5),
            rewards={"reward": float(row % 4)},
            reward=float(row % 4),
        )
        for row in range(ROWS)
    ]
    held = Samples.of(samples, ["reward"])
    table = RowTable.gather(held, Processes.alone())
    with Waits() as counted, monkeypatch.context() as patch:
        before(Tensor, "cpu", lambda _: counted.found.update(["cpu"]), patch.setattr)
        train_batch, _, _ = learn.builder.build(table, held, 0.0)
        metrics, skipped = learn.update(train_batch, step=1)
    assert skipped is None and metrics["updates/done"] == UPDATES
    return counted.found, len(train_batch.micro_batches)


ALGORITHMS = {
    "grpo": GRPORecipe(beta=0.1, updates_per_rollout=2, clip_low=0.2, clip_high=0.3, off_policy_max=0.5),
    "entropy": GRPORecipe(top_entropy=0.5, entropy_bonus=0.01, updates_per_rollout=2),
    "gspo": GRPORecipe(loss="gspo", updates_per_rollout=2, correction={"mode": "sequence_mask"}),
    "vespo": GRPORecipe(loss="vespo", updates_per_rollout=2),
    "online_dpo": OnlineDPORecipe(kind="online_dpo", pairing="outside_in"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_more_micro_batches_wait_no_more_often(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = build_algorithm(ALGORITHMS[name])
    few, of_few = waits(algorithm, 10_000, monkeypatch)
    many, of_many = waits(algorithm, 30, monkeypatch)
    assert of_many >= 2 * of_few, "the budget splits nothing"
    assert many == few
