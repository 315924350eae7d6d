"""In bfloat16, vLLM's head and the trainer's are one product: factors rounded, sums in float32."""

import random
from pathlib import Path

import pytest
import torch
from conftest import CPU, plan_of
from transformers import AutoModelForCausalLM, Qwen3Config

from rlgen.engines.colocated import ColocatedEngine
from rlgen.models.load import load_model
from rlgen.models.policy import Policy
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.rollout.sample import rollout
from rlgen.rollout.score import score
from rlgen.types import WHOLE, Prompt, Sampling, ids_of

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
def test_the_trainers_log_probs_are_vllms(folder: Path) -> None:
    plan = plan_of("qwen3", model=str(folder), dtype="bfloat16", fp32_head=True, max_model_len=64, max_num_seqs=16)
    policy = Policy(load_model(str(folder), None, torch.float32, "sdpa", CPU), torch.bfloat16, True)
    rng = random.Random(0)
    rows = [tuple(rng.randrange(256) for _ in range(8)) for _ in range(16)]
    prompts = [Prompt(position=i, row=i, text="", prompt_ids=ids_of(row), columns={}) for i, row in enumerate(rows)]
    engine = ColocatedEngine(plan, wait=None)
    try:
        groups = rollout(engine, prompts, Sampling(max_tokens=32, temperature=1.0, stop_ids=()), 1, 0, 0, byte_tokenizer())
    finally:
        engine.close()
    samples = [sample for group in groups for sample in group.samples]
    reported = torch.cat([torch.from_numpy(sample.sampler_logp) for sample in samples])

    def gap() -> float:
        trained = torch.cat(score(policy, samples, WHOLE, 4096, Processes.alone()))
        return (trained - reported).abs().mean().item()

    assert len(reported) > 400 and gap() <= 5e-4
    policy.fp32_head = False  # the comparison can fail
    assert gap() > 5e-3
