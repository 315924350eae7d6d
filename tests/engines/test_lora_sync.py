"""vLLM computes what the adapted trainer computes, sync after sync, and the weights under the adapter stay to the last bit."""

import pytest
import torch
from conftest import open_vllm, tiny_model
from helpers.adapters import CHOSEN, adapted, gap, gap_to_base, learn, sample
from helpers.slow import slow_but
from parity import BOUND, LEAST, POWER

from rlgen.models.lora import adapted_layers, factors, without_adapter
from rlgen.models.weights import base_digest, own_tensors
from rlgen.processes import Processes
from rlgen.sentinel.sync import send_weights

pytestmark = pytest.mark.usefixtures("one_thread")

SYNCS, LOOKED_AT = 200, (1, 2, 50, 100, 199, 200)


@pytest.mark.slow
def test_two_hundred_syncs_leave_the_base_alone_and_move_the_engine() -> None:
    policy, engine = adapted("qwen3"), open_vllm("qwen3", max_model_len=80, max_num_seqs=16)
    try:
        digest = base_digest(policy.model)
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
            assert gap_to_base(policy, samples) > 5 * BOUND
            assert gap(policy, stale) > 5 * BOUND
        assert base_digest(policy.model) == digest == base_digest(tiny_model("qwen3"))
        assert all(torch.equal(base[name], tensor) for name, tensor in own_tensors(policy.model).items())
        assert gap_to_base(policy, samples) > 0.1
    finally:
        engine.close()


@pytest.mark.parametrize("name", slow_but(CHOSEN, "qwen3-untied"))
def test_merged_weights_arrive(name: str) -> None:
    policy, engine = adapted(name), open_vllm(name, max_model_len=80, max_num_seqs=16)
    try:
        generator = torch.Generator().manual_seed(1)
        layers = adapted_layers(policy.model)
        with torch.no_grad():
            for layer in layers.values():
                second = factors(layer)[1]
                second.copy_(0.1 * torch.randn(second.shape, generator=generator))
        send_weights(engine, policy.model, 1, Processes.alone(), hashed=True)
        samples = sample(engine)
        assert gap(policy, samples) <= BOUND
        # the comparison can fail: without any adapter, and without that of any one layer
        assert gap_to_base(policy, samples) >= POWER * BOUND
        for layer_name in layers:
            with without_adapter(policy.model, only=[layer_name]):
                assert gap(policy, samples) >= LEAST * BOUND, layer_name
        with without_adapter(policy.model):  # what is switched off is not sent
            send_weights(engine, policy.model, 2, Processes.alone())
            samples = sample(engine)
            assert gap(policy, samples) <= BOUND
        assert base_digest(policy.model) == base_digest(tiny_model(name))
    finally:
        engine.close()
