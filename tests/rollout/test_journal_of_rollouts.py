"""Rollouts of a step that was trained, in the place of its records: they answer and reward as the journal did."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Proof
from helpers import samples
from helpers.journals import FACTS, SAMPLING, answer_one, attempt, group_of, opened, rewarded, scored_again
from helpers.rollouts import rollout_writer

from rlgen.rollout.journal import Journal
from rlgen.rollout.parquet import Rollout
from rlgen.rollout.samples import Samples
from rlgen.run.directory import RunDirectory
from rlgen.types import Completion, Request, Span, logp_of


def trained(folder: Path, kept: bool = False, world: int = 1) -> Journal:
    """A step that was sampled, scored and trained, by one of the processes or half of it by each of two; then it was killed."""
    journals = [opened(folder / "journal", rank=rank) for rank in range(world)]
    group = group_of(7, 8)
    sampled: dict[str, Any] = {"spans": (Span(0, 1, 0),), "cached_tokens": 2}
    logp = logp_of((-0.1, float("nan")))
    for at, (sample, request) in enumerate(zip(group.samples, requests(), strict=True)):
        given = samples.completion(sample.completion_ids.tolist(), logp.tolist(), sample.prompt_ids.tolist())
        answer_one(journals[at % world], 1, 3, replace(given, **sampled), at, request.seed)
    scored = journals[0].score(1, [group], rewarded)[0]
    if kept:
        journals[-1].kept.add(1)
    for rank, journal in enumerate(journals):
        rows = [replace(sample, sampler_logp=logp, **sampled) for sample in scored.samples]
        writer = rollout_writer(
            folder,
            rank=rank,
            world=world,
            prompt_at=lambda position: replace(group.prompt, position=position),
            stamp=lambda rollout, journal=journal: journal.stamp(rollout, SAMPLING),
            on_disk=journal.retire,
        )
        own = Samples.of(rows[rank::world], ["a", "b"])
        nothing, all_of_them = np.zeros(len(own)), np.ones(len(own), dtype=bool)
        writer.write(Rollout(step=1, samples=own, policy_logp=own.sampler_logp, advantage=nothing, trained=all_of_them))
        writer.wait()
        writer.close()
    return journals[0]


def resumed(folder: Path) -> None:
    """What `--resume` does with the rollouts of steps after its checkpoint."""
    (folder / "logs").mkdir(exist_ok=True)
    RunDirectory(folder, None).cut(0)


def requests() -> list[Request]:
    return [Request(prompt_ids=s.prompt_ids, seed=s.seed) for s in group_of(7, 8).samples]


def both(journal: Journal) -> dict[int, Completion]:
    return journal.found(1, [(3, 0), (3, 1)], requests(), SAMPLING, oldest=0)


def alike(ours: dict[int, Completion], theirs: dict[int, Completion]) -> bool:
    """Equal to the last bit; one of the log-probs is NaN."""
    bits = [{place: one.logp.tobytes() for place, one in side.items()} for side in (ours, theirs)]
    return bits[0] == bits[1] and ours == theirs


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_is_in_the_journal_or_in_the_rollouts_and_never_lost(tmp_path: Path, world: int) -> None:
    before = trained(tmp_path, kept=True, world=world)
    names = ["step_000001.bin", "step_000001.rank1.bin"][:world]
    assert [path.name for path in sorted((tmp_path / "journal").glob("step_*"))] == names, "samples of it were dropped"
    expected = both(opened(tmp_path / "journal"))
    assert expected[0].logp[0] == np.float32(-0.1) and math.isnan(expected[0].logp[1])
    before.drop(0, 9)
    trained(tmp_path, world=world)
    left = [path.name for path in sorted((tmp_path / "journal").glob("step_*"))]
    assert left == [] if world == 1 else left == ["step_000001.bin"], "the first to write sees no whole step"
    resumed(tmp_path)
    if world == 2:
        (tmp_path / "journal" / "step_000001.bin").unlink()
    assert [path.name for path in (tmp_path / "journal").glob("step_*")] == ["step_000001.parquet"]
    said: list[str] = []
    again = opened(tmp_path / "journal", say=said.append)
    assert max(again.files) == 1
    assert alike(both(again), expected) and {one.cached_tokens for one in expected.values()} == {2}
    scored_again(tmp_path / "journal")
    assert said == []
    trained(tmp_path, world=world).retire(1, tmp_path / "rollouts" / "step_000001.parquet")  # what has taken its place goes
    assert not (tmp_path / "journal" / "step_000001.parquet").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 9}, "to other prompts, seeds or sampling settings"),
        ({"temperature": 0.5}, "to other prompts, seeds or sampling settings"),
        ({"engine": "e 2"}, "by an engine of another kind, version or settings"),
        ({"weights": "other"}, "by other weights"),
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_no_answer_is_refused_in_the_same_words(tmp_path: Path, change: dict[str, Any], why: str, kept: bool) -> None:
    """By a journal that has the records of the step, or its rollouts in their place."""
    trained(tmp_path, kept)
    if not kept:
        resumed(tmp_path)
    said: list[str] = []
    facts = replace(FACTS, engine=change.get("engine", "e 1"))
    again = attempt(tmp_path / "journal", 0, said.append, facts=facts)
    again.starts_from(0, change.get("weights", "w0"))
    asked = [replace(one, seed=change.get("seed", one.seed)) for one in requests()]
    sampling = replace(SAMPLING, temperature=change.get("temperature", 0.7))
    assert again.found(1, [(3, 0), (3, 1)], asked, sampling, oldest=0) == {}
    assert len(said) == 1 and f"2 of 2 answers of step 1 are sampled again: they are {why}" in said[0]


@pytest.mark.slow
@pytest.mark.fault(65)
def test_a_changed_bit_of_rollouts_costs_them_and_is_said(tmp_path: Path, proof: Proof) -> None:
    trained(tmp_path)
    resumed(tmp_path)
    path = tmp_path / "journal" / "step_000001.parquet"
    whole, left_out = path.read_bytes(), 0
    expected = both(opened(tmp_path / "journal"))
    places = np.random.default_rng(0).choice(8 * len(whole), 600, replace=False)
    for place in places.tolist():
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        said: list[str] = []
        again = opened(tmp_path / "journal", say=said.append)
        got = both(again)
        if got:
            assert alike(got, expected), place
        else:
            left_out += 1
            assert said == ["journal: step_000001.parquet is ignored: damaged, or of another version of rlgen"], place
    assert left_out > 200  # the rest was not read: texts, statistics
    proof(f"{len(places)} single bits of a file of rollouts: {left_out} times left out, else what was taken was what was written")


def test_beside_what_an_attempt_before_has_left_nothing_is_replaced(tmp_path: Path) -> None:
    trained(tmp_path)
    resumed(tmp_path)
    whole = (tmp_path / "journal" / "step_000001.parquet").read_bytes()
    (tmp_path / "rollouts" / "step_000001.parquet").mkdir()  # killed before the first of two processes had written
    resumed(tmp_path)
    assert (tmp_path / "journal" / "step_000001.parquet").read_bytes() == whole
    assert (tmp_path / "journal" / "step_000001.1.parquet").is_dir()
    assert len(both(opened(tmp_path / "journal"))) == 2
