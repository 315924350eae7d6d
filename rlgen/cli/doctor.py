"""Runs all checks of the sentinel on a recipe's model and engine, without training: `rlgen doctor`."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlgen.cli.output import echo
from rlgen.recipe import Recipe, load_recipe
from rlgen.run.console import Terminal, log_to
from rlgen.run.launch import Launch
from rlgen.setup.attempt import meet

if TYPE_CHECKING:
    from rlgen.processes import Processes
    from rlgen.sentinel.verdict import Rung

Say = Callable[[str], None]
WIDTH = 20  # characters of the column of names


def doctor_command(path: Path, overrides: list[str], as_json: bool, store: bool) -> None:
    """Prints a verdict for each check, in each process that a launcher started. Raises SentinelError if a check failed."""
    launch, load = Launch.of(os.environ), partial(load_recipe, path, overrides)
    if launch.world == 1:
        recipe = load().recipe  # its mistakes are reported before torch is imported
        from rlgen.processes import Processes

        processes, heading = Processes.alone(), None
        if recipe.processes.strategy == "fsdp":
            heading = "one process holds all weights; for sharded ones (fsdp): `torchrun --nproc-per-node 2 -m rlgen doctor …`"
    else:
        processes, loaded = meet(load)
        recipe, heading = loaded.recipe, f"{launch.world} processes, {loaded.recipe.processes.strategy}"
    from rlgen.models.tiny import cache_dir

    say = Terminal(quiet=as_json or launch.rank > 0).say
    with processes.reporting_once():
        logs = cache_dir() / "doctor"  # kept after the command: error messages name a server's log
        logs.mkdir(parents=True, exist_ok=True)
        # Keeps the libraries' log output out of the terminal.
        log_to(logs / (f"rlgen.rank{launch.rank}.log" if launch.rank else "rlgen.log"))
        if heading is not None:
            say(heading)
        examine(recipe, logs, say, as_json, store, processes)
    processes.close()


def examine(recipe: Recipe, logs: Path, say: Say, as_json: bool, store: bool, processes: "Processes") -> None:
    """Runs the checks, compares the results with the stored baseline, and prints both."""
    from rlgen.models.tiny import cache_dir
    from rlgen.run.baseline import Baselines
    from rlgen.sentinel.verdict import failed

    began = time.perf_counter()
    versions, rungs = climbed(recipe, logs, say, processes)
    wrong = failed(rungs)
    model = {"path": recipe.model.path, "revision": recipe.model.revision, "dtype": recipe.model.dtype}
    baselines = Baselines(cache_dir() / "baselines", {**model, "engine": recipe.engine.kind})
    compared = baselines.compare(versions, rungs)
    if compared:
        say(f"baseline: {compared}")
    if store and wrong is None and processes.is_main:
        baselines.store(versions, rungs)
        say(f"baseline stored in {baselines.path}")
    seconds = time.perf_counter() - began
    if as_json and processes.is_main:
        report = {"healthy": wrong is None, "versions": versions, "rungs": [asdict(rung) for rung in rungs]}
        echo(json.dumps({**report, "baseline": compared, "seconds": round(seconds, 1)}, indent=2))
    if wrong is not None:
        raise wrong.error()
    say(f"healthy: what would be trained on is what the model sampled ({seconds:.0f} s)")


def climbed(recipe: Recipe, logs: Path, say: Say, processes: "Processes") -> "tuple[Mapping[str, str], list[Rung]]":
    """Opens trainer and engine as a run does, and prints the result of each check. Returns the versions and the results."""
    import torch
    import transformers

    from rlgen.run.manifest import check_model_files
    from rlgen.sentinel.rungs import climb
    from rlgen.setup.data import open_data
    from rlgen.setup.probe import probe_of, toy_gradient
    from rlgen.setup.trainer_and_engine import open_trainer_and_engine

    processes.on_main(lambda: check_model_files(Path(recipe.model.path)), keepalive=True)
    data = processes.main_first(lambda: open_data(recipe))
    recipe = data.recipe
    for notice in (*data.notices, *(f"warning: {warning}" for warning in data.warnings)):
        say(notice)
    with closing(open_trainer_and_engine(data, None, processes, logs, say)) as both:
        facts = both.engine.facts()
        gpu, runner = torch.cuda.is_available(), {} if facts.runner is None else {"model runner": facts.runner}
        device = torch.cuda.get_device_name() if gpu else f"cpu {torch.backends.cpu.get_cpu_capability()}"
        versions = {"engine": facts.engine, **runner, "torch": torch.__version__, "transformers": transformers.__version__}
        versions["device"] = device  # all that a baseline depends on
        say(", ".join(f"{name} {value}" if name != "engine" else value for name, value in versions.items()))
        rungs, probe = [], probe_of(both)
        for rung in climb(probe, toy_gradient(both, probe)):
            rungs.append(rung)
            say(f"{rung.number}  {rung.name:<{WIDTH}}  {rung.verdict.upper():<14}  {measurements(rung)}".rstrip())
            say(f"   {rung.sentence}")
    return versions, rungs


def measurements(rung: "Rung") -> str:
    """Returns `mean 9.1e-06 (bound 3.1e-05), RMS 1.4e-05 (bound 4.8e-05)`; empty without a measurement."""
    names = {"mean_delta": "mean", "rms_delta": "RMS", "max_delta": "max", "relative_distance": "distance"}
    return ", ".join(f"{names[name]} {rung.measured[name]:.1e} (bound {bound:.1e})" for name, bound in rung.bounds.items())
