"""The parts of `make scale` that work on files: they must run wherever they are told to, and give what the table states."""

from pathlib import Path

from measure_rollouts import measure

BYTES = 9.5  # a token of a small file, whose rows pay more for what is one value a row; `make scale` shows that of a large one


def test_a_folder_that_is_not_there_is_made_and_measured(tmp_path: Path) -> None:
    found = measure(64_000, tmp_path / "new")
    assert 8.0 < found["rollouts, bytes a token"] < BYTES  # ids and two log-probs that differ by rounding
    assert min(found.values()) > 0 and (tmp_path / "new" / "rollouts").is_dir()
