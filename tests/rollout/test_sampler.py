"""Sampling ahead: which weights answer which prompts, what is dropped, when the loop waits, and what a resumed run asks again."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
from conftest import Proof, read_jsonl
from helpers.journals import attempt
from helpers.samples import completion
from helpers.waiting import HANGS
from msgspec import structs

from rlgen.cli.train import train_command
from rlgen.engines.base import Finished
from rlgen.errors import EngineError, Fault, SentinelError
from rlgen.models.tiny import byte_tokenizer
from rlgen.rollout.frames import append_frames, read_frames
from rlgen.rollout.journal import Journal
from rlgen.rollout.sampler import Ahead, Sampler, without_stale
from rlgen.setup import trainer
from rlgen.types import Completion, Group, Prompt, Request, Sampling, Span, ids_of

STEPS, SIZE = 5, 2
Answers = Future[list[Completion]]


class Scripted:
    """Answers at once with the version that it has, or as old as it is told to be."""

    def __init__(self, age: Callable[[int], int] = lambda place: 0) -> None:
        self.version, self.age = 0, age
        self.asked: list[tuple[int, ...]] = []  # prompt ids of each call
        self.dies_after: int | None = None  # answers of a call
        self.answers = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> list[Completion]:
        self.asked.append(tuple(int(request.prompt_ids[0]) for request in requests[::SIZE]))
        answers = []
        for place, request in enumerate(requests):
            if len(answers) == self.dies_after:
                raise EngineError("killed")
            self.answers += 1
            answers.append(
                completion(
                    (7, 257),
                    (-1.0, -0.1 * self.answers),  # never the same twice, as of an engine that is not deterministic
                    request.prompt_ids,
                    version=max(0, self.version - self.age(place)),
                )
            )
            if finished:
                finished(place, answers[-1])
        return answers

    def submit(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> Answers:
        answered = Answers()
        try:
            answered.set_result(self.generate(requests, sampling, finished))
        except EngineError as error:
            answered.set_exception(error)
        return answered


def prompts_of(step: int) -> list[Prompt]:
    positions = range(2 * step, 2 * step + 2) if step <= STEPS else ()
    return [Prompt(position=at, row=at, text="", prompt_ids=ids_of([at]), columns={}) for at in positions]


SAMPLING = Sampling(max_tokens=4, temperature=1.0, stop_ids=(257,))


def journal(folder: Path, done: int = 0) -> tuple[Journal, list[str]]:
    """Of an attempt that begins after step `done` with the weights w0, w1 and so on; and what it says."""
    said: list[str] = []
    opened = attempt(folder, done, said.append)
    opened.starts_from(done, f"w{done}")
    return opened, said


def sampler(
    engine: Scripted, ahead: int, max_staleness: int = 1, of: Journal | None = None, whole: bool = False, in_flight: bool = False
) -> Sampler:
    of = of or journal(Path(mkdtemp()))[0]
    submit, most = engine.submit, max_staleness
    queue = Ahead(submit_to=submit, prompts_of=prompts_of, steps=ahead, max_staleness=most, in_flight=in_flight)
    return Sampler(
        engine=engine,  # type: ignore[arg-type]
        sampling=SAMPLING,
        group_size=SIZE,
        run_seed=0,
        tokenizer=byte_tokenizer(),
        journal=of,
        all_or_none=whole,
        ahead=queue if ahead else None,
    )


def trained(engine: Scripted, taken: Sampler, first: int = 1, last: int = STEPS) -> Iterator[tuple[int, list[Group], int]]:
    """Each step with its groups, and how many samples were dropped; the engine then takes its weights."""
    for step in range(first, last + 1):
        yield step, *taken.groups(step, prompts_of(step))
        taken.before_sync()
        taken.journal.starts_from(step, f"w{step}")
        engine.version = step


def train_until(engine: Scripted, taken: Sampler, first: int, last: int) -> list[list[Group]]:
    return [groups for _, groups, _ in trained(engine, taken, first, last)]


def killed(engine: Scripted, taken: Sampler, step: int, answers: int) -> None:
    """The engine dies in `step` after so many answers, and is there again."""
    engine.dies_after = answers
    with pytest.raises(EngineError):
        taken.groups(step, prompts_of(step))
    engine.dies_after, engine.asked = None, []


@pytest.mark.parametrize(("ahead", "expected"), [(0, [0] * STEPS), (1, [0] + [1] * (STEPS - 1))])
def test_a_step_ahead_is_one_version_old_and_strictly_on_policy_none(ahead: int, expected: list[int]) -> None:
    engine = Scripted()
    for step, groups, dropped in trained(engine, sampler(engine, ahead)):
        assert dropped == 0 and [group.group_id for group in groups] == [2 * step, 2 * step + 1]
        assert all(sample.prompt_ids.tolist() == [group.group_id] for group in groups for sample in group.samples)
        assert {step - 1 - sample.weight_version for group in groups for sample in group.samples} == {expected[step - 1]}
    assert engine.asked == [(2 * step, 2 * step + 1) for step in range(1, STEPS + 1)]  # each once, none after the last


def test_a_process_without_a_share_of_the_prompts_samples_nothing_ahead() -> None:
    taken = sampler(engine := Scripted(), ahead=1)
    taken.ahead = replace(taken.ahead, prompts_of=lambda step: ())
    assert [taken.groups(step, ()) for step in (1, 2)] == [([], 0), ([], 0)]
    assert engine.asked == [] and taken.pending == {}


@pytest.mark.fault(59)
def test_older_ones_are_dropped_and_counted(proof: Proof) -> None:
    engine = Scripted(age=lambda place: 2 if place == 1 else 0)
    taken = sampler(engine, ahead=1, max_staleness=2)
    engine.version = 3
    groups, dropped = taken.groups(4, prompts_of(4))  # trained by version 3: ages 0 and 2
    assert dropped == 0
    engine.version = 4
    groups, dropped = taken.groups(5, prompts_of(5))  # sampled by version 3 and 1, trained by version 4: ages 1 and 3
    assert dropped == 1
    assert [[sample.sample_index for sample in group.samples] for group in groups] == [[0], [0, 1]]
    assert taken.journal.kept == {5}, "its rollouts do not have the dropped one: the journal must"
    proof("one of four samples was three versions old, two are allowed")


@pytest.mark.parametrize(("ahead", "age"), [(0, 1), (0, -1), (1, -1)])
def test_an_old_sample_on_policy_and_a_newer_one_than_the_trainer_are_faults(ahead: int, age: int) -> None:
    engine = Scripted(age=lambda place: age)
    engine.version = 3
    with pytest.raises(SentinelError) as caught:
        sampler(engine, ahead).groups(4, prompts_of(4))
    assert caught.value.fault is Fault.STALE_ROLLOUTS


def test_a_failure_in_the_background_is_raised_by_the_step_it_belongs_to() -> None:
    engine = Scripted()
    taken = sampler(engine, ahead=1)
    engine.dies_after = 0
    taken.submit(taken.ahead, 2)
    engine.dies_after = None
    taken.before_sync()  # waits, and leaves the error to the step
    with pytest.raises(EngineError, match="killed"):
        taken.groups(2, prompts_of(2))


@pytest.mark.fault(59)
def test_a_step_without_samples_trains_nothing_and_is_counted(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    real = trainer.Sampler.groups

    def groups(taken: Sampler, step: int, prompts: Sequence[Prompt]) -> tuple[list[Group], int]:
        return without_stale(real(taken, step, prompts)[0], 9 if step == 2 else 0)

    monkeypatch.setattr(trainer.Sampler, "groups", groups)
    run = recipe_file.parent / "run"
    settings = ["engine={kind: transformers}", "run.steps=3", "health.no_update.steps=1"]
    train_command(recipe_file, settings, False, False, None, run)
    assert "reward/unscored and rollout/dropped_stale; " in capsys.readouterr().out.replace("\n", " "), "what the cause may be"
    first, empty, third = read_jsonl(run / "metrics.jsonl")
    assert empty["rollout/dropped_stale"] == 16 and empty["loss"] is None and empty["grad_norm"] is None
    assert empty["tokens/trained"] == empty["tokens/generated"] == 0 and empty["reward/mean"] is None
    assert (empty["updates/empty"], empty["updates/done"], third["updates/done"]) == (1, 0, 1)
    assert first["loss"] is not None and third["loss"] is not None and third["sampler/delta_max"] < 1e-4
    proof("all 16 samples of step 2 were too old: dropped, nothing trained, the run went on")


def test_what_is_in_the_journal_is_not_asked_again(tmp_path: Path) -> None:
    engine = Scripted()
    before = train_until(engine, sampler(engine, ahead=0, of=journal(tmp_path)[0]), 1, 2)
    killed(engine, sampler(engine, ahead=0, of=journal(tmp_path, 2)[0]), step=3, answers=3)  # of four
    engine.version = 1
    opened, said = journal(tmp_path, 1)  # resumed from the checkpoint of step 1
    after = train_until(engine, sampler(engine, ahead=0, of=opened), 2, 3)
    assert after[0] == before[1] and engine.asked == [(7,)]  # of step 3 the last answer of the last prompt; nothing of step 2
    assert [sample.sampler_logp[1] for group in after[1] for sample in group.samples] == pytest.approx([-0.9, -1.0, -1.1, -1.2])
    assert said == []


def test_where_neighbours_change_bits_all_are_asked_again_and_the_journal_wins(tmp_path: Path) -> None:
    engine = Scripted()
    killed(engine, sampler(engine, ahead=0, of=journal(tmp_path)[0]), step=1, answers=3)
    groups, _ = sampler(engine, ahead=0, of=journal(tmp_path)[0], whole=True).groups(1, prompts_of(1))
    assert engine.asked == [(2, 3)]
    logp = [sample.sampler_logp[1] for group in groups for sample in group.samples]
    assert logp == pytest.approx([-0.1, -0.2, -0.3, -0.7])  # the fourth of the second call
    assert len(read_frames(tmp_path / "step_000001.bin").records) == 4  # each answer once


def test_ahead_the_answers_of_earlier_weights_come_from_the_journal(tmp_path: Path) -> None:
    engine = Scripted()
    whole = train_until(engine, sampler(engine, ahead=1, of=journal(tmp_path)[0]), 1, 4)
    engine.version, engine.asked = 2, []
    opened, said = journal(tmp_path, 2)
    resumed = train_until(engine, sampler(engine, ahead=1, of=opened), 3, 5)
    assert resumed[:2] == whole[2:] and engine.asked == [] and said == []  # of step 5 too: it had been sampled
    assert {sample.weight_version for group in resumed[0] for sample in group.samples} == {1}


@pytest.mark.parametrize(("max_staleness", "left_out"), [(3, [0] * 5), (2, [0, 0, 0, 4, 4])])
def test_four_steps_ahead_the_queue_is_always_full_and_older_ones_are_dropped(max_staleness: int, left_out: list[int]) -> None:
    engine = Scripted()
    taken = sampler(engine, ahead=3, max_staleness=max_staleness, in_flight=True)
    asked: list[int] = []  # calls that the engine had got when each step was taken
    for step, groups, dropped in trained(engine, taken):
        assert dropped == left_out[step - 1]
        asked.append(len(engine.asked))
        age = min(step - 1, 3)
        assert {step - 1 - sample.weight_version for group in groups for sample in group.samples} == (set() if dropped else {age})
    assert asked == [4, 5, 5, 5, 5], "three steps beyond the one that trains, as long as there are any"
    assert engine.asked == [(2 * step, 2 * step + 1) for step in range(1, STEPS + 1)]
    assert taken.journal.kept == {step for step, count in enumerate(left_out, 1) if count}


class Flying(Scripted):
    """Samples the first token of each answer when it is asked, and the second when it is waited for, or told to land."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Callable[[], None]] = []

    def submit(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> Answers:
        first, landed = self.version, Answers()

        def mixed(answer: Completion) -> Completion:
            last = answer.weight_version
            return answer if first == last else replace(answer, spans=(Span(0, 1, first), Span(1, 2, last)))

        def told(place: int, answer: Completion) -> None:
            if finished:
                finished(place, mixed(answer))

        def land() -> None:
            if not landed.done():
                landed.set_result(list(map(mixed, self.generate(requests, sampling, told))))

        def result(timeout: float | None = None) -> list[Completion]:
            land()
            return Future.result(landed)

        landed.result = result  # type: ignore[method-assign]
        self.under_way.append(land)
        return landed

    def land(self) -> None:
        for land in self.under_way:
            land()


def spans_of(groups: list[Group]) -> set[tuple[Span, ...]]:
    return {sample.spans for group in groups for sample in group.samples}


def killed_in_flight(tmp_path: Path) -> tuple[Flying, list[list[Group]], list[list[Group]]]:
    """A run that was killed when step 3 was trained, and what of steps 4 and 5 the engine had answered: its groups by step."""
    engine = Flying()
    before = sampler(engine, ahead=2, max_staleness=2, of=journal(tmp_path)[0], in_flight=True)
    whole = train_until(engine, before, 1, 3)
    engine.version = 2  # version 3 was not sent any more
    engine.land()
    later = [before.answered(call, future.result()) for call, future in before.pending.values()]
    engine.asked.clear()
    engine.version = 1
    return engine, whole, later


def test_what_weights_sampled_that_a_resumed_run_has_not_yet_comes_from_the_journal(tmp_path: Path) -> None:
    engine, whole, later = killed_in_flight(tmp_path)
    assert [spans_of(groups) for groups in (*whole, *later)] == [
        {(Span(0, 2, 0),)},
        {(Span(0, 1, 0), Span(1, 2, 1))},
        {(Span(0, 1, 0), Span(1, 2, 2))},
        {(Span(0, 1, 1), Span(1, 2, 2))},
        {(Span(0, 2, 2),)},
    ]
    opened, said = journal(tmp_path, 1)
    resumed = train_until(engine, sampler(engine, ahead=2, max_staleness=2, of=opened, in_flight=True), 2, 5)
    assert resumed == [*whole[1:], *later] and engine.asked == [] and said == []


def test_weights_that_come_out_otherwise_refuse_what_they_sampled_and_nothing_else(tmp_path: Path) -> None:
    engine, whole, _ = killed_in_flight(tmp_path)
    opened, said = journal(tmp_path, 1)
    taken = sampler(engine, ahead=2, max_staleness=2, of=opened, in_flight=True)
    assert train_until(engine, taken, 2, 2)[0] == whole[1], "of versions 0 and 1 alone"
    opened.weights[2] = "other bits"
    engine.version = 2
    again = taken.groups(3, prompts_of(3))[0]
    # Not before version 2 was there: until then the answers of the journal might have been of it.
    assert engine.asked[0] == (6, 7) and spans_of(again) == {(Span(0, 2, 2),)}
    assert "answers of step 3 are sampled again: they are by other weights" in said[0] and {4, 5} == set(taken.pending)


class Waiting(Scripted):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: list[Answers] = []
        self.of_future: list[Callable[[], list[Completion]]] = []

    def submit(self, requests: Sequence[Request], sampling: Sampling, finished: Finished | None = None) -> Answers:
        self.futures.append(Answers())
        self.of_future.append(partial(self.generate, requests, sampling, finished))
        return self.futures[-1]

    def answer(self, call: int) -> None:
        self.futures[call].set_result(self.of_future[call]())


def saving(taken: Sampler) -> threading.Thread:
    saved = threading.Thread(target=taken.flush_pending, args=(1,), daemon=True)
    saved.start()
    return saved


def test_a_save_waits_for_what_earlier_weights_were_asked_and_for_nothing_else(tmp_path: Path) -> None:
    engine = Waiting()
    taken = sampler(engine, ahead=1, of=journal(tmp_path)[0])
    taken.submit(taken.ahead, 1)
    engine.answer(0)
    taken.groups(1, prompts_of(1))  # asks for step 2
    taken.journal.starts_from(1, "w1")
    engine.version = 1
    interrupted = Answers()
    interrupted.set_exception(KeyboardInterrupt())  # a stop, while step 2 waits for its answers
    call, waiting = taken.pending[2]
    taken.pending[2] = call, interrupted
    with pytest.raises(KeyboardInterrupt):
        taken.groups(2, prompts_of(2))
    taken.pending[2] = call, waiting
    saved = saving(taken)
    saved.join(0.2)
    assert saved.is_alive()
    engine.answer(1)
    saved.join(HANGS)
    assert not saved.is_alive()
    taken.groups(2, prompts_of(2))  # asks for step 3, of the weights of step 1
    saved = saving(taken)
    saved.join(HANGS)
    assert not saved.is_alive(), "a run that goes on after step 1 asks for step 3 again"


def test_in_flight_a_save_waits_for_nothing_and_all_of_the_journal_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, flushed = Waiting(), list[int]()
    taken = sampler(engine, ahead=3, max_staleness=3, of=journal(tmp_path)[0], in_flight=True)
    monkeypatch.setattr(Journal, "flush", lambda self, step: flushed.append(step))
    taken.submit(taken.ahead, 1)
    engine.answer(0)
    taken.groups(1, prompts_of(1))
    taken.flush_pending(1)  # returns, though nothing of steps 2 to 4 is there
    assert flushed == [2, 3, 4] and not any(future.done() for future in engine.futures[1:])
    taken.before_sync()  # neither


def test_ahead_without_the_journal_says_that_it_is_not_exact(tmp_path: Path) -> None:
    engine = Scripted()
    engine.version = 2
    opened, said = journal(tmp_path, 2)
    sampler(engine, ahead=1, of=opened).groups(3, prompts_of(3))
    assert engine.asked[0] == (6, 7) and len(said) == 1 and "4 answers of step 3 are missing" in said[0]


def groups_told(engine: Scripted, ahead: int, of: Journal | None = None) -> tuple[Sampler, list[tuple[int, Group, int]]]:
    """A sampler, and of each group that it tells of: the step, the group, and how many answers the engine had given by then."""
    told: list[tuple[int, Group, int]] = []
    taken = sampler(engine, ahead, of=of)
    taken.group_finished = lambda step, group: told.append((step, group, engine.answers))
    return taken, told


def test_a_group_is_told_of_when_its_last_answer_is_there_and_ahead_with_its_step() -> None:
    engine = Scripted()
    taken, told = groups_told(engine, ahead=0)
    groups, _ = taken.groups(1, prompts_of(1))
    assert [(step, group.group_id, answers) for step, group, answers in told] == [(1, 2, 2), (1, 3, 4)]
    assert [group for _, group, _ in told] == groups
    taken, told = groups_told(Scripted(), ahead=1)
    groups, _ = taken.groups(1, prompts_of(1))
    assert [(step, group.group_id) for step, group, _ in told] == [(1, 2), (1, 3), (2, 4), (2, 5)]
    assert [group for step, group, _ in told if step == 1] == groups


def test_a_group_with_an_answer_to_something_else_is_not_told_of() -> None:
    engine = Scripted(age=lambda place: 1 if place == 1 else 0)
    engine.version = 3
    taken, told = groups_told(engine, ahead=0)
    with pytest.raises(SentinelError) as caught:
        taken.groups(4, prompts_of(4))
    assert caught.value.fault is Fault.STALE_ROLLOUTS
    assert [group.group_id for _, group, _ in told] == [9], "the engine answers 8 and 9, and 8 is wrong"


def test_of_a_step_that_the_journal_has_nothing_is_told(tmp_path: Path) -> None:
    """Its rewards may be there, too."""
    engine = Scripted()
    killed(engine, sampler(engine, ahead=0, of=journal(tmp_path)[0]), step=1, answers=1)
    taken, told = groups_told(engine, ahead=0, of=journal(tmp_path)[0])
    taken.groups(1, prompts_of(1))
    assert told == []
    taken.journal.starts_from(1, "w1")
    engine.version = 1
    taken.groups(2, prompts_of(2))
    assert [group.group_id for _, group, _ in told] == [4, 5]


def test_a_replayed_answer_is_checked_as_a_new_one(tmp_path: Path) -> None:
    engine = Scripted()
    sampler(engine, ahead=0, of=journal(tmp_path)[0]).groups(1, prompts_of(1))
    path = tmp_path / "step_000001.bin"
    changed = [structs.replace(record, token_ids=ids_of((7, 8)).tobytes()) for record in read_frames(path).records]
    path.unlink()
    append_frames(path, changed, begun=True)
    # The checksums hold, but an answer is ended by a stop token that is not there.
    with pytest.raises(SentinelError) as caught:
        sampler(engine, ahead=0, of=journal(tmp_path)[0]).groups(1, prompts_of(1))
    assert caught.value.fault is Fault.DROPPED_STOP_TOKEN
