"""Parts that many tests share: tiny models, samples, recipes, and the real engines."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from rlgen.engines import Engine, build_engine
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.transformers import TransformersEngine
from rlgen.models.load import load_model, locate
from rlgen.models.tiny import build_tiny
from rlgen.processes import Processes
from rlgen.recipe import Recipe
from rlgen.sentinel.sync import send_weights
from rlgen.types import Sample

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")

# Long files with few tests: begun first, so that no core waits for the other at the end (`make test`).
LONG = (
    *(
        "test_learning",
        "test_processes",
        "test_server_faults",
        "test_resume",
        "test_signals",
        "test_parity",
        "test_ladder",
        "test_watch",
    ),
    *("test_lora_runs", "test_splits", "test_golden", "test_serve", "test_numbers"),
)

RECIPE = """\
run: {name: test, steps: 2}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64}
rewards:
  - {use: exact_match}
  - {use: length, args: {target: 6}, weight: 0.1}
rollout: {prompts_per_step: 4, group_size: 4, max_completion_tokens: 12}
optim: {learning_rate: 1.0e-3}
"""


pytest_plugins = ["faults.table"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", action="store_true", help="run the tests of faults, the slow ones too, and print their table")
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    faults, slow = config.getoption("faults"), config.getoption("slow")
    for item in list(items):
        if not (item.get_closest_marker("fault") if faults else slow or not item.get_closest_marker("slow")):
            items.remove(item)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes down how a test of a fault knows that the fault happened: "killed by SIGKILL in write 7 of a save"."""

    def take_down(text: str) -> None:
        request.node.user_properties.append(("proof", text))

    return take_down


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A small recipe on the colocated engine."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def tiny_model(name: str) -> Any:
    return load_model(str(build_tiny(name)), None, torch.float32, "sdpa", CPU)


def open_vllm(name: str, **changes: Any) -> ColocatedEngine:
    """The colocated engine as a recipe opens it; `changes` override single arguments."""
    arguments: dict[str, Any] = {
        "model": str(build_tiny(name)),
        "revision": None,
        "dtype": "float32",
        "fp32_head": True,
        "max_model_len": 640,
        "max_num_seqs": 64,
        "kv_cache_gib": None,
        "gpu_memory_utilization": None,
        "tensor_parallel_size": 1,
        "wait": None,
        "sleep": False,
        "model_impl": "auto",
        "quantization": None,
        "structured_outputs": False,
        "enforce_eager": None,
        "extra": {},
    }
    return ColocatedEngine(**{**arguments, **changes})


def open_transformers(name: str) -> TransformersEngine:
    return TransformersEngine(model=tiny_model(name), fp32_head=True, max_num_seqs=64)


def open_server(name: str) -> Engine:
    """A server that is launched, and stopped when the engine is closed."""
    recipe = Recipe.model_validate(
        {
            "run": {"name": "server"},
            "model": {"path": f"tiny:{name}", "dtype": "float32"},
            "data": {"source": "task:sort"},
            "rewards": [{"use": "exact_match"}],
            "engine": {"kind": "server", "launch": True, "max_model_len": 640, "start_timeout": 120.0},
        }
    )
    engine = build_engine(recipe, locate(recipe.model.path), Processes.alone(), Path(mkdtemp()), print)
    send_weights(engine, tiny_model(name), 0, Processes.alone())  # before that it is stale, and answers nothing
    return engine


# Every promise of `Engine` is tested on each.
OPENERS: dict[str, Callable[[str], Engine]] = {
    "colocated": open_vllm,
    "transformers": open_transformers,
    "server": open_server,
}


@pytest.fixture(scope="module", params=OPENERS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Every engine on tiny:qwen3."""
    opened = OPENERS[request.param]("qwen3")
    yield opened
    opened.close()


def make_sample(**changes: Any) -> Sample:
    """A sample of three tokens, the last of them a stop token."""
    values: dict[str, Any] = {
        "group_id": 0,
        "sample_index": 0,
        "prompt_ids": (5, 6),
        "completion_ids": (7, 8, 259),
        "sampler_logp": (-0.5, -1.0, -0.25),
        "loss_mask": (True, True, True),
        "finish_reason": "stop",
        "weight_version": 0,
        "seed": 1,
        "completion": "x",
        "rewards": {},
        "reward": None,
    }
    return Sample(**{**values, **changes})


@pytest.fixture
def rlgen() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in a process of its own, as a user does."""

    def run(*arguments: object, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlgen", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **environment},
        )

    return run


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
