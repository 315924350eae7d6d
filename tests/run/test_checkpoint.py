"""Checkpoints come back to the last bit; half a checkpoint is none."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers.train_state import learn, parts, position, save_parts

from rlgen.errors import CheckpointError
from rlgen.files import read_json
from rlgen.processes import Processes
from rlgen.run import writing
from rlgen.run.checkpoint import Checkpoints, little_space, load_checkpoint


def test_going_on_equals_never_stopping(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = parts()
    learn(*whole, 3)
    path = save_parts(Checkpoints(tmp_path, 2, Processes.alone()), 3, whole)
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
    checkpoints = Checkpoints(tmp_path, 1, Processes.alone())
    save_parts(checkpoints, 1, mine)

    def write(moments: object, folder: Path, rank: int) -> list[str]:
        folder.mkdir()
        (folder / "shard-00001-model.safetensors").touch()
        return ["shard-00001-model.safetensors"]

    monkeypatch.setattr(writing, "is_sharded", lambda model: True)
    monkeypatch.setattr(writing, "save_shards", write)
    monkeypatch.setattr(
        writing, "appears", lambda path, seconds=0: path.unlink()
    )  # its writer has seen it, the main process does not
    with pytest.raises(CheckpointError, match=r"shard-00001-model.safetensors of another process is not visible"):
        save_parts(checkpoints, 2, mine)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_the_newest_stay_and_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    mine = parts()
    checkpoints = Checkpoints(tmp_path, 2, Processes.alone())
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
    path = save_parts(Checkpoints(tmp_path, 2, Processes.alone()), 1, mine)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"step_000001 cannot be read \(SafetensorError\)"):
        load_checkpoint(path, *mine)


def test_a_disk_with_little_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = parts()
    learn(*mine)
    path = save_parts(Checkpoints(tmp_path, 2, Processes.alone()), 1, mine)
    takes = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert little_space(tmp_path, mine[0]) is None
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(2.1 * takes)))
    assert little_space(tmp_path, mine[0]) is None
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=int(1.9 * takes)))
    assert "GB of free space, and a checkpoint takes about" in (little_space(tmp_path, mine[0]) or "")
