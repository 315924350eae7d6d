"""Parts that many tests share: tiny models, samples, recipes, and the real engines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers import paths
from helpers.recipes import SHORT, recipe_for
from helpers.scoring import opened, scorer
from helpers.slow import slow_but
from helpers.waiting import HANGS
from hypothesis import HealthCheck, settings

from rlgen.engines.base import Engine
from rlgen.engines.colocated import ColocatedEngine
from rlgen.engines.open import build_engine
from rlgen.engines.plan import EnginePlan
from rlgen.engines.transformers import TransformersEngine
from rlgen.models import memory
from rlgen.models.load import load_model, locate
from rlgen.models.tiny import build_tiny
from rlgen.processes import Processes
from rlgen.run.checkpoint import Checkpoints
from rlgen.sentinel.sync import send_weights

__all__ = ["opened", "scorer"]  # fixtures
ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
Proof = Callable[[str], None]  # of the fixture `proof`
Run = Callable[..., subprocess.CompletedProcess[str]]  # of the fixture `rlgen`

# An example may take as long as it takes, and so may drawing it.
settings.register_profile("rlgen", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlgen")

# A suite that a shell starts in the background ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Long files with few tests: begun first, so that no core waits for the other at the end (`make test`).
LONG: list[str] = ["test_recipes", "test_learning", "test_processes", "test_process_faults", "test_server_faults", "test_resume"]
LONG += ["test_prove_resume", "test_signals", "test_parity", "test_ladder", "test_watch", "test_lora_runs"]
LONG += ["test_make", "test_serve", "test_numbers", "test_two_processes", "test_paths", "test_sharded"]

RECIPE = """\
run: {name: test, steps: 2}
model: {path: "tiny:qwen3", dtype: float32}
data: {source: "task:sort", chat: true, max_prompt_tokens: 64, options: {size: 200}}
rewards:
  - {use: exact_match}
  - {use: length, args: {target: 6}, weight: 0.1}
rollout: {prompts_per_step: 4, group_size: 4, max_completion_tokens: 12}
optim: {learning_rate: 1.0e-3}
"""


def of_rows(source: str) -> str:
    """`RECIPE` with another source and what belongs to it: of_rows("rows.jsonl, chat: true")."""
    return RECIPE.replace('"task:sort", chat: true', source).replace(", options: {size: 200}", "")


pytest_plugins = ["faults.table"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", action="store_true", help="run the tests of faults, the slow ones too, and print their table")
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption("--real", action="store_true", help="run the tests of a real model alone")
    parser.addoption("--until", type=float, help="begin no test after this second since the epoch; files as they are named")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    faults, slow, only_real = (config.getoption(name) for name in ("faults", "slow", "real"))
    for item in list(items):
        if item.get_closest_marker("path") and item.get_closest_marker("slow"):
            raise pytest.UsageError(f"{item.nodeid}: a path is declared by a test of `make test`, and this one is slow")
        wanted = item.get_closest_marker("fault") if faults else slow or not item.get_closest_marker("slow")
        if not (wanted or only_real) or bool(item.get_closest_marker("real")) != only_real:
            items.remove(item)
    if config.getoption("until") is None:
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip("the time is up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that declares a way through training must have gone it, in a folder that it is given; one of a fault has a proof."""
    yield
    if item.get_closest_marker("fault"):
        assert "proof" in dict(item.user_properties), "the test of a fault says with `proof` how it is known to have happened"
    if ways := {marker.args for marker in item.iter_markers("path")}:
        folders = [value for value in item.funcargs.values() if isinstance(value, Path)]  # type: ignore[attr-defined]
        gone = set().union(*map(paths.went, folders))
        assert ways <= gone, f"declared, and not gone: {ways - gone}; gone: {gone}"


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    """Records how a test of a fault knows that the fault happened: "killed by SIGKILL in write 7 of a save"."""
    return lambda text: request.node.user_properties.append(("proof", text))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two gain nothing on models of this size, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def counted_once() -> Iterator[None]:
    """What is the same model and size is counted once: it takes seconds."""
    counts: dict[tuple[Any, ...], memory.Counts] = {}
    count = memory.count

    def remembered(config: Any, *sizes: Any) -> memory.Counts:
        key = (json.dumps({**config.to_dict(), "_name_or_path": None}, default=str), *sizes)
        if key not in counts:
            counts[key] = count(config, *sizes)
        return counts[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "count", remembered)
        yield


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A small recipe on the colocated engine."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def tiny_model(name: str) -> Any:
    return load_model(str(build_tiny(name)), None, torch.float32, "sdpa", CPU)


def plan_of(name: str, **changes: Any) -> EnginePlan:
    """How vLLM runs a tiny model where a recipe says nothing; `changes` override single fields."""
    folder = str(build_tiny(name))
    recipe = recipe_for(folder, engine={"kind": "colocated", "max_model_len": 640, "max_num_seqs": 64})
    return replace(EnginePlan.of(recipe.engine_needs, folder), **changes)


def open_vllm(name: str, **changes: Any) -> ColocatedEngine:
    """The colocated engine as a recipe opens it; `changes` override single fields of its plan."""
    return ColocatedEngine(plan_of(name, **changes), wait=None)


def open_transformers(name: str) -> TransformersEngine:
    return TransformersEngine(model=tiny_model(name), fp32_head=True, max_num_seqs=64)


def open_server(name: str, **model: Any) -> Engine:
    """A server that is launched, and stopped when the engine is closed."""
    settings = {"kind": "server", "launch": True, "max_model_len": 640, "start_timeout": HANGS}
    recipe = recipe_for(f"tiny:{name}", engine=settings, model=model, **SHORT)
    engine = build_engine(recipe.engine_needs, locate(recipe.model.path), Processes.alone(), Path(mkdtemp()), print)
    send_weights(engine, tiny_model(name), 0, Processes.alone())  # before that it is stale, and answers nothing
    return engine


# Every promise of `Engine` is tested on each.
OPENERS: dict[str, Callable[[str], Engine]] = {"colocated": open_vllm, "transformers": open_transformers, "server": open_server}


@pytest.fixture(scope="module", params=slow_but(OPENERS, *(name for name in OPENERS if name != "server")))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Every engine on tiny:qwen3."""
    opened = OPENERS[request.param]("qwen3")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of a pretrained chat model, which is downloaded and converted once."""
    from real_model import real_model  # of scripts/: programs that tests start import this file, and have no path to it

    return real_model()


@pytest.fixture
def rlgen() -> Run:
    """Runs the command line in a process of its own, as a user does."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlgen", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=HANGS,
            env={**os.environ, **environment},
        )

    return run


def save(checkpoints: Checkpoints, *values: Any) -> Path:
    """Saves, and waits until the checkpoint is complete."""
    path = checkpoints.save(*values)
    checkpoints.complete(wait=True)
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
