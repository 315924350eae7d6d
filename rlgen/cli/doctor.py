"""`rlgen doctor`: climbs the whole ladder on a recipe's model and engine, trains nothing."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlgen.cli.output import echo
from rlgen.cli.train import log_to
from rlgen.errors import ProcessError
from rlgen.recipe import Recipe, load_recipe
from rlgen.run.console import Terminal
from rlgen.run.launch import Launch

WIDTH = 20  # of the column of names


def doctor_command(path: Path, overrides: list[str], as_json: bool, store: bool) -> None:
    """Prints a verdict for each rung as it is climbed.

    Raises:
        SentinelError: a rung failed.
        RlgenError: the parts cannot be opened.
    """
    recipe = load_recipe(path, overrides).recipe
    if (world := Launch.of(os.environ).world) > 1:
        raise ProcessError(f"{world} processes run; `rlgen doctor` looks at one: start it alone")
    say = Terminal(quiet=as_json).say
    from rlgen.models.tiny import cache_dir

    logs = cache_dir() / "doctor"  # a server's log must outlive the error that names it
    logs.mkdir(parents=True, exist_ok=True)
    log_to(logs / "rlgen.log")  # the libraries' own words would drown ours
    examine(recipe, logs, say, as_json, store)


def examine(recipe: Recipe, logs: Path, say: Any, as_json: bool, store: bool) -> None:
    from rlgen.models.tiny import cache_dir
    from rlgen.processes import Processes
    from rlgen.run.baseline import Baselines
    from rlgen.run.manifest import check_model_files
    from rlgen.sentinel.ladder import climb
    from rlgen.sentinel.verdict import failed
    from rlgen.trainers.sides import load_data, open_sides, toy_gradient

    began = time.perf_counter()
    check_model_files(Path(recipe.model.path))
    data = load_data(recipe)
    for notice in data.notices:
        say(notice)
    say(f"opening {recipe.model.path} on both sides: trainer and the {recipe.engine.kind} engine")
    with opened(open_sides(recipe, data, None, Processes.alone(), logs, say)) as sides:
        versions = versions_of(sides.probe.engine.facts().engine)
        say(", ".join(f"{name} {value}" if name != "engine" else value for name, value in versions.items()))
        rungs = []
        for rung in climb(sides.probe, toy_gradient(sides)):
            rungs.append(rung)
            numbers = f"  {next(iter(rung.measured.values())):.1e} (bound {rung.bound:.0e})" if rung.measured else ""
            say(f"{rung.number}  {rung.name:<{WIDTH}}  {rung.verdict.upper():<14}{numbers}\n   {rung.sentence}")
    wrong = failed(rungs)
    model = {"path": recipe.model.path, "revision": recipe.model.revision, "dtype": recipe.model.dtype}
    baselines = Baselines(cache_dir() / "baselines", {**model, "engine": recipe.engine.kind})
    compared = baselines.compare(versions, rungs)
    if compared:
        say(f"baseline: {compared}")
    if store and wrong is None:
        baselines.store(versions, rungs)
        say(f"baseline stored in {baselines.path}")
    seconds = time.perf_counter() - began
    if as_json:
        report = {"healthy": wrong is None, "versions": versions, "rungs": [rung.as_json() for rung in rungs]}
        echo(json.dumps({**report, "baseline": compared, "seconds": round(seconds, 1)}, indent=2))
    if wrong is not None:
        raise wrong.error()
    say(f"healthy: what would be trained on is what the model sampled ({seconds:.0f} s)")


@contextmanager
def opened(sides: Any) -> Iterator[Any]:
    try:
        yield sides
    finally:
        sides.probe.engine.close()


def versions_of(engine: str) -> Mapping[str, str]:
    """What an upgrade would change."""
    import torch
    import transformers

    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return {"engine": engine, "torch": torch.__version__, "transformers": transformers.__version__, "device": device}
