"""Every fault that the sentinel can name is planted, and named: by the ladder before step 1."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted as p
import pytest
from helpers.slow import slow_but

from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import Fault
from rlgen.models.tiny import CHAT_TEMPLATE
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.sentinel.bounds import Bounds, Gap
from rlgen.sentinel.rungs import climb
from rlgen.sentinel.verdict import Outcome, Rung, agreement
from rlgen.setup.data import open_data
from rlgen.setup.probe import probe_of, toy_gradient
from rlgen.setup.trainer_and_engine import open_trainer_and_engine
from rlgen.types import Completion, Sampling

Proof = Callable[[str], None]

UP_1, UP_2 = "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"
DOWN = "model.layers.2.mlp.down_proj.weight"
TRANSFORMERS = "engine={kind: transformers}"
# Rows that fill a block of the prefix cache; log-probs at another temperature than 1.
LONG, WARM = "engine={kind: colocated, max_model_len: 160}", "rollout.temperature=0.7"

LORA = "model.lora={rank: 4, alpha: 8.0}"
BLIND = "sentinel.max_delta=100.0"

RAW_DENIED = p.lying("logprobs_mode", "processed_logprobs", p.engine_argument("logprobs_mode", "raw_logprobs"))
HALF_DENIED = p.lying("head_dtype", "float32", p.lying("dtype", "float32", p.engine_argument("dtype", "bfloat16")))

# name -> (plant, the rung that must fail, the fault it must name, words of its sentence, overrides)
PLANTED: dict[str, tuple[p.Plant, int, Fault, str, list[str]]] = {
    # in vLLM
    "raw log-probs": (p.engine_argument("logprobs_mode", "raw_logprobs"), 0, Fault.RAW_LOGPROBS, "raw_logprobs", [WARM]),
    "raw log-probs, denied": (RAW_DENIED, 2, Fault.RAW_LOGPROBS, "those of temperature 1", [WARM]),
    "other temperature": (p.sampling_parameter("temperature", 1.0), 2, Fault.WRONG_TEMPERATURE, "temperature 1", [WARM]),
    "other temperature at 1": (p.sampling_parameter("temperature", 0.7), 1, Fault.WRONG_TEMPERATURE, "at temperature 0.7", []),
    "top-p": (p.sampling_parameter("top_p", 0.9), 1, Fault.TRUNCATED_SUPPORT, "top-p 0.9", []),
    "top-k": (p.sampling_parameter("top_k", 50), 1, Fault.TRUNCATED_SUPPORT, "top-k 50", []),
    "min-p": (p.sampling_parameter("min_p", 0.3), 1, Fault.TRUNCATED_SUPPORT, "min-p 0.3", []),
    "top-p ignored": (p.sampling_parameter("top_p", 1.0), 2, Fault.TRUNCATED_SUPPORT, "of all ids", ["rollout.top_p=0.8"]),
    "top-k ignored": (p.sampled_from_all, 2, Fault.TRUNCATED_SUPPORT, "log-probs of all ids", [TRANSFORMERS, "rollout.top_k=40"]),
    "bfloat16 engine": (p.engine_argument("dtype", "bfloat16"), 0, Fault.ENGINE_SETTINGS, "'bfloat16' in the engine", []),
    "bfloat16 engine, denied": (HALF_DENIED, 1, Fault.NUMERICS, "dtype, head precision or model code", []),
    "bfloat16 head": (p.engine_argument("hf_overrides", {}), 0, Fault.ENGINE_SETTINGS, "head_dtype", ["model.dtype=bfloat16"]),
    "stale tensor": (p.loaded(p.stale(DOWN)), 3, Fault.STALE_TENSOR, f"earlier values of {DOWN}", []),
    "two stale tensors": (p.loaded(p.stale(DOWN, UP_1)), 3, Fault.STALE_TENSOR, UP_1, []),
    "all weights stale": (p.nothing_loaded, 3, Fault.STALE_WEIGHTS, "reached none of its weights", []),
    "old weights not put back": (p.loaded(p.only_once()), 3, Fault.UNEXPLAINED, "other weights than it was sent", []),
    "sync skipped": (p.sync_skipped, 3, Fault.STALE_WEIGHTS, "received version -1", []),
    "tied head stale": (p.tied_head_stale, 3, Fault.STALE_HEAD, "model.embed_tokens.weight", []),
    "swapped in the engine": (p.loaded(p.swapped(UP_1, UP_2)), 3, Fault.SWAPPED_TENSORS, UP_2, []),
    "swapped on the way": (p.received(p.swapped(UP_1, UP_2)), 3, Fault.SWAPPED_TENSORS, "changed places on the way", []),
    "lost on the way": (p.received(p.without(DOWN)), 3, Fault.INCOMPLETE_SYNC, DOWN, []),
    "not loaded": (p.loaded(p.without(DOWN)), 3, Fault.INCOMPLETE_SYNC, DOWN, []),
    "prefix cache kept": (p.cache_not_emptied, 4, Fault.STALE_PREFIX_CACHE, "128 tokens", [LONG]),
    "decode is not prefill": (p.noisy_prefill, 5, Fault.DECODE_PREFILL, "prefilling", []),
    # of an adapter
    "adapter ignored": (p.adapter_left_out(), 3, Fault.ADAPTER_IGNORED, "its log-probs are the base model's", [LORA]),
    "adapter of a layer ignored": (p.adapter_left_out(DOWN), 3, Fault.ADAPTER_IGNORED, f"the adapter of {DOWN}", [LORA]),
    "adapter at another scale": (p.adapter_at_another_scale, 3, Fault.UNEXPLAINED, "another effect", [LORA, TRANSFORMERS]),
    "all weights stale under an adapter": (p.nothing_loaded, 3, Fault.STALE_WEIGHTS, "none of its weights", [LORA]),
    # around an engine
    "other template": (
        *(p.engine_tokenizer("chat_template", CHAT_TEMPLATE + "{{ ' ' }}"), 0),
        *(Fault.TEMPLATE_MISMATCH, "chat", [TRANSFORMERS]),
    ),
    "other end": (p.engine_tokenizer("eos_token", "<|endoftext|>"), 0, Fault.SPECIAL_TOKENS, "eos_token_id", [TRANSFORMERS]),
    "other pad": (p.engine_tokenizer("pad_token", "<|endoftext|>"), 0, Fault.SPECIAL_TOKENS, "pad_token_id", [TRANSFORMERS]),
    "last id dropped": (p.without_last, 0, Fault.DROPPED_STOP_TOKEN, "never learns to stop", [TRANSFORMERS]),
    "last log-prob dropped": (p.without_last_logp, 0, Fault.MISSING_LOGPROBS, "the stop token too", [TRANSFORMERS]),
    "no log-probs": (p.each(p.without_logp), 0, Fault.MISSING_LOGPROBS, "0 log-probs", [TRANSFORMERS]),
    "id beyond the vocabulary": (p.first_id(128_000), 0, Fault.UNKNOWN_IDS, "the id 128000", [TRANSFORMERS]),
    "id below 0": (p.first_id(-1), 0, Fault.UNKNOWN_IDS, "the id -1", [TRANSFORMERS]),
    "infinite log-prob": (p.first_logp(-math.inf), 0, Fault.MISSING_LOGPROBS, "infinities", [TRANSFORMERS]),
    "log-prob that is no number": (p.first_logp(math.nan), 0, Fault.MISSING_LOGPROBS, "NaN", [TRANSFORMERS]),
    "log-prob above 0": (p.first_logp(0.5), 0, Fault.MISSING_LOGPROBS, "above 0", [TRANSFORMERS]),
    "rolled": (p.each(p.rolled), 1, Fault.SHIFTED_LOGPROBS, "by one place", [TRANSFORMERS]),
    "shifted, last repeated": (p.last_logp_repeated, 1, Fault.SHIFTED_LOGPROBS, "by one place", [TRANSFORMERS]),
    "flattened": (p.flattened, 0, Fault.FLATTENED_COMPLETIONS, "list of tokens", [TRANSFORMERS]),
    "duplicated": (p.duplicated, 0, Fault.MISSING_PROMPT, "6 completions were requested and 7", [TRANSFORMERS]),
    "dropped": (p.dropped, 0, Fault.MISSING_PROMPT, "6 completions were requested and 5", [TRANSFORMERS]),
    "replaced": (p.replaced, 0, Fault.MISSING_PROMPT, "requests have no answer, ", [TRANSFORMERS]),
    "interleaved": (p.interleaved, 0, Fault.COMPLETION_ORDER, "another order", [TRANSFORMERS]),
    "relabelled": (p.relabelled, 1, Fault.COMPLETION_ORDER, "prompts that they were not sampled for", [TRANSFORMERS]),
    "log-probs exchanged": (p.exchanged_logp, 1, Fault.COMPLETION_ORDER, "of the same length", [TRANSFORMERS]),
    "batch dependence": (p.noisy_alone, 5, Fault.BATCH_DEPENDENCE, "alone", [TRANSFORMERS]),
    "unexplained": (p.noisy_after_a_sync, 3, Fault.UNEXPLAINED, "other weights than it was sent", [TRANSFORMERS]),
    # in the recipe
    "blind bounds": (lambda _: ["recipe"], 3, Fault.BLIND_BOUNDS, "sentinel.max_delta", [TRANSFORMERS, BLIND]),
    # in the trainer
    "split dependence": (p.local_denominator, 6, Fault.SPLIT_DEPENDENCE, "depends on the split", [TRANSFORMERS]),
}
# Lines of the list of faults.
SHOWS = {
    **dict.fromkeys([Fault.INCOMPLETE_SYNC, Fault.STALE_TENSOR, Fault.STALE_HEAD, Fault.SWAPPED_TENSORS], 54),
    Fault.STALE_WEIGHTS: 55,
    Fault.ADAPTER_IGNORED: 58,
    **dict.fromkeys([Fault.COMPLETION_ORDER, Fault.DROPPED_STOP_TOKEN, Fault.MISSING_PROMPT], 60),
}
# Named while a run goes on: see test_watch.py, and test_lora_runs.py for one.
WHILE_RUNNING = {Fault.STALE_ROLLOUTS, Fault.DRIFT, Fault.BASE_CHANGED, Fault.FOREIGN_TOKENS}


# On vLLM these; the rest of its planted faults are slow.
QUICK = ("tied head stale", "lost on the way")


def marks_of(name: str, overrides: list[str]) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK or TRANSFORMERS in overrides else [pytest.mark.slow]


def ladder(recipe: Path, overrides: list[str], greedy: bool = False) -> list[Rung]:
    return checks_of(recipe, ["rollout.max_completion_tokens=24", *overrides], greedy)[0]


def checks_of(recipe: Path, overrides: list[str], greedy: bool = False) -> tuple[list[Rung], bool]:
    """The checks of doctor, and whether rows are packed."""
    # Which of two faults explains ids of flat distributions better is a matter of luck, which these rows have.
    loaded = load_recipe(recipe, ["data.options.size=1000", *overrides]).recipe
    if greedy:  # refused in a recipe
        loaded = loaded.model_copy(update={"rollout": loaded.rollout.model_copy(update={"temperature": 0.0})})
    with closing(open_trainer_and_engine(open_data(loaded), None, Processes.alone(), recipe.parent, print)) as both:
        probe = probe_of(both)
        return list(climb(probe, toy_gradient(both, probe))), both.state.policy.packed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[*([pytest.mark.fault(SHOWS[fault])] if fault in SHOWS else []), *marks_of(n, overrides)])
        for n, (_, _, fault, _, overrides) in PLANTED.items()
    ],
)
def test_a_planted_fault_is_named(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, proof: Proof) -> None:
    plant, number, fault, words, overrides = PLANTED[name]
    fired = plant(monkeypatch)
    rungs = ladder(recipe_file, overrides)
    assert fired, "the fault did not happen"
    assert [rung.verdict for rung in rungs[:-1] if rung.verdict is Outcome.FAILED] == []
    assert (rungs[-1].number, rungs[-1].verdict, rungs[-1].fault) == (number, Outcome.FAILED, fault), rungs[-1]
    assert words in rungs[-1].sentence
    error = rungs[-1].error()
    assert error.exit_code == 6 and error.fault is fault and fault.value in str(error)
    proof(f"planted and fired: {name}")


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("engine", [LONG, TRANSFORMERS])
def test_without_a_fault_nothing_is_named(recipe_file: Path, engine: str, dtype: str) -> None:
    rungs = ladder(recipe_file, [engine, WARM, f"model.dtype={dtype}"])
    assert [rung.number for rung in rungs] == list(range(7))
    expected = {Outcome.OK} if engine == LONG else {Outcome.OK, Outcome.NOT_NEEDED}
    assert {rung.verdict for rung in rungs} == expected
    assert all(rung.power > 5 * rung.bound for rung in rungs if rung.power is not None and rung.bound is not None)


def test_rows_as_long_as_the_engine_takes_are_checked(recipe_file: Path) -> None:
    """To prefill a row, vLLM must be able to add a token to it."""
    rungs, _ = checks_of(recipe_file, ["engine={kind: colocated}", "rollout.max_completion_tokens=8"])
    assert [(rung.number, rung.verdict) for rung in rungs[5:]] == [(5, Outcome.OK), (6, Outcome.OK)]


@pytest.mark.parametrize(("dtype", "of", "fault"), [("float32", 1, True), ("bfloat16", 1, False), ("bfloat16", 3, True)])
def test_rounding_may_choose_another_first_token(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, of: int, fault: bool
) -> None:
    p.first_tokens_alone(of)(monkeypatch)
    rung = ladder(recipe_file, [TRANSFORMERS, f"model.dtype={dtype}"])[5]
    assert (rung.number, rung.fault) == (5, Fault.BATCH_DEPENDENCE if fault else None)
    assert rung.verdict is (Outcome.FAILED if fault else Outcome.OK)


def test_where_no_token_can_be_compared_the_recipe_sampling_is_not_measurable(recipe_file: Path) -> None:
    """In bfloat16 the flat distributions of a tiny model have an id at the edge of every nucleus."""
    rungs = ladder(recipe_file, [TRANSFORMERS, "model.dtype=bfloat16", "rollout.top_p=0.5"])
    assert [rung.number for rung in rungs] == list(range(7))
    assert (rungs[2].verdict, rungs[2].measured) == (Outcome.NOT_MEASURABLE, {}), rungs[2]
    assert "top_p 0.5, no token can be compared" in rungs[2].sentence and rungs[3].verdict is Outcome.OK


def test_greedy_is_compared_at_temperature_1(recipe_file: Path) -> None:
    rungs = ladder(recipe_file, [TRANSFORMERS], greedy=True)
    assert [rung.number for rung in rungs] == list(range(7))
    assert {rung.verdict for rung in rungs} == {Outcome.OK, Outcome.NOT_NEEDED}
    assert rungs[2].verdict is Outcome.OK and "the same distribution: temperature 1" in rungs[2].sentence
    assert rungs[2].power is not None and rungs[2].power > 1  # were the choice reported as a sure one, with log-probs of 0


@pytest.mark.slow
def test_greedy_log_probs_of_a_sure_choice_are_seen(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sure(generate: Any, engine: Any, requests: Any, sampling: Sampling) -> list[Completion]:
        answers = generate(engine, requests, sampling)
        return answers if sampling.temperature else [replace(a, logp=np.zeros_like(a.logp)) for a in answers]

    p.instead(TransformersEngine, "generate", sure)(monkeypatch)
    rungs = ladder(recipe_file, [TRANSFORMERS], greedy=True)
    assert (rungs[-1].number, rungs[-1].verdict) == (2, Outcome.FAILED), rungs[-1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_fault_an_adapter_has_one_effect(recipe_file: Path, dtype: str) -> None:
    rungs = ladder(recipe_file, [LONG, WARM, LORA, f"model.dtype={dtype}"])
    assert [(rung.number, rung.name) for rung in rungs][3:5] == [(3, "changed weights"), (3, "adapter")]
    assert [rung.number for rung in rungs] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert {rung.verdict for rung in rungs} == {Outcome.OK}
    effects = rungs[4].measured
    assert effects["effect"] > 5 * (rungs[4].bound or 0)
    assert effects["effect_in_engine"] == pytest.approx(effects["effect"], rel=0.1)


def test_a_gap_that_is_not_a_number_is_the_worst() -> None:
    small, large, unknown = Gap(1e-6, 1e-6, 1e-6), Gap(1e-3, 1e-3, 1e-3), Gap(np.nan, np.nan, np.nan)
    bounds = Bounds(mean_delta=1e-4)
    assert bounds.worst(small, large, small) is large and bounds.worst(large, small) is large
    assert bounds.worst(small, unknown) is unknown and bounds.worst(unknown, small) is unknown


def test_every_fault_is_planted_somewhere() -> None:
    assert {fault for _, _, fault, _, _ in PLANTED.values()} | WHILE_RUNNING == set(Fault)


def test_the_summary_says_what_was_not_measurable_after_what_was() -> None:
    blind = "This check is blind: this fault would move log-probs by 0.05 nats, which is less than 5 times the bound."
    rungs = [
        Rung(number=1, name="same weights", verdict=Outcome.OK, sentence="", measured={"mean_delta": 0.028}, bound=0.098),
        Rung(number=2, name="policy", verdict=Outcome.NOT_MEASURABLE, sentence=blind, measured={"mean_delta": 0.01}, bound=0.098),
        Rung(number=3, name="sync", verdict=Outcome.OK, sentence="", measured={"mean_delta": 0.066}, bound=0.2, power=3.7),
    ]
    measured = "same weights 2.8e-02 of 9.8e-02, policy 1.0e-02 of 9.8e-02, sync 6.6e-02 of 2.0e-01 (3.7 without a sync)"
    assert agreement(rungs) == f"engine and trainer agree: {measured}. Not measurable: policy. {blind[:-1]}"
