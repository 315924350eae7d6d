"""The journal: exact to the last bit, without half a line, no longer than it is needed."""

import json
import math
import os
import random
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_sample, tiny_model

from rlgen.engines.base import Facts, Settings
from rlgen.errors import CheckpointError
from rlgen.models.weights import bits
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.rollout import journal as module
from rlgen.rollout.journal import Journal, sound_lines
from rlgen.trainers import build
from rlgen.trainers.loop import Trainer
from rlgen.types import Completion, Group, Prompt, Request, Sampling

SAMPLING = Sampling(max_tokens=64, temperature=0.7, stop_ids=(257,))
REQUEST = Request(prompt_ids=(1, 2), seed=5)


SETTINGS = Settings(dtype="float32", head_dtype="float32", logprobs_mode="processed_logprobs", vocab_size=260)
FACTS = Facts(engine="e 1", model="m", revision=None, settings=SETTINGS, stop_ids=(), max_model_len=None, cache_block=None)


def opened(folder: Path, rank: int = 0, judge: str = "judge") -> Journal:
    """Of a run that begins."""
    journal = Journal.open(folder, 0, Processes.alone(), FACTS, [judge], print)
    journal.rank = rank
    journal.starts_from(0, "w0", ())
    return journal


def completion(logp: tuple[float, ...]) -> Completion:
    ids = tuple(range(len(logp)))
    return Completion(token_ids=ids, logp=logp, finish_reason="length", weight_version=0, prompt_ids=(1, 2), cached_tokens=3)


def found(journal: Journal, group: int = 0, step: int = 1, request: Request = REQUEST) -> dict[int, Completion]:
    return journal.found(step, [(group, 0)], [request], SAMPLING, oldest=0)


def test_log_probs_come_back_to_the_last_bit(tmp_path: Path) -> None:
    rng = random.Random(0)
    singles = [struct.unpack("f", struct.pack("I", rng.getrandbits(32)))[0] for _ in range(20000)]
    doubles = [struct.unpack("d", struct.pack("Q", rng.getrandbits(64)))[0] for _ in range(20000)]
    values = tuple(value for value in (*singles, *doubles, -0.0, 5e-324, -1.17549435e-38) if math.isfinite(value))
    written = completion(values)
    opened(tmp_path).answered(1, 0, 0, REQUEST, SAMPLING, written)
    back = found(opened(tmp_path))[0]
    assert back == written and isinstance(back.token_ids, tuple)
    assert struct.pack(f"{len(values)}d", *back.logp) == struct.pack(f"{len(values)}d", *values)
    assert torch.equal(torch.tensor(back.logp).view(torch.int32), torch.tensor(values).view(torch.int32))


@pytest.mark.fault(63)
def test_half_a_line_is_left_out_and_the_next_one_stands_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Callable[[str], None]
) -> None:
    journal = opened(tmp_path)
    for group in range(3):
        journal.answered(2, group, 0, REQUEST, SAMPLING, completion((-1.0,)))
    path = tmp_path / "step_000002.jsonl"
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40):  # without its line break the last line is whole still
        path.write_bytes(whole[:cut])
        again = opened(tmp_path)
        assert [bool(found(again, group, step=2)) for group in range(3)] == [True, True, cut == len(whole) - 1]
        again.answered(2, 2, 0, REQUEST, SAMPLING, completion((-2.0,)))
        third = opened(tmp_path)
        assert [bool(found(third, group, step=2)) for group in range(3)] == [True, True, True]
        assert capsys.readouterr().out == ""  # that is what a kill does, and no damage
    proof("the last line was cut off 1 and 40 bytes before its end")


@pytest.mark.fault(65)
def test_a_changed_bit_costs_its_line_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], proof: Callable[[str], None]
) -> None:
    journal = opened(tmp_path)
    for group in range(3):
        journal.answered(2, group, 0, REQUEST, SAMPLING, completion((-1.5,)))
    path = tmp_path / "step_000002.jsonl"
    whole = path.read_bytes()
    begins, ends = whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1)
    capsys.readouterr()
    for place in range(begins, ends):  # of the second line, one bit of each byte
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        again = opened(tmp_path)
        assert [bool(found(again, group, step=2)) for group in range(3)] == [True, False, True], flipped[begins:ends]
        count = flipped.count(b"\n") - 2  # one more where the bit makes a line break
        said = f"journal: {count} lines of step_000002.jsonl are damaged, or of another rlgen: left out\n"
        assert capsys.readouterr().out == said
    proof(f"one bit of each of the {ends - begins} bytes of a line of the journal, each time that line alone was left out")


def test_a_journal_that_cannot_be_written_or_is_a_link_is_an_error_of_the_disk(tmp_path: Path) -> None:
    journal = opened(tmp_path / "a")
    outside = tmp_path / "outside"
    outside.write_text("somebody's")
    (tmp_path / "a" / "step_000002.jsonl").symlink_to(outside)
    with pytest.raises(CheckpointError, match="is a link"):
        journal.answered(2, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))
    with pytest.raises(CheckpointError, match="is a link"):
        opened(tmp_path / "a")
    assert outside.read_text() == "somebody's"
    (tmp_path / "b").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        opened(tmp_path / "b")


def test_many_threads_write_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write_all(file, data[:500]))  # as a disk that is nearly full does

    def write(group: int) -> None:
        for _ in range(50):
            journal.answered(1, group, 0, REQUEST, SAMPLING, completion((-0.5,) * 200))

    threads = [threading.Thread(target=write, args=(group,)) for group in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(sound_lines(tmp_path / "step_000001.jsonl", print))) == 1 + 8 * 50


def test_another_number_of_processes_finds_all_by_group(tmp_path: Path) -> None:
    for rank in range(3):
        opened(tmp_path, rank=rank).answered(1, rank, 0, REQUEST, SAMPLING, completion((-float(rank),)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000001.jsonl",
        "step_000001.rank1.jsonl",
        "step_000001.rank2.jsonl",
    ]
    alone = opened(tmp_path)
    assert [found(alone, group)[0].logp for group in range(3)] == [(-0.0,), (-1.0,), (-2.0,)]


def test_what_no_checkpoint_needs_is_removed_and_nothing_else(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for step in range(1, 8):
        journal.answered(step, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))
    (tmp_path / "notes.txt").write_text("somebody's")
    journal.drop(0, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", *(f"step_00000{n}.jsonl" for n in (5, 6, 7))]
    journal.close()
    journal.distrust(6)  # the sentinel has caught the engine in step 6
    journal.answered(7, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))  # one that was under way
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_000005.jsonl"]


def test_what_the_sentinel_remembers_outlives_what_it_has_caught(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.starts_from(1, "w1", [0.25])
    journal.starts_from(2, "w2", [0.25])
    journal.starts_from(2, "w2", [0.25, 0.5])  # it has looked at this sync
    journal.answered(3, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))
    journal.distrust(3)
    resumed = Journal.open(tmp_path, 2, Processes.alone(), FACTS, ["judge"], print)
    assert resumed.starts_from(2, "w2", ()) == [0.25, 0.5] and resumed.weights == {1: "w1", 2: "w2"}
    assert not found(resumed, step=3)


@pytest.mark.parametrize("removed", [False, True])
def test_a_kill_while_what_was_caught_is_removed_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    journal = opened(tmp_path)
    journal.starts_from(2, "w2", [0.25, 0.5])
    for step in (3, 4):
        journal.answered(step, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))
    drop = Journal.drop

    def killed(*given: Any) -> None:
        if removed:
            drop(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "drop", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.distrust(3)
    resumed = Journal.open(tmp_path, 2, Processes.alone(), FACTS, ["judge"], print)
    assert resumed.starts_from(2, "w2", ()) == [0.25, 0.5]


def test_on_a_full_disk_what_was_caught_is_removed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(path: Path, text: str) -> None:
        raise CheckpointError("no room for a second file")

    journal = opened(tmp_path)
    journal.starts_from(2, "w2", [0.25, 0.5])
    journal.answered(3, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))
    journal.answered(4, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))
    monkeypatch.setattr(module, "write_text", write_text)
    journal.distrust(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001.jsonl", "step_000003.jsonl"]
    assert [line["kind"] for line in sound_lines(tmp_path / "step_000003.jsonl", print)] == ["start"]


def test_no_process_removes_what_the_main_one_keeps_of_what_was_caught(tmp_path: Path) -> None:
    """All of them hear of it at once, and each takes its time."""
    main, other = opened(tmp_path), opened(tmp_path)
    other.rank = 1
    for journal in (main, other):
        journal.starts_from(2, "w2", [0.25, 0.5])
        journal.answered(3, journal.rank, 0, REQUEST, SAMPLING, completion((-1.0,)))

    class Both:
        """The main process is first at everything."""

        @staticmethod
        def agreed(work: Any) -> None:
            work()

        @staticmethod
        def on_main(work: Any) -> None:
            if work is not None and current is main:
                work()

    for current in (main, other):
        Trainer.distrust(SimpleNamespace(processes=Both, journal=current), 3)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.glob("step_000003*")] == ["step_000003.jsonl"]
    assert Journal.open(tmp_path, 2, Processes.alone(), FACTS, ["judge"], print).starts_from(2, "w2", ()) == [0.25, 0.5]


def test_weights_before_the_checkpoint_are_known_by_what_they_became(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.starts_from(1, "w1", [0.25])
    journal.starts_from(2, "w2", [0.25, 0.5])
    for weights, gaps, known in (("w2", [0.25, 0.5], {1: "w1", 2: "w2"}), ("other", (), {2: "other"})):
        resumed = Journal.open(tmp_path, 2, Processes.alone(), FACTS, ["judge"], print)
        assert resumed.starts_from(2, weights, ()) == gaps and resumed.weights == known


def group_of(*ids: int, answer: str = "7") -> Group:
    prompt = Prompt(position=3, row=3, text="", prompt_ids=(5, 6), columns={"answer": answer})
    samples = tuple(make_sample(group_id=3, sample_index=at, completion_ids=(one, 259)) for at, one in enumerate(ids))
    return Group(group_id=3, prompt=prompt, samples=samples)


def rewarded(groups: list[Group]) -> list[Group]:
    return [
        replace(group, samples=tuple(replace(s, rewards={"a": 1 / 3, "b": None}, reward=1 / 3) for s in group.samples))
        for group in groups
    ]


def test_rewards_are_those_that_were_given(tmp_path: Path) -> None:
    first = opened(tmp_path).score(1, [group_of(7, 8)], rewarded)

    def never(groups: list[Group]) -> list[Group]:
        raise AssertionError("scored again")

    assert opened(tmp_path).score(1, [group_of(7, 8)], never) == first == rewarded([group_of(7, 8)])
    for other in (
        lambda: opened(tmp_path).score(1, [group_of(7, 9)], never),  # a neighbour is another one
        lambda: opened(tmp_path, judge="edited").score(1, [group_of(7, 8)], never),
        lambda: opened(tmp_path).score(1, [group_of(7, 8, answer="corrected")], never),
        lambda: opened(tmp_path).score(2, [group_of(7, 8)], never),
    ):
        with pytest.raises(AssertionError, match="scored again"):
            other()


def test_rewards_of_a_call_are_taken_together(tmp_path: Path) -> None:
    """How many failures end a run is a share of the calls."""
    one, other = group_of(7, 8), replace(group_of(9), group_id=4)
    journal = opened(tmp_path)
    journal.score(1, [one, other], rewarded)
    path, asked = tmp_path / "step_000001.jsonl", []

    def noting(groups: list[Group]) -> list[Group]:
        asked.append([group.group_id for group in groups])
        return rewarded(groups)

    assert opened(tmp_path).score(1, [one, other], noting) == rewarded([one, other]) and not asked
    whole = path.read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(whole) if '"group_id": 4' in line)
    path.write_text("".join(whole[:last]))  # killed between the two lines
    assert opened(tmp_path).score(1, [one, other], noting) == rewarded([one, other]) and asked == [[3, 4]]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.folder = tmp_path / "gone"
    with pytest.raises(CheckpointError, match=r"gone/step_000001.jsonl cannot be written: .*free space or change run.dir"):
        journal.answered(1, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))


def test_a_digest_of_weights_sees_the_last_bit() -> None:
    model, alone = tiny_model("qwen3"), Processes.alone()
    before = bits(model, alone)
    assert bits(model, alone) == before == bits(tiny_model("qwen3"), alone)
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    with torch.no_grad():
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    assert bits(model, alone) != before


class Opened(Exception):
    """What the trainer's journal is."""


def journal_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, base: str | None = None, **engine: object) -> Journal:
    """As a trainer opens it, with an engine of these settings and an adapter on the weights of this digest."""
    settings = {"kind": "colocated", **engine}
    rest = {"data": {"source": "task:sort"}, "rewards": [{"use": "exact_match"}]}
    recipe = Recipe.model_validate({"run": {"name": "r"}, "model": {"path": "tiny:qwen3"}, "engine": settings, **rest})
    sides = SimpleNamespace(base=base, done=0, probe=SimpleNamespace(engine=SimpleNamespace(facts=lambda: FACTS)))
    directory, console, scorer = SimpleNamespace(journal=folder), SimpleNamespace(say=print), SimpleNamespace(rewards=[])
    real = Journal.open

    def opened(*values: Any) -> None:
        raise Opened(real(*values))

    with monkeypatch.context() as patch, pytest.raises(Opened) as caught:
        patch.setattr(Journal, "open", opened)
        build.assemble(recipe, directory, console, Processes.alone(), None, scorer, sides)  # type: ignore[arg-type]
    journal: Journal = caught.value.args[0]
    journal.starts_from(0, "w0", ())
    return journal


def test_answers_of_another_engine_or_base_are_sampled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever decides log-probs beside the weights that are trained."""
    first = {"base": "b0", "extra": {"block_size": 16}, "quantization": "fp8"}
    journal_of_a_run(tmp_path, monkeypatch, **first).answered(1, 0, 0, REQUEST, SAMPLING, completion((-1.0,)))
    for other in ({}, {"base": "b1"}, {"base": None}, {"extra": {"block_size": 32}}, {"extra": {}}, {"quantization": None}):
        again = journal_of_a_run(tmp_path, monkeypatch, **{**first, **other})
        capsys.readouterr()
        assert bool(found(again)) == (not other), other
        said = "journal: 1 of 1 answers of step 1 are by an engine of another kind, version or settings: sampled anew\n"
        assert capsys.readouterr().out == (said if other else "")


def test_a_line_is_plain_json(tmp_path: Path) -> None:
    opened(tmp_path).answered(1, 4, 0, REQUEST, SAMPLING, completion((-0.1,)))
    line = json.loads((tmp_path / "step_000001.jsonl").read_text().splitlines()[1])
    assert (line["kind"], line["group_id"], line["logp"], line["weight_version"], line["weights"]) == (
        "answer",
        4,
        [-0.1],
        0,
        "w0",
    )
