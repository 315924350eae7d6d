"""vLLM computes the trainer's log-probs after a sync of changed weights: tied and untied, dense and experts, capped and not.

`make parity` measures all of rlgen's tiny models; these are the ones that differ most.
"""

import pytest
from helpers.slow import slow_but
from parity import BOUND, LEAST, POWER, measure

from rlgen.engines import vllm_weights
from rlgen.errors import EngineError
from rlgen.models import weights

pytestmark = pytest.mark.usefixtures("one_thread")

CHOSEN = ["qwen3-tied", "qwen3-untied", "llama-untied", "qwen2-tied", "gemma3_text-tied", "olmo3-untied", "gpt2-tied"]
CHOSEN += ["phi-untied", "cohere-tied", "gemma2-tied", "qwen3_moe-untied", "mixtral-tied", "granitemoe-tied", "glm4_moe-untied"]


@pytest.mark.parametrize("name", slow_but(CHOSEN, "qwen3-tied"))
def test_changed_weights_arrive(name: str) -> None:
    found = measure(name)
    assert found.gap <= BOUND
    # the comparison can fail: had nothing been sent, and had any one tensor stayed old
    assert found.unsynced >= POWER * BOUND
    assert found.least >= LEAST * BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name, patch", [("qwen3-tied", "repack_heads"), ("mixtral-untied", "forget_expert_kernels")])
def test_the_fault_that_a_patch_cures_is_still_there(name: str, patch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, patch, lambda model: {})
    found = measure(name)
    assert found.start <= BOUND < 0.1 < found.changed


@pytest.mark.slow
def test_experts_in_the_trainers_layout_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they sent as transformers holds them, not as a checkpoint does, the comparison would show it."""
    monkeypatch.setattr("rlgen.sentinel.sync.checkpoint_tensors", lambda model: weights.own_tensors(model).items())
    with pytest.raises(EngineError):
        measure("mixtral-untied")
