"""Tiny models: every name builds and loads, and what is special about one shows in what it computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CPU, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlgen.errors import SetupError
from rlgen.models.load import load_model
from rlgen.models.policy import LmHead, check_head
from rlgen.models.tiny import ARCHITECTURES, build_tiny, names, parse_name
from rlgen.models.weights import own_tensors

IDS = torch.randint(0, 256, (8, 48), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logp(model: AutoModelForCausalLM) -> Tensor:
    return model(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("name", names())
def test_every_name_builds_and_loads(name: str) -> None:
    model = tiny_model(name)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (name.endswith("-tied"))
    assert all(tensor.any() for tensor in own_tensors(model).values()), "a lost tensor of zeros would not show"
    assert logp(model).isfinite().all()
    LmHead.of(model)  # rlgen computes its logits


def test_names_are_architectures_with_a_tying() -> None:
    assert {parse_name(name)[0] for name in names()} == set(ARCHITECTURES)
    assert parse_name("qwen3") == ("qwen3", True) and parse_name("llama") == ("llama", False)
    assert parse_name("qwen3-untied") == ("qwen3", False)
    unknown = {"qwen9": "is not a tiny model; there are tiny:qwen3, ", "qwen3-loose": "is not a tiny model"}
    for name, said in {**unknown, "gemma2-untied": ": vLLM serves gemma2 tied only"}.items():
        with pytest.raises(SetupError, match=f"tiny:{name} ?{said}"):
            parse_name(name)


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe"])
def test_the_same_name_gives_the_same_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    for place in ("one", "two"):
        monkeypatch.setenv("RLGEN_CACHE", str(tmp_path / place))
        torch.rand(7)  # whatever the process drew before
        built.append({path.name: path.read_bytes() for path in build_tiny(name).iterdir()})
    assert built[0] == built[1]


# setting, and a value under which another model would be computed
SPECIAL = [
    ("gemma2", "final_logit_softcapping", None),
    ("gemma2", "attn_logit_softcapping", None),
    ("gemma2", "sliding_window", 4096),
    ("mistral", "sliding_window", 4096),
    ("mistral", "sliding_window", 17),
    ("gemma3_text", "sliding_window", 17),
    ("olmo3", "sliding_window", 17),
    ("exaone4", "sliding_window", 17),
    ("granite", "logits_scaling", 1.0),
    ("cohere", "logit_scale", 1.0),
    ("qwen3_moe", "norm_topk_prob", False),
    ("qwen3_moe", "num_experts_per_tok", 1),
]


@pytest.mark.parametrize("name, setting, value", SPECIAL)
def test_what_is_special_shows(name: str, setting: str, value: object) -> None:
    """Were trainer or engine to ignore the setting, `scripts/parity.py` would see 100 times its bound."""
    folder = str(build_tiny(name))
    config = AutoConfig.from_pretrained(folder)
    assert getattr(config, setting) != value
    other = AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(folder, **{setting: value}), attn_implementation="eager"
    )
    assert (logp(other.eval()) - logp(tiny_model(name))).abs().max() > 1e-2


def test_capped_attention_is_computed() -> None:
    """By the fused kernels of torch it would not be, and nothing would say so."""
    capped, plain = tiny_model("gemma2"), tiny_model("qwen3")
    assert capped.config._attn_implementation == "eager" and plain.config._attn_implementation == "sdpa"
    fused = AutoModelForCausalLM.from_pretrained(build_tiny("gemma2"), attn_implementation="sdpa").eval()
    assert (logp(fused) - logp(capped)).abs().max() > 1e-2
    named = load_model(str(build_tiny("gemma2")), None, torch.float32, "eager", CPU)
    assert torch.equal(logp(named), logp(capped))


@pytest.mark.parametrize("name, lost", [("gemma2", "softcap"), ("granite", "scale"), ("cohere", "scale")])
def test_a_head_that_is_read_wrongly_is_refused(name: str, lost: str) -> None:
    model = tiny_model(name)
    head = LmHead.of(model)
    wrong = replace(head, rule=replace(head.rule, **{lost: {"softcap": None, "scale": 1.0}[lost]}))
    check_head(model, head)
    with pytest.raises(SetupError, match="computes its logits in a way rlgen does not know"):
        check_head(model, wrong)
