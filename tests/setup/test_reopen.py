"""What an attempt goes on from, where there was one before."""

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from conftest import Proof, of_rows
from helpers.recipes import written

from rlgen.errors import RlgenError, UsageError
from rlgen.files import read_json, write_json
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.run.directory import RunDirectory
from rlgen.run.launch import launched_by
from rlgen.setup.data import open_data
from rlgen.setup.inputs import same_sizes
from rlgen.setup.reopen import TrainOptions, after_restart, goes_on, open_directory, reopen


def test_a_restart_goes_on_with_its_own_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert not goes_on(tmp_path / "run", again), "the first attempt had not come so far"
    directory = RunDirectory.create(tmp_path / "run", "", "")
    directory.write_status("running", 3, 9)
    assert goes_on(directory.path, again)
    assert not goes_on(directory.path, {}) and not goes_on(directory.path, {"TORCHELASTIC_RESTART_COUNT": "0"})
    status = read_json(directory.status_file)
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "create_time", lambda process: time.time())
        assert not goes_on(directory.path, again), "in the next container a new launcher has the old one's pid"
    host, pid, began = status["launcher"]
    # Another pid; another time; another machine; and what an earlier rlgen took down.
    for other in ([host, pid + 1, began], [host, pid, began + 60], ["elsewhere", pid, began], pid):
        write_json(directory.status_file, {**status, "launcher": other})
        assert not goes_on(directory.path, again), "a run that was there before the launch"
    directory.close()


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], Path]:
    """What an attempt that ended with a code has left to torchrun's next one, which this process is."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def leave(code: int | None) -> Path:
        directory = RunDirectory.create(tmp_path / "run", "", "")
        directory.write_status("running" if code is None else "failed", 3, 9, code, "" if code is None else "what it said")
        directory.close()
        return directory.path

    return leave


@pytest.mark.fault(79)
@pytest.mark.parametrize("code", [2, 3, 4, 5, 7, 8, 75])
def test_a_restart_does_not_repeat_an_end_that_was_meant(ended: Callable[[int | None], Path], code: int, proof: Proof) -> None:
    path = ended(code)
    before = (path / "status.json").read_bytes()
    with pytest.raises(RlgenError, match=r"not restarted, because the last attempt ended with exit \d+: what it said$") as caught:
        after_restart(path, TrainOptions())
    assert caught.value.exit_code == code and str(caught.value).startswith(f"{path} ")
    assert (path / "status.json").read_bytes() == before
    proof(f"status.json of the attempt before: exit {code}")


@pytest.mark.fault(79)
@pytest.mark.parametrize("code", [6, 9, 70, 130, None])  # None: it was killed
def test_a_restart_goes_on_from_an_end_that_nobody_meant(
    ended: Callable[[int | None], Path], monkeypatch: pytest.MonkeyPatch, code: int | None, proof: Proof
) -> None:
    path, asked = ended(code), TrainOptions(changed_rewards=True, clean=True)
    assert after_restart(path, asked) == TrainOptions(resume=True, changed_rewards=True), "and --clean was for the first attempt"
    from_20 = TrainOptions(resume=True, resume_step=20)
    assert after_restart(path, from_20) == from_20, "it had trained nothing"
    write_json(path / "provenance.json", [{"launcher": 1}, {"launcher": launched_by()}])
    assert after_restart(path, from_20) == TrainOptions(resume=True), "later checkpoints are its own"
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert after_restart(path, asked) is asked, "started by hand"
    proof(f"status.json of the attempt before: exit {code}")


@pytest.mark.parametrize(
    "saved, override, refused",
    [
        (True, "run.steps=9", None),
        (False, "run.steps=9", "data.source: {old}/train.jsonl -> {new}/train.jsonl"),  # no digest is compared
        (True, "data.source=other.jsonl", "data.source: {old}/train.jsonl -> {new}/other.jsonl"),
        (True, "rewards.0.use=r.py:g", "rewards.0.use: {old}/r.py:f -> {new}/r.py:g"),
        (True, "rewards.0.args.words={new}/words", "rewards.0.args.words: {old}/words -> {new}/words"),
    ],
)
def test_local_inputs_of_a_folder_that_was_moved_are_left_to_their_digests(
    tmp_path: Path, saved: bool, override: str, refused: str | None
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    text = of_rows("train.jsonl").replace("use: exact_match", f"use: 'r.py:f', args: {{words: {old}/words}}")
    first = load_recipe(written(old, text))
    run = RunDirectory.create(old / "run", "", first.resolved)
    if saved:
        (run.checkpoints / "step_000001").mkdir()
    run.close()
    old.rename(new)
    loaded = load_recipe(new / "recipe.yaml", [override.format(new=new)])
    if refused is None:
        reopen(new / "run", loaded).close()
        assert f"source: {old}/train.jsonl" in (new / "run" / "resolved.yaml").read_text(), "until the attempt begins to train"
        return
    with pytest.raises(UsageError, match=re.escape(f"\n  {refused.format(old=old, new=new)}\n")):
        reopen(new / "run", loaded)


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("rollout.prompts_per_step", 2, "was 2 and is 3 now"),
        ("rollout.prompts_per_step", 3, None),  # as follows from the data
        ("rollout.max_completion_tokens", 6, "was 6 and is 512 now"),
        ("eval.max_completion_tokens", 6, "was 6 and is unset now"),
        ("data.max_prompt_tokens", 64, None),  # the ids of the prompts are compared
    ],
)
def test_a_size_that_is_no_longer_set_is_another(tmp_path: Path, key: str, value: int, refused: str | None) -> None:
    source = "{source: %s.jsonl, columns: {prompt: q, answer: a}}\n"
    text = "model: {path: 'tiny:qwen3'}\nrewards: [{use: exact_match}]\n"
    recipe = written(tmp_path, text + "data: " + source % "train" + "eval: " + source % "other")
    for name, count in (("train", 3), ("other", 2)):
        written(tmp_path, "".join(f'{{"q": "{name} {row}", "a": "1"}}\n' for row in range(count)), f"{name}.jsonl")
    before, loaded = load_recipe(recipe, [f"{key}={value}"]), load_recipe(recipe)
    RunDirectory.create(tmp_path / "run", "", dump_recipe(open_data(before.recipe).recipe)).close()
    (run := reopen(tmp_path / "run", loaded)).close()
    with nullcontext() if refused is None else pytest.raises(UsageError, match=f"{key} {refused}; set it as it was"):
        same_sizes(run, open_data(loaded.recipe))


def test_clean_keeps_what_the_new_run_reads(tmp_path: Path) -> None:
    first = load_recipe(written(tmp_path, of_rows("train.jsonl")))
    run = RunDirectory.create(tmp_path / "run", "", first.resolved)
    run.write_status("done", 1, 1, 0)
    model = run.checkpoints / "step_000001"
    model.mkdir()
    run.close()
    place = [f"run.dir={tmp_path}", "run.name=run"]
    loaded = load_recipe(tmp_path / "recipe.yaml", [*place, f"model.path={model}"])
    with pytest.raises(UsageError, match=r"--clean: .*/run holds model\.path of this recipe; nothing was deleted"):
        open_directory(loaded, TrainOptions(clean=True))
    assert model.exists() and run.status_file.exists()
    open_directory(load_recipe(tmp_path / "recipe.yaml", place), TrainOptions(clean=True)).close()
    assert not model.exists()
