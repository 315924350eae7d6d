"""An adapted model is its base until it is trained, is itself when merged, and is its base again without its adapter."""

import random
from pathlib import Path
from typing import Any

import pytest
import sweep
import torch
from conftest import CPU, tiny_model
from helpers.adapters import SMALL, moved
from helpers.samples import make_sample
from helpers.train_state import equal, learn, parts, save_parts
from peft import PeftModel

from rlgen.errors import CheckpointError, Fault, SentinelError, SetupError
from rlgen.models import lora, weights
from rlgen.models.load import load_model, locate
from rlgen.models.lora import adapted_layers, adapter_tensors, add_adapter, factors, targets, without_adapter
from rlgen.models.policy import BasePolicy, Policy
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import base_digest, checkpoint_tensors, model_tensors, own_tensors
from rlgen.processes import Processes
from rlgen.recipe.models import LoraRecipe
from rlgen.rollout.batch import collate
from rlgen.rollout.samples import Samples
from rlgen.run.checkpoint import Checkpoints, load_checkpoint
from rlgen.types import WHOLE

# Plain, packed and transposed projections; experts that are no linear layers, and a shared one that is.
NAMES = ["qwen3", "qwen3-untied", "phi3", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "granitemoe", "glm4_moe"]
IDS = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("name", NAMES)
def test_merged_tensors_make_a_plain_model_compute_what_the_adapted_one_does(name: str) -> None:
    model, plain = moved(name), tiny_model(name)
    digest, base = base_digest(plain), logits(plain)
    with_adapter = logits(model)
    assert (with_adapter - base).abs().max() > 0.3
    sent = dict(checkpoint_tensors(model))
    assert list(sent) == list(dict(checkpoint_tensors(plain)))
    own = own_tensors(plain)
    assert list(own_tensors(model)) == list(own)
    for tensor_name, tensor in model_tensors(plain, sent.items()):
        own[tensor_name].copy_(tensor)
    assert (logits(plain) - with_adapter).abs().max() < 3e-5
    # the base itself has not moved, and comes back without its adapter, to the last bit
    assert base_digest(model) == digest != base_digest(plain)
    with without_adapter(model):
        assert torch.equal(logits(model), base)
        assert weights.base_digest(model) == digest
        assert all(torch.equal(a, b) for a, b in zip(dict(checkpoint_tensors(model)).values(), tiny(name), strict=True))
    assert torch.equal(logits(model), with_adapter)


def tiny(name: str) -> list[torch.Tensor]:
    return list(dict(checkpoint_tensors(tiny_model(name))).values())


@pytest.mark.parametrize(("use_rslora", "expected"), [(False, 8.0 / 4), (True, 8.0 / 4**0.5)])
def test_a_merged_tensor_is_the_textbooks_and_new(use_rslora: bool, expected: float) -> None:
    model = moved("qwen3", recipe=LoraRecipe(rank=4, alpha=8.0, use_rslora=use_rslora))
    layers, merged = adapted_layers(model), dict(weights.merged_tensors(model))
    assert len(layers) == 28 and {lora.scale(layer) for layer in layers.values()} == {expected}
    for name, layer in layers.items():
        (first, second), weight = factors(layer), lora.base_weight(layer)
        assert torch.allclose(merged[name], weight + expected * (second @ first), atol=1e-7)
        assert merged[name].data_ptr() != weight.data_ptr() and not merged[name].requires_grad


def test_a_new_adapter_does_nothing_follows_from_its_seed_and_draws_from_no_random_state() -> None:
    base, models = logits(tiny_model("qwen3")), [tiny_model("qwen3") for _ in range(3)]
    states = random.getstate(), torch.get_rng_state()
    for model, seed in zip(models, (0, 0, 1), strict=True):
        add_adapter(model, SMALL, seed)
    assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())
    assert all(torch.equal(logits(model), base) for model in models)
    first, same, other = (torch.cat([t.flatten() for t in adapter_tensors(model).values()]) for model in models)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert not any(factors(layer)[1].any() for layer in adapted_layers(models[0]).values())


def test_the_adapter_is_float32_over_a_base_of_bfloat16() -> None:
    model = load_model(str(build_tiny("qwen3")), None, torch.bfloat16, "sdpa", CPU)
    add_adapter(model, SMALL, 0)
    assert {tensor.dtype for tensor in adapter_tensors(model).values()} == {torch.float32}
    assert {tensor.dtype for tensor in own_tensors(model).values()} == {torch.bfloat16}
    sent = dict(checkpoint_tensors(model))
    assert sent["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_targets_are_all_linear_layers_but_the_head_or_endings_of_names() -> None:
    model = tiny_model("qwen3-untied")
    assert len(targets(model, "all-linear")) == 28 and "lm_head" not in targets(model, "all-linear")
    assert targets(model, ["0.self_attn.q_proj", "down_proj"]) == [
        "model.layers.0.self_attn.q_proj",
        *(f"model.layers.{layer}.mlp.down_proj" for layer in range(4)),
    ]
    assert targets(model, "v_proj") == [f"model.layers.{layer}.self_attn.v_proj" for layer in range(4)]


@pytest.mark.parametrize(
    "name, chosen, words",
    [
        ("qwen3", ["q_porj"], "whose name ends with q_porj; did you mean q_proj?"),
        ("qwen3", ["xyz"], "they are called q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("qwen3", ["proj"], "did you mean"),  # an ending is of whole words
        ("qwen3-untied", ["lm_head"], "besides its head"),
        ("mixtral", ["down_proj"], "experts are held as one tensor"),
        ("mixtral", ["experts"], "experts are held as one tensor"),
        (
            "glm4_moe",
            ["gate_proj", "up_proj"],
            "takes model.layers.0.mlp.gate_proj of Glm4MoeForCausalLM for a part of an expert",
        ),
    ],
)
def test_targets_that_are_none(name: str, chosen: list[str], words: str) -> None:
    with pytest.raises(SetupError, match=r"model\.lora\.targets: ") as caught:
        targets(tiny_model(name), chosen)
    assert words in str(caught.value) and caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["opt:projected", "nemotron_h", "llama4_text"])
def test_adapters_in_half_precision_of_what_is_no_plain_layer(name: str, tmp_path: Path) -> None:
    """Projections outside of the layers; layers that peft refuses; a router that its class calls a linear layer."""
    sweep.build(name, tmp_path)
    plain, model = (load_model(str(tmp_path), None, torch.bfloat16, "sdpa", CPU) for _ in range(2))
    add_adapter(model, SMALL, seed=0)
    own, base = (Policy(one, torch.bfloat16, True)(batch(), (WHOLE,)).logp for one in (model, plain))
    assert torch.equal(own, base)
    own.sum().backward()
    assert all(factors(layer)[1].grad.any() for layer in adapted_layers(model).values())


def test_what_is_not_adapted_is_said() -> None:
    assert lora.describe(moved("qwen3")) == "rank 4 in 28 linear layers, 38,912 of 860,032 parameters are trained"
    assert lora.describe(moved("glm4_moe")).endswith("not adapted: 12 linear layers, 6 packed tensors of experts")
    assert lora.describe(moved("qwen3", recipe=LoraRecipe(rank=4, targets=["q_proj"]))).endswith("not adapted: 24 linear layers")


def test_without_adapter_is_undone_whatever_happens_and_may_be_nested() -> None:
    model = moved("qwen3")
    on = logits(model)
    with pytest.raises(RuntimeError), without_adapter(model):
        with without_adapter(model, only=["model.layers.0.mlp.up_proj.weight"]):
            pass
        off = logits(model)
        raise RuntimeError
    assert torch.equal(logits(model), on) and torch.equal(off, logits(tiny_model("qwen3")))
    with without_adapter(model, only=["model.layers.0.mlp.up_proj.weight"]):
        partly = logits(model)
    assert not torch.equal(partly, on) and not torch.equal(partly, off)


def batch() -> Any:
    return collate(Samples.of([make_sample(), make_sample(prompt_ids=(9, 8, 7))]), [0, 1], CPU)


def gradients(policy: Policy, reference: BasePolicy | None) -> dict[str, torch.Tensor]:
    """Of a loss, with a forward of the reference between the policy's own and its backward pass."""
    logp = policy(batch(), (WHOLE,)).logp
    if reference is not None:
        with torch.no_grad():
            reference(batch(), (WHOLE,))
    logp.sum().backward()
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


def test_the_reference_is_the_base_and_leaves_the_policys_gradient_alone() -> None:
    model = moved("qwen3")
    policy = Policy(model, torch.float32, True)
    reference = BasePolicy(policy)
    alone, beside = gradients(policy, None), gradients(policy, reference)
    assert set(alone) == set(adapter_tensors(model)), "the base has no gradient"
    assert set(beside) == set(alone) and all(torch.equal(alone[name], beside[name]) and alone[name].any() for name in alone)
    base = Policy(tiny_model("qwen3"), torch.float32, True)
    with torch.no_grad():
        own, off, of_base = (side(batch(), (WHOLE,)).logp for side in (policy, reference, base))
    assert torch.equal(off, of_base) and (own - off).abs().max() > 0.1


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mixtral", "glm4_moe"])
def test_peft_opens_a_saved_adapter(name: str, tmp_path: Path) -> None:
    model = moved(name)
    lora.save_adapter(model, adapter_tensors(model), tmp_path, base_digest(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    opened = PeftModel.from_pretrained(tiny_model(name), str(tmp_path))
    assert torch.equal(logits(opened), logits(model))
    again = tiny_model(name)
    add_adapter(again, SMALL, seed=3)
    lora.load_adapter(tmp_path, again, base_digest(again))
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(SetupError, match="rlgen export"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    "recipe, words",
    [
        (SMALL, "does not fit the weights of model.path"),  # which differ by one number
        (LoraRecipe(rank=8, alpha=8.0), "model.lora.rank was 4 and is 8"),
        (LoraRecipe(rank=4, alpha=16.0), "model.lora.alpha was 8.0 and is 16.0"),
        (LoraRecipe(rank=4, alpha=8.0, use_rslora=True), "model.lora.use_rslora was False and is True"),
        (LoraRecipe(rank=4, alpha=8.0, targets=["q_proj"]), "adapts model.layers.0.mlp.down_proj, unlike model.lora.targets"),
    ],
)
def test_an_adapter_of_another_shape_or_base_is_refused(recipe: LoraRecipe, words: str, tmp_path: Path) -> None:
    model = moved("qwen3")
    lora.save_adapter(model, adapter_tensors(model), tmp_path, base_digest(model))
    other = tiny_model("qwen3")
    add_adapter(other, recipe, 0)
    if recipe == SMALL:
        own_tensors(other)["model.norm.weight"][0] += 1e-6
    before = {name: tensor.clone() for name, tensor in adapter_tensors(other).items()}
    with pytest.raises(CheckpointError) as caught:
        lora.load_adapter(tmp_path, other, base_digest(other))
    assert words in str(caught.value) and caught.value.exit_code == 8
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter_tensors(other).items())


def test_going_on_from_an_adapter_equals_never_stopping(tmp_path: Path) -> None:
    whole = parts(lora=SMALL)
    learn(*whole, updates=3)
    path = save_parts(Checkpoints(tmp_path, 2, Processes.alone(), base_digest(whole[0])), 3, whole)
    assert not (path / "model.safetensors").exists()
    random_state = torch.get_rng_state()
    learn(*whole, updates=2)
    again = parts(lora=SMALL)
    assert load_checkpoint(path, *again).step == 3
    torch.set_rng_state(random_state)
    learn(*again, updates=2)
    ours, theirs = adapter_tensors(again[0]), adapter_tensors(whole[0])
    assert equal(ours, theirs) and any(tensor.any() for tensor in ours.values())


def test_one_kind_of_checkpoint_is_not_taken_for_the_other(tmp_path: Path) -> None:
    adapted_ones, plain_ones = parts(lora=SMALL), parts()
    adapter = save_parts(Checkpoints(tmp_path / "a", 2, Processes.alone()), 1, adapted_ones)
    with pytest.raises(CheckpointError):
        load_checkpoint(adapter, *plain_ones)
    whole = save_parts(Checkpoints(tmp_path / "b", 2, Processes.alone()), 1, plain_ones)
    with pytest.raises(CheckpointError, match="holds no adapter"):
        load_checkpoint(whole, *adapted_ones)


def test_a_changed_base_is_not_saved_over(tmp_path: Path) -> None:
    own = parts(lora=SMALL)
    checkpoints = Checkpoints(tmp_path, 2, Processes.alone(), base_digest(own[0]))
    save_parts(checkpoints, 1, own)
    weight = own_tensors(own[0])["model.layers.3.mlp.down_proj.weight"]
    weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(10.0))  # one bit
    with pytest.raises(SentinelError) as caught:
        save_parts(checkpoints, 2, own)
    assert caught.value.fault is Fault.BASE_CHANGED and caught.value.exit_code == 6
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.fault(44)
def test_few_bits_need_a_gpu(proof: Any) -> None:
    with pytest.raises(SetupError, match="nf4 needs an NVIDIA GPU"):
        load_model(str(build_tiny("qwen3")), None, torch.bfloat16, "sdpa", CPU, quantization="nf4")
    proof("no GPU: nf4 is refused before the model is read")
