"""What was sampled and scored since the last checkpoint: a run that is killed samples none of it again.

`journal/step_000013.jsonl` has one line for each answer, written when it is finished, one for each group that was scored, and
one for the weights that the step starts from. Of several processes each writes its own, `step_000013.rank1.jsonl`.

A line is in the hands of the system when `append` returns: a killed process loses none, and half a line, which ends the file of
one that was killed while it wrote, is left out. A power cut may lose what was not flushed: it is sampled again. What a checkpoint
relies on is flushed before it is written (`flush`). Each line ends with its checksum: one that a disk has changed is left out.

An answer is taken from the journal when it was given to the same request (prompt, seed, sampling settings) by an engine of the
same kind, version and settings with the same weights, bit for bit. All else is sampled anew, and said.
"""

import hashlib
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rlgen.engines.base import Facts
from rlgen.errors import CheckpointError
from rlgen.files import append_text, flush, read_bytes, write_text, written
from rlgen.processes import Processes
from rlgen.types import Completion, Group, Request, Sample, Sampling

ANSWER = [name.name for name in fields(Completion) if name.name != "prompt_ids"]  # those are in the request

Line = dict[str, Any]
Key = tuple[int, int, int]  # step, group, place in the group


@dataclass(slots=True, kw_only=True)
class Journal:
    """The journal of one process. What others have written is read once, when it is opened, and is the same for all."""

    folder: Path
    rank: int
    engine: str  # digest of what decides how ids become log-probs
    judge: str  # digest of the rewards
    say: Callable[[str], None]
    answers: dict[Key, list[Line]] = field(default_factory=dict)  # of earlier attempts, the last one last
    scores: dict[tuple[int, int], list[Line]] = field(default_factory=dict)  # by step and group
    starts: list[Line] = field(default_factory=list)  # weights, and what they came from
    weights: dict[int, str] = field(default_factory=dict)  # digests by version
    newest: int = 0  # step of the newest answers of earlier attempts, the same in all processes
    begun: set[int] = field(default_factory=set)  # steps of which this process has written
    started: tuple[int, Line] | None = None  # the last start that was written, and its step
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # answers come in another thread

    @classmethod
    def open(
        cls,
        folder: Path,
        done: int,
        processes: Processes,
        engine: Facts,
        judge: Sequence[object],
        say: Callable[[str], None],
        beside: Sequence[object] = (),
    ) -> "Journal":
        """Reads what is there of the steps after `done`.

        Args:
            judge: what decides rewards.
            beside: what decides answers, but the engine's facts and the trained weights.

        Raises:
            CheckpointError: the folder cannot be made, or a file in it is a link.
        """

        def read() -> list[tuple[int, Line]]:
            with written(folder):
                folder.mkdir(exist_ok=True)
                files = [(step, path) for path in sorted(folder.iterdir()) if (step := step_of(path)) is not None and step > done]
                return [(step, line) for step, path in files for line in sound_lines(path, say)]

        described = {name: value for name, value in asdict(engine).items() if name not in ("max_model_len", "cache_block")}
        journal = cls(
            folder=folder,
            rank=processes.rank,
            engine=digest(sorted(described.items()), processes.device.type, *beside),
            judge=digest(*judge),
            say=say,
        )
        for step, line in processes.on_main(read):
            if line["kind"] == "answer":
                journal.answers.setdefault((step, line["group_id"], line["sample_index"]), []).append(line)
                journal.newest = max(journal.newest, step)
            elif line["kind"] == "rewards":
                journal.scores.setdefault((step, line["group_id"]), []).append(line)
            elif line["kind"] == "start":
                journal.starts.append(line)
        return journal

    def starts_from(self, version: int, weights: str, gaps: Sequence[float]) -> Sequence[float]:
        """Takes down the weights that step `version` + 1 starts from; the main process writes them.

        Args:
            weights: their digest, see `models.weights.bits`.
            gaps: what the sentinel remembers of the batches before.

        Returns:
            What it remembered when an earlier attempt had these weights, or `gaps`.
        """
        before = self.weights.get(version - 1)
        if before is None:
            for line in self.starts:
                if (line["version"], line["weights"]) == (version, weights):
                    before, gaps = line["before"] or before, line["gaps"]
            if before is not None:
                self.weights[version - 1] = before
        self.weights[version] = weights
        if self.rank == 0:
            start = {"kind": "start", "version": version, "weights": weights, "before": before, "gaps": list(gaps)}
            self.started = (version + 1, start)
            self.append(version + 1, start)
        return gaps

    def answered(self, step: int, group_id: int, sample_index: int, request: Request, sampling: Sampling, c: Completion) -> None:
        """Writes one answer."""
        self.append(
            step,
            {
                "kind": "answer",
                "group_id": group_id,
                "sample_index": sample_index,
                "asked": digest(c.prompt_ids, request.seed, sampling),  # the prompt that was answered, says the engine
                "engine": self.engine,
                "weights": self.weights.get(c.weight_version),
                **{name: getattr(c, name) for name in ANSWER},
            },
        )

    def found(
        self, step: int, places: Sequence[tuple[int, int]], requests: Sequence[Request], sampling: Sampling, oldest: int
    ) -> dict[int, Completion]:
        """Answers by place in the call, of weights from version `oldest` on."""
        found: dict[int, Completion] = {}
        refused: dict[str, int] = {}
        for place, (at, request) in enumerate(zip(places, requests, strict=True)):
            why = None
            for line in reversed(self.answers.pop((step, *at), [])):
                why = self.differs(line, digest(request.prompt_ids, request.seed, sampling), oldest)
                if why is None:
                    found[place] = completion_of(line, request)
                    break
            if why is not None:
                refused[why] = refused.get(why, 0) + 1
        for why, count in refused.items():
            self.say(f"journal: {count} of {len(requests)} answers of step {step} are {why}: sampled anew")
        return found

    def differs(self, line: Line, asked: str, oldest: int) -> str | None:
        """Why an answer is not one to what is asked now."""
        if line["asked"] != asked:
            return "to other prompts, seeds or sampling settings"
        if line["engine"] != self.engine:
            return "by an engine of another kind, version or settings"
        version = line["weight_version"]
        if version < oldest or line["weights"] is None or line["weights"] != self.weights.get(version):
            return "by other weights: training did not come to the same bits here"
        return None

    def score(self, step: int, groups: Sequence[Group], scorer: Callable[[list[Group]], list[Group]]) -> list[Group]:
        """The groups with their rewards: from the journal if the same completions were scored, else from `scorer`.

        All of a call or none: how many failures are tolerated depends on how many are scored together.
        """
        known = [scored for group in groups if (scored := self.scored(step, group)) is not None]
        if len(known) == len(groups):
            return known
        fresh = scorer(list(groups))
        lines = [
            {
                "kind": "rewards",
                "group_id": group.group_id,
                "of": self.digest_of(group),
                "samples": [changed(*pair) for pair in zip(group.samples, scored.samples, strict=True)],
            }
            for group, scored in zip(groups, fresh, strict=True)
        ]
        self.append(step, *lines)
        return fresh

    def scored(self, step: int, group: Group) -> Group | None:
        for line in reversed(self.scores.pop((step, group.group_id), [])):
            if line["of"] == self.digest_of(group):
                pairs = zip(group.samples, line["samples"], strict=True)
                return replace(group, samples=tuple(replace(sample, **values) for sample, values in pairs))
        return None

    def digest_of(self, group: Group) -> str:
        """Of all that rewards depend on: those of one sample may depend on its neighbours."""
        columns = sorted(group.prompt.columns.items())
        return digest(
            self.judge, columns, [(s.sample_index, s.prompt_ids, s.completion_ids, s.finish_reason) for s in group.samples]
        )

    def append(self, step: int, *lines: Line) -> None:
        """Raises CheckpointError."""
        text = "".join(map(sealed, lines))
        with self.lock:
            if self.closed:
                return
            path = self.path(step)
            if step not in self.begun and path.exists():
                mend(path)
            append_text(path, text, False)
            self.begun.add(step)

    def flush(self, step: int) -> None:
        """Waits until what this process has written of `step` is on disk. Raises CheckpointError."""
        path = self.path(step)
        with written(path):
            for place in (path, self.folder) if path.exists() else ():
                flush(place)

    def close(self) -> None:
        """Takes down no more."""
        with self.lock:
            self.closed = True

    def distrust(self, step: int) -> None:
        """Forgets all that any process has of the steps from `step` on: it was sampled by an engine that the sentinel has caught.

        For the main process, when all have closed theirs. What the sentinel remembers stays. Raises CheckpointError.
        """
        if self.started is None or self.started[0] < step:
            self.drop(step, sys.maxsize)
            return
        path, start = self.path(self.started[0]), sealed(self.started[1])
        try:
            write_text(path, start)  # first, and whole: a kill in between does not cost it
            self.drop(step, sys.maxsize, path)
        except CheckpointError:  # on a full disk what is removed makes room
            self.drop(step, sys.maxsize)
            append_text(path, start)

    def drop(self, first: int, last: int, kept: Path | None = None) -> None:
        """Removes what there is of the steps from `first` to `last`, but for the file `kept`. Raises CheckpointError."""
        with written(self.folder):
            for path in list(self.folder.iterdir()):
                step = step_of(path)
                if step is not None and first <= step <= last and path != kept:
                    path.unlink(missing_ok=True)

    def path(self, step: int) -> Path:
        return self.folder / (f"step_{step:06d}.rank{self.rank}.jsonl" if self.rank else f"step_{step:06d}.jsonl")


def step_of(path: Path) -> int | None:
    number = path.name.partition(".")[0].removeprefix("step_")
    return int(number) if path.suffix == ".jsonl" and number.isdecimal() else None


def sealed(line: Line) -> str:
    """One line with the checksum of all that stands before it."""
    text = json.dumps(line)
    return f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}\n'


def sound_lines(path: Path, say: Callable[[str], None]) -> Iterator[Line]:
    """What was written. What a kill has cut off at the end is left out; what a disk has changed too, and that is said."""
    *whole, last = read_bytes(path).split(b"\n")
    lines = [line for text in whole if (line := parsed(text)) is not None]
    if damaged := len(whole) - len(lines):
        say(f"journal: {damaged} lines of {path.name} are damaged, or of another rlgen: left out")
    yield from lines
    if (line := parsed(last)) is not None:
        yield line


def parsed(text: bytes) -> Line | None:
    """None: it is not what `sealed` has made."""
    try:
        line = json.loads(text)
        made = sealed({key: value for key, value in line.items() if key != "crc32"})
    except (ValueError, AttributeError, RecursionError):
        return None
    return line if made.encode() == text + b"\n" else None


def mend(path: Path) -> None:
    """Ends the last line, or takes it away: whoever wrote it may have been killed. Raises CheckpointError."""
    with written(path):
        content = read_bytes(path)
        last = content[content.rfind(b"\n") + 1 :]
        if last and parsed(last) is None:
            os.truncate(path, len(content) - len(last))
        elif last:
            append_text(path, "\n", False)


def completion_of(line: Line, request: Request) -> Completion:
    values: Any = {name: tuple(value) if isinstance(value := line[name], list) else value for name in ANSWER}
    return Completion(prompt_ids=request.prompt_ids, **values)


def changed(before: Sample, after: Sample) -> Line:
    """What scoring has filled in, whatever fields that are."""
    pairs = {name.name: (getattr(before, name.name), getattr(after, name.name)) for name in fields(Sample)}
    return {name: new for name, (old, new) in pairs.items() if old != new}


def digest(*things: object) -> str:
    """Of values whose `repr` says all there is to them: numbers, texts, tuples, dataclasses."""
    return hashlib.sha256(repr(things).encode()).hexdigest()[:16]
