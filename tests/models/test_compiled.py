"""Compiled layers compute what the others do, for batches of all sizes without compiling each, and no weight changes its name."""

from functools import partial

import pytest
import torch
from conftest import tiny_model
from helpers.batches import gradients, random_batch
from torch._dynamo.utils import counters

from rlgen.errors import SetupError
from rlgen.models import compiled
from rlgen.models.compiled import compile_layers
from rlgen.models.lora import add_adapter
from rlgen.models.policy import Policy
from rlgen.models.weights import own_tensors
from rlgen.recipe.models import LoraRecipe
from rlgen.setup.policy import checkpoint_activations
from rlgen.types import WHOLE, MicroBatch

pytestmark = [pytest.mark.usefixtures("one_thread", "fresh_compiler")]

# Rows of a batch, and tokens of its longest row.
SIZES = ((2, 9), (3, 14), (4, 21), (2, 33), (5, 8), (3, 27), (7, 12), (6, 40))


@pytest.fixture
def fresh_compiler() -> None:
    """Nothing is compiled yet."""
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def no_code_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as always, forward and backward, but what is traced is run by torch: writing and building C++ takes minutes."""
    monkeypatch.setattr(compiled.torch, "compile", partial(torch.compile, backend="aot_eager"))


def batch_of(rows: int, longest: int) -> MicroBatch:
    return random_batch(4, [max(1, longest - 4 - row) for row in range(rows)])


def compiled_policy(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Policy, Policy]:
    """The same model compiled and not; `kind` is plain, again (activations are computed again) or lora."""
    found = []
    for _ in range(2):
        model = tiny_model("qwen3")
        if kind == "lora":
            add_adapter(model, LoraRecipe(rank=4), 0, None)
        if kind == "again":
            checkpoint_activations(model)
        found.append(Policy(model, dtype, True))
    compile_layers(found[0].model)
    return found[0], found[1]


@pytest.mark.usefixtures("no_code_written")
@pytest.mark.parametrize("kind", ["plain", "again", "lora"])
@pytest.mark.slow
def test_compiled_layers_compute_the_same_in_batches_of_all_sizes(kind: str) -> None:
    policy, plain = compiled_policy(kind)
    graphs = []
    for size in SIZES:
        (logp, slope), (expected, of_plain) = (gradients(one, batch_of(*size)) for one in (policy, plain))
        assert (logp - expected).abs().max() < 1e-5
        assert (slope - of_plain).abs().max() < 1e-5 * of_plain.abs().max().clamp(min=1)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[1], f"other sizes were compiled anew: {graphs}"
    with torch.no_grad():
        for size in SIZES:
            policy(batch_of(*size), (WHOLE,))
        without_gradient = counters["stats"]["unique_graphs"]
        policy(batch_of(1, 12), (WHOLE,))
    assert without_gradient - graphs[-1] <= 2
    assert list(own_tensors(policy.model)) == list(own_tensors(plain.model))
    assert list(policy.model.state_dict()) == list(plain.model.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("no_code_written")
def test_layers_in_half_precision_are_compiled_too() -> None:
    policy, plain = compiled_policy("plain", torch.bfloat16)
    before = counters["stats"]["unique_graphs"]
    (logp, slope), (expected, of_plain) = (gradients(one, batch_of(4, 30)) for one in (policy, plain))
    assert before > 0 and (logp - expected).abs().max() < 0.1
    assert (slope - of_plain).norm() < 0.05 * of_plain.norm()


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(compiled.torch, "compile", lambda run, dynamic: broken)
        with pytest.raises(SetupError, match=r"model\.compile: Qwen3ForCausalLM cannot be compiled here .*no compiler"):
            compile_layers(Policy(tiny_model("qwen3"), torch.float32, True).model)
    with monkeypatch.context() as patch:
        patch.setattr(compiled.torch, "compile", lambda run, dynamic: lambda *args, **kwargs: run(*args, **kwargs) * 1.01)
        with pytest.raises(SetupError, match="gives different results when compiled"):
            compile_layers(Policy(tiny_model("qwen3"), torch.float32, True).model)
