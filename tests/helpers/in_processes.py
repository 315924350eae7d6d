"""Runs in processes that a launcher has started, which train several recipes one after the other."""

from pathlib import Path

from rlgen.processes import Processes
from rlgen.recipe import dump_recipe
from rlgen.recipe.load import LoadedRecipe
from rlgen.run.checkpoint import Checkpoints
from rlgen.run.console import Console
from rlgen.run.directory import RunDirectory
from rlgen.run.signals import StopRequest
from rlgen.setup.trainer import RunContext, open_trainer


def train_in(folder: Path, loaded: LoadedRecipe, processes: Processes) -> None:
    """Trains a new run, or goes on with one that is there from its newest checkpoint."""
    if processes.is_main and not folder.exists():
        RunDirectory.create(folder, loaded.text, dump_recipe(loaded.recipe)).close()
    processes.gather([None])
    directory = RunDirectory.join(folder)
    choice = processes.on_main(lambda: Checkpoints(directory.checkpoints, 9, Processes.alone()).choose())
    console = Console(loaded.recipe.run.steps, quiet=not processes.is_main)
    trainer, done = open_trainer(
        RunContext(recipe=loaded.recipe, directory=directory, console=console, processes=processes, start=choice)
    )
    trainer.run(done, StopRequest(launched=True))
    trainer.close()
