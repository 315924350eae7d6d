"""Faults that come while a run goes on: found in the first batch that they touch, before it moves a weight."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import planted as p
import pytest
import torch
from conftest import RECIPE, read_jsonl
from helpers.samples import make_sample
from torch import Tensor

from rlgen.cli.app import run_command
from rlgen.cli.train import train_command
from rlgen.engines import vllm_weights
from rlgen.engines.base import EngineCapabilities, Finished, SyncReport
from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import Fault, SentinelError
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.rollout.samples import Samples
from rlgen.run.compare import first_difference
from rlgen.sentinel.bounds import MOST, Bounds, Gap, Noise
from rlgen.sentinel.probe import Probe
from rlgen.sentinel.watch import Watch
from rlgen.setup import trainer
from rlgen.types import WHOLE, Completion, Distribution, Request, Sample, Sampling, Span, one_span

Proof = Callable[[str], None]

ROWS = 32  # of a rollout in this file; probes ask for fewer
TRANSFORMERS = "engine={kind: transformers}"
Event = Callable[[pytest.MonkeyPatch], object]


def run(recipe: Path, *overrides: str, resume: bool = False) -> Path:
    directory = recipe.parent / "run"
    train_command(recipe, ["checkpoint={every: 100}", *overrides], resume, False, None, directory)
    return directory


def after_the_start(event: Event) -> p.Plant:
    """The fault comes when the ladder has been climbed."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        fired: list[str] = []
        record_attempt = trainer.record_attempt

        def then(*arguments: Any) -> None:
            record_attempt(*arguments)
            fired.append("event")
            event(monkeypatch)

        monkeypatch.setattr(trainer, "record_attempt", then)
        return fired

    return plant


def cut_to_bfloat16(arrived: p.Named) -> p.Named:
    return [(name, tensor.bfloat16() if "norm" in name else tensor) for name, tensor in arrived]


def emptied(repack_heads: Callable[[Any], None], model: Any) -> None:
    """What sleep at level 2 leaves where only the weights are sent: rotary caches are no weights."""
    for buffer in model.buffers():
        buffer.zero_()
    repack_heads(model)


def in_rollouts(change: Callable[[Completion], Completion], first: int, probes_too: bool = False) -> Event:
    """Answers change from the rollout of version `first` on."""

    def changed(
        generate: Any, engine: Any, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None
    ) -> list[Completion]:
        if engine.weight_version < first or not (probes_too or len(requests) == ROWS):
            return list(generate(engine, requests, sampling, finished))
        answers = [change(answer) for answer in generate(engine, requests, sampling)]
        if finished:  # what is wrong is in the journal too, until the sentinel sees it
            for place, answer in enumerate(answers):
                finished(place, answer)
        return answers

    return p.instead(TransformersEngine, "generate", changed)


def rollouts_of_older_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout of version 2 is sampled with weights of version 0, and named version 2."""
    seen: list[dict[str, Tensor]] = []

    def weights_of(engine: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in engine._model.state_dict().items()}

    def remember(sync: Callable[..., SyncReport], engine: Any, *arguments: Any) -> SyncReport:
        seen.append(weights_of(engine))
        return sync(engine, *arguments)

    def lagging(generate: Any, engine: Any, requests: Sequence[Request], *rest: Any) -> Any:
        if engine.weight_version != 2 or len(requests) != ROWS:
            return generate(engine, requests, *rest)
        now = weights_of(engine)
        engine._model.load_state_dict(seen[0])
        answers = generate(engine, requests, *rest)
        engine._model.load_state_dict(now)
        return answers

    p.instead(TransformersEngine, "sync", remember)(monkeypatch)
    p.instead(TransformersEngine, "generate", lagging)(monkeypatch)


def older(answer: Completion) -> Completion:
    return replace(answer, spans=one_span(len(answer.token_ids), answer.weight_version - 2))


# name -> (what happens, the step that must not be trained, the fault, words of the message, overrides)
EVENTS: dict[str, tuple[Event, int, Fault, str, list[str]]] = {
    "no sync arrives": (p.nothing_loaded, 2, Fault.STALE_WEIGHTS, "reached none", []),
    "one sync does not arrive": (p.loaded(p.all_but_the_first()), 2, Fault.STALE_WEIGHTS, "once version 1 is sent again", []),
    "a sync is skipped and told": (p.sync_skipped, 2, Fault.STALE_WEIGHTS, "weight sync to version 1", []),
    "a tensor is lost": (p.received(p.without("model.norm.weight")), 2, Fault.INCOMPLETE_SYNC, "model.norm.weight", []),
    "a tensor loses bits": (p.received(cut_to_bfloat16), 2, Fault.STALE_TENSOR, "received bfloat16", []),
    "the head goes stale": (p.tied_head_stale, 2, Fault.DRIFT, "batch of step 2", []),
    "sleep drops buffers": (p.instead(vllm_weights, "repack_heads", emptied), 2, Fault.DRIFT, "not even after", []),
    "older rollouts, told": (in_rollouts(older, 2), 3, Fault.STALE_ROLLOUTS, "the trainer holds version 2", [TRANSFORMERS]),
    "older rollouts": (rollouts_of_older_weights, 3, Fault.STALE_ROLLOUTS, "than those of version 2", [TRANSFORMERS]),
    "log-probs stop": (in_rollouts(p.without_logp, 1), 2, Fault.MISSING_LOGPROBS, "0 log-probs", [TRANSFORMERS]),
    "log-probs shift": (in_rollouts(p.rolled, 1), 2, Fault.SHIFTED_LOGPROBS, "by one place", [TRANSFORMERS]),
    "noise": (in_rollouts(p.noisy, 1, probes_too=True), 2, Fault.DRIFT, "not even after", [TRANSFORMERS]),
}


SETTINGS = ["run.steps=5", "rollout.group_size=8"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that no event comes to, on the engine that starts fastest."""
    recipe = tmp_path_factory.mktemp("undisturbed") / "recipe.yaml"
    recipe.write_text(RECIPE)
    return run(recipe, *SETTINGS, TRANSFORMERS)


@pytest.mark.slow  # a drift in a run: the tests below
@pytest.mark.fault(54)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.fault(57)] if "sleep" in name else []) for name in EVENTS]
)
def test_an_event_stops_the_run_within_a_step_and_nothing_is_lost(
    recipe_file: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, proof: Proof
) -> None:
    event, step, fault, words, overrides = EVENTS[name]
    whole = request.getfixturevalue("undisturbed") if overrides else None  # made before the event is planted
    fired = after_the_start(event)(monkeypatch)
    overrides = [*SETTINGS, *overrides]
    with pytest.raises(SentinelError) as caught:
        run(recipe_file, *overrides)
    assert fired and caught.value.fault is fault and words in str(caught.value), caught.value
    directory = recipe_file.parent / "run"
    assert [record["step"] for record in read_jsonl(directory / "metrics.jsonl")] == list(range(1, step))
    status = read_json(directory / "status.json")
    assert (status["exit_code"], status["state"], status["step"]) == (6, "failed", step - 1)
    # What was trained is kept, and the run goes on from there once the fault is gone.
    monkeypatch.undo()
    run(recipe_file, *overrides, resume=True)
    records = read_jsonl(directory / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(record["sampler/delta_max"] <= 1e-4 and not record["sentinel/drift"] for record in records)
    if whole is not None:
        shutil.rmtree(directory / "checkpoints" / f"step_{step - 1:06d}")  # the stop saved it, and nobody stopped the other run
        assert (difference := first_difference(whole, directory)) is None, str(difference)
    proof(f"came in a run: {name}; named in step {step}, then resumed" + (", equal to the last bit" if whole else ""))


@pytest.mark.parametrize(
    ("policy", "kept"), [pytest.param("stop", [], marks=pytest.mark.slow), ("checkpoint_and_stop", ["step_000002"])]
)
def test_what_a_drift_leads_to(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, policy: str, kept: list[str]) -> None:
    after_the_start(in_rollouts(p.noisy, 2, probes_too=True))(monkeypatch)
    overrides = [f"sentinel={{on_drift: {policy}}}", *SETTINGS, TRANSFORMERS]
    with pytest.raises(SentinelError, match="batch of step 3"):
        run(recipe_file, *overrides)
    assert [path.name for path in sorted((recipe_file.parent / "run" / "checkpoints").iterdir())] == kept


def test_a_warning_trains_on(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    after_the_start(in_rollouts(p.noisy, 1))(monkeypatch)
    directory = run(recipe_file, "sentinel={on_drift: warn}", "run.steps=3", "rollout.group_size=8", TRANSFORMERS)
    assert [record["sentinel/drift"] for record in read_jsonl(directory / "metrics.jsonl")] == [False, True, True]
    assert capsys.readouterr().out.count("warning: sentinel: batch of step") == 2


@pytest.mark.slow
def test_in_bfloat16_a_shift_by_four_times_the_noise_is_a_drift(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_start(in_rollouts(lambda answer: replace(answer, logp=answer.logp - np.float32(0.025)), 7))(monkeypatch)
    overrides = ["model.dtype=bfloat16", "run.steps=9", "rollout.group_size=8", TRANSFORMERS]
    with pytest.raises(SentinelError, match="batch of step 8") as caught:
        run(recipe_file, *overrides)
    assert caught.value.fault is Fault.STALE_ROLLOUTS, "new samples are as good as ever"
    means = [record["sampler/delta_mean"] for record in read_jsonl(recipe_file.parent / "run" / "metrics.jsonl")]
    assert len(means) == 7 and max(means) < 0.0085


def test_what_is_under_way_ends_before_new_samples_are_compared() -> None:
    """Sampled ahead, the engine is still at the next step's prompts when a batch is found to have drifted."""
    calls: list[str] = []
    probe: Any = SimpleNamespace(
        whole=WHOLE,
        sample=lambda *values: calls.append("sample"),
        fits=lambda samples: True,
        bounds=SimpleNamespace(mean_delta=1e-5),
        version=3,
    )
    watch = watch_of(probe, calls, drain=lambda: calls.append("rest"))
    fault, _ = watch.look_again(probe, Gap(max_delta=0.5, mean_delta=0.1, rms_delta=0.5))
    assert fault is Fault.STALE_ROLLOUTS and calls == ["rest", "sample"]
    fault, why = watch.look_again(probe, Gap(max_delta=1e-3, mean_delta=9e-6, rms_delta=1e-3))
    assert fault is Fault.DRIFT and "on most tokens, but not on a few" in why, "weights are not named for a few tokens"


@pytest.mark.parametrize(("grown", "closely", "found"), [(4.0, 1.0, False), (1.0, 4.0, False), (1.0, 1.0, True)])
def test_a_gap_that_rounding_has_come_to_explain_is_no_drift(
    monkeypatch: pytest.MonkeyPatch, grown: float, closely: float, found: bool
) -> None:
    """The gap is four times what rounding explained when the run opened, so beyond the bounds of then; weights are others now."""
    opened, said = Noise(mean=1e-5, rms=2e-5), list[str]()
    gap = Gap(max_delta=4e-4, mean_delta=4e-5, rms_delta=8e-5)
    looked: list[int] = []

    def noise(samples: Sequence[Sample], distributions: Sequence[Distribution]) -> Noise:
        looked.append(len(samples))
        return Noise(mean=grown * opened.mean, rms=grown * opened.rms)

    def of_roundings(samples: Sequence[Sample], distribution: Distribution) -> Noise:
        return Noise(mean=closely * opened.mean, rms=closely * opened.rms)

    side: Any = SimpleNamespace(processes=Processes.alone(), noise=noise, noise_of_roundings=of_roundings)
    monkeypatch.setattr("rlgen.sentinel.watch.explain", lambda *_: None)
    watch = watch_of(probe_of_nothing(side, given=None, noise=opened), said)
    rows = [make_sample(group_id=row) for row in range(20)]
    assert watch.drifted(gap, lambda: rows, WHOLE, 3, "batch of step 3") is found and looked == [8]
    assert bool(said) is found and (not found or "mean |Δ log-prob| is 4e-05 nats, the bound is 3e-05" in said[0])
    within = Gap(max_delta=1.0, mean_delta=2.9e-5, rms_delta=5.9e-5)
    assert not watch.drifted(within, lambda: rows, WHOLE, 4, "batch of step 4")
    assert looked == [8], "nothing is measured without need"


def watch_of(probe: Any, said: list[str], drain: Callable[[], None] = lambda: None) -> Watch:
    return Watch(probe=probe, warns=True, sleeps=False, probe_every=None, drain=drain, say=said.append)


def probe_of_nothing(side: Any, given: Bounds | None, noise: Noise | None) -> Probe:
    """A probe of numbers alone: neither model nor engine is asked."""
    sampling = Sampling(max_tokens=4, temperature=1.0, stop_ids=(257,))
    known = {"trainer": side, "sampling": sampling, "given": given, "most": MOST["float32"], "noise": noise, "version": 0}
    engine = SimpleNamespace(abilities=EngineCapabilities())
    return Probe(**{field.name: cast(Any, {**known, "engine": engine}.get(field.name)) for field in fields(Probe)})


@pytest.mark.parametrize(("off", "found"), [(0, False), (3, True)])
def test_of_a_row_of_several_versions_the_tokens_of_present_weights_are_compared(
    monkeypatch: pytest.MonkeyPatch, off: int, found: bool
) -> None:
    """Rows 0 and 1 end in tokens of version 2; what version 1 sampled differs by 5 nats, and is not looked at."""
    spans = ((Span(0, 2, 1), Span(2, 4, 2)), (Span(0, 3, 1), Span(3, 4, 2)), (Span(0, 4, 1),))
    ids, logp = (7, 8, 9, 257), (-1.0, -2.0, -3.0, -4.0)
    rows = [make_sample(sample_index=row, completion_ids=ids, sampler_logp=logp, spans=of) for row, of in enumerate(spans)]
    theirs = torch.tensor(logp).repeat(3)
    theirs[[0, 1, 4, 5, 6, 8, 9, 10, 11]] += 5.0
    theirs[off] += 0.25 if off else 0.0
    looked: list[Sample] = []
    said: list[str] = []
    monkeypatch.setattr("rlgen.sentinel.watch.explain", lambda probe, samples, distribution: looked.extend(samples))
    side: Any = SimpleNamespace(processes=Processes.alone())
    watch = watch_of(probe_of_nothing(side, given=Bounds(max_delta=1e-4), noise=None), said)
    assert watch(Samples.of(rows), theirs, 3) is found
    assert watch(Samples.of(rows), theirs, 4) is None, "nothing was sampled by version 3"
    if found:
        assert "0.25" in said[0] and [list(sample.completion_ids) for sample in looked] == [[9, 257], [257]]
        assert [list(sample.prompt_ids) for sample in looked] == [[5, 6, 7, 8], [5, 6, 7, 8, 9]]


def test_where_no_token_can_be_compared_no_drift_is_found_and_a_line_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens differ by 5 nats, and none is sure, in a batch and in an evaluation; then one is."""
    monkeypatch.setattr("rlgen.sentinel.watch.explain", lambda *_: None)
    rows, said = [make_sample(group_id=row) for row in range(2)], list[str]()
    size = len(rows[0].completion_ids)
    side: Any = SimpleNamespace(
        processes=Processes.alone(),
        logp=lambda samples, _: [torch.from_numpy(one.sampler_logp) + 5.0 for one in samples],
        sure=lambda samples, _: [torch.zeros(size, dtype=torch.bool) for _ in samples],
    )
    watch = watch_of(probe_of_nothing(side, given=Bounds(max_delta=1e-4), noise=None), said)
    theirs, sure = torch.cat(side.logp(rows, WHOLE)), torch.zeros(2 * size, dtype=torch.bool)
    first = rows[0].weight_version + 1
    assert watch(Samples.of(rows), theirs, first, sure) is None and watch(Samples.of(rows), theirs, first, sure) is None
    assert len(said) == 1 and "batch of step" in said[0] and "rounding decides which ids are kept" in said[0]
    nucleus = replace(watch.probe.sampling, top_p=0.5)
    assert watch.aside(nucleus).evaluated(rows, 0) == watch.aside(nucleus).evaluated(rows, 1) == {}
    assert len(said) == 2 and "evaluation after step 0" in said[1] and "top_p 0.5" in said[1]
    sure[0] = True
    assert watch(Samples.of(rows), theirs, first, sure) is True and "max |Δ log-prob| is 5 nats" in said[2]


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_of_turns_that_saw_two_caches_nothing_is_compared(monkeypatch: pytest.MonkeyPatch, keeps_cache: bool) -> None:
    """Five turns in three rows: an engine that keeps its cache has two of version 2 alone, and rows 1 and 2 show the others."""
    rows = [
        make_sample(
            completion_ids=(7, 8, 9, 257), sampler_logp=(-1.0, -2.0, -3.0, -4.0), spans=tuple(Span(*span) for span in spans)
        )
        for spans in ([(0, 4, 2)], [(0, 1, 1), (1, 2, 2), (3, 4, 2)], [(0, 0, 1), (0, 2, 2), (3, 4, 1)])
    ]
    theirs = torch.tensor([-1.0, -2.0, -3.0, -4.0]).repeat(3)
    theirs[[5, 8, 9]] += 5.0  # by mixed caches
    monkeypatch.setattr("rlgen.sentinel.watch.explain", lambda *_: None)
    side: Any = SimpleNamespace(processes=Processes.alone())
    probe = probe_of_nothing(side, given=Bounds(max_delta=1e-4), noise=None)
    engine: Any = SimpleNamespace(abilities=EngineCapabilities(in_flight=True, keeps_cache=keeps_cache))
    watch = watch_of(replace(probe, engine=engine), [])
    assert watch(Samples.of(rows), theirs, 3) is not keeps_cache
    theirs[7] += 1.0
    assert watch(Samples.of(rows), theirs, 3)
    samples = Samples.of(rows)
    assert samples.turns.tolist() == [1, 2, 2] and samples.weight_version.tolist() == [2, 1, 1]
    assert samples.weight_version.tolist() == [row.weight_version for row in rows]
    assert samples.loss_mask.values.tolist() == [True] * 4 + [True, True, False, True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_the_commands_end_with_6(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    p.tied_head_stale(monkeypatch)
    monkeypatch.chdir(recipe_file.parent)
    monkeypatch.setattr("sys.argv", ["rlgen", command, str(recipe_file)])
    assert run_command() == 6
    assert "error: sentinel: rung 3, changed weights: stale_head: the engine's head" in capsys.readouterr().err
