"""Is it the upgrade? What was measured before, compared with what is measured now."""

from pathlib import Path

import pytest

from rlgen.run.baseline import Baselines
from rlgen.sentinel.verdict import Outcome, Rung

OLD = {"engine": "vllm 0.31.0", "torch": "2.12.0", "device": "cpu"}
NEW = {**OLD, "engine": "vllm 0.32.0"}


def measured(mean: float) -> list[Rung]:
    numbers = {"mean_delta": mean, "max_delta": 3 * mean}
    return [
        Rung(number=0, name="contract", verdict=Outcome.OK, sentence=""),
        Rung(number=1, name="same weights", verdict=Outcome.OK, sentence="", measured=numbers, bound=0.03),
    ]


@pytest.fixture
def baselines(tmp_path: Path) -> Baselines:
    return Baselines(tmp_path / "baselines", {"path": "tiny:qwen3", "dtype": "bfloat16"})


def test_without_a_baseline_nothing_is_said(baselines: Baselines) -> None:
    assert baselines.compare(NEW, measured(0.007)) is None


def test_a_rise_that_came_with_an_upgrade_is_put_down_to_it(baselines: Baselines) -> None:
    baselines.store(OLD, measured(0.002))
    told = baselines.compare(NEW, measured(0.02))
    assert told is not None and told.startswith("worse than the baseline of ")
    assert "same weights, mean_delta: 0.002 -> 0.02" in told and "it came with engine vllm 0.31.0 -> vllm 0.32.0" in told
    calm = baselines.compare(NEW, measured(0.004))
    assert calm is not None and calm.startswith("no worse") and calm.endswith("with engine vllm 0.31.0 -> vllm 0.32.0")


def test_a_rise_on_the_same_versions_is_not_an_upgrade(baselines: Baselines) -> None:
    baselines.store(OLD, measured(0.02))
    baselines.store(NEW, measured(0.002))
    told = baselines.compare(NEW, measured(0.02))
    assert told is not None and told.endswith("versions and device are the same: not an upgrade")
    assert (baselines.compare(OLD, measured(0.02)) or "").startswith("no worse"), "each is compared with its own versions"


def test_noise_far_below_the_bound_is_no_rise(baselines: Baselines) -> None:
    baselines.store(OLD, measured(1e-7))
    assert (baselines.compare(NEW, measured(9e-5)) or "").startswith("no worse")


def test_storing_again_takes_the_place_of_the_same_versions(baselines: Baselines) -> None:
    for mean in (0.001, 0.002, 0.003):
        baselines.store(OLD, measured(mean))
    assert [entry["measured"]["same weights"]["mean_delta"] for entry in baselines.entries()] == [0.003]
    other = Baselines(baselines.folder, {**baselines.model, "dtype": "float32"})
    assert other.entries() == [], "another dtype is another baseline"
