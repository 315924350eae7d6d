"""Tiny models with adapters, and how far an engine is from them."""

from typing import Any

import torch
from conftest import CPU, tiny_model
from parity import prompts

from rlgen.models.lora import adapted_layers, add_adapter, factors, without_adapter
from rlgen.models.policy import Policy
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.recipe.models import LoraRecipe
from rlgen.rollout.batch import collate
from rlgen.rollout.sample import rollout
from rlgen.rollout.samples import Samples
from rlgen.rollout.score import score
from rlgen.sentinel.bounds import engine_gap
from rlgen.types import WHOLE, Distribution, Sample, Sampling

SMALL = LoraRecipe(rank=4, alpha=8.0)
SAMPLING = Sampling(max_tokens=16, temperature=1.0, stop_ids=(257, 259))
# Projections that the engine packs, that are packed already, that are transposed; tied heads; experts that are not adapted.
CHOSEN = ["qwen3-untied", "phi3-untied", "gpt2-tied", "mixtral-tied", "qwen2_moe-untied", "glm4_moe-untied"]


def adapted(name: str) -> Policy:
    model = tiny_model(name)
    add_adapter(model, SMALL, seed=0)
    return Policy(model, torch.float32, True)


def moved(name: str, recipe: LoraRecipe = SMALL) -> Any:
    """A model with an adapter that has an effect."""
    model, generator = tiny_model(name), torch.Generator().manual_seed(1)
    add_adapter(model, recipe, seed=0)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            second = factors(layer)[1]
            second.copy_(0.1 * torch.randn(second.shape, generator=generator))
    return model


def sample(engine: Any) -> list[Sample]:
    groups = rollout(engine, prompts(), SAMPLING, 1, 0, engine.weight_version, byte_tokenizer())
    return [sample for group in groups for sample in group.samples]


def gap(policy: Policy, samples: list[Sample], distribution: Distribution = WHOLE) -> float:
    """The most that engine and trainer differ on any token."""
    return engine_gap(samples, score(policy, samples, distribution, 4096, Processes.alone())).max_delta


def gap_to_base(policy: Policy, samples: list[Sample]) -> float:
    with without_adapter(policy.model):
        return gap(policy, samples)


def learn(policy: Policy, optimizer: torch.optim.Optimizer, samples: list[Sample]) -> None:
    """A step towards what was sampled first: every factor moves, in steps of the size that training takes."""
    logp = policy(collate(Samples.of(samples, ()), [0, 1], CPU), (WHOLE,)).logp
    (-logp.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
