"""Journal of a run: stores answers and rewards since the last checkpoint, so that a resumed run does not sample them again.

    journal/step_000013.bin, step_000013.rank1.bin   answers as they finish, and rewards of groups; one file per process
    journal/step_000013.parquet                      the rollouts of a step that an earlier attempt had already trained
    journal/start_000013.jsonl                       the weights that the step starts from

When `append` returns, the record has been written to the operating system but not flushed. A killed process loses no complete
record; a record that was only partly written is ignored by the reader. After a power cut unflushed records may be missing, and
are sampled again. Records that a checkpoint relies on are flushed before the checkpoint is written (`flush`). Each record has a
checksum; a record whose checksum does not match is ignored. Once the rollouts of a step are on disk they contain its answers,
and the journal files of that step are removed (`retire`).

An answer is reused only if it was given to the same request (prompt, seed, sampling settings) by an engine of the same kind,
version and settings with bit-identical weights, of all versions that sampled it. A conversation of several turns is one answer,
written when it has ended, and is reused only with the same tools. Every other answer is sampled again, and a message says
how many and why. A step is read on demand; each process reads its own rows from the files of all processes that wrote the step.

Why not SQLite: its locks fail on many network file systems, where runs are stored; several processes would share one file.
"""

import errno
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlgen.engines.base import EngineInfo
from rlgen.files import append_bytes, flush_to_disk, remove_path, unwritable, written
from rlgen.processes import Processes
from rlgen.rollout.frames import (
    AnswerRecord,
    Line,
    Record,
    Rewards,
    append_frames,
    asked_digest,
    columns_digest,
    digest,
    mend,
    read_frames,
    rewards_digest,
    sealed,
    sound_lines,
)
from rlgen.rollout.parquet import Rollout, Stamp, parts_of, read_part, read_stamp
from rlgen.rollout.read import processes_of
from rlgen.rollout.sample import sample_of, sample_seed
from rlgen.rollout.samples import Samples
from rlgen.types import Completion, Group, Prompt, Request, Sample, Sampling

Place = tuple[int, int]  # group id, sample index
OF_NO_LOGP = ("max_model_len", "cache_block", "experts")  # facts of an engine that change no log-prob, or that its plan has, too


@dataclass(slots=True, kw_only=True)
class Journal:
    """The journal of one process: writes this process's records, and reads the records of all processes of earlier attempts."""

    folder: Path
    rank: int
    engine: str  # digest of what decides how ids become log-probs
    judge: str  # digest of the rewards
    say: Callable[[str], None]
    files: Mapping[int, Sequence[str]] = field(default_factory=dict)  # earlier attempts' files by step; the same in all ranks
    starts: Sequence[Line] = ()  # start records of earlier attempts: weights, and the weights of the versions before
    versions: int = 1  # how many earlier versions may have sampled for a step: its start record has their digests
    writes: bool = True  # the engine's answers; False: another process writes those of the engine that they share
    weights: dict[int, str] = field(default_factory=dict)  # digests by version
    begun: set[int] = field(default_factory=set)  # steps for which this process has written records
    kept: set[int] = field(default_factory=set)  # steps whose rollouts lack some samples, or experts: their files stay
    told: set[str] = field(default_factory=set)  # files whose damage was reported
    newest: dict[int, int] = field(default_factory=dict)  # by step, of `newest_version`
    started: int = 0  # the step of the last start that was written
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # engines report answers from another thread

    @classmethod
    def open(
        cls,
        folder: Path,
        done: int,
        processes: Processes,
        engine: EngineInfo,
        judge: Sequence[object],
        say: Callable[[str], None],
        beside: Sequence[object] = (),
        versions: int = 1,
        writes: bool = True,
    ) -> "Journal":
        """Lists the journal files of steps after `done` and reads the start records, in the main process for all.

        Raises CheckpointError if the folder cannot be created, or one of its files is a symbolic link.

        Args:
            done: last step that the checkpoint contains.
            engine: facts that decide log-probs; those of `OF_NO_LOGP` are left out of the digest.
            judge: values that decide the rewards.
            beside: values that decide the answers, other than the engine's facts and the trained weights.
            versions: how many versions before the present one may sample for a step (`rollout.async_steps`), at least 1.
            writes: whether this process writes its engine's answers.
        """

        def look() -> tuple[dict[int, list[str]], list[Line]]:
            with written(folder):
                folder.mkdir(exist_ok=True)
                later = [path for path in sorted(folder.iterdir()) if (journal_step(path) or 0) > done]
            if link := next((path for path in later if path.is_symlink()), None):
                raise unwritable(link, OSError(errno.ELOOP, "a link"))
            files: dict[int, list[str]] = {}
            for path in later:
                if not is_start(path):
                    files.setdefault(journal_step(path) or 0, []).append(path.name)
            return files, [line for path in later if is_start(path) for line in sound_lines(path, say)]

        of_engine = asdict(replace(engine, model=Path(engine.model).name))  # its folder may be moved
        described = {name: value for name, value in of_engine.items() if name not in OF_NO_LOGP}
        files, starts = processes.on_main(look)
        return cls(
            folder=folder,
            rank=processes.rank,
            engine=digest(sorted(described.items()), processes.device.type, *beside),
            judge=digest(*judge),
            say=say,
            files=files,
            starts=starts,
            versions=versions,
            writes=writes,
        )

    def starts_from(self, version: int, weights: str) -> None:
        """Records the digest of the weights that step `version` + 1 starts from; only the main process writes the record."""
        if version - 1 not in self.weights:  # the first start of this attempt
            for line in self.starts:
                if (line["version"], line["weights"]) == (version, weights):
                    before = line["before"]
                    before = before if isinstance(before, list) else [before]  # one version, in runs that could not have more
                    self.weights |= {version - age: of for age, of in enumerate(before, 1) if of is not None}
        self.weights[version] = weights
        self.started = version + 1
        if self.rank == 0:
            before = [self.weights.get(version - age) for age in range(1, self.versions + 1)]  # the newest first
            start = {"version": version, "weights": weights, "before": before}
            with self.lock:
                if not self.closed:
                    path = self.start_path(version + 1)
                    if path.exists():
                        mend(path)
                    append_bytes(path, sealed(start).encode(), False)

    def answered(self, step: int, sample: Sample, sampling: Sampling) -> None:
        """Writes one answer of the engine to the journal of `step`, unless another process of the same engine does so."""
        if self.writes:
            self.append(step, answer_of(sample, digest(sampling), self.engine, self.weights))

    def found(
        self, step: int, places: Sequence[Place], requests: Sequence[Request], sampling: Sampling, oldest: int
    ) -> dict[int, Completion]:
        """Returns the reusable answers, keyed by index into `requests`; all are of weights from version `oldest` on.

        Says how many stored answers were refused, and why.
        """
        found: dict[int, Completion] = {}
        refused: Counter[str] = Counter()
        wanted = set(places)
        answers: dict[Place, list[AnswerRecord]] = {}  # oldest first
        for record in self.records(step):
            if isinstance(record, AnswerRecord) and (at := (record.group_id, record.sample_index)) in wanted:
                answers.setdefault(at, []).append(record)
        with_these = digest(sampling)
        for place, (at, request) in enumerate(zip(places, requests, strict=True)):
            why = None
            for answer in reversed(answers.get(at, ())):
                why = self.differs(answer, asked_digest(request.prompt_ids, request.seed, with_these), oldest)
                if why is None:
                    found[place] = answer.completion(request.prompt_ids)
                    break
            if why is not None:
                refused[why] += 1
        for why, count in refused.items():
            self.say(f"journal: {count} of {len(requests)} answers of step {step} are sampled again: they are {why}")
        return found

    def newest_version(self, step: int) -> int:
        """Returns the newest weights that answers of earlier attempts to a step name; -1: there are no such answers."""
        if step not in self.newest:
            answers = (record for record in self.records(step) if isinstance(record, AnswerRecord))
            self.newest[step] = max((version for answer in answers for _, _, version in answer.spans), default=-1)
        return self.newest[step]

    def records(self, step: int) -> Iterator[Record]:
        """Reads the sound records of a step, those of its rollouts first; says of each file once what it ignores of it."""
        for name in sorted(self.files.get(step, ()), key=lambda name: not name.endswith(".parquet")):
            if name.endswith(".parquet"):
                yield from self.of_rollouts(self.folder / name)
                continue
            found = read_frames(self.folder / name)
            if found.damaged:
                self.say_once(name, f"{found.damaged} records of {name} are ignored")
            yield from found.records

    def of_rollouts(self, path: Path) -> Iterator[Record]:
        """Reads the rollouts of a step that an earlier attempt had trained, as the answers and rewards that they were."""
        judge, columns, groups = "", dict[str, str](), dict[int, list[Sample]]()
        for part in parts_of(path):
            found = read_part(part)
            if found is None:
                file = str(part.relative_to(self.folder))
                self.say_once(file, f"{file} is ignored")
                continue
            samples, stamp = found
            judge, columns = stamp["judge"], {**columns, **stamp["columns"]}
            weights = {int(version): of for version, of in stamp["weights"].items()}
            for sample in samples:
                if not stamp.get("experts"):  # those answers are in the journal alone
                    yield answer_of(sample, stamp["sampling"], stamp["engine"], weights)
                groups.setdefault(sample.group_id, []).append(sample)
        for group_id, own in groups.items():  # several processes may have trained the samples of a group
            own.sort(key=lambda sample: sample.sample_index)
            of = rewards_digest(judge, columns.get(str(group_id), ""), own)
            yield Rewards(group_id=group_id, of=of, samples=list(map(given_rewards, own)))

    def say_once(self, file: str, what: str) -> None:
        """Reports a problem with a file the first time the file is read, and not again."""
        if file not in self.told:
            self.told.add(file)
            self.say(f"journal: {what}: damaged, or of another version of rlgen")

    def differs(self, answer: AnswerRecord, asked: str, oldest: int) -> str | None:
        """Returns why a stored answer cannot be reused for the present request; None if it can."""
        if answer.asked != asked:
            return "to other prompts, seeds or sampling settings"
        if answer.engine != self.engine:
            return "by an engine of another kind, version or settings"
        versions = {version for _, _, version in answer.spans}
        same = all(answer.weights.get(one) == self.weights.get(one) is not None for one in versions)
        if min(versions, default=-1) < oldest or not same:
            return "by other weights: training gave other bits in this attempt"
        return None

    def score(self, step: int, groups: Sequence[Group], scorer: Callable[[list[Group]], list[Group]]) -> list[Group]:
        """Returns the groups with their rewards, from the journal if the same completions were scored before, else from `scorer`.

        Takes all rewards of a call from the journal or none, because the number of tolerated failures depends on how many samples
        are scored together.
        """
        known = self.scored(step, groups)
        if len(known) == len(groups):
            return [known[group.group_id] for group in groups]
        fresh = scorer(list(groups))
        records = [
            Rewards(group_id=group.group_id, of=self.judged(group), samples=list(map(given_rewards, scored.samples)))
            for group, scored in zip(groups, fresh, strict=True)
        ]
        self.append(step, *records)
        return fresh

    def scored(self, step: int, groups: Sequence[Group]) -> dict[int, Group]:
        """Returns the groups that earlier attempts have scored, by group id; groups without samples count as scored."""
        of = {group.group_id: self.judged(group) for group in groups} if step in self.files else {}
        known: dict[int, Sequence[Mapping[str, Any]]] = {group.group_id: () for group in groups if not group.samples}
        for record in self.records(step):
            if isinstance(record, Rewards) and of.get(record.group_id) == record.of:
                known[record.group_id] = record.samples
        scored = {}
        for group in groups:
            if group.group_id in known:
                pairs = zip(group.samples, known[group.group_id], strict=True)
                scored[group.group_id] = replace(group, samples=tuple(replace(sample, **rewards) for sample, rewards in pairs))
        return scored

    def judged(self, group: Group) -> str:
        return rewards_digest(self.judge, columns_digest(group.prompt), group.samples)

    def append(self, step: int, *records: Record) -> None:
        """Appends records to this process's file of `step`; does nothing once the journal is closed. Raises CheckpointError."""
        with self.lock:
            if not self.closed:
                append_frames(self.path(step), records, begun=step in self.begun)
                self.begun.add(step)

    def flush(self, step: int) -> None:
        """Waits until all that this process has written for `step` is on disk. Raises CheckpointError."""
        for path in (self.path(step), self.start_path(step)):
            # `retire` may remove it at any time: the rollouts, on disk by then, have its records.
            with written(path), suppress(FileNotFoundError):
                for place in (path, self.folder):
                    flush_to_disk(place)

    def close(self) -> None:
        """Stops recording: later calls of `append` write nothing."""
        with self.lock:
            self.closed = True

    def stamp(self, rollout: Rollout, sampling: Sampling) -> Stamp:
        """Returns the metadata that `found` and `score` need in order to reuse the samples of a step from its rollout files."""
        versions = np.unique(rollout.samples.spans.values[:, 2]).tolist()
        return {
            "engine": self.engine,
            "sampling": digest(sampling),
            "judge": self.judge,
            "weights": {str(version): self.weights.get(version) for version in versions},
            "kept": rollout.step in self.kept,
            **({"experts": True} if rollout.samples.experts else {}),
        }

    def retire(self, step: int, rollouts: Path) -> None:
        """Removes this process's journal file of a step, once all processes have written the rollouts, which contain its records.

        The main process also removes the files that earlier attempts left. Nothing is removed if any process dropped samples of
        the step as too old, since those samples are not in the rollouts. Raises CheckpointError.
        """
        stamps = [read_stamp(part) for part in parts_of(rollouts)]
        if any(stamp is None or stamp["kept"] for stamp in stamps):
            return
        own = {self.path(step, rank).name for rank in range(max(1, len(stamps)))}
        with self.lock, written(self.folder):
            self.path(step).unlink(missing_ok=True)
            self.begun.discard(step)
            for name in self.files.get(step, ()) if self.rank == 0 else ():
                if name not in own:
                    remove_path(self.folder / name)

    def invalidate(self, step: int) -> None:
        """Removes the records of all processes from `step` on, because the sentinel found a fault in the engine that made them.

        Call it in the main process after all processes have closed their journals. The last start record is kept.
        """
        self.drop(step, sys.maxsize, kept=self.start_path(self.started))

    def drop(self, first: int, last: int, kept: Path | None = None) -> None:
        """Removes all journal files of the steps `first` to `last`, except the file `kept`. Raises CheckpointError."""
        with written(self.folder):
            for path in list(self.folder.iterdir()):
                step = journal_step(path)
                if step is not None and first <= step <= last and path != kept:
                    remove_path(path)

    def path(self, step: int, rank: int | None = None) -> Path:
        """Returns the file to which a process, this one by default, writes the records of a step."""
        rank = self.rank if rank is None else rank
        return self.folder / (f"step_{step:06d}.rank{rank}.bin" if rank else f"step_{step:06d}.bin")

    def start_path(self, step: int) -> Path:
        """Returns the file to which the main process writes the start record of a step."""
        return self.folder / f"start_{step:06d}.jsonl"


def journal_step(path: Path) -> int | None:
    """Returns the step that a journal file belongs to; None for any other file."""
    name, _, _ = path.name.partition(".")
    number = name.removeprefix("start_" if is_start(path) else "step_")
    return int(number) if number.isdecimal() and path.suffix in (".bin", ".parquet", ".jsonl") else None


def is_start(path: Path) -> bool:
    """Returns whether a file holds start records, of the weights that a step starts from."""
    return path.name.startswith("start_") and path.suffix == ".jsonl"


def answer_of(sample: Sample, sampling: str, engine: str, weights: Mapping[int, str | None]) -> AnswerRecord:
    """Returns a sample as the engine's answer. `sampling`, `engine`, `weights`: digests, that of the weights by version."""
    return AnswerRecord(
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        asked=asked_digest(sample.prompt_ids, sample.seed, sampling),
        engine=engine,
        weights={int(span.version): weights.get(span.version) for span in sample.spans},
        token_ids=sample.completion_ids.astype("<i4", copy=False).tobytes(),
        logp=sample.sampler_logp.astype("<f4", copy=False).tobytes(),
        finish_reason=sample.finish_reason,
        spans=[(int(span.start), int(span.stop), int(span.version)) for span in sample.spans],
        cached_tokens=int(sample.cached_tokens),
        messages=sample.messages,
        counts=dict(sample.counts),
        experts=sample.experts.tobytes(),
        experts_shape=sample.experts.shape,
    )


def given_rewards(sample: Sample) -> dict[str, Any]:
    """Returns the fields of a sample that scoring fills in."""
    return {"rewards": dict(sample.rewards), "reward": sample.reward, "reward_errors": dict(sample.reward_errors)}


def is_recorded(run: Path, step: int) -> bool:
    """Returns whether files of a step are there; whether they are complete shows only when they are read."""
    return bool(processes_of(run, step) or journal_of(run, step))


def journal_of(run: Path, step: int) -> list[str]:
    """Returns the names of the journal files with answers and rewards of a step."""
    return sorted(file.name for file in (run / "journal").glob(f"step_{step:06d}.*"))


def from_journal(
    run: Path,
    step: int,
    labels: Sequence[str],
    prompt_at: Callable[[int], Prompt],
    sampling: Sampling,
    run_seed: int,
    oldest: int,
    say: Callable[[str], None],
) -> Samples:
    """Returns the samples of a step whose answers and rewards are in the journal, ordered by group and by sample.

    The journal lacks the prompts. It holds a step from its first answer until its rollouts are on disk; a step that
    `rollouts.every` leaves out, until the oldest checkpoint is a later one. Writes nothing.

    Args:
        labels: names of the rewards.
        prompt_at: returns the prompt at a position of the data's order.
        oldest: weight version; samples of older weights were dropped.
        say: receives what is damaged.
    """
    files = {step: journal_of(run, step)}
    journal = Journal(folder=run / "journal", rank=0, engine="", judge="", say=say, files=files, closed=True)
    answers: dict[int, dict[int, AnswerRecord]] = {}  # the newest ones, by group id and sample index
    rewarded: dict[int, Sequence[Mapping[str, Any]]] = {}  # the newest ones, by group id
    for record in journal.records(step):
        if isinstance(record, AnswerRecord):
            answers.setdefault(record.group_id, {})[record.sample_index] = record
        else:
            rewarded[record.group_id] = record.samples
    with_these, samples = digest(sampling), []
    for group_id in sorted(rewarded):
        prompt = prompt_at(group_id)
        every = [(one, one.completion(prompt.prompt_ids)) for _, one in sorted(answers.get(group_id, {}).items())]
        own = [(answer, completion) for answer, completion in every if completion.weight_version >= oldest]
        if len(own) != len(rewarded[group_id]):
            continue  # the caller sees that samples are missing
        for (answer, completion), given in zip(own, rewarded[group_id], strict=True):
            seed = sample_seed(run_seed, group_id, answer.sample_index)
            if answer.asked == asked_digest(prompt.prompt_ids, seed, with_these):  # else the data or the tokenizer have changed
                samples.append(replace(sample_of(prompt, answer.sample_index, seed, completion, text=""), **given))
    return Samples.of(samples, labels)
