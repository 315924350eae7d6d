"""vLLM computes the trainer's log-probs after a sync of changed weights: tied and untied, dense and experts, capped and not.

`make parity` measures all of rlgen's tiny models; these are the ones that differ most.
"""

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch
from conftest import CPU, plan_of
from helpers.slow import slow_but
from parity import BOUND, LEAST, POWER, measure
from transformers import AutoModelForCausalLM, Qwen3Config

from rlgen.engines import vllm_weights
from rlgen.engines.colocated import ColocatedEngine
from rlgen.errors import EngineError
from rlgen.models import weights
from rlgen.models.load import load_model
from rlgen.models.policy import Policy
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.rollout.sample import rollout
from rlgen.rollout.score import score
from rlgen.types import WHOLE, Prompt, Sampling, ids_of

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
    monkeypatch.setattr("rlgen.sentinel.sync.checkpoint_tensors", lambda model, cast: cast(weights.own_tensors(model).items()))
    with pytest.raises(EngineError):
        measure("mixtral-untied")


# --- in bfloat16, the heads are one product: factors rounded, sums in float32 -------------------------------------------------

HIDDEN, VOCABULARY = 1024, 32_768


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers add nothing, so that the hidden states are the same on both sides and the head alone can differ."""
    path = tmp_path_factory.mktemp("wide")
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.randn(VOCABULARY, HIDDEN).bfloat16())  # the same rounded
        model.lm_head.weight.normal_(std=0.1)  # logits of a standard deviation of 3.2
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
def test_in_bfloat16_the_trainers_log_probs_are_vllms(folder: Path) -> None:
    plan = plan_of("qwen3", model=str(folder), dtype="bfloat16", fp32_head=True, max_model_len=64, max_num_seqs=16)
    policy = Policy(load_model(str(folder), None, torch.float32, "sdpa", CPU), torch.bfloat16, True)
    rng = random.Random(0)
    rows = [tuple(rng.randrange(256) for _ in range(8)) for _ in range(16)]
    prompts = [Prompt(position=i, row=i, text="", prompt_ids=ids_of(row), columns={}) for i, row in enumerate(rows)]
    with closing(ColocatedEngine(plan, wait=None)) as engine:
        groups = rollout(engine, prompts, Sampling(max_tokens=32, temperature=1.0, stop_ids=()), 1, 0, 0, byte_tokenizer())
    samples = [sample for group in groups for sample in group.samples]
    reported = torch.cat([torch.from_numpy(sample.sampler_logp) for sample in samples])

    def gap() -> float:
        trained = torch.cat(score(policy, samples, WHOLE, 4096, Processes.alone()))
        return (trained - reported).abs().mean().item()

    assert len(reported) > 400 and gap() <= 5e-4
    policy.fp32_head = False  # the comparison can fail
    assert gap() > 5e-3
