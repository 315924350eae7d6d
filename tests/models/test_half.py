"""A forward pass in bfloat16 rounds all that it multiplies as an engine holds it, and keeps no copy of a weight."""

import copy
from pathlib import Path
from typing import Any

import pytest
import sweep
import torch
from conftest import CPU, tiny_model
from helpers.batches import gradients, random_batch
from helpers.samples import TEXTS
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlgen.errors import SetupError
from rlgen.models.half import compute_as_held
from rlgen.models.load import load_config, load_model
from rlgen.models.lora import add_adapter
from rlgen.models.memory import count
from rlgen.models.policy import Hidden, Policy
from rlgen.models.tiny import build_tiny
from rlgen.recipe.models import LoraRecipe
from rlgen.setup.policy import checkpoint_activations
from rlgen.types import WHOLE, MicroBatch

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear")


def loss_of(policy: Policy) -> Tensor:
    return policy(random_batch(8, (16, 9, 16)), (WHOLE,)).logp.sum()


class Products(TorchDispatchMode):
    """Records the dtypes of the matrices that are multiplied outside of the head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, ...]] = set()
        self.vocabulary = vocabulary

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in PRODUCTS:
            matrices = [each for each in args if isinstance(each, Tensor) and each.dim() > 1]
            if all(self.vocabulary not in each.shape for each in (*matrices, result)):
                self.seen.add(tuple(each.dtype for each in matrices))
        return result


class Rounded(TorchDispatchMode):
    """Follows the copies of weights that are made in bfloat16."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        head = policy.head.weight.data_ptr()  # in a tied model the embedding too; the head rounds its own
        self.weights = {p.data_ptr() for p in policy.parameters() if p.dim() > 1 and p.data_ptr() != head}
        self.copies: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ == "_to_copy" and args[0].data_ptr() in self.weights:
            self.copies.append(StorageWeakRef(result.untyped_storage()))
        return result

    @property
    def alive(self) -> int:
        return sum(not copy.expired() for copy in self.copies)


def with_autocast(policy: Policy) -> Tensor:
    """The loss, were the weights not rounded but `torch.autocast` used."""
    compute_as_held(policy.model)
    hidden = policy.hidden

    def cast(given: MicroBatch) -> Hidden:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return hidden(given)

    policy.hidden = cast  # type: ignore[method-assign]
    return loss_of(policy)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt2"])
def test_all_products_are_of_bfloat16(name: str) -> None:
    policy = Policy(tiny_model(name), torch.bfloat16, True)
    with Products(policy.head.weight.shape[0]) as products:
        loss_of(policy).backward()
    assert products.seen == {(torch.bfloat16, torch.bfloat16)}
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in policy.parameters())


def test_autocast_computes_experts_in_float32() -> None:
    policy = Policy(tiny_model("qwen3_moe"), torch.bfloat16, True)
    with Products(policy.head.weight.shape[0]) as products:
        with_autocast(policy)
    assert (torch.float32, torch.float32) in products.seen


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_no_rounded_weight_outlives_its_layer(name: str) -> None:
    policy = Policy(tiny_model(name), torch.bfloat16, True)
    with Rounded(policy) as rounded:
        loss = loss_of(policy)
        forward = len(rounded.copies)
        assert forward >= 2 * 5 and rounded.alive == 0
        loss.backward()
    assert len(rounded.copies) > forward and rounded.alive == 0


def test_autocast_keeps_a_copy_of_all() -> None:
    policy = Policy(tiny_model("qwen3"), torch.bfloat16, True)
    with Rounded(policy) as rounded:
        loss = with_autocast(policy)
        assert rounded.alive == len(rounded.copies) >= 2 * 7
    del loss


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt2", "gemma2"])
def test_log_probs_and_gradients_are_those_of_a_model_that_is_held_in_bfloat16(name: str) -> None:
    held = Policy(load_model(str(build_tiny(name)), None, torch.bfloat16, "sdpa", CPU), torch.bfloat16, True)
    policy = Policy(tiny_model(name), torch.bfloat16, True)
    ours, theirs = loss_of(policy), loss_of(held)
    assert ours.item() == theirs.item()
    ours.backward(), theirs.backward()
    for (path, mine), rounded in zip(policy.named_parameters(), held.parameters(), strict=True):
        gap, size = (mine.grad - rounded.grad.float()).norm(), rounded.grad.float().norm()
        assert gap <= 2**-8 * size, path  # the head's share is added up in float32


@pytest.mark.parametrize("name", ["qwen3", "phi"])
def test_what_is_computed_wider_has_the_weights_that_an_engine_holds(name: str) -> None:
    held = Policy(load_model(str(build_tiny(name)), None, torch.bfloat16, "sdpa", CPU).float(), torch.float32, True)
    policy, batch = Policy(tiny_model(name), torch.bfloat16, True), random_batch(8, (16, 9, 16))
    found = policy.scores_in(batch, (WHOLE,), torch.bfloat16, torch.float32)[0]
    assert (found - held(batch, (WHOLE,)).logp).abs().max() < 1e-5


def test_a_copy_computes_with_its_own_weights() -> None:
    policy = Policy(tiny_model("qwen3"), torch.bfloat16, True)
    reference = copy.deepcopy(policy)
    before = loss_of(reference).item()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert loss_of(reference).item() == before != loss_of(policy).item()


@pytest.mark.parametrize("kind", ["half", "packed", "lora"])
def test_activations_computed_again_give_the_same_gradient(kind: str) -> None:
    found = []
    for again in (False, True):
        model = tiny_model("mistral" if kind == "packed" else "qwen3")
        if kind == "lora":
            add_adapter(model, LoraRecipe(rank=4, alpha=8.0), seed=0)
        if again:
            checkpoint_activations(model)
        policy = Policy(model, torch.bfloat16 if kind == "half" else torch.float32, True)
        assert kind != "packed" or policy.pack(TEXTS) is None
        found.append(gradients(policy, random_batch(8, (16, 9, 16)))[1])
    assert torch.equal(*found) and found[0].any()


def test_a_model_that_cannot_compute_activations_again_is_refused(tmp_path: Path) -> None:
    sweep.build("jetmoe", tmp_path)
    said = r"model\.gradient_checkpointing: ValueError: JetMoeForCausalLM does not support gradient checkpointing\.; remove it"
    with pytest.raises(SetupError, match=said):
        checkpoint_activations(load_model(str(tmp_path), None, torch.float32, "sdpa", CPU))
    with pytest.raises(SetupError, match="what autograd keeps of this model cannot be counted without values"):
        count(load_config(str(tmp_path), None), 1, 8, torch.float32, "sdpa")
