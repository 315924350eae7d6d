"""Faults that others trained on, each planted in the real engine where it is the engine's, and in a wrapper of one otherwise.

A plant takes a `pytest.MonkeyPatch`, and returns a list that grows whenever the fault happens: a test asserts that it did.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from helpers.samples import completion
from torch import Tensor

from rlgen.engines import vllm_compat, vllm_weights
from rlgen.engines.base import EngineInfo, Finished, SyncReport
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.transformers import TransformersEngine
from rlgen.losses import policy as policy_module
from rlgen.losses.inputs import LossInputs, Totals
from rlgen.models import weights
from rlgen.models.load import load_model
from rlgen.models.lora import base_weight, without_adapter
from rlgen.models.weights import checkpoint_tensors
from rlgen.sentinel import contract, sync
from rlgen.types import Completion, Request, Sampling, one_span

Plant = Callable[[pytest.MonkeyPatch], list[str]]
Answers = list[Completion]
Named = list[tuple[str, Tensor]]


def instead(owner: Any, name: str, stand_in: Callable[..., Any]) -> Plant:
    """`stand_in(function, *arguments)` is called in the place of `owner.name`, which is `function`."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        fired: list[str] = []
        function = getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> Any:
            fired.append(name)
            return stand_in(function, *arguments, **named)

        monkeypatch.setattr(owner, name, called)
        return fired

    return plant


# --- in vLLM -----------------------------------------------------------------------------------------------------------------


def engine_argument(name: str, value: object) -> Plant:
    """vLLM is opened with another argument than rlgen gives."""
    return instead(vllm_compat, "open_llm", lambda open_llm, vllm, given: open_llm(vllm, {**given, name: value}))


# The engine ignores top-k, and reports log-probs of all ids.
sampled_from_all = instead(
    TransformersEngine,
    "generate",
    lambda generate, engine, requests, sampling, *rest: generate(engine, requests, replace(sampling, top_k=0), *rest),
)


def sampling_parameter(name: str, value: object) -> Plant:
    """vLLM samples with another parameter."""

    def params(sampling_params: Callable[..., Any], *arguments: Any) -> Any:
        made = sampling_params(*arguments)
        setattr(made, name, value)
        return made

    return instead(vllm_compat, "sampling_params", params)


def lying(field: str, value: object, plant: Plant) -> Plant:
    """As `plant`, while the engine says of itself what the trainer hopes to hear."""

    def told(facts: Callable[..., EngineInfo], *arguments: Any) -> EngineInfo:
        found = facts(*arguments)
        return replace(found, settings=replace(found.settings, **{field: value}))

    def planted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        instead(vllm_compat, "facts", told)(monkeypatch)
        return plant(monkeypatch)

    return planted


def loaded(change: Callable[[Named, dict[str, Tensor]], Named | None]) -> Plant:
    """What vLLM loads after it gave its receipt: `change` of the tensors that arrived and those it was opened with."""

    def load(load_weights: Callable[..., tuple[str, ...]], llm: Any, weights: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
        changed = change(list(weights), original(llm))
        return () if changed is None else load_weights(llm, changed)

    return instead(vllm_weights, "load_weights", load)


def original(llm: Any) -> dict[str, Tensor]:
    """The tensors that the engine was opened with."""
    model = load_model(llm.llm_engine.model_config.model, None, torch.float32, "sdpa", torch.device("cpu"))
    return dict(checkpoint_tensors(model))


def received(change: Callable[[Named], Named]) -> Plant:
    """What vLLM receives, before it gives its receipt."""

    def synced(sync: Callable[..., SyncReport], engine: Any, weights: Iterable[tuple[str, Tensor]], *rest: Any) -> SyncReport:
        return sync(engine, change(list(weights)), *rest)

    return instead(ColocatedEngine, "sync", synced)


def swapped(one: str, other: str) -> Callable[..., Named]:
    def change(arrived: Named, *_: Any) -> Named:
        held = dict(arrived)
        return list({**held, one: held[other], other: held[one]}.items())

    return change


def without(name: str) -> Callable[..., Named]:
    return lambda arrived, *_: [(other, tensor) for other, tensor in arrived if other != name]


def stale(*names: str) -> Callable[..., Named]:
    return lambda arrived, first: [(name, first[name] if name in names else tensor) for name, tensor in arrived]


nothing_loaded = loaded(lambda arrived, first: None)


def only_once() -> Callable[..., Named | None]:
    """The first weights that arrive are loaded, and none after them."""
    loads = count()
    return lambda arrived, *_: None if next(loads) else arrived


def all_but_the_first() -> Callable[..., Named | None]:
    """The first weights that arrive are lost."""
    loads = count()
    return lambda arrived, *_: arrived if next(loads) else None


tied_head_stale = instead(vllm_weights, "repack_heads", lambda *_: None)


def cache_not_emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    same_salt = instead(vllm_compat, "vllm_prompts", lambda prompts, requests, salt: prompts(requests, "always the same"))
    same_salt(monkeypatch)
    with vllm_compat.process_kept_as_is():
        vllm = vllm_compat.import_vllm()
    return instead(vllm.LLM, "reset_prefix_cache", lambda *_: True)(monkeypatch)


# The engine skips a sync and says so.
sync_skipped = instead(ColocatedEngine, "sync", lambda *_: SyncReport(version=-1, received={}, not_loaded=()))

noisy_prefill = instead(
    ColocatedEngine, "prefill_logp", lambda prefill, *arguments: [row - np.float32(0.01) for row in prefill(*arguments)]
)


def adapter_left_out(*layers: str) -> Plant:
    """What is sent are the weights without the adapter: all of them, or those of `layers`."""

    def unmerged(tensors: Callable[..., Iterable[tuple[str, Tensor]]], *arguments: Any) -> Named:
        with without_adapter(arguments[0], only=layers or None):
            return [(name, tensor.clone()) for name, tensor in tensors(*arguments)]

    return instead(sync, "checkpoint_tensors", unmerged)


# The adapter is merged with alpha / rank of another recipe.
adapter_at_another_scale = instead(
    weights, "merged_weight", lambda _, layer: base_weight(layer) + 0.5 * layer.get_delta_weight("default").detach()
)


# --- around an engine --------------------------------------------------------------------------------------------------------


def answers(change: Callable[[Answers], Answers]) -> Plant:
    """Answers of the transformers engine pass through `change`."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        fired: list[str] = []
        generate = TransformersEngine.generate

        def generated(engine: Any, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> Answers:
            given = generate(engine, requests, sampling)
            changed = change(list(given))
            if changed != given:
                fired.append("answers")
            return changed

        monkeypatch.setattr(TransformersEngine, "generate", generated)
        return fired

    return plant


def each(change: Callable[[Completion], Completion]) -> Plant:
    return answers(lambda given: [change(answer) for answer in given])


@each
def without_last(answer: Completion) -> Completion:
    if answer.finish_reason != "stop":
        return answer
    spans = one_span(len(answer.logp) - 1, answer.weight_version)
    return replace(answer, token_ids=answer.token_ids[:-1], logp=answer.logp[:-1], spans=spans)


without_last_logp = each(lambda answer: replace(answer, logp=answer.logp[:-1]) if answer.finish_reason == "stop" else answer)
last_logp_repeated = each(lambda answer: replace(answer, logp=np.append(answer.logp[1:], answer.logp[-1:])))


def first_id(number: int) -> Plant:
    """An id in place of the first one."""
    return each(lambda answer: replace(answer, token_ids=np.array([number, *answer.token_ids[1:]], dtype=np.int32)))


def first_logp(number: float) -> Plant:
    """A log-prob in place of the first one."""
    return each(lambda answer: replace(answer, logp=np.array([number, *answer.logp[1:]], dtype=np.float32)))


def without_logp(answer: Completion) -> Completion:
    return replace(answer, logp=np.full_like(answer.logp, np.nan))


def rolled(answer: Completion) -> Completion:
    return replace(answer, logp=np.roll(answer.logp, -1))


def noisy(answer: Completion) -> Completion:
    return replace(answer, logp=answer.logp - np.float32(0.02) * (1 + np.arange(len(answer.logp), dtype=np.float32) % 3))


@answers
def flattened(given: Answers) -> Answers:
    return [
        completion([token], [logp], answer.prompt_ids, answer.weight_version, "length")
        for answer in given
        for token, logp in zip(answer.token_ids, answer.logp, strict=True)
    ]


duplicated = answers(lambda given: [*given, given[-1]])
dropped = answers(lambda given: given[:-1])
# As many answers as requests, the first one twice and the last not at all.
replaced = answers(lambda given: [given[0], *given[:-1]])
# A0 B0 A1 B1 for A0 A1 B0 B1.
interleaved = answers(lambda given: [*given[0::2], *given[1::2]])


@answers
def relabelled(given: Answers) -> Answers:
    """The first two rows change places, and their echoes of the prompts are put right."""
    if len(given) < 2 or np.array_equal(given[0].prompt_ids, given[1].prompt_ids):
        return given
    first, second = given[:2]
    return [replace(second, prompt_ids=first.prompt_ids), replace(first, prompt_ids=second.prompt_ids), *given[2:]]


@answers
def exchanged_logp(given: Answers) -> Answers:
    """Two rows of equal length change log-probs."""
    if len(given) < 2 or len(given[0].logp) != len(given[1].logp):
        return given
    return [replace(given[0], logp=given[1].logp), replace(given[1], logp=given[0].logp), *given[2:]]


# Log-probs depend on how many requests there are.
noisy_alone = answers(lambda given: given if len(given) > 1 else [noisy(answer) for answer in given])


def first_tokens_alone(of: int) -> Plant:
    """The first `of` prompts that are sampled alone begin with another token."""
    seen: list[str] = []

    def change(given: Answers) -> Answers:
        if len(given) > 1 or len(seen) == of:
            return given
        seen.append("alone")
        ids = given[0].token_ids.copy()
        ids[0] = (ids[0] + 1) % 256
        return [replace(given[0], token_ids=ids)]

    return answers(change)


def noisy_after_a_sync(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What no rival explains."""
    fired = instead(TransformersEngine, "sync", lambda sync, *arguments: sync(*arguments))(monkeypatch)

    def generated(generate: Callable[..., Answers], *arguments: Any) -> Answers:
        return [noisy(answer) if fired else answer for answer in generate(*arguments)]

    instead(TransformersEngine, "generate", generated)(monkeypatch)
    return fired


def engine_tokenizer(name: str, value: str) -> Plant:
    """Beside the engine's weights lies a tokenizer with another value of one attribute."""

    def load(load_tokenizer: Callable[..., Any], *where: Any) -> Any:
        tokenizer = load_tokenizer(*where)
        setattr(tokenizer, name, value)
        return tokenizer

    return instead(contract, "load_tokenizer", load)


# --- in the trainer ----------------------------------------------------------------------------------------------------------


def of_the_micro_batch(row_coefficient: Callable[..., Tensor], aggregation: Any, x: LossInputs) -> Tensor:
    tokens = int(x.mask.sum())
    totals = Totals(sequences=len(x.mask), tokens=tokens, kept=tokens, prompts=1, pairs=1)
    return row_coefficient(aggregation, replace(x, totals=totals))


# The loss divides by the tokens of the micro-batch.
local_denominator = instead(policy_module, "row_coefficient", of_the_micro_batch)
