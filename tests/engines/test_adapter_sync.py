"""vLLM computes what the adapted trainer computes, sync after sync: from merged weights, or from the adapter alone.

The weights under the adapter stay to the last bit.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, open_vllm, tiny_model
from helpers.adapters import CHOSEN, adapted, gap, gap_to_base, learn, moved, sample
from helpers.recipes import SHORT, recipe_for
from helpers.slow import slow_but
from helpers.waiting import HANGS
from parity import BOUND, LEAST, POWER
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from rlgen.engines import worker
from rlgen.engines.base import EngineCapabilities, SyncReport
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.open import build_engine
from rlgen.engines.transfer import FileTransfer
from rlgen.engines.worker import verified_files
from rlgen.errors import EngineError, SentinelError
from rlgen.models.factors import FIRST, SCALE, SECOND, is_factors, merged
from rlgen.models.load import locate
from rlgen.models.lora import adapted_layers, add_adapter, factors, without_adapter
from rlgen.models.policy import Policy
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import adapter_factors, base_digest, checkpoint_tensors, own_tensors
from rlgen.processes import Processes
from rlgen.recipe.models import LoraRecipe
from rlgen.sentinel.sync import send_weights

pytestmark = pytest.mark.usefixtures("one_thread")

Factors = dict[str, Tensor]
SYNCS, LOOKED_AT = 200, (1, 2, 50, 100, 199, 200)


class ByFiles:
    """vLLM in this process that is sent weights as a server is: files, and the worker's own method."""

    def __init__(self, name: str) -> None:
        extension = {"worker_extension_cls": "rlgen.engines.worker.Worker"}
        self.vllm: ColocatedEngine = open_vllm(name, max_model_len=80, max_num_seqs=16, extra=extension)
        self.outbox = FileTransfer(None)
        self.bytes: list[int] = []
        self.on_the_way: Callable[[Factors], Factors] = lambda sent: sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vllm, name)

    @property
    def abilities(self) -> EngineCapabilities:
        return replace(self.vllm.abilities, merges=True)

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int, hashed: bool = False) -> SyncReport:
        folder = self.outbox.write(self.on_the_way(dict(weights)).items(), version)
        self.bytes.append(sum(file.stat().st_size for file in verified_files(folder, version)[0]))
        (told,) = self.vllm._llm.collective_rpc("rlgen_load", args=(str(folder), version, hashed))
        if "error" in told:
            raise EngineError(told["error"])
        self.outbox.current = folder
        assert self.vllm._llm.reset_prefix_cache()
        self.vllm.weight_version, self.vllm._syncs = version, self.vllm._syncs + 1
        return SyncReport(version=version, received=told["received"], not_loaded=tuple(told["not_loaded"]))

    def close(self) -> None:
        self.outbox.close()
        self.vllm.close()


def in_files(name: str) -> Factors:
    return {key: tensor for file in build_tiny(name).glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_worker_merges_what_the_trainer_merges(name: str) -> None:
    model = moved(name)
    sent, wanted = dict(adapter_factors(model)), dict(checkpoint_tensors(model))
    assert len(sent) == 3 * len(adapted_layers(model)) and is_factors(sent) and not is_factors(wanted)
    found = dict(merged(in_files(name).items(), sent, torch.float32, CPU))
    assert set(found) == set(wanted)
    # a transposed product adds up in another order
    assert all(torch.allclose(found[key], wanted[key], rtol=0, atol=1e-7) for key in wanted)
    assert name == "gpt2-tied" or all(torch.equal(found[key], wanted[key]) for key in wanted)
    with without_adapter(model):
        assert all(tensor.item() == 0 for key, tensor in adapter_factors(model) if key.endswith(SCALE))
        switched_off = dict(merged(in_files(name).items(), dict(adapter_factors(model)), torch.float32, CPU))
    assert all(torch.equal(tensor, switched_off[key]) for key, tensor in in_files(name).items())


def test_a_merge_rounds_the_base_as_the_trainer_holds_it() -> None:
    base, ones = torch.tensor([[1.001, 2.0]]), torch.ones(1, 1)
    sent = {f"w{FIRST}": torch.tensor([[0.25, 0.5]]), f"w{SECOND}": ones, f"w{SCALE}": torch.tensor(2.0)}
    other = torch.tensor([1.001])
    found = dict(merged([("other", other), ("w", base)], sent, torch.bfloat16, CPU))
    assert found["w"].tolist() == [[1.5, 3.0]] and found["w"].dtype == torch.float32
    assert found["other"] is other
    with pytest.raises(EngineError, match=r"the adapter changes w, which is not in the files .* set engine.lora to merged"):
        list(merged([("other", other)], sent, torch.bfloat16, CPU))


def test_an_adapter_of_rank_8_is_two_hundredths_of_the_bytes() -> None:
    """The shape of Qwen3-0.6B; in bfloat16 beside factors in float32."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, **heads), dtype=torch.bfloat16)
        model._weight_conversions = None  # which `from_pretrained` says
        add_adapter(model, LoraRecipe(rank=8, alpha=16.0), seed=0)
        whole = sum(tensor.bfloat16().nbytes for _, tensor in checkpoint_tensors(model))
        alone = sum(tensor.nbytes for _, tensor in adapter_factors(model))
    assert whole == pytest.approx(1.19e9, rel=0.01)
    assert 0.016 < alone / whole < 0.018


FAULTS: dict[str, Callable[[Factors, Factors], Factors]] = {
    "all left out": lambda sent, first: {key: 0 * tensor for key, tensor in sent.items()},
    "one layer left out": lambda sent, first: {**sent, (key := next(iter(first)).replace(FIRST, SCALE)): 0 * sent[key]},
    "half the scale": lambda sent, first: {key: tensor / 2 if key.endswith(SCALE) else tensor for key, tensor in sent.items()},
    "of the sync before": lambda sent, first: first,
    "layers exchanged": lambda sent, first: {
        key: sent[key.replace("s.0.", "s.x.").replace("s.1.", "s.0.").replace("s.x.", "s.1.")] for key in sent
    },
}


@pytest.mark.vllm
@pytest.mark.parametrize("name", slow_but(CHOSEN, "qwen3-untied"))
def test_adapters_and_merged_weights_arrive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(moved(name), torch.float32, True)
    with closing(ByFiles(name)) as engine:
        send_weights(engine, policy.model, 1, Processes.alone(), hashed=True, whole=True)
        from_merged = sample(engine)
        assert gap(policy, from_merged) <= BOUND
        send_weights(engine, policy.model, 1, Processes.alone(), hashed=True)
        assert engine.bytes[1] < engine.bytes[0] / 4  # of a model this small; see the bytes of a larger one
        samples = sample(engine)
        assert gap(policy, samples) <= BOUND
        # the comparison can fail: without any adapter, and without that of any one layer
        assert gap_to_base(policy, samples) >= POWER * BOUND
        for layer in adapted_layers(policy.model):
            with without_adapter(policy.model, only=[layer]):
                assert gap(policy, samples) >= LEAST * BOUND, layer
        if name != "gpt2-tied":
            pairs = zip(samples, from_merged, strict=True)
            assert all(
                (a.sampler_logp == b.sampler_logp).all() and (a.completion_ids == b.completion_ids).all() for a, b in pairs
            )
        with without_adapter(policy.model):  # what is switched off has no effect
            send_weights(engine, policy.model, 2, Processes.alone())
            assert gap(policy, sample(engine)) <= BOUND
        assert base_digest(policy.model) == base_digest(tiny_model(name))
        if name == "qwen3-untied":
            faults_are_found(policy, engine, monkeypatch)


def faults_are_found(policy: Policy, engine: ByFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dict(adapter_factors(adapted("qwen3-untied").model))
    for number, (fault, change) in enumerate(FAULTS.items(), start=3):
        engine.on_the_way = lambda sent, change=change: change(sent, first)  # type: ignore[misc]
        with pytest.raises(SentinelError):
            send_weights(engine, policy.model, number, Processes.alone(), hashed=True)
        engine.on_the_way = lambda sent: sent
        with monkeypatch.context() as patch:  # after the receipt
            patch.setattr(worker, "merged", lambda base, got, *more, change=change: merged(base, change(got, first), *more))
            send_weights(engine, policy.model, number, Processes.alone(), hashed=True)
        assert gap(policy, sample(engine)) >= LEAST * BOUND, fault
    send_weights(engine, policy.model, 99, Processes.alone(), hashed=True)
    assert gap(policy, sample(engine)) <= BOUND


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_two_hundred_syncs_leave_the_base_alone_and_move_the_engine(alone: bool) -> None:
    """Of the adapter alone, and of the weights that it is merged into."""
    policy = adapted("qwen3")
    opened: Any = ByFiles("qwen3") if alone else open_vllm("qwen3", max_model_len=80, max_num_seqs=16)
    with closing(opened) as engine:
        base = {name: tensor.clone() for name, tensor in own_tensors(policy.model).items()}
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
        samples = first = sample(engine)
        assert gap(policy, samples) == gap_to_base(policy, samples) <= BOUND  # at first the adapter does nothing
        for version in range(1, SYNCS + 1):
            before = {name: [f.detach().clone() for f in factors(layer)] for name, layer in adapted_layers(policy.model).items()}
            learn(policy, optimizer, first)
            if version > 1:  # A has no gradient as long as B is zero
                now = {name: factors(layer) for name, layer in adapted_layers(policy.model).items()}
                assert not any(torch.equal(f, old) for name in now for f, old in zip(now[name], before[name], strict=True))
            send_weights(engine, policy.model, version, Processes.alone(), hashed=version in LOOKED_AT)
            if version not in LOOKED_AT:
                continue
            stale, samples = samples, sample(engine)
            assert all(one.weight_version == version for one in samples)
            assert gap(policy, samples) <= BOUND
            # the engine has moved: off the base model, and off what it was when it was last looked at
            assert gap_to_base(policy, samples) > 5 * BOUND and gap(policy, stale) > 5 * BOUND
        assert base_digest(policy.model) == base_digest(tiny_model("qwen3"))
        assert all(torch.equal(base[name], tensor) for name, tensor in own_tensors(policy.model).items())
        assert gap_to_base(policy, samples) > 0.1
        assert not alone or (len(set(engine.bytes)) == 1 and len(engine.bytes) == SYNCS)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_launched_server_is_sent_the_adapter_alone(tmp_path: Path) -> None:
    settings = {"kind": "server", "launch": True, "lora": "adapter", "max_model_len": 80, "start_timeout": HANGS}
    model = {"lora": {"rank": 4, "alpha": 8.0}}
    engine_settings = {**settings, "transfer_dir": str(tmp_path)}
    needs = recipe_for("tiny:qwen3", engine=engine_settings, model=model, **SHORT).engine_needs
    policy = Policy(moved("qwen3"), torch.float32, True)
    with closing(build_engine(needs, locate("tiny:qwen3"), Processes.alone(), tmp_path, print)) as engine:
        assert engine.abilities.merges
        for version, whole in enumerate((False, True, False)):
            send_weights(engine, policy.model, version, Processes.alone(), hashed=True, whole=whole)
            (file,) = tmp_path.glob(f"rlgen-*/v{version}-*/*.safetensors")
            assert is_factors(load_file(file)) is not whole
            samples = sample(engine)
            assert gap(policy, samples) <= BOUND and gap_to_base(policy, samples) >= POWER * BOUND
