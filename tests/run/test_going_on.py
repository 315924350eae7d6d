"""Whole runs that go on after something went wrong with their files: as the run that nothing happened to, or not at all."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, Proof, read_jsonl, tiny_model
from helpers.before import before
from helpers.damage import flip
from helpers.disk import fill, mounted
from helpers.rollouts import records_but_times
from helpers.spread import SPREAD
from helpers.waiting import until
from safetensors.torch import load_file, save_file
from test_damage import resealed

from rlgen.cli.doctor import examine
from rlgen.cli.train import train_command
from rlgen.engines.transformers import TransformersEngine
from rlgen.errors import CheckpointError, DamagedCheckpoint, DataError, RlgenError, ServerLost, SetupError, UsageError
from rlgen.files import read_json, write_json
from rlgen.models.tiny import build_tiny
from rlgen.models.weights import bits
from rlgen.processes import Processes
from rlgen.recipe import load_recipe
from rlgen.rollout.sampler import Sampler
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.compare import first_difference
from rlgen.run.directory import RunDirectory
from rlgen.run.manifest import check_files
from rlgen.run.rollouts import RolloutWriter
from rlgen.setup import trainer, trainer_and_engine
from rlgen.setup.reopen import MAY_CHANGE

STEPS = 4
SETTINGS = ["engine={kind: transformers}", f"run.steps={STEPS}", "checkpoint={every: 1, keep: 3}"]
SETTINGS += ["rollout={prompts_per_step: 2, group_size: 2, max_completion_tokens: 4}"]
REWARDS = RECIPE[RECIPE.index("rewards:") : RECIPE.index("rollout:")]


def train(folder: Path, *overrides: str, place: str = "run", **how: Any) -> Path:
    train_command(folder / "recipe.yaml", [*SETTINGS, *overrides], how.pop("resume", False), False, None, folder / place, **how)
    return folder / place


def lose_after(step: int, lost: ServerLost) -> Callable[..., None]:
    def lose(engine: TransformersEngine, *_: Any) -> None:
        if engine.weight_version == step:
            raise lost

    return lose


@pytest.fixture(scope="module", autouse=True)
def no_ladder() -> Iterator[None]:
    """Files are what is tested here; the checks before a run take longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "climb", lambda probe: [])
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, started by someone whose umask lets everyone do everything; and its recipe beside it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.yaml").write_text(RECIPE.replace(REWARDS, f"rewards: [{{use: '{folder}/r.py:spread'}}]\n"))
    (folder / "r.py").write_text(SPREAD)
    (folder / "run").mkdir()
    (folder / "run").chmod(0o777)
    umask = os.umask(0)
    try:
        return train(folder)
    finally:
        assert os.umask(umask) == 0, "as it was before"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of all that."""
    return Path(shutil.copytree(whole.parent, tmp_path / "copy"))


def ended_alike(ours: Path, theirs: Path) -> bool:
    """To the last bit, but for times."""
    names = [f"checkpoints/step_{STEPS:06d}/{name}" for name in ("model.safetensors", "state/optimizer.safetensors")]
    pairs = [(load_file(ours / name), load_file(theirs / name)) for name in names]
    assert all(a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a) for a, b in pairs)
    assert records_but_times(ours) == records_but_times(theirs)
    assert first_difference(ours, theirs) is None
    status = read_json(ours / "status.json")
    return (status["state"], status["exit_code"]) == ("done", 0)


@pytest.mark.fault(91)
def test_no_library_opens_the_directory_to_strangers(whole: Path, proof: Proof) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (whole, *whole.rglob("*"))}
    loose = {str(path): oct(mode) for path, mode in modes.items() if mode & ~(0o750 if path.is_dir() else 0o640)}
    assert loose == {} and len(modes) > 50
    assert modes[whole] == 0o750 and modes[whole / "status.json"] == 0o640, "the group reads"
    proof(f"a run with umask 000 in a folder of 0777 left {len(modes)} files and folders, none beyond 0640 and 0750")


@pytest.mark.fault(65, 71)
def test_a_damaged_newest_one_is_told_loudly_and_costs_nothing(
    folder: Path, whole: Path, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    run = folder / "run"
    flip(run / "checkpoints" / "step_000004" / "model.safetensors")
    train(folder, resume=True)
    said = capsys.readouterr().out
    notice = "step_000004: model.safetensors has other bytes than were written; resuming from step 3 instead"
    assert said.count("DAMAGED CHECKPOINT") == 1 and notice in said and "resuming after step 3" in said
    assert notice in (run / "logs" / "rlgen.log").read_text()
    assert notice in read_json(run / "provenance.json")[-1]["notices"][0]
    assert ended_alike(run, whole)
    assert [path.name for path in (run / "checkpoints" / "set_aside").iterdir()] == ["step_000004"]
    archived = run / "logs" / "attempt_1"
    assert [record["step"] for record in read_jsonl(archived / "metrics.jsonl")] == [4]
    assert list((run / "journal").glob("step_*")) == [] and not (archived / "rollouts").exists()
    proof("one bit of step 4 flipped: resumed from 3, ended as the undisturbed run to the last bit")


@pytest.mark.fault(51)
def test_an_engine_that_is_lost_while_it_samples_costs_no_trained_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    rare = "checkpoint={every: 100, keep: 3}"
    with monkeypatch.context() as patch, pytest.raises(ServerLost, match="is gone") as caught:
        before(TransformersEngine, "generate", lose_after(3, ServerLost("http://127.0.0.1:1", "is gone")), patch.setattr)
        train(folder, rare, place="lost")
    run = folder / "lost"
    assert caught.value.exit_code == 6 and [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_000003"]
    train(folder, place="lost", resume=True)
    shutil.rmtree(folder / "run" / "checkpoints" / "step_000002")  # the other run saved no step 2
    assert ended_alike(run, folder / "run")
    proof("lost while it sampled for step 4: step 3 is saved, exit 6, and resumed it ended as the undisturbed run")


def test_a_lost_engine_is_what_a_run_ends_with_even_if_it_cannot_be_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = ServerLost("http://127.0.0.1:1", "is gone")
    before(TransformersEngine, "generate", lose_after(3, lost), monkeypatch.setattr)
    before(Checkpoints, "save", lambda *_: 1 / 0, monkeypatch.setattr)
    with pytest.raises(ServerLost) as caught:
        train(folder, "checkpoint={every: 100, keep: 3}", place="lost")
    assert caught.value is lost and lost.__cause__ is None
    assert "warning: step 3 could not be saved: division by zero" in capsys.readouterr().out


@pytest.mark.fault(65, 48)
def test_what_cannot_be_gone_on_from_is_known_before_the_engine_opens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    monkeypatch.setattr(trainer_and_engine, "build_engine", lambda *values: 1 / 0)
    (folder / "run" / "checkpoints" / "step_000002" / "manifest.json").unlink()
    for step in (3, 4):
        flip(folder / "run" / "checkpoints" / f"step_00000{step}" / "state" / "optimizer.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"no good checkpoint to resume from: .*with --resume-step") as caught:
        train(folder, resume=True)
    assert "step_000002: manifest.json is missing" in str(caught.value)
    assert all(f"step_00000{step}: state/optimizer.safetensors has other bytes" in str(caught.value) for step in (3, 4))
    status = read_json(folder / "run" / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 8) and status["message"] == str(caught.value)
    proof("all three damaged: exit 8 with each named, and no engine")


@pytest.mark.fault(65, 48)
def test_what_is_not_as_it_was_written_is_no_model_to_begin_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    monkeypatch.setattr(trainer_and_engine, "build_engine", lambda *values: 1 / 0)
    path = folder / "run" / "checkpoints" / "step_000002"
    file, settings = path / "model.safetensors", [*SETTINGS, f"model.path={path}"]
    flip(file)
    for begin in (
        lambda: train(folder, *settings, place="next"),
        lambda: examine(load_recipe(folder / "recipe.yaml", settings).recipe, folder, print, False, False, Processes.alone()),
    ):
        with pytest.raises(DamagedCheckpoint, match=r"step_000002: changed since it was written: model\.safetensors") as caught:
            begin()
        assert caught.value.exit_code == 8
    flip(file)
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    resealed(path)
    with pytest.raises(SetupError, match=r"step_000002: model\.norm\.weight has values that are not finite"):
        train(folder, *settings, place="next")
    assert read_json(folder / "next" / "status.json")["exit_code"] == 3
    proof("step 2 as model.path: with a flipped bit exit 8, by train and doctor; with a NaN and a manifest that fits, exit 3")


@pytest.mark.fault(66)
def test_a_checkpoint_of_another_run_is_refused_before_the_engine_opens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    """Copied into this run's folder by hand: the recipe says nothing of it."""
    monkeypatch.setattr(trainer_and_engine, "build_engine", lambda *values: 1 / 0)
    for settings, words in [
        (["trainer={kind: rloo}"], "another trainer: trainer.kind was grpo and is rloo"),
        (['model.path="tiny:llama"'], "another model: architecture was Qwen3ForCausalLM and is LlamaForCausalLM"),
    ]:
        place = folder / words[:13].replace(" ", "_")
        RunDirectory.create(place, "", (folder / "run" / "resolved.yaml").read_text()).close()
        shutil.copytree(folder / "run" / "checkpoints" / "step_000002", place / "checkpoints" / "step_000002")
        monkeypatch.setattr("rlgen.setup.reopen.changes", lambda *values: [])
        with pytest.raises(CheckpointError) as caught:
            train(folder, *settings, place=place.name, resume=True)
        assert words in str(caught.value) and caught.value.exit_code == 8
        assert read_json(place / "status.json")["exit_code"] == 8
    proof("step 2 of a GRPO run of tiny:qwen3 put into runs of RLOO and of tiny:llama")


@pytest.mark.fault(68, 71)
def test_going_on_from_a_step_that_is_named(folder: Path, whole: Path, proof: Proof) -> None:
    run = folder / "run"
    train(folder, resume_step=2)
    assert ended_alike(run, whole)
    assert sorted(path.name for path in (run / "checkpoints" / "set_aside").iterdir()) == ["step_000003", "step_000004"]
    assert [record["step"] for record in read_jsonl(run / "logs" / "attempt_1" / "metrics.jsonl")] == [3, 4]
    assert read_json(run / "provenance.json")[-1]["from_step"] == 2
    with pytest.raises(UsageError, match=r"--resume-step 9: .* has no checkpoint of that step; there are: 2, 3, 4"):
        train(folder, resume_step=9)
    proof("--resume-step 2 of 4: steps 3 and 4 set aside, trained again, equal to the last bit")


@pytest.mark.fault(68)
def test_what_was_changed_is_shown_and_rewards_need_a_word(
    folder: Path, whole: Path, request: pytest.FixtureRequest, proof: Proof
) -> None:
    run, code = folder / "run", whole.parent / "r.py"
    request.addfinalizer(lambda: code.write_text(SPREAD))
    with pytest.raises(UsageError) as caught:
        train(folder, "run.seed=1", "optim.learning_rate=0.5", f"rewards=[{{use: '{code}:spread', weight: 2.0}}]", resume=True)
    assert caught.value.exit_code == 2
    lines = ["  optim.learning_rate: 0.001 -> 0.5", "  rewards.0.weight: 1.0 -> 2.0", "  run.seed: 0 -> 1"]
    assert str(caught.value).splitlines()[1:-1] == lines
    free = ", ".join(key.removesuffix(".") for key in ("run.steps", *MAY_CHANGE, "eval"))
    assert f"Only {free} may change" in str(caught.value)
    with pytest.raises(UsageError, match=r"(?s)optim\.schedule: constant -> linear.*run\.steps: 4 -> 5"):
        train(folder, "optim.schedule=linear", "run.steps=5", resume=True)
    code.write_text(SPREAD + "# edited\n")
    with pytest.raises(UsageError, match=r"reward spread .*, or a module beside it, was edited .* --allow-changed") as caught:
        train(folder, "run.steps=5", resume_step=2)
    status = read_json(run / "status.json")
    assert (status["exit_code"], status["step"], status["steps"]) == (2, 2, 5), (
        "what was trained after step 2 is no longer part of it"
    )
    train(folder, "run.steps=5", resume=True, changed_rewards=True)
    first, last = (read_json(run / "provenance.json")[place]["rewards"] for place in (0, -1))
    assert first != last and [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    proof("three keys and a reward's file changed: each named; the file only with --allow-changed-rewards")


@pytest.mark.fault(68)
def test_data_that_was_edited_is_no_data_to_go_on_with(folder: Path, proof: Proof) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(12)))
    data = f"data={{source: '{rows}'}}"
    run = train(folder, data, "run.steps=2", place="of_file")
    recorded, text = (run / "metrics.jsonl").read_bytes(), rows.read_text()
    rows.write_text(text.replace("prompt 11", "prompt 12"))
    with pytest.raises(DataError, match=r"the data has changed since the last attempt \(fingerprint \w+, now \w+\)"):
        train(folder, data, "run.steps=3", place="of_file", resume=True)
    assert (run / "metrics.jsonl").read_bytes() == recorded
    rows.write_text(text)
    train(folder, data, "run.steps=3", place="of_file", resume=True)
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]
    proof("the last of twelve prompts was changed between two attempts")


@pytest.mark.fault(68)
def test_a_model_that_was_edited_is_no_reference_and_no_tokenizer_to_go_on_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof
) -> None:
    model = Path(shutil.copytree(build_tiny("qwen3"), folder / "model"))
    settings = [f"model.path={model}", "trainer={kind: online_dpo}"]
    run = train(folder, *settings, "run.steps=1", place="dpo")
    facts = read_json(run / "provenance.json")[-1]
    assert facts["weights"] == bits(tiny_model("qwen3"), Processes.alone()) and facts["stop_ids"] == [257, 259]
    metrics = (run / "metrics.jsonl").read_bytes()
    weights, template, stops = (model / name for name in ("model.safetensors", "chat_template.jinja", "generation_config.json"))
    for file, text, words in [
        (weights, None, r"the weights in model\.path .*/model have changed .* compared with another reference\. Bring them back"),
        (template, template.read_text().replace("assistant", "robot"), r"prompt_ids have changed .* chat template"),
        (stops, json.dumps({"eos_token_id": 259}), r"stop_ids have changed .*\(were \[257, 259\], now \[259\]\)"),
    ]:
        content = file.read_bytes()
        flip(file) if text is None else file.write_text(text)
        with monkeypatch.context() as patch, pytest.raises(UsageError, match=f"--resume: {words}") as caught:
            patch.setattr(trainer_and_engine, "build_engine", lambda *values: 1 / 0)
            train(folder, *settings, "run.steps=2", place="dpo", resume=True)
        assert caught.value.exit_code == 2 and (run / "metrics.jsonl").read_bytes() == metrics
        file.write_bytes(content)
    train(folder, *settings, "run.steps=2", place="dpo", resume=True)
    # Of a run that earlier versions began nothing is known, and it goes on.
    attempts = read_json(run / "provenance.json")
    write_json(
        run / "provenance.json", [{k: v for k, v in attempts[-1].items() if k not in ("weights", "prompt_ids", "stop_ids")}]
    )
    flip(weights)
    train(folder, *settings, "run.steps=3", place="dpo", resume=True)
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]
    proof("weights, template, stop ids edited between two attempts of Online DPO: exit 2 each, before the engine opened")


def test_weights_that_nothing_is_compared_with_may_change(folder: Path) -> None:
    """Without a reference the checkpoint has all that is needed."""
    model = Path(shutil.copytree(build_tiny("qwen3"), folder / "model"))
    train(folder, f"model.path={model}", "run.steps=1", place="grpo")
    flip(model / "model.safetensors")
    train(folder, f"model.path={model}", "run.steps=2", place="grpo", resume=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, "64m") as place:
        yield place


# What is begun when the disk fills up, the step in its arguments, bytes that are left, and what then cannot be written.
FILLED: dict[str, tuple[Any, str, Callable[..., int], int, str]] = {
    "journal": (Sampler, "groups", lambda sampler, step, prompts: step, 0, r"journal/step_000003\.bin"),
    "rollouts": (  # written at the same time as the journal of the next step
        *(RolloutWriter, "write", lambda writer, rollout: rollout.step, 0),
        r"(rollouts/step_000003\.parquet|start_000004\.jsonl)",
    ),
    # half of a checkpoint
    "save": (Checkpoints, "save", lambda checkpoints, at, *parts: at.step, 1 << 20, "checkpoints/step_000003"),
}


@pytest.mark.fault(70)
@pytest.mark.parametrize("when", ["journal", pytest.param("rollouts", marks=pytest.mark.slow), "save"])
def test_a_disk_that_fills_up(
    folder: Path, whole: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, when: str, proof: Proof
) -> None:
    owner, name, step_of, left, words = FILLED[when]
    run, taken = disk / "run", []

    def fills(*arguments: Any) -> None:
        """The checkpoint of step 2, which is written beside the loop, must not be what finds the disk full."""
        if step_of(*arguments) == 3 and not taken:
            until((run / "checkpoints" / "step_000002").exists)
            taken.append(fill(disk, left))

    before(owner, name, fills, monkeypatch.setattr)
    place = str(run)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device.*; free space or change") as caught:
        train(folder, place=place)
    assert taken and re.search(words, str(caught.value)) and caught.value.exit_code == 8
    status = read_json(run / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 8)
    # Trained, not saved. The loop hears of a save that failed beside it before the next step, or after that one.
    assert status["step"] in ((3, 4) if when == "save" else (2,))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    for step in (1, 2):
        check_files(run / "checkpoints" / f"step_00000{step}", hashes=True)
    (disk / "ballast").unlink()
    train(folder, place=place, resume=True)
    assert ended_alike(run, whole)
    proof(f"{taken[0] >> 20} MiB of ballast before the {when} of step 3; resumed with it gone, equal to the last bit")


def test_a_checkpoint_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(directory: RunDirectory, record: dict[str, Any]) -> None:
        if record["step"] == 1:
            directory.save_now.touch()

    before(RunDirectory, "write_metrics", asks, monkeypatch.setattr)
    run = train(folder, "checkpoint={every: 50, keep: 9}", "run.steps=3", place="asked")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000003"]
    assert not (run / "save_now").exists()


@pytest.mark.fault(17, 44, 68, 69)
def test_clean_starts_anew_and_a_finished_run_is_complete(
    folder: Path, whole: Path, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    run = folder / "run"
    train(folder, "run.steps=2", resume=True)
    assert f"already complete, {STEPS} steps" in capsys.readouterr().out
    status = read_json(run / "status.json")
    assert (status["exit_code"], status["step"], status["steps"]) == (0, STEPS, STEPS)

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}

    before_refusals = times()
    refused: list[tuple[list[str], dict[str, Any], str]] = [
        ([], {}, "already holds a run; go on with --resume"),
        ([], {"resume": True, "clean": True}, "leave one of them out"),
        (["run.seed=1"], {"resume": True}, "run.seed: 0 -> 1"),
        ([], {"resume": True, "place": "nothing"}, "holds no run to resume"),
    ]
    for settings, how, words in refused:
        with pytest.raises(UsageError, match=words) as caught:
            train(folder, *settings, **how)
        assert caught.value.exit_code == 2
    assert times() == before_refusals
    (run / "stray").touch()
    train(folder, "run.steps=1", clean=True)
    device = f"device: {torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'cpu'}, float32"
    assert device in capsys.readouterr().out.splitlines()
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1] and not (run / "stray").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    proof(f"complete: exit 0; taken, another seed, no run: exit 2, no file changed; --clean: trained from nothing; {device}")


@pytest.mark.fault(17, 19, 24)
def test_a_start_that_failed_does_not_keep_its_name(folder: Path, capsys: pytest.CaptureFixture[str], proof: Proof) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"prompt {number}"}) + "\n" for number in (0, 1, 2, 3, 1)))
    data = f"data={{source: '{rows}', columns: {{prompt: %s}}}}"
    codes = []
    for wrong in ("model.path=/nowhere", data % "qestion"):
        with pytest.raises(RlgenError) as caught:
            train(folder, wrong, place="corrected")
        codes.append(caught.value.exit_code)
        assert not (folder / "corrected").exists()
    run = train(folder, data % "question", "run.steps=1", place="corrected")
    assert read_json(run / "status.json")["exit_code"] == 0 and codes == [3, 4]
    assert capsys.readouterr().out.count("warning: 1 of 5 prompts are the same as an earlier one") == 1
    assert list(run.glob("logs/attempt_*")) == []
    assert len(read_json(run / "provenance.json")) == 1 and "qestion" not in (run / "resolved.yaml").read_text()
    with pytest.raises(UsageError, match="already holds a run"):
        train(folder, data % "question", "run.steps=1", place="corrected")
    proof(f"exit {codes[0]}, exit {codes[1]}, then exit 0 under the same name; one of five prompts stood twice")
