"""Routers are forced to the experts of the engine (`model.route_replay`), which travel with each sample."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CPU, open_server, open_vllm, plan_of, tiny_model
from helpers.batches import gradients, random_batch
from helpers.journals import answer_one, completion, found, opened
from helpers.recipes import recipe_for
from helpers.samples import TEXTS, make_sample
from torch import Tensor, nn

from rlgen.engines.answer import Labelled, ServerAnswer, read_answer
from rlgen.engines.base import require_experts
from rlgen.errors import EngineError, SetupError
from rlgen.models.load import load_model, locate
from rlgen.models.policy import Policy
from rlgen.models.routing import Routes, forced, is_mixture, routers_of, unforceable
from rlgen.recipe import Recipe
from rlgen.recipe.models import ModelRecipe
from rlgen.recipe.rules import contradictions
from rlgen.rollout.batch import collate
from rlgen.rollout.sample import turns_apart
from rlgen.rollout.samples import Samples
from rlgen.setup.trainer_and_engine import replays_routes
from rlgen.types import WHOLE, MicroBatch, Request, Sampling, Span, one_span

MIXTURES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe"]
LAYERS = 4


def policy_of(name: str, dtype: torch.dtype = torch.float32) -> Policy:
    policy = Policy(load_model(locate(f"tiny:{name}"), None, torch.float32, "sdpa", CPU), dtype, True)
    assert policy.replay_routes() is None
    return policy


def own_experts(policy: Policy, batch: MicroBatch) -> Tensor:
    """The experts [B, S, layers, k] that the policy chooses by itself, without packing."""
    found: dict[int, Tensor] = {}

    def note(layer: int, _: nn.Module, __: Any, given: Sequence[Tensor]) -> None:
        found[layer] = chosen(given)

    named = routers_of(policy.model).items()
    hooks = [router.register_forward_hook(partial(note, int(name.split(".")[2]))) for name, router in named]
    policy(replace(batch, experts=None), (WHOLE,))
    for hook in hooks:
        hook.remove()
    like = next(iter(found.values()))
    layers = [found.get(layer, torch.zeros_like(like)) for layer in range(LAYERS)]
    return torch.stack(layers, 1).view(*batch.input_ids.shape, LAYERS, -1).to(torch.int16)


def chosen(given: Sequence[Tensor]) -> Tensor:
    return next(one for one in given if not one.is_floating_point())


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_take_given_experts_and_weigh_them_by_their_own_scores(name: str) -> None:
    model = load_model(locate(f"tiny:{name}"), None, torch.float32, "sdpa", CPU)
    assert is_mixture(model.config)
    router = next(iter(routers_of(model).values()))
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    free = type(router).forward(router, hidden)
    best = chosen(free)
    for one, other in zip(forced(router, best, hidden), free, strict=True):
        assert torch.equal(one, other), "its own choice gives its own output"
    none = torch.full_like(best, -1)
    assert all(map(torch.equal, forced(router, none, hidden), free)), "-1 leaves the choice to the router"
    worst = torch.topk(-(hidden @ router.weight.T), best.shape[1]).indices
    given = forced(router, worst, hidden)
    assert torch.equal(chosen(given), worst) and not torch.equal(best, worst)
    weights = next(one for one in given if one.shape == worst.shape and one.is_floating_point())
    assert (weights > 0).all()
    weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0, "gradients flow through the router"


def test_what_cannot_be_forced_is_said() -> None:
    class NoTopK(nn.Module):
        top_k = 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, hidden: Tensor) -> Any:
            scores = hidden @ self.weight.T
            return scores, scores.argsort(dim=-1)[:, :2]

    assert unforceable(NoTopK()) == "RuntimeError: a router chose 0 times for 4 tokens"
    assert Routes.of(tiny_model("qwen3")) == "rlgen finds no routers in the layers of Qwen3ForCausalLM"


@pytest.mark.parametrize("packed", [False, True])
def test_where_routers_agree_nothing_changes(packed: bool) -> None:
    policy = policy_of("qwen3_moe")
    batch = random_batch(9, (5, 12, 7))
    given = replace(batch, experts=own_experts(policy, batch))
    if packed:
        assert policy.pack(TEXTS) is None
    (logp, gradient), (replayed, other) = gradients(policy, batch), gradients(policy, given)
    assert (replayed - logp).abs().max() <= 1e-6
    assert ((other - gradient).norm() / gradient.norm()).item() <= 1e-6
    elsewhere = replace(given, experts=(given.experts + 1) % 8)
    assert (gradients(policy, elsewhere)[0] - logp).abs().max() > 0.01, "other experts compute something else"


def test_other_experts_are_computed_alike_packed_padded_and_again() -> None:
    policy, batch = policy_of("qwen3_moe"), random_batch(9, (5, 12, 7))
    given = replace(batch, experts=(own_experts(policy, batch) + 1) % 8)
    logp, gradient = gradients(policy, given)
    assert policy.pack(TEXTS) is None
    packed, other = gradients(policy, given)
    assert (packed - logp).abs().max() <= 1e-5 and ((other - gradient).norm() / gradient.norm()).item() <= 1e-5
    policy.unpack("for the test")
    policy.model.gradient_checkpointing_enable()
    for module in policy.model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
    again, other = gradients(policy, given)
    assert torch.equal(again, logp) and ((other - gradient).norm() / gradient.norm()).item() <= 1e-6


def experts_for(tokens: int, first: int = 0) -> Any:
    return ((np.arange(tokens * 8).reshape(tokens, LAYERS, 2) + first) % 8).astype(np.uint8)


def test_experts_travel_with_their_samples() -> None:
    with_experts = make_sample(experts=experts_for(4))  # prompt of 2, completion of 3
    without = make_sample(sample_index=1)
    samples = Samples.of([with_experts, without], ())
    assert samples[0] == replace(with_experts, completion="") and not len(samples[1].experts)
    assert Samples.of([without], ()).experts == ()
    joined = Samples.join([samples.take([1]), samples.take([0])])
    assert joined.take([1, 0]) == samples and joined != samples
    batch = collate(joined, [0, 1], CPU)
    assert batch.experts is not None and batch.experts.dtype == torch.int16
    assert batch.experts[1, :4].tolist() == with_experts.experts.tolist()
    assert (batch.experts[0] == -1).all() and (batch.experts[1, 4:] == -1).all()
    assert collate(Samples.of([without], ()), [0], CPU).experts is None
    turns = turns_apart(make_sample(experts=experts_for(4), spans=(Span(0, 1, 0), Span(2, 3, 0))))
    assert [len(turn.experts) for turn in turns] == [2, 4]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_journal_has_experts(dtype: Any, tmp_path: Path) -> None:
    given = replace(completion((-1.0,)), experts=experts_for(2).astype(dtype))
    answer_one(opened(tmp_path), 1, 0, given)
    (answer,) = found(opened(tmp_path)).values()
    assert np.array_equal(answer.experts, given.experts) and answer.experts.dtype == dtype
    assert answer == given


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_answer_of_a_server_has_experts(dtype: Any) -> None:
    given = experts_for(4).astype(dtype)
    arrays = (1, 2), (7, 8, 9), (-1.0, -2.0, -3.0), "stop", [Labelled("r.1", 0, 3)], 0
    answer = read_answer(ServerAnswer.of(*arrays, given).packed(), True, "", lambda label: 1)
    assert np.array_equal(answer.experts, given) and answer.experts.dtype == dtype
    require_experts(answer)
    without = read_answer(ServerAnswer.of(*arrays).packed(), True, "", lambda label: 1)
    with pytest.raises(EngineError, match=r"the experts of 0 of the 4 tokens"):
        require_experts(without)


def recipe_of(model: dict[str, Any], **sections: Any) -> Recipe:
    engine = {"kind": "colocated"}
    return recipe_for("tiny:qwen3_moe", **{"engine": engine, "model": {"dtype": "bfloat16", **model}, **sections})


def test_the_default_follows_engine_and_model() -> None:
    assert ModelRecipe(path="x").route_replay is None
    said: list[str] = []
    location = locate("tiny:qwen3_moe")
    mixture, dense = Policy(tiny_model("qwen3_moe"), torch.float32, True), Policy(tiny_model("qwen3"), torch.float32, True)
    assert replays_routes(recipe_of({}), mixture, location, said.append) and mixture.routes is not None
    assert not replays_routes(recipe_of({"route_replay": False}), mixture, location, said.append)
    assert not replays_routes(recipe_of({}), dense, locate("tiny:qwen3"), said.append) and dense.routes is None
    assert said == []
    assert not replays_routes(recipe_of({}, engine={"kind": "transformers"}), mixture, location, said.append)
    assert said == ["model.route_replay: off: an engine of kind transformers does not return the experts of a token; engines with"
                    " vLLM do"]  # fmt: skip
    assert replays_routes(recipe_of({}, engine={"kind": "server", "launch": True}), mixture, location, said.append)
    elsewhere = {"kind": "server", "url": "http://127.0.0.1:9"}
    assert not replays_routes(recipe_of({}, engine=elsewhere), mixture, location, said.append)
    assert "off: servers that were started before return the experts of a token only if all recipes set" in said.pop()
    asked = recipe_of({"route_replay": True}, engine=elsewhere)
    assert replays_routes(asked, mixture, location, said.append) and asked.engine_needs.experts
    with pytest.raises(SetupError, match=r"model\.route_replay: Qwen3ForCausalLM has no experts to choose from; remove it"):
        replays_routes(recipe_of({"route_replay": True}), dense, locate("tiny:qwen3"), said.append)


REFUSED: dict[str, dict[str, Any]] = {
    "an engine of kind transformers does not return": {"engine": {"kind": "transformers"}},
    "it does not go with engine.in_flight": {
        "engine": {"kind": "server", "launch": True},
        "rollout": {"async_steps": 2, "prompts_per_step": 2, "group_size": 2},
    },
    "it does not go with engine.tensor_parallel_size": {"engine": {"kind": "colocated", "tensor_parallel_size": 2}},
    "it does not go with engine.structured_regex": {"engine": {"kind": "colocated", "structured_regex": "[0-9]+"}},
    "it does not go with rollout.use": {"rollout": {"use": "a.py:f"}},
    "it does not go with model.compile": {"model": {"compile": True}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_recipes_that_cannot_replay_are_refused(what: str) -> None:
    sections = dict(REFUSED[what])
    recipe = recipe_of({"route_replay": True, **sections.pop("model", {})}, **sections)
    (said,) = [one.what for one in contradictions(recipe) if one.path == "model.route_replay"]
    assert said.startswith(f"model.route_replay: {what}")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vllm": "0.31.2"}, r"vLLM 0\.31\.2 does not return the experts"),
        ({"vllm": "0.33.0"}, r"vLLM 0\.33\.0 does not return the experts of a token here"),
        ({"vllm": None}, r"vLLM 0\.0 does not return"),
        ({"extra": {"enable_prefix_caching": False}}, "only with its prefix cache"),
        ({"extra": {"worker_cls": "mine"}}, r"engine\.extra\.worker_cls takes the place"),
    ],
)
def test_engines_that_return_no_experts_say_why(changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("qwen3_moe", **{"vllm": "0.32.0", **changes})
    monkeypatch.setattr("rlgen.setup.trainer_and_engine.EnginePlan", SimpleNamespace(of=lambda *_: plan))
    policy = Policy(tiny_model("qwen3_moe"), torch.float32, True)
    with pytest.raises(SetupError, match=rf"model\.route_replay: .*{why}"):
        replays_routes(recipe_of({"route_replay": True}), policy, "", print)
    assert plan_of("qwen3_moe", vllm="0.32.0").without_experts() is None
    assert plan_of("qwen3_moe", vllm="0.33.0", on_gpu=True).without_experts() is None


def test_vllm_is_asked_for_experts_as_its_device_needs() -> None:
    assert plan_of("qwen3_moe").experts_arguments() == {}
    more = {"additional_config": {"mine": 1}}
    assert plan_of("qwen3_moe", experts=True, extra=more).experts_arguments() == {
        "additional_config": {"mine": 1, "rlgen_experts": True}
    }
    assert plan_of("qwen3_moe", experts=True, on_gpu=True).experts_arguments() == {"enable_return_routed_experts": True}
    assert plan_of("qwen3_moe").digest() != plan_of("qwen3_moe", experts=True).digest()


def gaps(name: str, dtype: str) -> dict[str, Any]:
    """Mean and maximum of |sampler_logp - policy_logp| with the experts of vLLM and without, and how often routers differ."""
    engine = open_vllm(name, dtype=dtype, experts=True)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 250, 24).astype(np.int32) for _ in range(16)]
    requests = [Request(prompt_ids=prompts[place // 4], seed=place) for place in range(64)]
    answers = engine.generate(requests, Sampling(max_tokens=40, temperature=1.0, stop_ids=(257,)))
    again = engine.generate(requests[:8], Sampling(max_tokens=40, temperature=1.0, stop_ids=(257,)))
    engine.close()
    assert all(np.array_equal(one.experts, other.experts) for one, other in zip(again, answers, strict=False))
    rows = [
        make_sample(
            group_id=place // 4,
            sample_index=place % 4,
            prompt_ids=answer.prompt_ids,
            completion_ids=answer.token_ids,
            sampler_logp=answer.logp,
            spans=one_span(len(answer.token_ids), 0),
            experts=answer.experts,
        )
        for place, answer in enumerate(answers)
    ]
    policy = policy_of(name, getattr(torch, dtype))
    batch = collate(Samples.of(rows, ()), range(len(rows)), CPU)
    measured: dict[str, Any] = {}
    for word, one in {"without": replace(batch, experts=None), "with": batch}.items():
        with torch.no_grad():
            gap = (policy(one, (WHOLE,)).logp[0] - batch.sampler_logp)[batch.mask].abs()
        measured[word] = {"mean": gap.mean().item(), "max": gap.max().item(), "of each": gap}
    known = batch.experts[..., 0, 0] >= 0
    own, given = (one.sort(-1).values for one in (own_experts(policy, batch), batch.experts))
    first = 1 if name == "glm4_moe" else 0  # its first layer is dense
    other = (own != given).any(-1)[..., first:]
    measured["routed otherwise"] = other[known].float().mean().item()
    # What rounding explains: of tokens that are predicted through the same experts either way.
    alike = ~other.any(-1)[:, 23 : 23 + batch.mask.shape[1]][batch.mask]
    measured["rounding"] = measured["without"].pop("of each")[alike].mean().item()
    del measured["with"]["of each"]
    return measured


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_returns_the_experts_that_an_engine_in_this_process_returns() -> None:
    requests = [Request(prompt_ids=np.arange(3, 20, dtype=np.int32), seed=place) for place in range(6)]
    sampling = Sampling(max_tokens=20, temperature=1.0, stop_ids=(257,))
    with closing(open_vllm("qwen3_moe", experts=True)) as inside, closing(open_server("qwen3_moe", route_replay=True)) as server:
        own, told = (engine.generate(requests, sampling) for engine in (inside, server))
    for one, other in zip(own, told, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.experts, other.experts)
        assert len(one.experts) == 16 + len(one.token_ids) and one.experts.dtype == other.experts.dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_replay_closes_the_gap_in_bfloat16(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    half, full = gaps(name, "bfloat16"), gaps(name, "float32")
    with capsys.disabled():
        print(f"\n{name} bfloat16 {half}\n{name} float32 {full}")
    assert half["routed otherwise"] > 0.001
    # What is left is what rounding explains: half of the mean, or more where a processor rounds more or a shared expert computes
    # most.
    assert half["with"]["mean"] <= half["rounding"] < half["without"]["mean"]
    assert half["with"]["max"] <= 0.5 * half["without"]["max"]
    assert full["with"]["mean"] <= full["without"]["mean"] + 1e-8 and full["with"]["max"] <= full["without"]["max"] + 1e-6
