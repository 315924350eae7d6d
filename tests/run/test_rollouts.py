"""Rollouts on disk: every value comes back; a file is whole or not there; none goes that a resume may need."""

import errno
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.before import before
from helpers.rollouts import rollout_writer
from helpers.samples import make_sample
from helpers.waiting import HANGS

from rlgen.analysis.pack import size_of
from rlgen.cli.train import train_command
from rlgen.errors import CheckpointError
from rlgen.models.tiny import byte_tokenizer
from rlgen.recipe import load_recipe
from rlgen.rollout import parquet
from rlgen.rollout.parquet import Rollout, read_part
from rlgen.rollout.read import read_rollouts, rollout_steps
from rlgen.rollout.samples import Ragged, Samples
from rlgen.run import rollouts as module
from rlgen.run.compare import first_difference
from rlgen.run.rollouts import RolloutWriter
from rlgen.types import Prompt, Sample, Span, ids_of, logp_of

TEXT = byte_tokenizer().decode([40, 41])
LABELS = ("exact match", "länge.x")
ODD: dict[str, Callable[[int], Any]] = {
    "step": lambda at: f"step {at}",  # named as a column of the file
    "data_step": lambda at: at,
    "prompt": lambda at: [{"role": "user", "content": f"sort {at}"}],
    "answer": lambda at: None if at % 2 else str(at),
    "mixed": lambda at: [1, "one", None, [1.5], {"a": 1}, True][at % 6],
    "number": lambda at: [1, 2.5][at % 2],
    "nothing": lambda at: None,
    "nested": lambda at: {"tests": [{"in": "1", "out": [at]}], "deep": {"er": None if at % 3 else "x"}},
    "keys": lambda at: {f"key{at}": at},
    "empty": lambda at: {},
    "large": lambda at: 2**70 + at,
    "nan": lambda at: float("nan"),
    "tuple": lambda at: (at, at + 1),
    "ünïcode 名": lambda at: "\U0001f600é\x00",
    "half": lambda at: "\ud800",
    "": lambda at: at,
    "a.b": lambda at: b"\xff\x00",
}
KEPT_AS_TEXT = ("mixed", "keys", "empty", "large", "half")


def odd_prompt(position: int, columns: Mapping[str, Callable[[int], Any]] = ODD) -> Prompt:
    """A prompt of whatever a data set may have; `columns` are those that a test needs."""
    values = {name: value(position) for name, value in columns.items()}
    return Prompt(position=position, row=position, text=f"prompt {position} \ud800", prompt_ids=ids_of((1, 2)), columns=values)


def sample(group: int, at: int, ids: tuple[int, ...] = (40, 41, 259), **changes: Any) -> Sample:
    values: dict[str, Any] = {
        **{"group_id": group, "sample_index": at, "prompt_ids": (1, 2, group), "completion_ids": ids, "completion": ""},
        **{"sampler_logp": [-0.1 * (place + 1) for place in range(len(ids))], "weight_version": 3, "seed": 2**61 + at},
        **{"rewards": {LABELS[0]: 1.0, LABELS[1]: 1 / 3}, "reward": 1 / 3, "cached_tokens": at},
    }
    return make_sample(**{**values, **changes})


ROWS = (
    sample(5, 1, reward=None, rewards={LABELS[0]: None, LABELS[1]: -0.0}, reward_errors={LABELS[0]: "timeout: ü"}),
    sample(5, 0, (7, 8, 9, 10, 11), spans=(Span(0, 2, 3), Span(4, 5, 4)), finish_reason="length"),
    sample(2, 0, sampler_logp=np.array([0x7FC12345, 0x80000000, 0x00000001], dtype=np.uint32).view(np.float32)),
    sample(2, 1, (259,)),
)


def rollout(step: int = 4, rows: tuple[Sample, ...] = ROWS) -> Rollout:
    samples = Samples.of(rows, LABELS)
    trained = np.array([row.group_id != 2 for row in rows], dtype=bool)
    logp = [row.sampler_logp * np.float32(1.5) if trains else logp_of(()) for row, trains in zip(rows, trained, strict=True)]
    return Rollout(
        step=step,
        samples=samples,
        policy_logp=Ragged.of(logp, np.float32),
        advantage=np.linspace(-1, 1, len(rows)),
        trained=trained,
    )


def writer(run: Path, **changes: Any) -> RolloutWriter:
    return rollout_writer(run, **{"prompt_at": odd_prompt, **changes})


def wrote(run: Path, *steps: Rollout, **changes: Any) -> Path:
    opened = writer(run, **changes)
    for step in steps:
        opened.write(step)
    opened.wait()
    opened.close()
    return run


def test_every_value_comes_back(tmp_path: Path) -> None:
    run = wrote(tmp_path, rollout())
    rows = read_rollouts(run, 4).to_pylist()
    assert [(row["group_id"], row["sample_index"]) for row in rows] == [(2, 0), (2, 1), (5, 0), (5, 1)]
    assert [row["trained"] for row in rows] == [False, False, True, True] and {row["step"] for row in rows} == {4}
    assert [row["advantage"] for row in rows] == np.linspace(-1, 1, 4)[[2, 3, 1, 0]].tolist()
    assert rows[0]["policy_logp"] is None
    assert rows[3]["policy_logp"] == [float(np.float32(-0.1 * n) * np.float32(1.5)) for n in (1, 2, 3)]
    texts = [TEXT, "", byte_tokenizer().decode([7, 8, 9, 10, 11]), TEXT]  # without messages, a completion is one turn
    assert [row["completion"] for row in rows] == texts
    assert rows[0]["prompt"] == "prompt 2 ?" and rows[2]["prompt_ids"] == [1, 2, 5]
    assert rows[2]["loss_mask"] == [True, True, False, False, True]
    assert rows[2]["spans"] == [{"start": 0, "stop": 2, "version": 3}, {"start": 4, "stop": 5, "version": 4}]
    assert [row["weight_version"] for row in rows] == [3] * 4 and rows[2]["finish_reason"] == "length"
    assert rows[3]["rewards"] == {LABELS[0]: None, LABELS[1]: 0.0} and math.copysign(1, rows[3]["rewards"][LABELS[1]]) == -1
    assert rows[3]["reward"] is None
    assert rows[3]["reward_errors"] == [(LABELS[0], "timeout: ü")] and rows[0]["reward_errors"] == []
    assert rows[0]["seed"] == 2**61 and rows[3]["cached_tokens"] == 1
    part = read_part(run / "rollouts" / "step_000004.parquet")
    assert part is not None
    samples = part[0]
    expected = Samples.of([ROWS[2], ROWS[3], ROWS[1], ROWS[0]], LABELS)
    assert samples.sampler_logp.values.tobytes() == expected.sampler_logp.values.tobytes()  # NaN and -0.0 to the last bit
    assert [replace(samples[row], sampler_logp=logp_of(())) for row in (1, 2, 3)] == [
        replace(row, sampler_logp=logp_of(())) for row in (ROWS[3], ROWS[1], ROWS[0])
    ]


def test_the_data_sets_columns_come_back_under_their_names(tmp_path: Path) -> None:
    table = read_rollouts(wrote(tmp_path, rollout()), 4)
    rows = table.to_pylist()
    named = {**dict(zip(ODD, ODD, strict=True)), "step": "data_data_step", "prompt": "data_prompt"}
    for name, value in ODD.items():
        for row in rows:
            expected, got = value(row["group_id"]), row[named[name]]
            if name in KEPT_AS_TEXT:
                assert table.schema.field(name).type == pa.string()
                assert got is None if expected is None else got == parquet.json.dumps(expected)
            elif name == "nan":
                assert math.isnan(got)
            else:
                assert got == (list(expected) if isinstance(expected, tuple) else expected), name
    assert pa.types.is_struct(table.schema.field("nested").type) and pa.types.is_list(table.schema.field("tuple").type)


def test_parts_of_several_processes_are_one_table(tmp_path: Path) -> None:
    """Whatever the rows of each have, and if one has none."""
    one = read_rollouts(wrote(tmp_path / "one", rollout()), 4)
    done: list[tuple[int, int]] = []
    for rank, rows in enumerate((ROWS[:1], (), ROWS[1:])):
        told = lambda step, path, rank=rank: done.append((rank, step))  # noqa: E731
        wrote(tmp_path / "three", rollout(rows=rows), rank=rank, world=3, on_disk=told)
    assert done == [(2, 4)], "the last one sees that the step is whole"
    folder = tmp_path / "three" / "rollouts" / "step_000004.parquet"
    assert sorted(path.name for path in folder.iterdir()) == [f"part-0000{rank}.parquet" for rank in range(3)]
    three = read_rollouts(tmp_path / "three", 4)
    differing = [
        name for name in one.column_names if name != "advantage" and str(one[name].to_pylist()) != str(three[name].to_pylist())
    ]
    assert differing == [] and one.schema == three.schema
    assert len({str(pq.read_schema(part).remove_metadata()) for part in folder.iterdir()}) == 1, (
        "other readers take the schema of one of them"
    )
    assert len(pd.read_parquet(folder)) == 4 and len(pq.read_table(folder)) == 4
    (folder / "part-00000.parquet").unlink()  # killed before it was written
    (folder / ".part-00000.parquet.17").write_bytes(b"PAR1 half")
    assert [row["group_id"] for row in read_rollouts(tmp_path / "three", 4).to_pylist()] == [2, 2, 5]


def test_a_process_that_was_first_hears_of_the_others_with_its_next_step_or_its_end(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    first, second = (
        writer(tmp_path, rank=rank, world=2, on_disk=lambda step, path, rank=rank: done.append((rank, step))) for rank in (0, 1)
    )
    for step in (1, 2):
        for one in (first, second):
            one.write(rollout(step))
            one.wait()
    assert done == [(1, 1), (0, 1), (1, 2)]
    first.close()
    second.close()
    assert done == [(1, 1), (0, 1), (1, 2), (0, 2)]


def test_parts_of_other_types_are_read_as_text(tmp_path: Path) -> None:
    """A value that none of the first prompts was like."""
    prompt_at = partial(odd_prompt, columns={"late": lambda at: "text" if at == 1000 else 1})
    wrote(tmp_path, rollout(rows=ROWS[:1]), rank=0, world=2, prompt_at=prompt_at)
    wrote(tmp_path, rollout(rows=(sample(1000, 0),)), rank=1, world=2, prompt_at=prompt_at)
    assert read_rollouts(tmp_path, 4)["late"].to_pylist() == ["1", '"text"']


def test_which_steps_are_written_and_which_stay(tmp_path: Path) -> None:
    needed = [0]
    opened = writer(tmp_path, every=2, keep=2, needed=lambda: needed[0])
    for step in range(1, 10):
        needed[0] = 4 if step == 9 else 0  # no checkpoint is there before
        opened.write(rollout(step), always=step in (5, 9))
        opened.wait()
        left = rollout_steps(tmp_path / "rollouts")
        assert left == ([5, 6, 8, 9] if step == 9 else [at for at in (2, 4, 5, 6, 8) if at <= step])
    opened.close()
    assert rollout_steps(wrote(tmp_path / "none", rollout(2), every=0) / "rollouts") == []


def test_a_step_is_written_behind_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is being written and one waits; a third has the loop wait."""
    go, began = threading.Semaphore(0), threading.Event()

    def waits(*values: object) -> None:
        began.set()
        go.acquire()

    before(module, "write_part", waits, monkeypatch.setattr)
    opened = writer(tmp_path)
    opened.write(rollout(1))
    opened.write(rollout(2))
    assert began.wait(HANGS) and rollout_steps(tmp_path / "rollouts") == []
    third = threading.Thread(target=opened.write, args=(rollout(3),))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    for _ in range(3):
        go.release()
    third.join(HANGS)
    opened.wait()
    assert rollout_steps(tmp_path / "rollouts") == [1, 2, 3]
    opened.close()


def full(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if "/rollouts/" in str(path) and flags & os.O_CREAT:
        raise OSError(errno.ENOSPC, "No space left on device")
    return OPEN(path, flags, mode, dir_fd=dir_fd)


OPEN = os.open


def test_what_goes_wrong_in_the_thread_is_raised_where_the_loop_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    opened = writer(tmp_path, on_disk=lambda step, path: told.append(step))
    opened.write(rollout(1))
    opened.wait()
    monkeypatch.setattr(os, "open", full)
    opened.write(rollout(2))
    for _ in range(2):  # a checkpoint must not be written after it either
        with pytest.raises(CheckpointError, match=r"step_000002\.parquet cannot be written: .*No space left.*free space"):
            opened.wait()
    with pytest.raises(CheckpointError, match="No space left"):
        opened.write(rollout(3))
    opened.close()
    assert told == [1] and [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.parquet"]


def test_a_disk_that_is_full_ends_the_run_and_no_checkpoint_is_without_its_rollouts(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", full)
    run = recipe_file.parent / "run"
    with pytest.raises(CheckpointError, match="No space left") as caught:
        train_command(recipe_file, ["engine={kind: transformers}", "checkpoint.every=1"], False, False, None, run)
    assert caught.value.exit_code == 8 and list((run / "checkpoints").glob("step_*")) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = wrote(tmp_path, rollout()) / "rollouts" / "step_000004.parquet"
    whole = bytearray(path.read_bytes())
    at = whole.index(ROWS[0].prompt_ids.tobytes()[:1], 40)
    for place in range(at, at + 400):
        whole[place] ^= 255
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"step_000004\.parquet cannot be read .* damaged"):
        read_rollouts(tmp_path, 4)
    path.write_bytes(whole[:-100])  # cut: its metadata, which a report reads, are gone
    with pytest.raises(CheckpointError, match=r"step_000004\.parquet cannot be read .* damaged"):
        size_of(path)
    with pytest.raises(CheckpointError, match=r"step_000005\.parquet does not exist"):
        read_rollouts(tmp_path, 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampler_logp": logp_of((-0.1, -0.2, np.nextafter(np.float32(-0.3), np.float32(0))))}, "sample 3, sampler_logp"),
        ({"reward": 0.0}, "sample 3, reward: None and 0.0"),
        ({"rewards": {LABELS[0]: None, LABELS[1]: 0.0}}, "sample 3, rewards"),  # the sign of zero
        ({"completion_ids": ids_of((40, 42, 259))}, "sample 3, completion: "),
        ({"spans": (Span(0, 2, 3),)}, "sample 3, loss_mask"),
        ({"reward_errors": {}}, "sample 3, reward_errors"),
        ({"cached_tokens": 99}, None),
    ],
)
def test_two_runs_with_other_rollouts_differ(tmp_path: Path, change: dict[str, Any], said: str | None) -> None:
    left, right = tmp_path / "left", tmp_path / "right"
    wrote(left, rollout(), rollout(5))
    wrote(right, rollout(rows=(replace(ROWS[0], **change), *ROWS[1:])), rollout(5))
    difference = first_difference(left, right)
    assert difference is None if said is None else f"rollouts/step_000004.parquet, step 4, {said}" in str(difference)


def test_the_recipe_says_which_steps(tmp_path: Path, recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["rollouts={every: 5, keep: 3}"]).recipe
    assert (recipe.rollouts.every, recipe.rollouts.keep) == (5, 3)
    with pytest.raises(Exception, match=r"rollouts\.keep is 3, but rollouts\.every 0 writes none"):
        load_recipe(recipe_file, ["rollouts={every: 0, keep: 3}"])
    for wrong in ("every: -1", "keep: 0", "never: 1"):
        with pytest.raises(Exception, match="rollouts"):
            load_recipe(recipe_file, [f"rollouts={{{wrong}}}"])
