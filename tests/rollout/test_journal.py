"""The journal: exact to the last bit, without half a record, no longer than it is needed."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Proof, tiny_model
from helpers.before import before
from helpers.journals import (
    FACTS,
    REQUEST,
    SAMPLING,
    answer_each,
    answer_one,
    attempt,
    completion,
    found,
    group_of,
    opened,
    rewarded,
    scored_again,
)
from helpers.recipes import recipe_for
from helpers.scripted import dialogue

from rlgen.engines.base import EngineCapabilities
from rlgen.engines.plan import EnginePlan
from rlgen.errors import CheckpointError
from rlgen.models.weights import bits
from rlgen.processes import EngineShare, Processes
from rlgen.rollout import journal as module
from rlgen.rollout.frames import AnswerRecord, parse_frames, read_frames
from rlgen.rollout.journal import Journal
from rlgen.setup.trainer import open_journal
from rlgen.trainers.saving import Saver
from rlgen.types import Group, Position, Span


def test_log_probs_come_back_to_the_last_bit(tmp_path: Path) -> None:
    patterns = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)  # NaN and infinities of all kinds among them
    logp = np.concatenate([patterns.view(np.float32), np.array([-0.0, np.nan, -np.inf, 1e-45], dtype=np.float32)])
    spans = (Span(0, 7, 0), Span(9, len(logp), 0))
    written = completion(logp, spans)
    answer_one(opened(tmp_path), 1, 0, written)
    back = found(opened(tmp_path))[0]
    assert back.logp.tobytes() == logp.tobytes() and back.token_ids.tobytes() == written.token_ids.tobytes()
    assert (back.spans, back.finish_reason, back.cached_tokens) == (spans, "length", 3)
    assert back.logp.dtype == np.float32 and back.token_ids.dtype == np.int32 and back.logp.flags.writeable
    assert isinstance(back.spans[0].version, int)
    (record,) = read_frames(tmp_path / "step_000001.bin").records
    assert isinstance(record, AnswerRecord) and (record.group_id, record.weights) == (0, {0: "w0"})
    assert record.logp == logp.tobytes() and record.spans == [(0, 7, 0), (9, len(logp), 0)]


@pytest.mark.fault(63)
def test_half_a_record_is_left_out_and_the_next_one_stands_alone(tmp_path: Path, proof: Proof) -> None:
    said: list[str] = []
    journal = opened(tmp_path)
    answer_each(journal, 2, range(3))
    path = tmp_path / "step_000002.bin"
    whole = path.read_bytes()
    last = whole.rindex(b"\xa7rlj")
    for cut in range(last, len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = opened(tmp_path, say=said.append)
        assert [bool(found(again, group, step=2)) for group in range(3)] == [True, True, cut == len(whole)]
        answer_one(again, 2, 2, completion((-2.0,)))
        third = opened(tmp_path, say=said.append)
        assert [found(third, group, step=2)[0].logp.item() for group in range(3)] == [-1.0, -1.0, -2.0]
        assert said == []  # that is what a kill does, and no damage
    proof(f"the last record was cut off at each of its {len(whole) - last} bytes")


@pytest.mark.fault(65)
def test_a_changed_bit_costs_its_record_and_is_said(tmp_path: Path, proof: Proof) -> None:
    journal = opened(tmp_path)
    answer_each(journal, 2, range(3), -1.5)
    path = tmp_path / "step_000002.bin"
    whole = path.read_bytes()
    begins, ends = whole.index(b"\xa7rlj", 1), whole.rindex(b"\xa7rlj")
    for place in range(8 * begins, 8 * ends):  # each bit of the second record
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        read = parse_frames(bytes(flipped))
        assert [record.group_id for record in read.records] == [0, 2] and read.damaged == 1, place
    path.write_bytes(flipped)
    said: list[str] = []
    again = opened(tmp_path, say=said.append)
    assert [bool(found(again, group, step=2)) for group in range(3)] == [True, False, True]
    assert said == ["journal: 1 records of step_000002.bin are ignored: damaged, or of another version of rlgen"]  # once
    proof(f"each of the {8 * (ends - begins)} bits of a record of the journal, each time that record alone was left out")


def test_no_bytes_make_it_fail_and_none_pass_for_what_was_written(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for group in range(4):
        answer_one(journal, 1, group, completion([-0.5] * (group + 1)))
    whole = (tmp_path / "step_000001.bin").read_bytes()
    sound = parse_frames(whole).records
    rng = np.random.default_rng(0)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 6)):
            at = int(rng.integers(0, len(damaged) + 1))
            kind = rng.integers(0, 4)
            if kind == 0:
                damaged[at : at + 1] = rng.bytes(1)
            elif kind == 1:
                del damaged[at : at + int(rng.integers(1, 60))]
            elif kind == 2:
                damaged[at:at] = rng.bytes(int(rng.integers(1, 60)))
            else:
                damaged[at:at] = whole[int(rng.integers(0, len(whole))) :][: int(rng.integers(1, 99))]
        read = parse_frames(bytes(damaged))
        assert all(record in sound for record in read.records) and read.end <= len(damaged)


def test_a_journal_that_cannot_be_written_or_is_a_link_is_an_error_of_the_disk(tmp_path: Path) -> None:
    journal = opened(tmp_path / "a")
    outside = tmp_path / "outside"
    outside.write_text("somebody's")
    (tmp_path / "a" / "step_000002.bin").symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link"):
        answer_each(journal, 2)
    with pytest.raises(CheckpointError, match="is a link"):
        opened(tmp_path / "a")
    assert outside.read_text() == "somebody's"
    (tmp_path / "b").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        opened(tmp_path / "b")
    journal.folder = tmp_path / "gone"
    with pytest.raises(CheckpointError, match=r"gone/step_000001.bin cannot be written: .*free space or change run.dir"):
        answer_each(journal, 1)


def test_a_file_that_is_retired_while_a_save_flushes_it_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save is written in the background: the rollouts of the next step may be on disk before it has flushed their journal."""
    journal = opened(tmp_path)
    answer_each(journal, 2)

    def retire(path: Path) -> None:
        if path.is_file():
            path.unlink()

    before(module, "flush_to_disk", retire, monkeypatch.setattr)
    journal.flush(2)
    assert not (tmp_path / "step_000002.bin").exists()


def test_many_threads_write_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write_all(file, data[:500]))  # as a disk that is nearly full does

    def write(group: int) -> None:
        for _ in range(50):
            answer_one(journal, 1, group, completion((-0.5,) * 200))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    read = read_frames(tmp_path / "step_000001.bin")
    assert len(read.records) == 8 * 50 and read.damaged == 0


def test_another_number_of_processes_finds_all_by_group(tmp_path: Path) -> None:
    for rank in range(3):
        answer_one(opened(tmp_path, rank=rank), 1, rank, completion((-float(rank),)))
    names = ["start_000001.jsonl", "step_000001.bin", "step_000001.rank1.bin", "step_000001.rank2.bin"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    alone = opened(tmp_path)
    assert [found(alone, group)[0].logp.tolist() for group in range(3)] == [[0.0], [-1.0], [-2.0]]


def test_nothing_of_a_step_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    for step in (1, 2, 3):
        answer_each(journal, step)
    read: list[str] = []
    before(module, "read_frames", lambda path: read.append(path.name), monkeypatch.setattr)
    again = opened(tmp_path, done=1)
    assert max(again.files) == 3 and read == []
    assert found(again, step=2) and read == ["step_000002.bin"]
    assert not found(again, step=1) and not found(again, step=4) and read == ["step_000002.bin"]


def test_what_no_checkpoint_needs_is_removed_and_nothing_else(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for step in range(1, 8):
        answer_each(journal, step)
        journal.starts_from(step - 1, f"w{step - 1}")
    (tmp_path / "notes.txt").write_text("somebody's")
    (tmp_path / "step_000003.parquet").mkdir()
    (tmp_path / "step_000004.1.parquet").write_text("")
    journal.drop(0, 4)
    left = [f"start_00000{n}.jsonl" for n in (5, 6, 7)] + [f"step_00000{n}.bin" for n in (5, 6, 7)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", *left]
    journal.close()
    journal.invalidate(6)  # the sentinel has caught the engine in step 6
    answer_each(journal, 7)  # one that was under way
    left = ["start_000005.jsonl", "start_000007.jsonl", "step_000005.bin"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", *left]


@pytest.mark.parametrize(("weights", "known"), [("w2", {1: "w1", 2: "w2"}), ("other", {2: "other"})])
def test_weights_before_the_checkpoint_are_known_by_what_they_became(tmp_path: Path, weights: str, known: Any) -> None:
    """The start of a step outlives what the sentinel has caught in it."""
    journal = opened(tmp_path)
    journal.starts_from(1, "w1")
    journal.starts_from(2, "w2")
    answer_each(journal, 3)
    journal.invalidate(3)
    resumed = attempt(tmp_path, 2)
    resumed.starts_from(2, weights)
    assert resumed.weights == known and not found(resumed, step=3)


@pytest.mark.parametrize("before", ["w1", None])
def test_a_start_that_names_one_version_before_is_read(tmp_path: Path, before: str | None) -> None:
    journal = opened(tmp_path)
    journal.starts = [{"version": 2, "weights": "w2", "before": before, "gaps": [0.5]}]  # of a run that recorded gaps here
    journal.starts_from(2, "w2")
    assert journal.weights == {0: "w0", 2: "w2", **({1: before} if before else {})}


def test_a_torn_start_is_left_out_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    journal = opened(tmp_path)
    journal.starts_from(1, "w1")  # and "w0" before it
    path = tmp_path / "start_000002.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = attempt(tmp_path, 1, said.append)
    again.starts_from(1, "w1")
    assert again.weights == {1: "w1"} and said == []
    path.write_bytes(whole.replace(b"w0", b"w9") + whole)
    again = attempt(tmp_path, 1, said.append)
    again.starts_from(1, "w1")
    assert again.weights == {0: "w0", 1: "w1"} and "1 lines of start_000002.jsonl are ignored" in said[0]


def test_no_process_removes_what_the_main_one_keeps_of_what_was_caught(tmp_path: Path) -> None:
    """All of them hear of it at once, and each takes its time."""
    main, other = opened(tmp_path), opened(tmp_path)
    other.rank = 1
    for journal in (main, other):
        journal.starts_from(2, "w2")
        answer_one(journal, 3, journal.rank, completion((-1.0,)))

    class Both:
        """The main process is first at everything."""

        @staticmethod
        def run_all(work: Any) -> None:
            work()

        @staticmethod
        def on_main(work: Any) -> None:
            if work is not None and current is main:
                work()

    for current in (main, other):
        sampler = SimpleNamespace(journal=current)
        Saver.invalidate_samples(SimpleNamespace(processes=Both, sampler=sampler, finish=lambda wait: None), 3)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.glob("*_000003*")] == ["start_000003.jsonl"]
    assert [start["weights"] for start in attempt(tmp_path, 2).starts] == ["w2"]


def test_rewards_are_those_that_were_given(tmp_path: Path) -> None:
    assert opened(tmp_path).score(1, [group_of(7, 8)], rewarded) == rewarded([group_of(7, 8)])
    scored_again(tmp_path)


def test_rewards_of_a_call_are_taken_together(tmp_path: Path) -> None:
    """How many failures end a run is a share of the calls."""
    one, other = group_of(7, 8), replace(group_of(9), group_id=4)
    opened(tmp_path).score(1, [one, other], rewarded)
    path, asked = tmp_path / "step_000001.bin", []

    def noting(groups: list[Group]) -> list[Group]:
        asked.append([group.group_id for group in groups])
        return rewarded(groups)

    assert opened(tmp_path).score(1, [one, other], noting) == rewarded([one, other]) and not asked
    path.write_bytes(path.read_bytes()[: path.read_bytes().rindex(b"\xa7rlj")])  # killed between the two
    assert opened(tmp_path).score(1, [one, other], noting) == rewarded([one, other]) and asked == [[3, 4]]


def test_a_digest_of_weights_sees_the_last_bit() -> None:
    model, alone = tiny_model("qwen3"), Processes.alone()
    before = bits(model, alone)
    assert bits(model, alone) == before == bits(tiny_model("qwen3"), alone)
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    with torch.no_grad():
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    assert bits(model, alone) != before


def test_it_costs_little(tmp_path: Path) -> None:
    """Less than a quarter of what JSON would, in CPU time, the least of five tries; it is a thirtieth."""
    answer = completion(np.random.default_rng(0).normal(size=2000))
    folders = [tmp_path / str(number) for number in range(5)]

    def took(work: Callable[[Path], Any]) -> tuple[float, Any]:
        tries = []
        for folder in folders:  # in one of them Python may collect garbage
            began = time.process_time()
            made = work(folder)
            tries.append(time.process_time() - began)
        return min(tries), made

    def write(folder: Path) -> None:
        journal = opened(folder)
        for group in range(100):
            answer_one(journal, 1, group, answer)

    wrote, _ = took(write)
    places = [(group, 0) for group in range(100)]
    read, got = took(lambda folder: opened(folder).found(1, places, [REQUEST] * 100, SAMPLING, 0))
    dumped, texts = took(lambda _: [json.dumps([answer.token_ids.tolist(), answer.logp.tolist()]) for _ in range(100)])
    loaded, _ = took(lambda _: [json.loads(text) for text in texts])
    assert len(got) == 100 and 4 * wrote < dumped and 4 * read < loaded, (wrote, read, dumped, loaded)


def test_facts_that_change_no_log_prob_leave_answers_as_they_are(tmp_path: Path) -> None:
    answer_one(opened(tmp_path), 1, 0, completion((-1.0,)))
    changes = [
        {"max_model_len": 9},
        {"cache_block": 9},
        {"experts": True},
        {"model": f"/moved/{FACTS.model}"},
        {"plan": "another"},
    ]
    for change, same in zip(changes, (True, True, True, True, False), strict=True):
        again = attempt(tmp_path, facts=replace(FACTS, **change))
        again.starts_from(0, "w0")
        assert bool(found(again)) == same, change


def journal_of_a_run(folder: Path, base: str | None = None, tools: str | None = None, **engine: object) -> Journal:
    """As a trainer opens it, with an engine of these settings, an adapter on the weights of this digest, and such tools."""
    settings = {"kind": "colocated", **engine}
    recipe = recipe_for("tiny:qwen3", engine=settings)
    directory, console = SimpleNamespace(journal=folder), SimpleNamespace(say=print)
    attempt = SimpleNamespace(recipe=recipe, directory=directory, console=console, processes=Processes.alone())
    facts = replace(FACTS, plan=EnginePlan.of(recipe.engine_needs, "m").digest())
    models, open_engine = SimpleNamespace(base=base), SimpleNamespace(facts=lambda: facts, abilities=EngineCapabilities())
    both = SimpleNamespace(
        state=SimpleNamespace(models=models),
        engine=open_engine,
        position=Position(),
        engine_share=EngineShare.of(Processes.alone(), 1),
    )
    talk = None if tools is None else dialogue(digest=tools)
    code = SimpleNamespace(scorer=SimpleNamespace(rewards=[]), dialogue=talk, custom=None)
    journal = open_journal(attempt, both, code)  # type: ignore[arg-type]
    journal.starts_from(0, "w0")
    return journal


def test_answers_of_another_engine_or_base_are_sampled_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever decides log-probs beside the weights that are trained."""
    first = {"base": "b0", "extra": {"block_size": 16}, "quantization": "fp8"}
    answer_one(journal_of_a_run(tmp_path, **first), 1, 0, completion((-1.0,)))
    others = [{}, {"base": "b1"}, {"base": None}, {"extra": {"block_size": 32}}, {"extra": {}}, {"quantization": None}]
    others += [{"model_impl": "transformers"}, {"enforce_eager": False}, {"tensor_parallel_size": 2}, {"tools": "t0"}]
    for other in others:
        again = journal_of_a_run(tmp_path, **{**first, **other})
        capsys.readouterr()
        assert bool(found(again)) == (not other), other
        why = "by an engine of another kind, version or settings"
        said = f"journal: 1 of 1 answers of step 1 are sampled again: they are {why}\n"
        assert capsys.readouterr().out == (said if other else "")
