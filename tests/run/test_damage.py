"""A checkpoint is what was written, to the last bit, or it is refused by name; and there is always one that is."""

import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from conftest import Proof
from helpers.damage import flip
from helpers.torchrun import launch, well
from helpers.train_state import Parts, equal, learn, parts, position, save_parts, state
from helpers.waiting import HANGS
from safetensors.torch import load_file, save_file

from rlgen.errors import CheckpointError, DamagedCheckpoint, DivergedError
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.recipe.models import LoraRecipe
from rlgen.run import writing
from rlgen.run.checkpoint import Checkpoints, check_fit, little_space, load_checkpoint
from rlgen.run.checkpoint_folder import CheckpointFolder
from rlgen.run.manifest import FORMAT, check_files, check_model_files, manifest_digest, read_manifest, seal
from rlgen.run.state import optimizer_tensors, save_shards

HERE = Path(__file__).parent
ALONE = Processes.alone()


@pytest.fixture(scope="module")
def trained() -> Parts:
    mine = parts()
    learn(*mine)
    return mine


@pytest.fixture(scope="module")
def saved(trained: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save_parts(Checkpoints(folder, 2, ALONE, trainer="grpo"), step, trained)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def resealed(path: Path) -> None:
    """A manifest that fits what is there now: as someone would write who changes a checkpoint on purpose."""
    before = asdict(read_manifest(path))
    (path / "manifest.json").unlink()
    seal(path, {key: value for key, value in before.items() if key not in ("files", "format")})


# --- whole -------------------------------------------------------------------------------------------------------------------


def test_going_on_equals_never_stopping(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = parts()
    learn(*whole, 3)
    path = save_parts(Checkpoints(tmp_path, 2, ALONE), 3, whole)
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    torch.manual_seed(6)
    learn(*whole, 2)
    again = parts()
    assert load_checkpoint(path, *again) == position(3)
    assert read_json(path / "state" / "state.json")["weight_version"] == 3
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn
    torch.manual_seed(6)
    learn(*again, 2)
    for a, b in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole[2].get_last_lr() == again[2].get_last_lr()


def test_without_the_shard_of_another_process_nothing_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared storage may show it late, or never."""
    mine = parts()
    checkpoints = Checkpoints(tmp_path, 1, ALONE)
    save_parts(checkpoints, 1, mine)

    def write(tensors: object, folder: Path, rank: int) -> list[str]:
        folder.mkdir()
        (folder / "shard-00001-model.safetensors").touch()
        return ["shard-00001-model.safetensors"]

    monkeypatch.setattr(writing, "DTensor", torch.nn.Parameter)  # every weight counts as a shard
    monkeypatch.setattr(writing, "save_shards", write)
    monkeypatch.setattr(
        writing, "appears", lambda path, seconds=0: path.unlink()
    )  # its writer has seen it, the main process does not
    with pytest.raises(CheckpointError, match=r"shard-00001-model.safetensors of another process is not visible"):
        save_parts(checkpoints, 2, mine)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_the_newest_stay_and_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    mine = parts()
    checkpoints = Checkpoints(tmp_path, 2, ALONE)
    assert checkpoints.choose().path is None
    for step in (1, 2, 10):
        save_parts(checkpoints, step, mine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000010"]
    (tmp_path / ".writing_000011").mkdir()
    (tmp_path / "step_000012").mkdir()
    assert checkpoints.choose().path == tmp_path / "step_000010"
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.bin")), "nothing is a pickle"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    mine = parts()
    path = save_parts(Checkpoints(tmp_path, 2, ALONE), 1, mine)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"step_000001 cannot be read \(SafetensorError\)"):
        load_checkpoint(path, *mine)


def test_a_disk_with_little_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = parts()
    learn(*mine)
    path = save_parts(Checkpoints(tmp_path, 2, ALONE), 1, mine)
    takes = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert little_space(tmp_path, mine[0]) is None
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(2.1 * takes)))
    assert little_space(tmp_path, mine[0]) is None
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(1.9 * takes)))
    assert "GB of free space, and a checkpoint takes about" in (little_space(tmp_path, mine[0]) or "")


# --- names ---------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_under_another_name_is_not_taken_for_a_later_one(folder: Path) -> None:
    shutil.copytree(folder / "step_000001", folder / "step_000006")
    for name in ("step_9", "step_0000009"):
        shutil.copytree(folder / "step_000001", folder / name)
    found = CheckpointFolder(folder)
    assert list(found.steps()) == [1, 2, 6] and not found.has(6)
    choice = Checkpoints(folder, 2, ALONE).choose()
    assert (choice.step, choice.later) == (2, (folder / "step_000006",))
    assert "it was written after step 1, and renamed or copied since" in choice.notices[0]


# --- damage --------------------------------------------------------------------------------------------------------------


def every_bit_is_noticed(files: Sequence[Path], check: Callable[[], object]) -> None:
    for file in files:
        content = file.read_bytes()
        flip(file)
        with pytest.raises(DamagedCheckpoint, match=file.name.replace(".", r"\.")) as caught:
            check()
        assert caught.value.exit_code == 8
        file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes of"),
    "emptied": (lambda file: os.truncate(file, 0), "has 0 bytes of"),
    "removed": (lambda file: file.unlink(), "is missing"),
    "one bit": (flip, "has other bytes than were written"),
    "one more": (lambda file: file.with_name("model-2.safetensors").write_bytes(b"x"), "does not belong there"),
    "a link": (lambda file: file.symlink_to(file.rename(file.parent.parent / "moved")), "is a link"),
}


@pytest.mark.fault(65)
@pytest.mark.parametrize("kind", DAMAGE)
def test_the_one_before_is_used_for_a_damaged_one(folder: Path, kind: str, proof: Proof) -> None:
    act, words = DAMAGE[kind]
    act(folder / "step_000002" / "model.safetensors")
    with pytest.raises(DamagedCheckpoint) as caught:
        check_files(folder / "step_000002", hashes=True)
    name = "model-2.safetensors" if kind == "one more" else "model.safetensors"
    assert caught.value.exit_code == 8 and f"step_000002: {name} " in str(caught.value) and words in str(caught.value)
    choice = Checkpoints(folder, 2, ALONE).choose()
    assert (choice.step, choice.later) == (1, (folder / "step_000002",))
    (notice,) = choice.notices
    assert notice.startswith("DAMAGED CHECKPOINT") and name in notice and "resuming from step 1" in notice
    with pytest.raises(DamagedCheckpoint):  # it was asked for by name
        Checkpoints(folder, 2, ALONE).choose(2)
    proof(f"{kind}: {caught.value}"[-120:])


@pytest.mark.fault(65)
def test_one_bit_of_any_file_is_noticed(folder: Path, proof: Proof) -> None:
    files = sorted(path for path in (folder / "step_000002").rglob("*") if path.is_file())
    names = {path.name for path in files}
    assert {"model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "manifest.json"} <= names
    every_bit_is_noticed(files, lambda: check_files(folder / "step_000002", hashes=True))
    check_files(folder / "step_000002", hashes=True)
    proof(f"one bit in each of {len(files)} files, all refused by name")


@pytest.mark.fault(65)
def test_one_bit_of_what_a_model_is_opened_from_is_noticed(folder: Path, proof: Proof) -> None:
    path = folder / "step_000002"
    flip(path / "state" / "optimizer.safetensors")  # no model is opened from it
    check_model_files(path)
    files = sorted(file for file in path.iterdir() if file.is_file())
    every_bit_is_noticed(files, lambda: check_model_files(path))
    (path / "config.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"step_000002: changed since it was written: config\.json\. .* remove manifest"):
        check_model_files(path)
    (path / "manifest.json").write_text('{"files": ["theirs"]}')
    check_model_files(path)
    proof(f"one bit in each of {len(files)} files, one removed: refused by name; a manifest of somebody else's: not looked at")


@pytest.mark.fault(65, 67)
def test_a_damaged_one_never_costs_the_good_one(folder: Path, trained: Parts, proof: Proof) -> None:
    """Keep 1, the newest damaged: the one before stays until a complete one is there."""
    kept, good = CheckpointFolder(folder), folder / "step_000001"
    (folder / "step_000002" / "model.safetensors").unlink()
    assert kept.rotate(1) == [] and good.exists()
    checkpoints = Checkpoints(folder, 1, ALONE)
    assert not checkpoints.folder.has(2), "so it is saved again"
    save_parts(checkpoints, 2, trained)
    assert sorted(path.name for path in folder.iterdir()) == ["set_aside", "step_000002"]
    check_files(folder / "step_000002", hashes=True)
    assert [path.name for path in kept.aside()] == ["step_000002"]
    proof("model.safetensors removed; rotation with keep 1 left step 1 until step 2 was whole")


@pytest.mark.fault(48)
@pytest.mark.parametrize("name", ["model.safetensors", "state/optimizer.safetensors"])
def test_values_that_are_not_finite_are_refused(folder: Path, name: str, proof: Proof) -> None:
    file = folder / "step_000002" / name
    tensors = load_file(file)
    key = next(key for key in sorted(tensors) if tensors[key].ndim == 2)
    tensors[key][1, 1] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    resealed(folder / "step_000002")
    check_files(folder / "step_000002", hashes=True)
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder, 2, ALONE).choose()
    assert caught.value.exit_code == 8 and not isinstance(caught.value, DamagedCheckpoint)
    assert f"{name}, {key}, has values that are not finite" in str(caught.value) and "--resume-step" in str(caught.value)
    assert Checkpoints(folder, 2, ALONE).choose(1).step == 1
    proof(f"inf in {key} of {name}")


@pytest.mark.fault(48, 67)
def test_values_that_are_not_finite_are_not_saved(folder: Path, proof: Proof) -> None:
    mine = parts()
    learn(*mine)
    for spoiled in (next(mine[0].parameters()).detach(), next(iter(mine[1].state.values()))["exp_avg_sq"]):
        before = spoiled.flatten()[3].item()
        spoiled.view(-1)[3] = float("nan")
        with pytest.raises(DivergedError, match="not finite; nothing was saved, and the last checkpoint is intact") as caught:
            save_parts(Checkpoints(folder, 1, ALONE), 3, mine)
        assert caught.value.exit_code == 7
        spoiled.view(-1)[3] = before
    assert sorted(path.name for path in folder.iterdir()) == ["step_000001", "step_000002"]
    proof("a NaN in a weight, then in a moment: no checkpoint, none rotated away")


# --- of something else -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(66)
def test_other_models_adapters_and_trainers_are_named(folder: Path, tmp_path: Path, proof: Proof) -> None:
    path = folder / "step_000002"
    lora = LoraRecipe(rank=4, alpha=8.0)
    mine = parts(lora=lora)
    adapter = save_parts(Checkpoints(tmp_path / "adapter", 1, ALONE), 1, mine)
    said = []
    for place, model, trainer, words in [
        (path, parts()[0], "rloo", "another trainer: trainer.kind was grpo and is rloo"),
        (path, parts("llama")[0], "grpo", "another model: architecture was Qwen3ForCausalLM and is LlamaForCausalLM"),
        (path, mine[0], None, "holds no adapter"),
        (adapter, parts()[0], None, "holds an adapter only"),
        (adapter, parts(lora=LoraRecipe(rank=8, alpha=8.0))[0], None, "another adapter: model.lora.rank was 4 and is 8"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            check_fit(place, model, trainer)
        assert words in str(caught.value) and caught.value.exit_code == 8 and str(place) in str(caught.value)
        said.append(words)
    check_fit(path, parts()[0], "grpo")
    check_fit(adapter, parts(lora=lora)[0], None)
    proof("; ".join(said)[:160])


@pytest.mark.fault(66)
def test_other_formats_are_named(folder: Path, proof: Proof) -> None:
    manifest = folder / "step_000002" / "manifest.json"
    content = json.loads(manifest.read_text())
    content.pop("sha256")
    content["format"] = FORMAT + 1
    manifest.write_text(json.dumps({**content, "sha256": manifest_digest(content)}))
    with pytest.raises(CheckpointError, match=f"is of checkpoint format {FORMAT + 1}, but this rlgen reads {FORMAT}") as caught:
        Checkpoints(folder, 2, ALONE).choose()
    assert caught.value.exit_code == 8 and not isinstance(caught.value, DamagedCheckpoint)
    manifest.unlink()
    state = folder / "step_000002" / "state" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 1}))
    with pytest.raises(CheckpointError, match=f"is of checkpoint format 1, but this rlgen reads {FORMAT}") as caught:
        Checkpoints(folder, 2, ALONE).choose()
    assert not isinstance(caught.value, DamagedCheckpoint)
    proof(f"formats {FORMAT + 1} and 1 refused by number, exit 8")


# --- pickles -----------------------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.fault(88)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_pickle_is_never_opened(
    folder: Path, trained: Parts, tmp_path: Path, sharded: bool, proof: Proof, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fired = folder / "step_000002", tmp_path / "fired"
    planted = ["pytorch_model.bin", "training_args.bin", "model.pt", "state/optimizer.pt", "state/random.pkl", "state/.metadata"]
    if sharded:
        (path / "state" / "optimizer.safetensors").unlink()
        save_shards(optimizer_tensors(trained[0], trained[1]), path / "state" / "optimizer", 0)
        planted += ["state/optimizer/.metadata", "state/optimizer/__0_0.distcp"]
    for name in planted:
        (path / name).write_bytes(pickle.dumps(Evil(fired)))
    with pytest.raises(DamagedCheckpoint, match=r"model\.pt does not belong there"):
        check_files(path, hashes=True)
    resealed(path)  # whoever can write there can write the manifest too
    read = []
    for place in ("pickle.load", "pickle.loads", "torch.load", "torch.distributed.checkpoint.filesystem.pickle.load"):
        monkeypatch.setattr(place, lambda *values, place=place, **named: read.append(place))
    choice = Checkpoints(folder, 2, ALONE).choose()
    assert choice.path == path
    again = parts()
    assert load_checkpoint(path, *again).step == 2
    assert equal(state(*again), state(*trained))
    assert not fired.exists() and read == []
    monkeypatch.undo()
    pickle.loads((path / "model.pt").read_bytes())
    assert fired.exists(), "it would have fired"
    proof(f"{len(planted)} pickles planted, with a manifest that names them: loaded to the last bit, none opened")


# --- killed saves ------------------------------------------------------------------------------------------------------------


def killed(tmp_path: Path, kind: str, every: int) -> list[dict[str, Any]]:
    ended = well(launch(HERE / "killed_save.py", tmp_path, kind, every, launcher=[sys.executable], timeout=HANGS))
    return [json.loads(line) for line in ended.stdout.splitlines()]


def survived(rows: list[dict[str, Any]]) -> str:
    for row in rows:
        assert row["signal"] == 9, row
        assert row["equal"] and row["notices"] == [], ("a good one at each instant, to the last bit", row)
        assert row["after"] == ["step_000002"] and row["equal_after"], ("the next start needs no hand", row)
        assert all(name.startswith(("step_", ".writing_", ".removing_")) for name in row["left"]), row
    assert {row["step"] for row in rows} == {1, 2}, "before and after the rename"
    assert any(".removing_step_000001" in row["left"] for row in rows), "while rotating too"
    return f"SIGKILL at {len(rows) // 2} of {rows[0]['of']} instants of a save, last file whole and half there: -9 each"


@pytest.mark.slow
@pytest.mark.fault(62, 67)
def test_a_save_that_is_killed(tmp_path: Path, proof: Proof) -> None:
    proof(survived(killed(tmp_path, "whole", 9)))


@pytest.mark.slow
@pytest.mark.fault(62, 67)
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_save_that_is_killed_anywhere(tmp_path: Path, kind: str, proof: Proof) -> None:
    rows = killed(tmp_path, kind, 1)
    assert len(rows) == 2 * rows[0]["of"]
    proof(f"{kind}: {survived(rows)}")
