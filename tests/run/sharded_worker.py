"""Processes that train one recipe in several ways, one after the other: torchrun sharded_worker.py RECIPE FOLDER WAY...

A way to train is a name and overrides, NAME=KEY=VALUE;KEY=VALUE. FOLDER/NAME is then a run directory.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlgen.opening.trainer import Attempt, open_trainer
from rlgen.processes import Processes
from rlgen.recipe import dump_recipe, load_recipe
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.signals import StopRequest


def train(recipe: Path, folder: Path, overrides: list[str], processes: Processes) -> None:
    """Trains a new run, or goes on with one that is there from its newest checkpoint."""
    loaded = load_recipe(recipe, overrides)
    if processes.is_main and not folder.exists():
        RunDirectory.create(folder, loaded.text, dump_recipe(loaded.recipe)).close()
    processes.gather([None])
    directory = RunDirectory.join(folder)
    choice = processes.on_main(lambda: Checkpoints(directory.checkpoints, 9, Processes.alone()).choose())
    console = Console(1, quiet=not processes.is_main)
    attempt = Attempt(recipe=loaded.recipe, directory=directory, console=console, processes=processes, checkpoint=choice.path)
    built, done = open_trainer(attempt)
    built.run(done, StopRequest(launched=True))
    built.close()


def main(recipe: Path, folder: Path, ways: Sequence[str]) -> None:
    processes = Processes.open(60)
    for way in ways:
        name, _, overrides = way.partition("=")
        train(recipe, folder / name, [text for text in overrides.split(";") if text], processes)
    processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
