"""Checkpoints come back to the last bit; half a checkpoint is none."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import save, tiny_model

from rlgen.errors import CheckpointError
from rlgen.files import read_json
from rlgen.models.tiny import byte_tokenizer
from rlgen.processes import Processes
from rlgen.run import checkpoint, writing
from rlgen.run.checkpoint import Checkpoints, little_space
from rlgen.types import Position


def parts(learning_rate: float = 1e-3):
    model = tiny_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)


def learn(model, optimizer, schedule, steps: int) -> None:
    for _ in range(steps):
        model(torch.randint(0, 256, (2, 8)), labels=torch.randint(0, 256, (2, 8))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def test_going_on_equals_never_stopping(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = parts()
    learn(*whole, 3)
    path = save(Checkpoints(tmp_path, 2, Processes.alone()), Position(3, 24), whole[0], byte_tokenizer(), whole[1], whole[2])
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    torch.manual_seed(6)
    learn(*whole, 2)
    again = parts()
    assert Checkpoints.load(path, *again, Processes.alone()) == Position(step=3, prompts=24)
    assert read_json(path / "state" / "state.json")["weight_version"] == 3
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn
    torch.manual_seed(6)
    learn(*again, 2)
    for a, b in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole[2].get_last_lr() == again[2].get_last_lr()


def test_without_the_shard_of_another_process_nothing_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared storage may show it late, or never."""
    model, optimizer, schedule = parts()
    checkpoints = Checkpoints(tmp_path, 1, Processes.alone())
    save(checkpoints, Position(1, 1), model, byte_tokenizer(), optimizer, schedule)

    def write(moments: object, folder: Path, rank: int) -> list[str]:
        folder.mkdir()
        (folder / "shard-00001-model.safetensors").touch()
        return ["shard-00001-model.safetensors"]

    monkeypatch.setattr(checkpoint, "is_sharded", lambda model: True)
    monkeypatch.setattr(writing, "save_shards", write)
    monkeypatch.setattr(
        writing, "appears", lambda path, seconds=0: path.unlink()
    )  # its writer has seen it, the main process does not
    with pytest.raises(CheckpointError, match=r"shard-00001-model.safetensors of another process is not visible"):
        save(checkpoints, Position(2, 2), model, byte_tokenizer(), optimizer, schedule)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_the_newest_stay_and_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    model, optimizer, schedule = parts()
    checkpoints = Checkpoints(tmp_path, 2, Processes.alone())
    assert checkpoints.choose().path is None
    for step in (1, 2, 10):
        save(checkpoints, Position(step, step), model, byte_tokenizer(), optimizer, schedule)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000010"]
    (tmp_path / ".writing_000011").mkdir()
    (tmp_path / "step_000012").mkdir()
    assert checkpoints.choose().path == tmp_path / "step_000010"
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.bin")), "nothing is a pickle"


def test_damage_and_other_models_are_named(tmp_path: Path) -> None:
    model, optimizer, schedule = parts()
    path = save(Checkpoints(tmp_path, 2, Processes.alone()), Position(1, 1), model, byte_tokenizer(), optimizer, schedule)
    other = tiny_model("llama")
    with pytest.raises(CheckpointError, match="another model"):
        Checkpoints.load(path, other, torch.optim.AdamW(other.parameters()), schedule, Processes.alone())
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"step_000001 cannot be read \(SafetensorError\)"):
        Checkpoints.load(path, model, optimizer, schedule, Processes.alone())


def test_a_failed_write_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, schedule = parts()
    checkpoints = Checkpoints(tmp_path, 1, Processes.alone())
    save(checkpoints, Position(1, 1), model, byte_tokenizer(), optimizer, schedule)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlgen.run.writing.save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device; free space"):
        save(checkpoints, Position(2, 2), model, byte_tokenizer(), optimizer, schedule)
    assert checkpoints.choose().path == tmp_path / "step_000001"


def test_a_disk_with_little_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, schedule = parts()
    learn(model, optimizer, schedule, 1)
    path = save(Checkpoints(tmp_path, 2, Processes.alone()), Position(1, 1), model, byte_tokenizer(), optimizer, schedule)
    takes = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert little_space(tmp_path, model) is None
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(2.1 * takes)))
    assert little_space(tmp_path, model) is None
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(1.9 * takes)))
    assert "GB of free space, and a checkpoint takes about" in (little_space(tmp_path, model) or "")
