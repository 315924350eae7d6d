"""The golden run. It changes only when numbers are meant to: `make golden-update`, and the commit says why."""

import json

import golden
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("trainer", golden.TRAINERS)
def test_ten_steps_are_as_they_were(trainer: str) -> None:
    stored = json.loads(golden.GOLDEN.read_text())
    assert stored["recipe"] == golden.RECIPE and stored["trainers"] == golden.TRAINERS
    good, lines = golden.compare(stored, {trainer: golden.run(golden.TRAINERS[trainer])})
    assert good, lines


def test_the_comparison_can_fail() -> None:
    stored = json.loads(golden.GOLDEN.read_text())
    for trainer, records in stored["runs"].items():
        assert len(records) == golden.STEPS and all(record["grad_norm"] > 0 for record in records)
        assert golden.compare(stored, {trainer: records})[0]
        moved = [{**record, "loss": record["loss"] + (1e-4 if record["step"] == 7 else 0)} for record in records]
        assert not golden.compare(stored, {trainer: moved})[0]
        elsewhere = {**stored, "made_on": {**stored["made_on"], "processor": "another"}}
        near = [{**record, "loss": record["loss"] + 1e-7} for record in records]
        assert golden.compare(elsewhere, {trainer: near})[0] and not golden.compare(elsewhere, {trainer: moved})[0]
